"""The training loop and its output.

This module does not depend on ranks. A script passes two functions to ``train``:

``step(rows, labels)``
    takes a step on a minibatch and returns the loss before the step;
``evaluate(rows, labels)``
    returns the loss and the accuracy on the rows held out, with the running averages of batch norm.
"""

if __name__ == "__main__":
    raise SystemExit(f"{__doc__}\nScripts use this file; run train_resnet.py.")

import sys
import time

import numpy as np
from command_line import script
from tqdm import tqdm


def describe(model, images, options):
    trained = sum(param.get_value(borrow=True).size for param in model.params)
    print(f"Images:  {images.source}; {options.valid} held out")
    print(
        f"Network: {2 + 3 * sum(options.blocks)} layers, {trained / 1e6:.1f} million parameters, "
        f"{options.size}x{options.size} pixels, {options.classes} classes"
    )
    print(
        f"Steps:   {options.steps} of {options.batch} images, in {options.slices} slice(s), "
        f"learning rate {options.learning_rate:g}, seed {options.seed}",
        flush=True,
    )


def train(minibatches, valid, step, evaluate, options):
    """Train, and print a line at each evaluation; return the seconds and the loss of each step."""
    seconds, losses = [], []
    with progress_bar(options.steps * options.batch) as bar:
        write(bar, " step    loss  valid loss  valid accuracy  seconds/step")
        for first in range(0, options.steps, options.evaluate_every):
            bar.set_description("training", refresh=False)
            for _ in range(first, min(first + options.evaluate_every, options.steps)):
                taken, loss = timed_step(minibatches, step)
                seconds.append(taken)
                losses.append(loss)
                script.check_loss(loss, f"at step {len(losses)}")
                bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
                bar.update(options.batch)
            bar.set_description("evaluating")
            valid_loss, accuracy = evaluate(*valid)
            line = len(losses), np.mean(losses[first:]), valid_loss, accuracy
            taken = np.median(seconds[first:])
            write(bar, "{:5d}  {:6.4f}  {:10.4f}  {:14.2%}  {:12.3f}".format(*line, taken))
    return seconds, losses


def timed_step(minibatches, step):
    """Return the seconds of a step, including loading its images, and its loss."""
    start = time.perf_counter()
    loss = float(step(*next(minibatches)))
    return time.perf_counter() - start, loss


def progress_bar(images):
    """Return a progress bar, which is disabled if stderr is a file or a pipe."""
    return tqdm(total=images, unit=" images", leave=False, disable=None)


def write(bar, line):
    bar.write(line)
    sys.stdout.flush()


def print_table(rows):
    """Print a table of rows ``(name, seconds of each step, images per step, loss or None)``."""
    print(f"\n{'':28}images/s  seconds/step    loss")
    for what, seconds, images, loss in rows:
        median = np.median(seconds)
        loss = "-" if loss is None else f"{loss:.4f}"
        print(f"{what:28}{images / median:8.2f}  {median:12.3f}  {loss:>6}")
