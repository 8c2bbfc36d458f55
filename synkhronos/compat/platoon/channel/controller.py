"""The controller: it answers the requests of the workers, and starts them if it is told to."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from types import SimpleNamespace
from typing import Any, Sequence

import synkhronos as synk
from synkhronos.compat.platoon import launcher

_logger = logging.getLogger(__name__)
_GRACE = 10.0  # seconds for workers to end after the controller was told to stop


class Controller:
    """A controller. Scripts override `handle_control`, create one, and call `serve`.

    With the name of an experiment it starts its workers, a process for each device, and each has its own
    files of output. Otherwise workers are started by hand, and attach at any time.

    Parameters
    ----------
    control_port : int, default: 5567
        Workers find the controller by this number. It stands for a name on this machine, not for a port
        of the network.
    data_port, data_hwm
        Accepted; minibatches need no port.
    devices : list of str, optional
        Theano's devices, one for each worker.
    workers : int, optional
        The number of workers, if it is not the number of devices.
    experiment_name, log_directory, worker_args : str, optional
        As in the options of `default_parser`.
    multi : bool
        Several machines, which is an error.
    """

    _listener: synk.Listener | None = None
    _started = launcher.Workers("", (), "", None)  # none
    _parent = 0

    def __init__(
        self,
        control_port: int = launcher.CONTROL_PORT,
        data_port: int | None = None,
        data_hwm: int = launcher.DATA_HWM,
        devices: Sequence[str] | None = None,
        experiment_name: str | None = None,
        log_directory: str | None = None,
        worker_args: str | None = None,
        multi: bool = False,
        workers: int | None = None,
    ) -> None:
        if multi:
            raise ValueError(
                "Controller: expected one machine, got multi=True; write a script for several machines "
                "with synkhronos itself: python -m synkhronos launch"
            )
        self._devices = list(devices or [])[:workers]
        if experiment_name and not self._devices:
            raise ValueError(
                f"Controller: expected devices for the workers of {experiment_name}, got none; name "
                f"them, as in -D cuda0 cuda1"
            )
        if experiment_name:
            self._started = launcher.Workers(
                experiment_name, self._devices, worker_args or "", log_directory
            )
        self._workers = self._started.pids
        try:
            self._listen(control_port, len(self._workers) or workers)
        except BaseException:
            self._started.end()
            raise

    @staticmethod
    def default_parser() -> argparse.ArgumentParser:
        """Return a parser with the options of a controller."""
        parser = argparse.ArgumentParser(description="A controller of Platoon, by synkhronos.")
        add = parser.add_argument
        starts = "the workers run EXPERIMENT_NAME_worker.py; else none starts"
        add("experiment_name", nargs="?", help=starts)
        add("log_directory", nargs="?", help="where the output of each worker goes")
        how = parser.add_mutually_exclusive_group()
        how.add_argument("--single", action="store_true", help="one machine, which is what there is")
        how.add_argument("--multi", action="store_true", help="several machines: not available")
        each = "Theano's devices, one for each worker"
        add("-D", "--devices", nargs="+", metavar="DEVICE", help=each)
        add("-nw", "--workers", type=int, metavar="N", help="the number of workers; all_reduce needs it")
        add("-w", "--worker-args", default="", help="the arguments of the workers")
        port = launcher.CONTROL_PORT
        add("--control-port", type=int, default=port, help="default: %(default)s")
        return parser

    @staticmethod
    def default_arguments(args: argparse.Namespace) -> dict[str, Any]:
        """Return the arguments of a controller from its options."""
        names = ("experiment_name", "log_directory", "multi", "devices", "workers", "worker_args")
        return {name: getattr(args, name) for name in (*names, "control_port")}

    def handle_control(self, req: Any, worker_id: int, req_info: Any) -> Any:
        """Return the answer to a request of a worker; scripts override it.

        Parameters
        ----------
        req, req_info : object
            What the worker has given to ``send_req``.
        worker_id : int
            The process of the worker.
        """
        raise NotImplementedError(
            f"the request {req!r} of worker {worker_id} has no answer; override "
            f"Controller.handle_control(req, worker_id, req_info)"
        )

    def _listen(self, port: int, size: int | None = None) -> None:
        ranks = {pid: rank for rank, pid in enumerate(self._started.pids)}
        self._parent = os.getpid()
        self._done: set[int] = set()
        self._seen: set[int] = set()
        self._needed = size or 1
        self._stop_at: float | None = None
        self._listener = synk.Listener(launcher.name_of(port), size, ranks.get)

    def worker_is_done(self, worker_id: int) -> None:
        """Note that a worker will ask nothing more: `serve` ends when all workers are done."""
        self._done.add(worker_id)

    def init_data(self, port: int | None = None) -> None:
        """Prepare to send minibatches, in the process that sends them.

        The port is not used: minibatches are in memory that the workers share.
        """
        self._opened("init_data")
        self.asocket = SimpleNamespace(close=lambda: None)  # what was sent remains until it is received

    def send_mb(self, arrays: Any) -> None:
        """Send a minibatch, an array or a list of arrays, to the worker that asks for one first.

        It waits while 8 minibatches have not been received.
        """
        self._opened("send_mb").send(arrays, self._check_parent)

    def _check_parent(self) -> None:
        """End a process that sends, if the controller has ended."""
        if os.getpid() != self._parent and os.getppid() != self._parent:
            sys.exit("the controller has ended, so nobody receives the minibatches")

    def _opened(self, method: str) -> synk.Listener:
        if self._listener is None:
            raise RuntimeError(f"{method}: expected init_control(port) before")
        return self._listener

    def serve(self) -> int:
        """Answer the requests until all workers have ended.

        Workers that were started by hand have ended when at least one has come, or as many as the
        controller was started for, and all have closed their connections or are done.

        Returns
        -------
        int
            0, or 1 if a worker has failed; the others are ended then.
        """
        listener, started = self._opened("serve"), self._started
        try:
            died = listener.serve(self._answer, self._are_over)
            if not started.pids:
                return int(died > 0)
            codes = started.codes()
            if any(codes):
                shown = {pid: code for pid, code in zip(started.pids, codes) if code}
                _logger.warning("workers have failed; exit codes by process: %s", shown)
            return int(self._stop_at is None and any(code != 0 for code in codes))
        finally:
            self._end()

    def _are_over(self) -> bool:
        if self._stop_at is not None and time.monotonic() > self._stop_at:
            return True
        if self._started.pids:
            return self._started.are_over()
        attached = self._opened("serve").pids
        self._seen.update(attached)
        return len(self._seen | self._done) >= self._needed and not set(attached) - self._done

    def _close(self) -> None:
        """Let the workers end soon; those that do not are ended then, which is no failure.

        Scripts call it in `handle_control`.
        """
        if self._stop_at is None:
            self._stop_at = time.monotonic() + _GRACE

    def _end(self) -> None:
        if self._listener is not None and os.getpid() == self._parent:
            self._listener.close()
            self._started.end()

    def _answer(self, request: Any, worker_id: int, info: Any) -> Any:
        self._seen.add(worker_id)
        return self.handle_control(request, worker_id, info)


class Lieutenant(Controller):
    """The former controller: scripts override ``handle_control(req)``, and call `init_control`."""

    def __init__(self) -> None:
        """Wait for `init_control`."""

    def init_control(self, port: int) -> None:
        """Let workers find this controller by a number."""
        self._listen(port)

    def handle_control(self, req: Any) -> Any:  # type: ignore[override]  # the former arguments
        """Return the answer to a request of a worker; scripts override it."""
        raise NotImplementedError(
            f"the request {req!r} has no answer; override Lieutenant.handle_control(req)"
        )

    def _answer(self, request: Any, worker_id: int, info: Any) -> Any:
        self._seen.add(worker_id)
        return self.handle_control(request)
