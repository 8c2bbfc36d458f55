"""The commands ``python -m synkhronos run SCRIPT`` and ``python -m synkhronos doctor``."""

import argparse
import os
import subprocess
import sys
from typing import Optional, Sequence

from synkhronos.host import compile_cache, environment, heap, library_links
from synkhronos.host.doctor import CHECKS
from synkhronos.host.probe import PROBLEM

DESCRIPTION = "Data-parallel Theano on all the cores or GPUs of one machine."
RUN = "run a script with Theano's flags set right for this machine, also one that imports Theano"
DOCTOR = "check that all is there that is needed, and say how to mend what is not"


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Carry out a command and return the exit status.

    Parameters
    ----------
    arguments : sequence of str, optional
        Those after the program's name; by default those of this process.
    """
    parser = argparse.ArgumentParser(prog="python -m synkhronos", description=DESCRIPTION)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    run_parser = commands.add_parser("run", help=RUN, description=RUN)
    run_parser.add_argument("script", metavar="SCRIPT", help="the script's path")
    run_parser.add_argument("rest", metavar="ARGS", nargs=argparse.REMAINDER, help="its arguments")
    commands.add_parser("doctor", help=DOCTOR, description=DOCTOR)
    options = parser.parse_args(arguments)
    if options.command == "run":
        return run(options.script, options.rest)
    if options.command == "doctor":
        return doctor()
    parser.print_help()
    return 2


def run(script: str, arguments: Sequence[str]) -> int:
    """Become ``python SCRIPT ARGS``, with the environment that Theano needs.

    The interpreter is replaced, not nested: exit status, traceback, signals, ``sys.path`` and
    ``__main__`` are Python's own, and Theano is not yet imported when the script begins.
    """
    complaint = (
        environment.python_complaint(sys.version_info[:3])
        or environment.package_complaint()
        or compile_cache.complaint(compile_cache.folder(os.environ))
    )
    if complaint:
        print(complaint, file=sys.stderr)
        return 1
    environment.set_flags(os.environ)
    os.environ.update(heap.tunables())
    try:
        os.environ.update(library_links.environment())
    except OSError as error:  # a script that does not use GPUs can go on
        print(f"python -m synkhronos run: {error}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()  # before Python 3.9 it is written in blocks, too
    if script.startswith("-") and script != "-":
        script = os.path.join(os.curdir, script)  # a file's name, and no option of Python's
    options = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    if getattr(sys.stdout, "write_through", False):
        options.append("-u")
    os.execv(sys.executable, [sys.executable, *options, script, *arguments])


def doctor() -> int:
    """Print what each check found, and return 1 if something that is needed is missing."""
    needed_is_missing = False
    for check in CHECKS:
        result = check()
        print(result.line(), flush=True)
        needed_is_missing |= result.state == PROBLEM
    summary = "Something that is needed is missing." if needed_is_missing else "All is there."
    print(summary)
    return int(needed_is_missing)


if __name__ == "__main__":
    sys.exit(main())
