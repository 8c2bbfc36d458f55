"""The commands ``python -m synkhronos run``, ``launch``, ``top``, ``install`` and ``doctor``."""

import argparse
import functools
import itertools
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from typing import Any, Dict, List, Optional, Sequence

from synkhronos._version import __version__
from synkhronos.host import heap, imports, installation, job, nvidia, preparation
from synkhronos.host.doctor import checks
from synkhronos.host.doctor.check import OK, PROBLEM
from synkhronos.machines.job import ending, launcher, reports, running, tasks
from synkhronos.machines.job.config import Job, JobError, make_job
from synkhronos.machines.job.doctor import MPI, check_hosts

#: The checks of ``doctor``
CHECKS = (*checks.CHECKS, MPI)

DESCRIPTION = "Data-parallel Theano on all the cores or GPUs of one machine or several."
PROGRAM_USAGE = "SCRIPT | -m MODULE | -c CODE  [ARGS ...]"
LAUNCH_USAGE = f"""%(prog)s [-h]
           [-n MACHINES] [--ranks K] [--hosts A,B | --hostfile FILE]
           [--config FILE] [--mpi OPTIONS] [--restart N] [--dry-run]
           {PROGRAM_USAGE}"""
#: The help of each command
COMMANDS = {
    "run": "run a script with Theano and malloc set up for the machine, even if it imports Theano first",
    "launch": "run a script on several machines, by OpenMPI's mpirun",
    "top": "show what each rank of a running script does: rows per second, waits, memory, last command",
    "install": "install Theano 1.0.5 by pip on each supported version of Python; also Lasagne and Keras",
    "doctor": "check that everything needed is installed, and report how to fix what is not",
}
SERVE = """  # each line in one piece, at once, as several ranks write to the same pipe
import sys
for file in sys.stdout, sys.stderr:
    file.reconfigure(line_buffering=True, write_through=False)
from synkhronos.world.job import serve
serve()
"""
# The same as ``-m synkhronos``, but where there is no such module, the error names the machine.
START = """
import socket, sys
try:
    from synkhronos.__main__ import main
except ImportError as error:
    sys.exit(
        f"{socket.gethostname()}: {sys.executable} cannot import synkhronos: {error}; install the same "
        f"version on every machine, under the same path\\nREPORT"
    )
sys.exit(main())
""".replace("REPORT", reports.BEGIN + reports.FAILED)
#: The options of ``launch`` that have a value: its name, and their help
LAUNCH_OPTIONS = {
    "-n": ("MACHINES", "the number of machines"),
    "--ranks": ("K", "the number of ranks on each machine; by default one for each GPU or core"),
    "--hosts": ("A,B", "the machines, with commas in between; the first one runs the script"),
    "--hostfile": ("FILE", "a file with one machine in each line"),
    "--config": ("FILE", "a TOML file with the keys hosts, ranks, environment, mpi and devices"),
    "--mpi": ("OPTIONS", "more options for mpirun, in one argument"),
    "--restart": (
        "N",
        "start the job again, up to N times, when it has ended because a machine or a task was lost, on "
        "the machines that can be reached; the script resumes from its last checkpoint",
    ),
}


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run a command and return the exit status.

    Parameters
    ----------
    arguments : sequence of str, optional
        The arguments after the program's name; by default the arguments of this process.
    """
    parser = argparse.ArgumentParser(prog="python -m synkhronos", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"Synkhronos {__version__}")
    parsers = make_parsers(parser)
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    # The arguments of a program not by `argparse`, which would take options of the script for its own.
    if arguments[:1] == ["run"]:
        return run(program_of(parsers["run"], arguments[1:]))
    if arguments[:1] == ["launch"]:
        return launch(parsers["launch"], arguments[1:])
    options = parser.parse_args(arguments)
    if options.command == "doctor":
        return doctor(options.hosts, options.verbose)
    if options.command == "top":
        from synkhronos.host.top import top

        return top(options.process, options.once, options.interval)
    if options.command == "install":
        return install(parsers["install"], options.names, options.constraint)
    parser.print_help()
    return 2


def make_parsers(parser: argparse.ArgumentParser) -> Dict[str, argparse.ArgumentParser]:
    """Add the commands, and return the parser of each."""
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    special: Dict[str, Dict[str, Any]] = {
        "run": {"usage": f"%(prog)s [-h] {PROGRAM_USAGE}"},
        "launch": {"usage": LAUNCH_USAGE, "allow_abbrev": False},
    }
    parsers = {
        name: commands.add_parser(name, help=text, description=text, **special.get(name, {}))
        for name, text in COMMANDS.items()
    }
    for name, (value, text) in LAUNCH_OPTIONS.items():
        kind = int if name in ("-n", "--ranks", "--restart") else str
        parsers["launch"].add_argument(name, type=kind, metavar=value, help=text)
    parsers["launch"].add_argument("--dry-run", action="store_true", help="print the mpirun line only")
    text = "the process of the script; by default all scripts of this user"
    parsers["top"].add_argument("process", nargs="?", type=int, metavar="PID", help=text)
    text = "print one report as text, and end"
    parsers["top"].add_argument("--once", action="store_true", help=text)
    text = "the time that each report is about (default: 1)"
    parsers["top"].add_argument("--interval", type=seconds, default=1.0, metavar="SECONDS", help=text)
    text = f"{', '.join(installation.NAMES)}; by default theano"
    parsers["install"].add_argument("names", nargs="*", metavar="NAME", help=text)
    text = "a file with the versions that pip is to take; this option can be repeated"
    parsers["install"].add_argument(
        "--constraint", action="append", default=[], metavar="FILE", help=text
    )
    text = "list the repairs of Theano"
    parsers["doctor"].add_argument("--verbose", action="store_true", help=text)
    text = "also check these machines for launch"
    parsers["doctor"].add_argument("--hosts", metavar="A,B", help=text)
    return parsers


def seconds(text: str) -> float:
    """Return a time that is more than 0."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise ValueError(text)
    return number


def program_of(parser: argparse.ArgumentParser, arguments: List[str]) -> List[str]:
    """Return the arguments of ``run`` in the form in which Python takes them.

    Parameters
    ----------
    parser : argparse.ArgumentParser
        Reports an error, and ends this process, if they name no program.
    arguments : list of str
        The arguments after ``run``.
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


def launch(parser: argparse.ArgumentParser, arguments: List[str]) -> int:
    """Run a program on several machines, and return its exit status.

    On one machine that is not named, this is ``run``.

    Parameters
    ----------
    parser : argparse.ArgumentParser
        The parser of the options.
    arguments : list of str
        The options, and the program.
    """
    count = options_before_program(arguments)
    options = parser.parse_args(arguments[:count])
    program = program_of(parser, arguments[count:])
    try:
        if options.hosts is not None and options.hostfile is not None:
            raise JobError("expected --hosts or --hostfile, got both")
        if options.restart is not None and options.restart < 0:
            raise JobError(f"--restart: expected a number from 0 on, got {options.restart}")
        given = options.ranks, options.hosts, options.hostfile, options.config, options.mpi
        what = make_job(options.n, *given)
        check_program(program)
        if what.machines == 1 and not what.hosts:
            if options.restart:
                raise JobError("--restart: name the machines by --hosts, --hostfile or --config")
            return launch_here(what, program, options.dry_run)
        launcher.check_machines(what)
        python = [sys.executable, *interpreter_options()]
        if options.dry_run:
            line = [*python, "-m", "synkhronos", "run", *program]
            print(shlex.join(launcher.command(what, line)))
            return 0
        line = [*python, "-c", START, "run", *program]
        mpirun = launcher.find_mpirun()
        launcher.check_names(what)
        given_input = tasks.own_input(what)
    except JobError as error:
        parser.error(str(error))
    if mpirun.passed_over:
        note = f"{mpirun.path} is used, OpenMPI {mpirun.version}, whose library mpi4py loads"
        print(f"{parser.prog}: {note}, and not {mpirun.passed_over}", file=sys.stderr)
    if options.restart:
        read = functools.partial(make_job, None if what.hosts else options.n, *given)
        return running.run_again(what, line, mpirun, options.restart, read, options.n, given_input)
    what = launcher.with_networks(what, mpirun.path)
    what = what._replace(environment={**what.environment, **given_input})
    command = launcher.command(what, line, mpirun.path, survives_deaths=mpirun.survives_deaths)
    return running.run(command, reads_input=not given_input).code


def options_before_program(arguments: Sequence[str]) -> int:
    """Return how many of the arguments of ``launch`` come before the program."""
    count = 0
    while count < len(arguments):
        name = arguments[count].partition("=")[0]
        if name in LAUNCH_OPTIONS:
            count += 1 if "=" in arguments[count] else 2
        elif name in ("--dry-run", "-h", "--help") or name[:2] == "-n" and name[2:].isdecimal():
            count += 1
        else:
            break
    return min(count, len(arguments))


def check_program(program: Sequence[str]) -> None:
    """Raise a `JobError` if the program is a script that does not exist."""
    first = program[0]
    if first[:2] not in ("-m", "-c") and first != "-" and not os.path.exists(first):
        raise JobError(f"there is no script {first}")


def launch_here(what: Job, program: List[str], dry_run: bool) -> int:
    """Run a program on this machine alone, as ``run`` does."""
    if dry_run:
        settings = [f"{name}={value}" for name, value in what.environment.items()]
        line = [sys.executable, *interpreter_options(), "-m", "synkhronos", "run", *program]
        print(shlex.join([*(["env", *settings] if settings else []), *line]))
        return 0
    os.environ.update(what.environment)
    return run(program)


def interpreter_options() -> List[str]:
    """Return the options of this Python, for another Python."""
    options = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [*options, "-u"] if getattr(sys.stdout, "write_through", False) else list(options)


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
    task = job.task_of(os.environ)
    if task is not None:
        ending.sweep()
    if task is not None and task.number > 0:  # the script runs in the first task only
        program = ["-c", SERVE]
        prepare_other_task(task)
    elif task is not None:
        prepare_task_of_script()
    complaint = preparation.complaint()
    if complaint:
        print(complaint, file=sys.stderr)
        if task is not None and task.number > 0:
            reports.report(reports.FAILED)
        return 1
    preparation.set_flags(os.environ)
    os.environ.update(heap.tunables())
    os.environ.update(imports.variables())
    try:
        os.environ.update(nvidia.environment())
    except OSError as error:  # the script may not need GPUs
        print(f"python -m synkhronos run: {error}", file=sys.stderr)
    os.environ.update(job.variables(os.environ))
    if task is not None and job.survives_deaths():
        ending.watch_start()
    sys.stdout.flush()
    sys.stderr.flush()  # buffered before Python 3.9
    os.execv(sys.executable, [sys.executable, *interpreter_options(), *program])


def prepare_task_of_script() -> None:
    """Prepare the task that runs the script: its input, its signals and its exit code."""
    is_launched = os.environ.pop(job.LAUNCHED, None) == "1"
    if job.INPUT in os.environ:
        tasks.open_input(os.environ.pop(job.INPUT))
    if is_launched or job.survives_deaths():
        tasks.go_on_in_child(is_launched)


def prepare_other_task(task: job.Task) -> None:
    """Prepare a task that does not run the script: its output, and its signals."""
    if os.environ.pop(job.LAUNCHED, None) == "1":
        host = socket.gethostname()
        apart = job.tasks_apart()
        tasks.prefix_output(f"{host}:{task.number // apart}" if apart else host)
    # They are meant for the script. If this task ended by SIGTERM, mpirun would kill the script at once.
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", job.TERMINATE):
        signal.signal(signal.Signals[name], signal.SIG_IGN)


def install(
    parser: argparse.ArgumentParser, names: Sequence[str], constraints: Sequence[str] = ()
) -> int:
    """Install Theano and the named packages, import it in a fresh process, and return the exit status.

    Parameters
    ----------
    parser : argparse.ArgumentParser
        Reports a name that is not known, and ends this process.
    names : sequence of str
        Of ``installation.NAMES``.
    constraints : sequence of str
        Files with the versions that pip is to take.
    """
    for name in names:
        if name not in installation.NAMES:
            parser.error(f"expected one or more of {', '.join(installation.NAMES)}, got {name}")
    complaint = installation.complaint()
    if complaint:
        print(complaint, file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        for command in installation.commands(names, constraints, folder):
            status = run_shown(command)
            if status:
                print(f"pip failed, with the exit status {status}", file=sys.stderr)
                return status
    status = run_shown(installation.trial())
    if status:
        remedy = "see the error above, and what python -m synkhronos doctor reports"
        print(f"Theano is installed, but importing it fails: {remedy}", file=sys.stderr)
    else:
        print("Theano 1.0.5 works. Scripts import synkhronos before theano, or are started by:")
        print("python -m synkhronos run SCRIPT")
    return status


def run_shown(command: installation.Command) -> int:
    """Print a command and run it, and return its exit status."""
    print(command.line(), flush=True)
    return command.run()


def doctor(hosts: Optional[str] = None, verbose: bool = False) -> int:
    """Print the result of each check, and return 1 if something required is missing.

    Parameters
    ----------
    hosts : str, optional
        Machines to check, too, with commas in between.
    verbose : bool
        Whether to print more than a line about what works.
    """
    needed_is_missing = False
    of_hosts = check_hosts(hosts) if hosts is not None else iter(())
    try:
        for result in itertools.chain((check.run() for check in CHECKS), of_hosts):
            is_short = result.state == OK and not verbose
            print(result.line().partition("\n")[0] if is_short else result.line(), flush=True)
            needed_is_missing |= result.state == PROBLEM
        summary = "Something required is missing." if needed_is_missing else "Everything required works."
        print(summary, flush=True)
    except BrokenPipeError:  # the reader, such as head, has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still buffered
        return 128 + signal.SIGPIPE
    return int(needed_is_missing)


if __name__ == "__main__":
    sys.exit(main())
