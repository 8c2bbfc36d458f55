"""Run one of these programs as a script, with options, and print a line for each step."""

if __name__ == "__main__":
    raise SystemExit(f"{__doc__}\nScripts use this file; run mlp.py.")

import contextlib
import inspect
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))
import script  # first, as it shows Ctrl-C during the imports

import numpy as np


def show(main, *names):
    """Call `main` with the options of the command line, and print what it returns for each step.

    The names label the numbers of a step. The first number must stay finite.
    """
    script.run(lambda: print_steps(main, names))


def print_steps(main, names):
    parser = script.parser(sys.modules[main.__module__].__doc__)
    defaults = inspect.signature(main).parameters
    for name, least, most in (("steps", 1, 100_000), ("batch_size", 2, 100_000)):
        default = defaults[name].default
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=script.whole(least, most),
            default=default,
            metavar="N",
            help=f"default: {default}",
        )
    options = parser.parse_args()
    is_serial = Path(sys.argv[0]).stem.endswith("_theano")
    if not is_serial:
        script.say_too_small()
    work = "compiling and training with plain Theano"
    with script.showing(work) if is_serial else contextlib.nullcontext():
        history = main(options.steps, options.batch_size)
    for step, numbers in enumerate(history):
        numbers = np.atleast_1d(numbers)
        script.check_loss(numbers[0], f"at step {step}")
        shown = (f"{name} {number:.6f}" for name, number in zip(names, numbers))
        print(f"step {step}: {', '.join(shown)}")
