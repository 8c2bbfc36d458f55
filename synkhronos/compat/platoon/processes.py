"""The processes of an experiment: how the controller starts and ends its workers."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from typing import Sequence

from synkhronos.host.machine import cores
from synkhronos.host.signals import die_with_parent

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
    files = []
    try:
        if folder is not None:
            path = os.path.join(folder, f"{kind}{label}")
            files += [open(f"{path}.{end}", "wb") for end in ("out", "err")]
        out, err = files or (None, None)
        return subprocess.Popen(
            command, stdout=out, stderr=err, env=environment, preexec_fn=die_with_parent
        )
    finally:
        for file in files:
            file.close()


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

    @property
    def pids(self) -> list[int]:
        """Their processes, in the order of the devices."""
        return [process.pid for process in self._processes]

    def are_over(self) -> bool:
        """Whether all have ended, or one of them has failed."""
        codes = [process.poll() for process in self._processes]
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
