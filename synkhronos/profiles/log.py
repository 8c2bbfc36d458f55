"""The record of each rank: the times of methods, and of the operations of compiled functions.

Inside the block, methods of each rank's own objects are replaced by timed versions. Outside the block
nothing is measured, so there is no overhead.
"""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Sequence

import numpy as np

from synkhronos.world.rank_state import RankState
from synkhronos.world.world import current_world, world_exists

if TYPE_CHECKING:
    from synkhronos._typing import AnyArray, Compiled
    from synkhronos.arithmetic.machines import Reading
    from synkhronos.engines.base import OperationTime, Timing

#: The categories of a profile, in their order
CATEGORIES = ("compute", "copy", "load", "reduce", "wait", "other")
COMMAND = "command"
_MOST_NODES = 1 << 20  # times of single nodes that a rank keeps, for the trace

# The category of the time of a method, and the attribute of `RankState` that has the method; None:
# `RankState` itself. Only compiled functions call others of these methods: the collectives in their
# graphs.
_TIMED = (
    ("compute", "engine", "call"),
    ("copy", None, "take"),
    ("copy", "store", "place"),
    ("wait", "transport", "barrier"),
    ("wait", "transport", "collect"),
    ("copy", "overlap", "start"),
    ("wait", "overlap", "finish"),
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


class NodeTimes(NamedTuple):
    """The times of the nodes of a function in one call.

    Attributes
    ----------
    event : int
        The index of the call among the events of the rank.
    function : int
        The index of the function among those of the rank.
    seconds : numpy.ndarray
        The seconds of each node.
    """

    event: int
    function: int
    seconds: AnyArray


class _Timed:
    """A function whose operations are timed."""

    def __init__(self, compiled: Compiled, index: int, times: Timing) -> None:
        self.compiled, self.index, self.times = compiled, index, times
        self._before = np.array(times.read())

    def of_call(self) -> AnyArray:
        """Return the seconds of each node since the last time."""
        before, self._before = self._before, np.array(self.times.read())
        seconds: AnyArray = (self._before - before).astype("float32")
        return seconds


class Log:
    """The events recorded on this rank, by a clock, and the operations of functions, if wanted."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.step, self.clock = 0, clock
        self.events: list[Event] = []
        self.node_times: list[NodeTimes] = []
        self._n_nodes = 0  # in `node_times`
        self._replaced: list[tuple[Any, str]] = []
        self._functions: dict[int, _Timed] = {}  # by id
        self._timing = contextlib.ExitStack()

    def replace(self, owner: Any, method: str, category: str) -> None:
        """Time every call of a method of one object, and count its commands as steps."""
        original, clock = getattr(owner, method), self.clock

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            try:
                return original(*args, **kwargs)
            finally:
                seconds = clock() - start
                name = _name_of(args[0]) if category == "compute" else method
                self.events.append(Event(self.step, category, name, start, seconds))
                self.step += category == COMMAND

        setattr(owner, method, timed)
        self._replaced.append((owner, method))

    def time_operations(self, engine: Any) -> None:
        """Time the operations of every function that the engine calls, from its first call on."""
        original = engine.call

        def timed(compiled: Compiled, *args: Any) -> Any:
            function = self._functions.get(id(compiled))
            if function is None:
                times = self._timing.enter_context(engine.time_operations(compiled))
                function = _Timed(compiled, len(self._functions), times)
                self._functions[id(compiled)] = function
            outputs = original(compiled, *args)
            if self._n_nodes < _MOST_NODES:
                self._n_nodes += len(function.times.nodes)
                # The event of this call is added next.
                self.node_times.append(NodeTimes(len(self.events), function.index, function.of_call()))
            return outputs

        engine.call = timed
        self._replaced.append((engine, "call"))

    def functions(self) -> list[Timed]:
        """Return the functions whose operations were timed, once this has stopped."""
        return [
            Timed(_name_of(function.compiled), list(function.times), function.times.nodes)
            for function in self._functions.values()
        ]

    def add(self, category: str, name: str, start: float) -> None:
        """Add an event that ends now."""
        self.events.append(Event(self.step, category, name, start, self.clock() - start))

    def stop(self) -> None:
        for owner, method in self._replaced:
            if method in vars(owner):
                delattr(owner, method)
        self._timing.close()


def note(category: str, name: str, seconds: float) -> None:
    """Add an event that ends now, if this process is measured; it may be the script or a rank.

    Parameters
    ----------
    category : str
        One of the categories of a `Profile`.
    name : str
        What was done.
    seconds : float
        How long it has taken.
    """
    log = current_world().rank_state.log if world_exists() else None
    if log is not None:
        log.add(category, name, log.clock() - seconds)


def _name_of(compiled: Compiled) -> str:
    return getattr(compiled, "name", None) or "call"


def begin(state: RankState, operations: bool) -> list[Reading]:
    """Begin to measure on a rank, also the operations of compiled functions if they are wanted."""
    readings = state.transport.compare_clocks()
    state.log = log = Log(state.transport.clock)
    if operations:
        log.time_operations(state.engine)
    for category, name, method in _TIMED:
        owner = state if name is None else getattr(state, name)
        if hasattr(owner, method):
            log.replace(owner, method, category)
    for category, owner, method in state.comm.timed():
        log.replace(owner, method, category)
    if not state.is_master:
        log.replace(state, "execute", COMMAND)
    return readings


class Timed(NamedTuple):
    """A function whose operations were timed.

    Attributes
    ----------
    name : str
        Its name.
    times : list of OperationTime
        The sums of its calls.
    nodes : list of str
        The operation of each node, in the order in which they are computed.
    """

    name: str
    times: list[OperationTime]
    nodes: Sequence[str]


class OfRank(NamedTuple):
    """The measurements on a rank.

    Attributes
    ----------
    events : list of Event
    functions : list of Timed
        The functions whose operations were timed.
    node_times : list of NodeTimes
        One for each call of these functions.
    machine, host : int, str
        The number and the name of its machine.
    """

    events: list[Event]
    functions: list[Timed]
    node_times: list[NodeTimes]
    machine: int
    host: str


def end(state: RankState) -> tuple[OfRank, list[Reading]]:
    """End the measurement on a rank, and return it."""
    log = stop(state)
    readings = state.transport.compare_clocks()
    measured = log.events, log.functions(), log.node_times
    return OfRank(*measured, state.transport.machine, socket.gethostname()), readings


def stop(state: RankState) -> Log:
    """Stop measuring on this rank, and return its `Log`."""
    log: Log = state.log
    state.log = None
    log.stop()
    return log
