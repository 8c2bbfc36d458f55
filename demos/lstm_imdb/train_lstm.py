"""Train an LSTM that reads reviews and tells their sentiment, with a training rule.

    python train_lstm.py --rule EASGD --processes 2
    python train_lstm.py --data aclImdb --rule EASGD --plot curve.png

The task and the rule come from Platoon's example. Each process trains on its share of the reviews at its
own pace. Every 10 steps it moves its parameters and the center's parameters towards each other. The
network comes from the chapter "LSTM Networks for Sentiment Analysis" of the Deep Learning Tutorials: a
vector for each word, LSTM cells (from ``demos/ports/lstm.py``), the mean of their outputs over the
words, and a softmax.

``--data`` names a folder with the files of the Large Movie Review Dataset, or others in the same
folders: ``train/pos``, ``train/neg``, ``test/pos`` and ``test/neg``. Without it, the reviews are made by
a grammar.
"""

import sys
from pathlib import Path

DEMOS = Path(__file__).resolve().parent.parent
sys.path[1:1] = [str(DEMOS), str(DEMOS / "ports")]
import script
from script import whole

script.need("sklearn", "tqdm")
import synkhronos as synk  # before Theano
import lstm
import numpy as np
import reviews
import rule_script
import theano
import theano.tensor as T
from synkhronos.extensions import rules, updates

theano.config.floatX = "float32"
SHOWN = 3  # reviews
ROWS_A_SLICE = 500  # evaluated at a time


def parse(arguments):
    """Return the options and the rule."""
    parser = script.parser(__doc__)
    script.add_processes(parser)
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--data", type=script.folder, metavar="DIR", help="of text files (default: made reviews)"
    )
    for group, name, kind, default, what in (
        (source, "reviews", whole(20), 6000, "to make"),
        (parser, "words", whole(1, 1_000_000), 10_000, "of the vocabulary, with --data"),
        (parser, "length", whole(1, 10_000), 100, "of a review in words: the last ones are used"),
        (parser, "cells", whole(1, 10_000), 32, "of the LSTM, and items of the vector of a word"),
        (parser, "batch-size", whole(1, 100_000), 16, "reviews of each process in a step"),
        (parser, "epochs", whole(1, 100_000), 5, "over all reviews"),
        (parser, "seed", whole(0, 2**32 - 1), 1, "of weights and shuffling"),
    ):
        shown = f"{what} (default: {default})"
        group.add_argument(f"--{name}", type=kind, metavar="N", default=default, help=shown)
    parser.add_argument(
        "--learning-rate",
        type=script.positive(),
        metavar="RATE",
        help="default: 0.01 for Adam; 0.5 with --momentum, which goes with gradient descent",
    )
    parser.add_argument("--plot", type=script.image_file, metavar="FILE", help="draw the losses")
    rule_script.add_options(parser)
    options = parser.parse_args(arguments)
    rule = rule_script.make_rule(parser, options)
    return options, rule


def load(options):
    """Return the reviews."""
    if not options.data:
        return reviews.make(options.reviews, options.length)
    try:
        return reviews.load(options.data, options.words, options.length)
    except (OSError, ValueError) as error:
        raise script.UserError(f"--data: the reviews cannot be read: {error}") from error


def build(n_words, options):
    """Return the parameters, the training step, and the functions that measure and that predict."""
    random, cells = np.random.RandomState(options.seed), options.cells

    def orthogonal():
        return np.linalg.qr(random.normal(size=(cells, cells)))[0]

    vectors = lstm.shared(random.normal(0, 0.1, (n_words, cells)), "vectors")
    W = lstm.shared(np.hstack([orthogonal() for _ in range(4)]), "W")
    U = lstm.shared(np.hstack([orthogonal() for _ in range(4)]), "U")
    b = lstm.shared(np.repeat([0, 1, 0, 0], cells), "b")  # at first, nothing is forgotten
    V, c = lstm.shared(random.normal(0, 0.1, (cells, 2)), "V"), lstm.shared(np.zeros(2), "c")
    params = [vectors, W, U, b, V, c]

    x, y = T.imatrix("x"), T.ivector("y")
    longest = T.neq(x, reviews.PADDING).sum(axis=1).max()
    words = x[:, :longest].T  # the cells have time along axis 0
    mask = T.cast(T.neq(words, reviews.PADDING), theano.config.floatX)
    outputs = lstm.lstm(vectors[words], mask, W, U, b)
    mean = (outputs * mask[:, :, None]).sum(axis=0) / mask.sum(axis=0)[:, None]
    probabilities = T.nnet.softmax(T.dot(mean, V) + c)
    loss = T.nnet.categorical_crossentropy(probabilities, y).mean()
    accuracy = T.eq(probabilities.argmax(axis=1), y).mean(dtype=theano.config.floatX)
    update, rate = (updates.sgd, 0.5) if options.momentum else (updates.adam, 0.01)
    step = rules.make_step(loss, params, [x, y], update, learning_rate=options.learning_rate or rate)
    measure = synk.function([x, y], {"loss": loss, "accuracy": accuracy})
    return params, step, measure, synk.function([x], (probabilities[:, 1], "gather"))


def main(arguments=None):
    options, rule = parse(arguments)
    found = load(options)
    n = options.processes = script.fork(options.processes, devices=options.devices)
    if len(found.parts["train"][1]) < n:
        raise script.UserError(
            f"{len(found.parts['train'][1])} reviews to train are too few for {n} processes"
        )
    sizes = {part: len(labels) for part, (_, labels) in found.parts.items()}
    print(f"Data:   {found.source}")
    print("        {train} to train, {valid} to validate, {test} to test; ".format(**sizes), end="")
    print(f"{len(found.words)} words")
    print(f"Rule:   {rule!r}, {n} process(es), {options.batch_size} reviews of each in a step")
    sys.stdout.flush()
    params, step, measure, predict = build(len(found.words), options)
    data = {part: [synk.data(array) for array in arrays] for part, arrays in found.parts.items()}
    record = rule_script.train(
        step,
        params,
        data["train"],
        rule,
        options,
        batch_size=options.batch_size,
        epochs=options.epochs,
        validate=(measure, data["valid"]),
    )
    rule_script.print_validations(record)
    tested = measure(*data["test"], num_slices=-(-sizes["test"] // (n * ROWS_A_SLICE)))
    print(f"Test:   loss {tested['loss']:.4f}, accuracy {tested['accuracy']:.2%}")
    rule_script.print_times(record)
    rows, labels = (array[:SHOWN] for array in found.parts["test"])
    for row, label, probability in zip(rows, labels, predict(rows)):
        says = f"positive by {probability:.0%}, and is {'positive' if label else 'negative'}"
        print(f"{says}: {found.text(row)[:200]}")
    if options.plot:
        record.plot(options.plot, ["loss"])
        print(f"Plot:   {options.plot}")
    synk.close()
    return record, float(tested["accuracy"])


if __name__ == "__main__":
    script.run(main)
