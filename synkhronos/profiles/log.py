"""The record of each rank: the times of methods, and of the operations of compiled functions.

Inside the block, methods of each rank's own objects are replaced by timed versions. Outside the block
nothing is measured, so there is no overhead.
"""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

from synkhronos.world.here import Command, Here

if TYPE_CHECKING:
    from synkhronos._typing import Compiled
    from synkhronos.arithmetic.clocks import Reading
    from synkhronos.engines.timing import OperationTime

COMMAND = "command"

# The category of the time of a method, and the attribute of `Here` that has the method; None: `Here`
# itself. Only compiled functions call others of these methods: the collectives in their graphs.
_TIMED = (
    ("compute", "engine", "call"),
    ("copy", None, "take"),
    ("copy", "store", "place"),
    ("wait", "transport", "barrier"),
    ("wait", "transport", "collect"),
    ("copy", "ahead", "start"),
    ("wait", "ahead", "finish"),
)


class Event(NamedTuple):
    """A timed interval on one rank.

    Attributes
    ----------
    step : int
        The number of the command that it is part of, from 0.
    category : str
        One of `CATEGORIES`, or ``"command"`` for a whole command.
    name : str
        The name of the method or function.
    start, seconds : float
        Start and duration, by the ``time.perf_counter`` of the machine on which the script runs.
    """

    step: int
    category: str
    name: str
    start: float
    seconds: float


class Log:
    """The events recorded on this rank, by a clock, and the operations of functions, if wanted."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.step, self.clock = 0, clock
        self.events: list[Event] = []
        self._replaced: list[tuple[Any, str]] = []
        # By id: the function, and the times of its operations
        self._functions: dict[int, tuple[Compiled, list[OperationTime]]] = {}
        self._timing = contextlib.ExitStack()

    def replace(self, owner: Any, method: str, category: str) -> None:
        """Time every call of a method of one object."""
        original, clock = getattr(owner, method), self.clock

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            try:
                return original(*args, **kwargs)
            finally:
                seconds = clock() - start
                name = _name_of(args[0]) if category == "compute" else method
                self.events.append(Event(self.step, category, name, start, seconds))

        setattr(owner, method, timed)
        self._replaced.append((owner, method))

    def time_operations(self, engine: Any) -> None:
        """Time the operations of every function that the engine calls, from its first call on."""
        original = engine.call

        def timed(compiled: Compiled, *args: Any) -> Any:
            if id(compiled) not in self._functions:
                times = self._timing.enter_context(engine.time_operations(compiled))
                self._functions[id(compiled)] = compiled, times
            return original(compiled, *args)

        engine.call = timed
        self._replaced.append((engine, "call"))

    def operations(self) -> list[tuple[str, list[OperationTime]]]:
        """Return the name of each function and the times of its operations, once this has stopped."""
        return [(_name_of(compiled), times) for compiled, times in self._functions.values()]

    def add(self, category: str, name: str, start: float) -> None:
        """Add an event that ends now."""
        self.events.append(Event(self.step, category, name, start, self.clock() - start))

    def replace_command(self, owner: Any, method: str) -> None:
        """Time every command, and count the commands as steps."""
        self.replace(owner, method, COMMAND)
        timed = getattr(owner, method)

        def counted(command: Any) -> Any:
            try:
                return timed(command)
            finally:
                self.step += 1

        setattr(owner, method, counted)

    def stop(self) -> None:
        for owner, method in self._replaced:
            if method in vars(owner):
                delattr(owner, method)
        self._timing.close()


def _name_of(compiled: Compiled) -> str:
    return getattr(compiled, "name", None) or "call"


class Begin(Command):
    """Begin to measure.

    Parameters
    ----------
    operations : bool
        Whether the operations of compiled functions are timed, too.
    """

    def __init__(self, operations: bool) -> None:
        self.operations = operations

    def run(self, here: Here) -> list[Reading]:
        readings = here.transport.compare_clocks()
        here.log = log = Log(here.transport.clock)
        if self.operations:
            log.time_operations(here.engine)
        for category, name, method in _TIMED:
            owner = here if name is None else getattr(here, name)
            if hasattr(owner, method):
                log.replace(owner, method, category)
        for category, owner, method in here.comm.timed():
            log.replace(owner, method, category)
        if not here.is_master:
            log.replace_command(here, "execute")
        return readings


class OfRank(NamedTuple):
    """The measurements on a rank.

    Attributes
    ----------
    events : list of tuple
        The fields of each `Event`.
    operations : list of (str, list of OperationTime)
        For each compiled function its name, and the sums of its calls.
    machine, host : int, str
        The number and the name of its machine.
    """

    events: list[tuple[Any, ...]]
    operations: list[tuple[str, list[OperationTime]]]
    machine: int
    host: str


class End(Command):
    """End the measurement, and return it."""

    def run(self, here: Here) -> tuple[OfRank, list[Reading]]:
        log = stop(here)
        events = [tuple(event) for event in log.events]
        readings = here.transport.compare_clocks()
        host = socket.gethostname()
        return OfRank(events, log.operations(), here.transport.machine, host), readings


def stop(here: Here) -> Log:
    """Stop measuring on this rank, and return its `Log`."""
    log: Log = here.log
    here.log = None
    log.stop()
    return log
