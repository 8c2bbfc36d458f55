"""What is recorded on each rank: the times of methods, and of the operations of compiled functions.

Inside the block, methods of each rank's own objects are replaced by timed versions. Outside the block
nothing is measured, so there is no overhead.
"""

from __future__ import annotations

import contextlib
import socket
from typing import NamedTuple

from synkhronos.world.here import Command

COMMAND = "command"

# Which category the time of a method belongs to, and which attribute of `Here` has the method; None:
# `Here` itself. Only compiled functions call others of these methods: the collectives in their graphs.
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

    def __init__(self, clock):
        self.step, self.clock = 0, clock
        self.events = []
        self._replaced = []
        self._functions = {}  # by id: the function, and the times of its operations
        self._timing = contextlib.ExitStack()

    def replace(self, owner, method, category):
        """Time every call of a method of one object."""
        original, clock = getattr(owner, method), self.clock

        def timed(*args, **kwargs):
            start = clock()
            try:
                return original(*args, **kwargs)
            finally:
                seconds = clock() - start
                name = _name_of(args[0]) if category == "compute" else method
                self.events.append(Event(self.step, category, name, start, seconds))

        setattr(owner, method, timed)
        self._replaced.append((owner, method))

    def time_operations(self, engine):
        """Time the operations of every function that the engine calls, from its first call on."""
        original = engine.call

        def timed(compiled, *args):
            if id(compiled) not in self._functions:
                times = self._timing.enter_context(engine.time_operations(compiled))
                self._functions[id(compiled)] = compiled, times
            return original(compiled, *args)

        engine.call = timed
        self._replaced.append((engine, "call"))

    def operations(self):
        """Return the name of each function and the times of its operations, once this has stopped."""
        return [(_name_of(compiled), times) for compiled, times in self._functions.values()]

    def add(self, category, name, start):
        """Add an event that ends now."""
        self.events.append(Event(self.step, category, name, start, self.clock() - start))

    def replace_command(self, owner, method):
        """Time every command, and count the commands as steps."""
        self.replace(owner, method, COMMAND)
        timed = getattr(owner, method)

        def counted(command):
            try:
                return timed(command)
            finally:
                self.step += 1

        setattr(owner, method, counted)

    def stop(self):
        for owner, method in self._replaced:
            if method in vars(owner):
                delattr(owner, method)
        self._timing.close()


def _name_of(compiled):
    return getattr(compiled, "name", None) or "call"


class Begin(Command):
    """Begin to measure.

    Parameters
    ----------
    operations : bool
        Whether the operations of compiled functions are timed, too.
    """

    def __init__(self, operations):
        self.operations = operations

    def run(self, here):
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
    """What was measured on a rank.

    Attributes
    ----------
    events : list of tuple
    operations : list of (str, list of OperationTime)
        For each compiled function its name, and the sums of its calls.
    machine : int
    host : str
    """

    events: list[tuple]
    operations: list[tuple]
    machine: int
    host: str


class End(Command):
    """End the measurement, and return what was measured."""

    def run(self, here):
        log = stop(here)
        events = [tuple(event) for event in log.events]
        readings = here.transport.compare_clocks()
        host = socket.gethostname()
        return OfRank(events, log.operations(), here.transport.machine, host), readings


def stop(here):
    """Stop measuring on this rank, and return its `Log`."""
    log, here.log = here.log, None
    log.stop()
    return log
