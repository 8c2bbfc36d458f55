"""The commands ``python -m synkhronos run SCRIPT`` and ``python -m synkhronos doctor``."""

import argparse
import os
import subprocess
import sys
from typing import Optional, Sequence

from synkhronos.host import compile_cache, environment, heap, imports, library_links
from synkhronos.host.doctor import CHECKS
from synkhronos.host.probe import PROBLEM

DESCRIPTION = "Data-parallel Theano on all the cores or GPUs of one machine."
RUN = "run a script with Theano and malloc set up for this machine, even if it imports Theano first"
DOCTOR = "check that everything needed is installed, and report how to fix what is not"


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run a command and return the exit status.

    Parameters
    ----------
    arguments : sequence of str, optional
        The arguments after the program's name; by default those of this process.
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
    """Replace this process by ``python SCRIPT ARGS``, with the environment that Theano needs.

    Because the interpreter is replaced, the exit status, tracebacks, signals, ``sys.path`` and
    ``__main__`` are the same as without this command, and Theano is not imported when the script starts.
    Python finds the modules of ``host/imports`` from its start.
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
    os.environ.update(imports.variables())
    try:
        os.environ.update(library_links.environment())
    except OSError as error:  # the script may not need GPUs
        print(f"python -m synkhronos run: {error}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()  # buffered before Python 3.9
    if script.startswith("-") and script != "-":
        script = os.path.join(os.curdir, script)  # the name of a file, not an option of Python
    options = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    if getattr(sys.stdout, "write_through", False):
        options.append("-u")
    os.execv(sys.executable, [sys.executable, *options, script, *arguments])


def doctor() -> int:
    """Print the result of each check, and return 1 if something required is missing."""
    needed_is_missing = False
    for check in CHECKS:
        result = check()
        print(result.line(), flush=True)
        needed_is_missing |= result.state == PROBLEM
    summary = "Something required is missing." if needed_is_missing else "Everything required works."
    print(summary)
    return int(needed_is_missing)


if __name__ == "__main__":
    sys.exit(main())
