"""The worker: a process that trains, asks the controller what to do, and shares parameters."""

from __future__ import annotations

import argparse
from typing import Any, Callable, Sequence

import numpy as np

import synkhronos as synk
from synkhronos._typing import SharedVariable
from synkhronos.compat.platoon import launcher
from synkhronos.compat.platoon.param_sync import EASGD, ParamSyncRule
from synkhronos.engines.names import package

#: The operations by the names that Platoon and NCCL have for them
OPERATIONS = {
    "+": "sum", "sum": "sum", "add": "sum", "*": "prod", "prod": "prod", "product": "prod",
    "max": "max", "maximum": "max", "min": "min", "minimum": "min", "avg": "avg",
}  # fmt: skip


class Worker:
    """A worker, which attaches to the controller that has the same port.

    Parameters
    ----------
    control_port : int
        The port of the controller.
    data_port, port : int, optional
        Accepted; minibatches need no port.
    socket_timeout : int, default: 300000
        The longest wait for the controller, in milliseconds.
    data_hwm : int
        Accepted; 8 minibatches wait in memory at most.

    Attributes
    ----------
    new_linear_params_format : bool
        Always False: the parameters are separate arrays.
    """

    new_linear_params_format = False
    #: The worker that this process has made last, for rules that are given none.
    latest: Worker | None = None

    def __init__(
        self,
        control_port: int = launcher.CONTROL_PORT,
        data_port: int | None = None,
        socket_timeout: int = launcher.SOCKET_TIMEOUT,
        data_hwm: int = launcher.DATA_HWM,
        port: int | None = None,
    ) -> None:
        self._seconds = socket_timeout / 1000
        self._attached = synk.attach(launcher.name_of(control_port), self._seconds)
        self._center: synk.Center | None = None
        self._params: list[SharedVariable] = []
        self._rule: ParamSyncRule | None = None
        Worker.latest = self

    @staticmethod
    def default_parser() -> argparse.ArgumentParser:
        """Return a parser with the options of a worker."""
        parser = argparse.ArgumentParser(description="A worker of Platoon, by synkhronos.")
        add, port, wait = parser.add_argument, launcher.CONTROL_PORT, launcher.SOCKET_TIMEOUT
        add("--control-port", type=int, default=port, help="default: %(default)s")
        add("--data-port", type=int, help="the port of the minibatches, if there is one")
        add("--data-hwm", type=int, default=launcher.DATA_HWM, help="accepted, and not used")
        longest = "milliseconds to wait for the controller; default: %(default)s"
        add("--socket-timeout", type=int, default=wait, help=longest)
        return parser

    @staticmethod
    def default_arguments(args: argparse.Namespace) -> dict[str, Any]:
        """Return the arguments of a worker from its options."""
        names = ("control_port", "data_port", "data_hwm", "socket_timeout")
        return {name: getattr(args, name) for name in names}

    @property
    def local_size(self) -> int:
        """The number of workers on this machine; those that are attached now, if it is not known."""
        return self._attached.size or self._attached.attached

    @property
    def global_size(self) -> int:
        """The number of workers, which is `local_size` on one machine."""
        return self.local_size

    @property
    def local_rank(self) -> int:
        """The number of this worker, from 0."""
        return self._attached.rank

    @property
    def global_rank(self) -> int:
        """The number of this worker, which is `local_rank` on one machine."""
        return self._attached.rank

    # Requests

    def send_req(self, req: Any, info: Any = None) -> Any:
        """Send a request to the controller, and return its answer."""
        return self._attached.ask(req, info, self._seconds)

    def init_mb_sock(self, port: int | None = None, data_hwm: int = launcher.DATA_HWM) -> None:
        """Do nothing: minibatches are in memory that the workers share."""

    def recv_mb(self) -> Any:
        """Return the next minibatch of the controller, as it was sent: an array or a list of arrays."""
        received = self._attached.receive(self._seconds)
        if received is None:
            raise synk.SynkhronosError(
                f"recv_mb: no minibatch within {self._seconds:g} seconds; send_mb() has to send as many "
                f"as the workers receive"
            )
        return received

    # Parameters that all workers share

    def init_shared_params(
        self,
        params: SharedVariable | Sequence[SharedVariable],
        param_sync_rule: ParamSyncRule | None = None,
    ) -> None:
        """Share parameters. The first worker that calls it gives the central ones their values.

        The values of this worker remain as they are.

        Parameters
        ----------
        params : shared variable, or list of these
            The parameters of this worker.
        param_sync_rule : ParamSyncRule, optional
            What `sync_params` does.
        """
        self._params = as_list(params)
        self._rule = param_sync_rule
        own = [param.get_value() for param in self._params]
        self._center = self._attached.center(self._params)
        for param, value in zip(self._params, own):  # a center sets them for workers that come later
            param.set_value(value)
        self._begin()

    def _begin(self) -> None:
        """Let the rule know the values from which this worker goes on."""
        if self._rule is not None:
            self._rule.begin([param.get_value() for param in self._params])

    @property
    def shared_params(self) -> list[np.ndarray]:
        """A copy of the central parameters."""
        return self._find_center("shared_params").value()

    def sync_params(self, synchronous: bool = True) -> None:
        """Update this worker's parameters and the central ones by the rule.

        Parameters
        ----------
        synchronous : bool, default: True
            Whether the other workers wait meanwhile. Otherwise several can be in it at once if the rule
            is `EASGD`; no change is lost in either case.
        """
        center = self._find_center("sync_params")
        rule = self._rule
        if rule is None:
            raise ValueError(
                "sync_params: expected a rule, got None; give one to init_shared_params, as in "
                "param_sync_rule=EASGD(0.5)"
            )
        if not synchronous and type(rule) is EASGD:
            center.elastic(rule.alpha)
            return
        update: Callable[[Any, Any], Any] = rule.update_params
        center.update(lambda central, own: update(own, central))

    def copy_to_local(self) -> None:
        """Set this worker's parameters to the central ones."""
        self._find_center("copy_to_local").pull()
        self._begin()

    def _find_center(self, method: str) -> synk.Center:
        if self._center is None:
            raise RuntimeError(f"{method}: expected init_shared_params() before")
        return self._center

    # Workers together

    def lock(self, timeout: float | None = None) -> bool:
        """Wait until no worker has the lock, and take it; return False after `timeout` seconds."""
        return self._attached.lock().acquire(timeout)

    def unlock(self) -> None:
        """Give the lock to another worker."""
        self._attached.lock().release()

    def all_reduce(self, src: Any, op: str = "+", dest: Any = None) -> Any:
        """Reduce an array of each worker; all workers call it at the same point.

        Parameters
        ----------
        src : shared variable or numpy.ndarray
            Of the same shape and dtype in every worker.
        op : str
            ``"+"``, ``"*"``, ``"max"`` or ``"min"``, or a word for one of these.
        dest : shared variable or numpy.ndarray, optional
            Is set to the result.

        Returns
        -------
        shared variable or numpy.ndarray
            A new one with the result, of the kind of `src`; None if there is a `dest`.
        """
        is_shared = hasattr(src, "get_value")
        value = src.get_value(borrow=True) if is_shared else src
        reduced = self.all_reduce_arrays([np.asarray(value)], op)[0]
        if dest is None:
            return package.shared(reduced) if is_shared else reduced
        if hasattr(dest, "set_value"):
            dest.set_value(reduced)
        else:
            np.copyto(dest, reduced)
        return None

    def all_reduce_arrays(self, arrays: Sequence[np.ndarray], op: str) -> list[np.ndarray]:
        """Return the reductions of arrays; all workers call it at the same point."""
        if op not in OPERATIONS:
            raise ValueError(f"all_reduce: op: expected one of {sorted(OPERATIONS)}, got {op!r}")
        reduced: list[np.ndarray] = self._attached.all_reduce(list(arrays), OPERATIONS[op])  # type: ignore[arg-type]  # one of its words
        return reduced

    def close(self) -> None:
        """Leave the controller."""
        if Worker.latest is self:
            Worker.latest = None
        self._attached.close()


class Soldier(Worker):
    """The former worker.

    Parameters
    ----------
    port : int, optional
        The port of the controller; or that of the minibatches, which is not used, if there is a `cport`.
    cport : int, optional
        The port of the controller.
    """

    def __init__(self, port: int | None = None, cport: int | None = None, **options: Any) -> None:
        given = cport if cport is not None else port
        super().__init__(launcher.CONTROL_PORT if given is None else given, **options)

    def init_shared_params(
        self,
        *args: Any,
        param_sync_rule: ParamSyncRule | None = None,
        cleanup: bool = False,
        **named: Any,
    ) -> None:
        """Share parameters: ``init_shared_params(params, param_sync_rule, cleanup=False)``.

        A name for the memory, before the parameters, is accepted, and so is `cleanup`; neither is used,
        as nothing is left of earlier workers.
        """
        given = list(args)
        if given and isinstance(given[0], str):
            del given[0]
        params = given.pop(0) if given else named.pop("params")
        super().init_shared_params(params, given[0] if given else param_sync_rule)


def as_list(params: Any) -> list[Any]:
    """Return a list of shared variables, given one or several."""
    return [params] if hasattr(params, "get_value") else list(params)


def find_worker(worker: Worker | None) -> Worker:
    """Return a worker, by default the one that this process has made last."""
    found = Worker.latest if worker is None else worker
    if found is None:
        raise RuntimeError("expected a Worker, but this process has made none; make one before")
    return found
