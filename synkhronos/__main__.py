"""The commands ``python -m synkhronos run`` and ``python -m synkhronos doctor``."""

import argparse
import os
import subprocess
import sys
from typing import List, Optional, Sequence

from synkhronos._version import __version__
from synkhronos.host import compile_cache, environment, heap, imports, library_links
from synkhronos.host.doctor import CHECKS
from synkhronos.host.probe import PROBLEM

DESCRIPTION = "Data-parallel Theano on all the cores or GPUs of one machine."
RUN = "run a script with Theano and malloc set up for this machine, even if it imports Theano first"
RUN_USAGE = "%(prog)s [-h] SCRIPT | -m MODULE | -c CODE  [ARGS ...]"
DOCTOR = "check that everything needed is installed, and report how to fix what is not"


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run a command and return the exit status.

    Parameters
    ----------
    arguments : sequence of str, optional
        The arguments after the program's name; by default those of this process.
    """
    parser = argparse.ArgumentParser(prog="python -m synkhronos", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"Synkhronos {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    run_parser = commands.add_parser("run", help=RUN, description=RUN, usage=RUN_USAGE)
    commands.add_parser("doctor", help=DOCTOR, description=DOCTOR)
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["run"]:
        # Not by `argparse`, which would take options of the script for its own.
        return run(program_of(run_parser, arguments[1:]))
    options = parser.parse_args(arguments)
    if options.command == "doctor":
        return doctor()
    parser.print_help()
    return 2


def program_of(parser: argparse.ArgumentParser, arguments: List[str]) -> List[str]:
    """Return the arguments of ``run`` in the form in which Python takes them.

    Parameters
    ----------
    parser : argparse.ArgumentParser
        Reports an error, and ends this process, if they name no program.
    arguments : list of str
    """
    first = arguments[0] if arguments else ""
    if first in ("-h", "--help"):
        parser.parse_args([first])
    if not first:
        parser.error("expected the path of a SCRIPT, -m MODULE or -c CODE")
    if first in ("-m", "-c") and len(arguments) == 1:
        parser.error(f"expected a {'MODULE' if first == '-m' else 'string of CODE'} after {first}")
    if first == "--" and len(arguments) > 1:
        first, *arguments = arguments[1:]
        return [os.path.join(os.curdir, first) if first.startswith("-") else first, *arguments]
    if first.startswith("-") and first != "-" and first[:2] not in ("-m", "-c"):
        parser.error(f"expected a SCRIPT, -m MODULE or -c CODE, got the option {first}")
    return arguments


def run(program: Sequence[str]) -> int:
    """Replace this process by ``python PROGRAM``, with the environment that Theano needs.

    Because the interpreter is replaced, the exit status, tracebacks, signals, ``sys.path`` and
    ``__main__`` are the same as without this command, and Theano is not imported when the script starts.
    Python finds the modules of ``host/imports`` from its start.

    Parameters
    ----------
    program : sequence of str
        A script, ``-m`` and a module or ``-c`` and code, with the arguments for it.
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
    options = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    if getattr(sys.stdout, "write_through", False):
        options.append("-u")
    os.execv(sys.executable, [sys.executable, *options, *program])


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
