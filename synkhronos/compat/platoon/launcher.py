"""The command ``platoon-launcher``: it starts a controller, which starts the workers by `Workers`.

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
from typing import Any, Sequence, TextIO

from synkhronos.compat.platoon import configparser
from synkhronos.host.machine import cores
from synkhronos.host.signals import die_with_parent

SUCCESS, FAILED, WRONG_ARGUMENTS, OF_SYSTEM, OTHER = range(5)
LOGS = "PLATOON_LOGS"
_CONTROLLER = ["-m", "synkhronos.compat.platoon.controller"]
_CONTROLLERS_GRACE = 15.0  # seconds for the controller to end its workers
CONTROL_PORT = 5567
#: Seconds, in milliseconds as Platoon has them
SOCKET_TIMEOUT = 300_000
DATA_HWM = 10
_GRACE = 5.0  # seconds between SIGTERM and SIGKILL
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def name_of(port: int) -> str:
    """Return the name of the listener that stands for a port."""
    return f"platoon-{port}"


def start(
    script: Sequence[str], kind: str, label: str, device: str, folder: str | None, share: int = 1
) -> subprocess.Popen[bytes]:
    """Start a controller or a worker, which ends when this process ends.

    Parameters
    ----------
    script : list of str
        The script, or ``-m`` and a module, and the arguments.
    kind, label : str
        The names of the two files of its output are `kind` and `label` with ``.out`` and ``.err``.
    device : str
        Theano's device.
    folder : str or None
        The folder of the files; by default it writes to the output of this process.
    share : int
        The number of processes that divide the cores, unless the environment says how many threads
        there are.

    Raises
    ------
    OSError
        If there can be no such process or file.
    """
    environment = dict(os.environ)
    flags = [environment.get("THEANO_FLAGS", ""), f"device={device}"]
    environment["THEANO_FLAGS"] = ",".join(filter(None, flags))
    environment["PYTHONUNBUFFERED"] = "1"
    if share > 1 and not any(name in environment for name in _THREADS):
        environment.update(dict.fromkeys(_THREADS, str(max(1, cores() // share))))
    command = [sys.executable, "-u", "-m", "synkhronos", "run", *script]
    with contextlib.ExitStack() as opened:
        files: dict[str, Any] = {}
        for name, end in (("stdout", "out"), ("stderr", "err")) if folder is not None else ():
            path = os.path.join(folder or "", f"{kind}{label}.{end}")
            files[name] = opened.enter_context(open(path, "wb"))
        return subprocess.Popen(command, **files, env=environment, preexec_fn=die_with_parent)


class Workers:
    """The workers of a controller.

    Parameters
    ----------
    experiment : str
        They run the script ``<experiment>_worker.py``.
    devices : list of str
        A device for each worker.
    arguments : str
        The arguments of the script, as in a shell.
    folder : str or None
        Where their output goes.
    """

    def __init__(
        self, experiment: str, devices: Sequence[str], arguments: str, folder: str | None
    ) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        script = [f"{experiment}_worker.py", *shlex.split(arguments)]
        try:
            for label, device in zip(labels_of(devices), devices):
                started = start(script, "worker", label, device, folder, len(devices))
                self._processes.append(started)
        except BaseException:
            self.end()
            raise
        #: In the order of the devices
        self.pids = [process.pid for process in self._processes]

    def are_over(self) -> bool:
        """Whether all have ended, or one of them has failed."""
        codes = self.codes()
        return None not in codes or any(codes)

    def end(self) -> list[int]:
        """End those that still run, and return the exit codes; negative ones are signals."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self._processes:
                if process.poll() is None:
                    process.send_signal(number)
            for process in self._processes:
                try:
                    process.wait(_GRACE)
                except subprocess.TimeoutExpired:
                    continue
        return [process.wait() for process in self._processes]

    def codes(self) -> list[int | None]:
        """Return the exit code of each worker, or None while it runs."""
        return [process.poll() for process in self._processes]


def labels_of(devices: Sequence[str]) -> list[str]:
    """Return the names of devices for files; those of a device that is repeated are numbered."""
    labels = []
    for number, device in enumerate(devices):
        before = devices[:number].count(device)
        labels.append(f"{device}-{before}" if devices.count(device) > 1 else device)
    return labels


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
    controller = start(script, "controller", "cpu", "cpu", folder)
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
            controller.wait(_CONTROLLERS_GRACE)
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
