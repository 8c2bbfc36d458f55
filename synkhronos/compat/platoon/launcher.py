"""The command ``platoon-launcher``: it starts a controller, which starts the workers.

Exit codes: 0 for success; 1 if a worker or the controller has failed; 2 for wrong arguments; 3 for an
error of the system or a controller that a signal has ended; 4 for any other error.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from typing import Sequence, TextIO

from synkhronos.compat.platoon import configparser, processes

SUCCESS, FAILED, WRONG_ARGUMENTS, OF_SYSTEM, OTHER = range(5)
LOGS = "PLATOON_LOGS"
_CONTROLLER = ["-m", "synkhronos.compat.platoon.controller"]
_GRACE = 15.0  # seconds for the controller to end its workers


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(
        prog="platoon-launcher",
        description="Run EXPERIMENT_controller.py, if there is one, and EXPERIMENT_worker.py for each "
        "device, by synkhronos. Their output is in a folder of PLATOON_LOGS.",
    )
    parser.add_argument("experiment_name", metavar="EXPERIMENT")
    add, where = parser.add_argument, parser.add_mutually_exclusive_group()
    add("-nw", "--workers", nargs="+", type=int, metavar="N", help="the number of workers")
    each = "a device of Theano for each worker"
    where.add_argument("-D", "--devices", nargs="+", metavar="DEVICE", help=each)
    where.add_argument("-H", "--hosts", nargs="+", metavar="HOST", help="this machine only")
    add("-c", "--controller-args", default="", help='such as -c="--patience 3"')
    add("-w", "--worker-args", "--workers-args", default="", help='such as -w="--rate 1"')
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return the exit code."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    name = options.experiment_name
    try:
        hosts = [] if options.devices else find_hosts(options.hosts)
        elsewhere = sorted(set(hosts) - names_of_this_machine())
        devices = find_devices(options.devices, options.workers)
    except ValueError as error:
        parser.error(str(error))
    if elsewhere:
        parser.error(
            f"expected this machine as the only host, in -H, {configparser.HOSTS} and .platoonrc, got "
            f"{', '.join(elsewhere)}; what workers share is in the memory of one machine; scripts for "
            f"several machines use synkhronos itself: python -m synkhronos launch"
        )
    if not os.path.isfile(f"{name}_worker.py"):
        parser.error(f"there is no script {name}_worker.py here")
    if not devices:
        parser.error(
            f"expected devices: name them, as in -D cuda0 cuda1, in {configparser.DEVICES} or .platoonrc"
        )
    try:
        return launch(name, devices, options.controller_args, options.worker_args)
    except OSError as error:
        _say(f"platoon-launcher: {error}", sys.stderr)
        return OF_SYSTEM
    except Exception as error:
        _say(f"platoon-launcher: {type(error).__name__}: {error}", sys.stderr)
        return OTHER


def names_of_this_machine() -> set[str]:
    """Return the names by which configuration files may call this machine."""
    name = os.uname().nodename
    return {name, name.partition(".")[0], "localhost"}


def find_hosts(named: Sequence[str] | None) -> list[str]:
    """Return the hosts: those that are named, of the environment or of a file, or none."""
    with contextlib.suppress(KeyError):
        return list(named or configparser.fetch_hosts())
    return []


def find_devices(named: Sequence[str] | None, workers: Sequence[int] | None) -> list[str]:
    """Return the devices: those that are named, of the environment or of a file, or all GPUs."""
    devices = list(named or [])
    for host in sorted(names_of_this_machine()):
        with contextlib.suppress(KeyError):
            devices = devices or configparser.fetch_devices_for_host(host)
    if not devices:
        import synkhronos as synk  # takes a second

        devices = [f"cuda{number}" for number in range(synk.get_n_gpu())]
    return devices[: workers[0]] if workers else devices


def launch(name: str, devices: Sequence[str], controller_arguments: str, worker_arguments: str) -> int:
    """Start the controller, wait for its end, and return the exit code."""
    folder = os.path.join(LOGS, name, time.strftime("%Y-%m-%d_%H-%M-%S"))
    os.makedirs(folder, exist_ok=True)
    own = f"{name}_controller.py"
    script = [own] if os.path.isfile(own) else list(_CONTROLLER)
    script += [name, folder, "--single", "-D", *devices, "-nw", str(len(devices))]
    script += shlex.split(controller_arguments)
    if worker_arguments:
        script.append(f"--worker-args={worker_arguments}")
    _say(f"### Launching experiment: {name}, on {', '.join(devices)}")
    controller = processes.start(script, "controller", "cpu", "cpu", folder)
    _say(f"### Logs folder: {folder}")
    code = wait_for(controller)
    if code < 0:
        _say(f"The controller was ended by {signal.Signals(-code).name}.", sys.stderr)
        return OF_SYSTEM
    if code:
        _say(f"The experiment has failed, with the exit code {code}; see {folder}.", sys.stderr)
        return FAILED
    _say("The experiment has ended successfully.")
    return SUCCESS


def wait_for(controller: subprocess.Popen[bytes]) -> int:
    """Return the exit code of the controller. An interrupt, which it gets too, ends this process."""
    try:
        return controller.wait()
    except KeyboardInterrupt:
        try:
            controller.wait(_GRACE)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            controller.kill()
            controller.wait()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        raise


def _say(text: str, file: TextIO | None = None) -> None:
    stream = file or sys.stdout
    stream.write(text + "\n")
    stream.flush()


if __name__ == "__main__":
    sys.exit(main())
