"""`profile`: how each rank spends its time.

Inside the block, methods of each rank's own objects are replaced by timed versions. Outside the block
nothing is measured, so there is no overhead.
"""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Iterator, NamedTuple, Sequence

import numpy as np

from synkhronos import _html
from synkhronos._errors import FuseError
from synkhronos._typing import PathLike
from synkhronos.arithmetic.clocks import Reading, to_own
from synkhronos.functions.replicate import replicate
from synkhronos.world.here import Command
from synkhronos.world.world import current_world

CATEGORIES = ("compute", "copy", "reduce", "wait", "other")
_COMMAND = "command"

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


class Profile:
    """The measurements of a `profile` block.

    Attributes
    ----------
    categories : tuple of str
        ``"compute"``: inside compiled functions, without the waiting in their collectives; ``"copy"``:
        copying rows, and copying arrays to shared memory; ``"reduce"``: the arithmetic of collectives;
        ``"wait"``: waiting for other ranks; ``"other"``: the rest of each command.
    events : list of list of Event
        The events of each rank, in order.
    seconds : numpy.ndarray
        Time in seconds, float64 of shape ``(steps, ranks, categories)``; each command is one step.
    hosts : list of str
        The name of each rank's machine.
    clock_error : float
        By how many seconds the starts on other machines may be wrong, as their clocks are compared
        with that of the script's machine; 0 if there are no others.
    """

    categories = CATEGORIES

    def __init__(self) -> None:
        self.events: list[list[Event]] = []
        self.seconds: np.ndarray = np.zeros((0, 0, len(CATEGORIES)))
        self.hosts: list[str] = []
        self.clock_error = 0.0
        self._names_hosts = False

    def _align(self, found: Sequence[_OfRank], begin: list[Reading], end: list[Reading]) -> None:
        """Take what the ranks have measured, given the readings of each machine's clock, if any."""
        self.hosts = [one.host for one in found]
        self._names_hosts = len(begin) > 1
        self.clock_error = max((one.error for one in (*begin, *end)), default=0.0)
        by_rank = [[Event(*event) for event in one.events] for one in found]
        for rank, (_, machine, _) in enumerate(found):
            if machine:  # not the one of the script
                pair = begin[machine], end[machine]
                by_rank[rank] = [
                    event._replace(start=to_own(*pair, event.start)) for event in by_rank[rank]
                ]
        self._take(by_rank)

    def _take(self, events: list[list[Event]]) -> None:
        self.events = events
        steps = max((event.step + 1 for by_rank in events for event in by_rank), default=0)
        self.seconds = np.zeros((steps, len(events), len(CATEGORIES)))
        rest = self.seconds[:, :, -1]
        for rank, by_rank in enumerate(events):
            begin = {event.step: event.start for event in by_rank if event.category == _COMMAND}
            ended: list[Event] = []
            for event in by_rank:
                if event.category == _COMMAND:
                    rest[event.step, rank] += event.seconds
                    continue
                own = event.seconds
                while ended and ended[-1].start >= event.start:  # it was inside this one
                    own -= ended.pop().seconds
                ended.append(event)
                self.seconds[event.step, rank, CATEGORIES.index(event.category)] += own
                # The master also copies before its command, for example the numbers of rows.
                if event.start >= begin.get(event.step, np.inf):
                    rest[event.step, rank] -= own
        np.maximum(rest, 0, out=rest)

    def table(self) -> str:
        """Return a table of the milliseconds per step of each rank and category, as a string."""
        steps, ranks, _ = self.seconds.shape
        lines = [f"{steps} steps; milliseconds per step, and the share of each rank's time"]
        lines.append("rank " + "".join(f"{name:>18}" for name in CATEGORIES) + f"{'all':>12}")
        for rank in range(ranks):
            each = 1e3 * self.seconds[:, rank].sum(axis=0) / max(steps, 1)
            total = each.sum()
            cells = [f"{one:>10.3f} {one / total if total else 0:>6.1%}" for one in each]
            lines.append(f"{rank:>4} " + "".join(f"{cell:>18}" for cell in cells) + f"{total:>12.3f}")
        return "\n".join(lines)

    __repr__ = table

    def _repr_html_(self) -> str:
        steps, ranks, _ = self.seconds.shape
        rows = []
        for rank in range(ranks):
            each = 1e3 * self.seconds[:, rank].sum(axis=0) / max(steps, 1)
            shares = each / (each.sum() or 1)
            cells = [f"{one:.3f} ({share:.0%})" for one, share in zip(each, shares)]
            rows.append([f"rank {rank}", *cells, f"{each.sum():.3f}"])
        title = f"Milliseconds per step, of {steps} steps, and the share of each rank's time"
        return _html.table(title, rows, ("", *CATEGORIES, "all"))

    def save(self, path: PathLike) -> None:
        """Write the events as a Chrome trace, for https://ui.perfetto.dev or chrome://tracing.

        Parameters
        ----------
        path : str or path-like
            The JSON file to write.

        Raises
        ------
        OSError
            If the file cannot be written.
        """
        begin = min((event.start for by_rank in self.events for event in by_rank), default=0)
        trace = []
        for rank, by_rank in enumerate(self.events):
            args = {"name": self._label(rank)}
            trace.append({"name": "process_name", "ph": "M", "pid": rank, "args": args})
            for event in by_rank:
                trace.append(
                    {
                        "name": event.name,
                        "cat": event.category,
                        "ph": "X",
                        "pid": rank,
                        "tid": 0,
                        "ts": 1e6 * (event.start - begin),
                        "dur": 1e6 * event.seconds,
                        "args": {"step": event.step},
                    }
                )
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": trace, "displayTimeUnit": "ms"}, file)

    def _label(self, rank):
        return f"rank {rank} on {self.hosts[rank]}" if self._names_hosts else f"rank {rank}"


class _Log:
    """The events recorded on this rank, by a clock."""

    def __init__(self, clock):
        self.step, self.clock = 0, clock
        self.events = []
        self._replaced = []

    def replace(self, owner, method, category):
        """Time every call of a method of one object."""
        original, clock = getattr(owner, method), self.clock

        def timed(*args, **kwargs):
            start = clock()
            try:
                return original(*args, **kwargs)
            finally:
                seconds = clock() - start
                name = getattr(args[0], "name", None) if category == "compute" else method
                self.events.append(Event(self.step, category, name or method, start, seconds))

        setattr(owner, method, timed)
        self._replaced.append((owner, method))

    def add(self, category, name, start):
        """Add an event that ends now."""
        self.events.append(Event(self.step, category, name, start, self.clock() - start))

    def replace_command(self, owner, method):
        """Time every command, and count the commands as steps."""
        self.replace(owner, method, _COMMAND)
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


class _Begin(Command):
    def run(self, here):
        readings = here.transport.compare_clocks()
        here.log = log = _Log(here.transport.clock)
        for category, name, method in _TIMED:
            owner = here if name is None else getattr(here, name)
            if hasattr(owner, method):
                log.replace(owner, method, category)
        for category, owner, method in here.comm.timed():
            log.replace(owner, method, category)
        if not here.is_master:
            log.replace_command(here, "execute")
        return readings


class _OfRank(NamedTuple):
    events: list[tuple]
    machine: int
    host: str


class _End(Command):
    def run(self, here):
        events = _stop(here)
        readings = here.transport.compare_clocks()
        return _OfRank(events, here.transport.machine, socket.gethostname()), readings


def _stop(here):
    """Stop measuring on this rank, and return what was measured."""
    log, here.log = here.log, None
    log.stop()
    return [tuple(event) for event in log.events]


@contextlib.contextmanager
def profile(path: PathLike | None = None) -> Iterator[Profile]:
    """Measure how every rank spends its time in the block.

    Parameters
    ----------
    path : str or path-like, optional
        A file to which a Chrome trace is written at the end of the block.

    Yields
    ------
    Profile
        Contains the measurements after the end of the block.

    Raises
    ------
    NotForkedError, ClosedError, WorldBrokenError
        If there are no processes that can be used.
    FuseError
        If the block is inside another ``profile()`` block.
    OSError
        If `path` cannot be written.

    Examples
    --------
    >>> import numpy as np
    >>> import synkhronos as synk
    >>> import theano.tensor as T
    >>> synk.fork(2, use_gpu=False)
    2
    >>> x = T.dvector("x")
    >>> f = synk.function([x], (x.sum(), "sum"))
    >>> with synk.profile() as measured:
    ...     for _ in range(3):
    ...         _ = f(np.arange(4.0))
    >>> measured.seconds.shape  # steps, ranks, categories
    (3, 2, 5)
    >>> print(measured)  # doctest: +ELLIPSIS
    3 steps; milliseconds per step, and the share of each rank's time
    rank ...
    >>> synk.close()
    """
    world = current_world()
    world.check_usable()
    if world.here.log:
        raise FuseError(
            "profile(): already inside a profile() block, and blocks cannot be nested; remove the inner "
            "one: the outer block measures these calls, too"
        )
    replicate(world)
    measured = Profile()
    try:
        begin = world.run(_Begin())[world.master_rank]
        log = world.here.log
        log.events.clear()  # they are about the wait for the workers in that command
        log.replace_command(world, "run")
        yield measured
    finally:
        if world.here.log:
            world.here.log.stop()
        if world.broken is None and not world.closed:
            found, readings = zip(*world.run(_End()))
            measured._align(found, begin, readings[world.master_rank])
            if path is not None:
                measured.save(path)
        elif world.here.log:  # no command can run, but this rank must stop measuring
            _stop(world.here)
