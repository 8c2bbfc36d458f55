"""What the demos have in common as scripts: options with limits, errors in one line, the exit status."""

if __name__ == "__main__":
    raise SystemExit(f"{__doc__}\nScripts use this file; run demo_1.py.")

import argparse
import contextlib
import importlib
import importlib.util
import math
import os
import sys
import time
from pathlib import Path


def say_interrupted(kind, error, traceback):
    """Show Ctrl-C while a script imports its modules in one line; Python then exits with 130."""
    if issubclass(kind, KeyboardInterrupt):
        print(f"{Path(sys.argv[0]).name}: interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)


sys.excepthook = say_interrupted  # before the imports that take seconds

import synkhronos as synk
from synkhronos.host import compiler as used
from synkhronos.host.progress import Progress, is_off

NAME, TITLE = used.NAME, used.TITLE  # "theano" and "Theano", or "pytensor" and "PyTensor"
compiler, T = importlib.import_module(NAME), importlib.import_module(f"{NAME}.tensor")
MOST_PROCESSES = 256
SLOW = "the first time this can take minutes"


class UserError(Exception):
    """Unusable options, files or results; the message says why, and is shown without a traceback."""


def need(*names, extra="demos"):
    """End the script with one line if these packages, which it imports next, are not installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(
            f"{Path(sys.argv[0]).name}: this script also needs {', '.join(missing)}; in the folder of "
            f"Synkhronos: python -m pip install '.[{extra}]'"
        )


# Options


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message):
        self.exit(2, f"{self.prog}: {message} (--help lists the options)\n")


def parser(description):
    """Return a parser; the description is the first line of a docstring."""
    return Parser(description=description.splitlines()[0])


def whole(least=1, most=1_000_000):
    """Return a type of options: whole numbers between these limits."""

    def convert(text):
        with contextlib.suppress(ValueError):
            if least <= int(text) <= most:
                return int(text)
        raise argparse.ArgumentTypeError(f"expected a whole number from {least} to {most}, got {text!r}")

    return convert


def positive(most=1000.0):
    """Return a type of options: numbers greater than 0, and at most this one."""

    def convert(text):
        with contextlib.suppress(ValueError):
            if 0 < float(text) <= most:
                return float(text)
        raise argparse.ArgumentTypeError(
            f"expected a number greater than 0 and at most {most:g}, got {text!r}"
        )

    return convert


def folder(text):
    """Type of options: a folder that exists."""
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"expected a folder, and there is none at {text!r}")
    return Path(text)


def new_file(text):
    """Type of options: a file that can be written, or replaced."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file, and {text!r} is a folder")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: there is no {str(path.parent)!r}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: permission denied")
    return path


def image_file(text):
    """Type of options: a file that can be written, in a format that matplotlib can write."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise argparse.ArgumentTypeError(f"drawing needs matplotlib: {error}") from error
    suffix = Path(text).suffix[1:].lower()
    formats = sorted(FigureCanvasAgg.filetypes)
    if suffix not in formats:
        raise argparse.ArgumentTypeError(
            f"expected a file name that ends in one of {', '.join(formats)}, got {text!r}"
        )
    return new_file(text)


def add_processes(options, default=None, devices=True):
    """Add the options ``--processes`` and ``--devices`` to a parser."""
    every = "one per core, or one per GPU" if devices else "one per core"
    shown = every if default is None else default
    number = whole(1, MOST_PROCESSES)
    options.add_argument(
        "-n", "--processes", type=number, metavar="N", default=default, help=f"default: {shown}"
    )
    if devices:
        named = "one per process, such as: cuda0 cuda1"
        options.add_argument("-d", "--devices", nargs="+", metavar="DEVICE", help=named)


# Running


def fork(n=None, **options):
    """Start the processes; raise `UserError` if they cannot be had, for example for want of a device."""
    try:
        return synk.fork(n, **options)
    except synk.WorkerError as error:
        raise UserError(error.message) from error
    except (ValueError, RuntimeError, synk.SynkhronosError) as error:
        raise UserError(str(error)) from error


def say_too_small():
    """Say that this demo is not faster with several processes; scripts call it before they start."""
    print("(Too small to be faster on several processes; sh demos/run shows a gain.)", flush=True)


def showing(work):
    """Return a context that shows what takes long, such as compiling with plain Theano.

    Synkhronos itself shows that it compiles.
    """
    return Progress().show(work, SLOW)


class Compiling:
    """Shows which of several functions is being compiled, and says how long each has taken.

    Parameters
    ----------
    total : int
        The number of functions, each of which is compiled in a block ``with compiling(name):``.
    """

    def __init__(self, total):
        self._total, self._number, self._progress = total, 0, Progress()

    @contextlib.contextmanager
    def __call__(self, name):
        self._number += 1
        title, start = f"{self._number} of {self._total}, {name}", time.perf_counter()
        # Synkhronos itself shows that it compiles, but it does not know how many functions follow.
        with self._progress.show(f"compiling {title}", SLOW):
            yield
        tell(f"compiled {title}: {time.perf_counter() - start:.1f} s")


def tell(line):
    """Write a line about the progress to stderr, unless this is switched off."""
    if not is_off():
        print(line, file=sys.stderr, flush=True)


def check_loss(loss, where):
    """Stop the training if the loss is not a number any more."""
    if not math.isfinite(loss):
        raise UserError(
            f"the loss is {loss} {where}, so the training has diverged and was stopped; a smaller "
            f"learning rate may help"
        )


def run(main):
    """Run a script, and end it with its exit status; what a user can change is shown in one line."""
    try:
        main()
    except KeyboardInterrupt:  # the workers end with the script
        problem, status = "interrupted", 130  # as a shell reports it
    except (UserError, MemoryError, OSError) as error:
        problem, status = str(error) or type(error).__name__, 1
    except synk.WorkerError as error:
        if error.type_name != UserError.__name__:
            raise
        problem, status = error.message, 1
    except synk.SynkhronosError as error:
        problem, status = str(error), 1
    else:
        return
    sys.stdout.flush()
    # Below the message Theano adds the node of the graph.
    print(f"{Path(sys.argv[0]).name}: {problem.splitlines()[0]}", file=sys.stderr)
    sys.exit(status)
