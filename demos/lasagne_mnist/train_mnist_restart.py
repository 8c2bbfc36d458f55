"""Train on MNIST, lose a worker halfway, and end with the same parameters as without the loss.

    python train_mnist_restart.py --processes 2 --model mlp

Every few steps the script saves the complete state of the training to a checkpoint: the parameters,
their velocities, the random streams of the dropout on every rank, and the number of steps taken. Halfway
it kills a worker. It then starts new workers, loads the checkpoint, and repeats the lost steps. At the
end it trains once more, without interruption, and compares the results.

With ``--go-on-with 1`` the script continues with fewer processes. With ``--checkpoint FILE`` the
checkpoints are kept, and ``--resume`` continues a run that was ended, for example by Ctrl-C or a power
failure.
"""

import filecmp
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import command_line
import numpy as np
import script
import synkhronos as synk
import train_mnist_cpu_data
from training import Epoch, batches


class Training:
    """A training that can continue from any step: the number of a step determines its rows."""

    def __init__(self, digits, options):
        self.options = options
        self.train_epoch, self.evaluate = train_mnist_cpu_data.build(digits, options)
        self.rows = len(digits.parts["train"][1])
        self.batches = batches(self.rows, options.batch_size)
        self.steps = options.epochs * len(self.batches)

    def take_step(self, step):
        epoch, number = divmod(step, len(self.batches))
        order = np.random.RandomState([self.options.seed, epoch]).permutation(self.rows)
        ((loss, _),) = self.train_epoch(order[self.batches[number]])  # an epoch of one minibatch
        return loss

    def run(self, position, checkpoint=None, lose_at=None):
        """Take the remaining steps. With a checkpoint, survive the loss of workers."""
        print("  step  epoch  train loss  valid loss  valid accuracy", flush=True)
        while position["step"] < self.steps:
            if checkpoint and position["step"] % self.options.save_every == 0:
                synk.save(checkpoint, position)
            if position["step"] == lose_at:
                lose_at = None
                kill_a_worker(position["step"])
            try:
                loss = self.take_step(position["step"])
                script.check_loss(loss, f"at step {position['step']}")
            except synk.WorldBrokenError as error:
                print(f"        {type(error).__name__}: {error}")
                position = self.start_again(checkpoint)
            else:
                position["step"] += 1
                position["losses"] = np.append(position["losses"], loss)
                if position["step"] % len(self.batches) == 0:
                    self.end_epoch(position)
        return position["history"], float(self.evaluate("test")[1])

    def end_epoch(self, position):
        epoch = position["step"] // len(self.batches)
        row = [epoch, np.mean(position["losses"]), *self.evaluate("valid")]
        position["history"] = np.concatenate([position["history"], [row]])
        position["losses"] = np.zeros(0)
        print("{:6d}  {:5d}  {:10.4f}  {:10.4f}  {:14.2%}".format(position["step"], *row), flush=True)

    def start_again(self, checkpoint):
        began = time.perf_counter()
        self.options.processes = synk.restart(self.options.go_on_with)
        position = synk.load(checkpoint)
        print(
            f"        Started again with {self.options.processes} process(es), from the checkpoint of "
            f"step {position['step']}, in {time.perf_counter() - began:.2f} s",
            flush=True,
        )
        return position


def beginning():
    """Return the start of a training: no steps, no losses in this epoch, no rows for former epochs."""
    return {"step": 0, "losses": np.zeros(0), "history": np.zeros((0, 4))}


def kill_a_worker(step):
    worker = max(multiprocessing.active_children(), key=lambda process: process.name)
    print(f"{step:6d}  Killing {worker.name}, process {worker.pid}, with SIGKILL", flush=True)
    os.kill(worker.pid, signal.SIGKILL)


def train_with_a_loss(training, options, is_kept):
    position, lose_at = beginning(), training.steps // 2
    if options.resume:
        try:
            position = synk.load(options.checkpoint)
        except (ValueError, OSError) as error:
            raise script.UserError(f"--resume: {options.checkpoint}: {error}") from error
        print(f"Going on from step {position['step']} of {options.checkpoint}")
    if options.processes == 1 or position["step"] > lose_at:
        lose_at = None
    try:
        return training.run(position, options.checkpoint, lose_at)
    except KeyboardInterrupt:
        if is_kept:
            print(f"Use --resume --checkpoint {options.checkpoint} to continue", file=sys.stderr)
        raise


def compare(training, start, accuracy, options):
    """Train without interruption from the same start; return whether the results are identical."""
    print("Once more, without interruption:")
    ends = [start.with_name(name) for name in ("end.npz", "undisturbed.npz")]
    synk.save(ends[0])
    if options.processes != options.forked:
        options.processes = synk.restart(options.forked)
    synk.load(start)
    _, undisturbed = training.run(beginning())
    synk.save(ends[1])
    same = filecmp.cmp(*ends, shallow=False)
    print(f"Test:   accuracy {undisturbed:.2%} without interruption, {accuracy:.2%} with a worker lost")
    if same:
        print("        Parameters, velocities and random streams are the same, bit for bit")
    else:
        print("        Not bit-identical: the dropout depends on the number of processes")
    return same


def main(arguments=None):
    parser = command_line.parser(__doc__)
    script.add_processes(parser, devices=False)
    number = script.whole(1, script.MOST_PROCESSES)
    parser.add_argument("--go-on-with", type=number, metavar="N", help="processes after the loss")
    parser.add_argument(
        "--checkpoint",
        type=script.new_file,
        metavar="FILE",
        help="keep the checkpoints here (default: a temporary file)",
    )
    parser.add_argument(
        "--save-every",
        type=script.whole(),
        metavar="STEPS",
        default=10,
        help="default: 10",
    )
    parser.add_argument("--resume", action="store_true", help="continue from the --checkpoint")
    parser.add_argument("--no-compare", action="store_true", help="do not train again for comparison")
    options = parser.parse_args(arguments)
    if options.resume and not (options.checkpoint and options.checkpoint.exists()):
        parser.error(f"--resume needs a --checkpoint that exists, got {options.checkpoint}")
    options.forked = options.processes = script.fork(options.processes, use_gpu=False)
    if (options.go_on_with or 1) > options.forked:
        parser.error(f"--go-on-with: expected at most {options.forked}, got {options.go_on_with}")
    with tempfile.TemporaryDirectory() as folder:
        return train(options, Path(folder))


def train(options, folder):
    """Train with a loss and, for comparison, without; return the accuracy, and whether they agree."""
    epochs, is_kept = options.epochs, options.checkpoint is not None
    options.checkpoint = options.checkpoint or folder / "checkpoint.npz"
    digits = command_line.prepare(options)
    options.epochs = epochs or max(1, digits.epochs // 5)  # it trains twice
    training = Training(digits, options)
    print(
        f"Saves:  every {options.save_every} steps of {training.steps}, to "
        f"{options.checkpoint if is_kept else 'a temporary file'}; processes: {options.processes}"
    )
    start = folder / "start.npz"
    synk.save(start)
    history, accuracy = train_with_a_loss(training, options, is_kept)
    print(f"Test:   accuracy {accuracy:.2%}")
    if options.plot:
        epochs = [Epoch(int(number), *rest, seconds=None) for number, *rest in history]
        command_line.plot(epochs, accuracy, options)
    same = None if options.no_compare else compare(training, start, accuracy, options)
    synk.close()
    return accuracy, same


if __name__ == "__main__":
    script.run(main)
