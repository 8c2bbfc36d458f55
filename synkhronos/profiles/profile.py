"""`profile`: how each rank spends its time, and which operations take it."""

from __future__ import annotations

import contextlib
import json
from typing import Iterator, Sequence

import numpy as np

from synkhronos import _html
from synkhronos._checks import check_flag
from synkhronos._errors import FuseError
from synkhronos._typing import AnyArray, PathLike
from synkhronos.arithmetic.machines import Reading, to_own
from synkhronos.functions.replicate import replicate
from synkhronos.profiles import log as of_rank
from synkhronos.profiles import operations as tables
from synkhronos.profiles.drawing import Timeline, draw_timeline, make_figure, make_timeline
from synkhronos.profiles.log import CATEGORIES, COMMAND, Event, OfRank
from synkhronos.profiles.operations import Operation
from synkhronos.profiles.trace import make_trace
from synkhronos.world.rank_state import Ask
from synkhronos.world.world import current_world


class Profile:
    """The measurements of a `profile` block.

    Attributes
    ----------
    categories : tuple of str
        ``"compute"``: inside compiled functions, without the waiting in their collectives; ``"copy"``:
        copying rows, and copying arrays to shared memory; ``"load"``: waiting for the batches of a
        `Loader`; ``"reduce"``: the arithmetic of collectives; ``"wait"``: waiting for other ranks;
        ``"other"``: the rest of each command.
    events : list of list of Event
        The events of each rank, in order.
    seconds : numpy.ndarray
        Time in seconds, float64 of shape ``(steps, ranks, categories)``; each command is one step.
    operations : list of Operation
        With ``profile(operations=True)``: the operations of compiled functions, of each function the
        longest first. Each has the attributes ``function``, ``name``, ``kind`` (its class, with the
        module), ``kernel`` (``"fast"``, or ``"Theano's own"`` if this library has none for it),
        ``nodes`` (how many nodes of the graph), ``seconds`` (per step, as a mean of the ranks) and
        ``share`` (of the time of all operations of the function).
    hosts : list of str
        The name of each rank's machine.
    clock_error : float
        By how many seconds the starts on other machines may be wrong, as their clocks are compared
        with that of the script's machine; 0 if there are no others.
    """

    categories = CATEGORIES

    def __init__(self) -> None:
        self.events: list[list[Event]] = []
        self.seconds: AnyArray = np.zeros((0, 0, len(CATEGORIES)))
        self.operations: list[Operation] = []
        self.hosts: list[str] = []
        self.clock_error = 0.0
        self._names_hosts = False
        self._measured: Sequence[OfRank] = ()

    def _align(self, found: Sequence[OfRank], begin: list[Reading], end: list[Reading]) -> None:
        """Take the measurements of the ranks, given the readings of each machine's clock, if any."""
        self.hosts = [item.host for item in found]
        self._names_hosts = len(begin) > 1
        self.clock_error = max((item.error for item in (*begin, *end)), default=0.0)
        by_rank = [item.events for item in found]
        for rank, item in enumerate(found):
            if item.machine:  # not the script's
                pair = begin[item.machine], end[item.machine]
                by_rank[rank] = [e._replace(start=to_own(*pair, e.start)) for e in item.events]
        self._take(by_rank)
        timed = [[(each.name, each.times) for each in item.functions] for item in found]
        self.operations = tables.of_ranks(timed, len(self.seconds))
        self._measured = found

    def _take(self, events: list[list[Event]]) -> None:
        self.events = events
        steps = max((event.step + 1 for by_rank in events for event in by_rank), default=0)
        self.seconds = np.zeros((steps, len(events), len(CATEGORIES)))
        rest = self.seconds[:, :, -1]
        for rank, by_rank in enumerate(events):
            begin = {event.step: event.start for event in by_rank if event.category == COMMAND}
            ended: list[Event] = []
            for event in by_rank:
                if event.category == COMMAND:
                    rest[event.step, rank] += event.seconds
                    continue
                own = event.seconds
                while ended and ended[-1].start >= event.start:  # it was inside this event
                    own -= ended.pop().seconds
                ended.append(event)
                self.seconds[event.step, rank, CATEGORIES.index(event.category)] += own
                # The master also copies before its command, for example the numbers of rows.
                if event.start >= begin.get(event.step, np.inf):
                    rest[event.step, rank] -= own
        np.maximum(rest, 0, out=rest)

    def table(self, most: int = 10) -> str:
        """Return a table of the milliseconds per step of each rank and category, as a string.

        A table for each compiled function follows if its operations were timed.

        Parameters
        ----------
        most : int, default: 10
            The number of operations to list of each function; a last line has the sums of the others.
        """
        steps = len(self.seconds)
        lines = [f"{steps} steps; milliseconds per step, and the share of each rank's time"]
        lines.append("rank " + "".join(f"{name:>18}" for name in CATEGORIES) + f"{'all':>12}")
        for rank, each in enumerate(self._milliseconds()):
            total = each.sum()
            cells = [f"{item:>10.3f} {item / total if total else 0:>6.1%}" for item in each]
            lines.append(f"{rank:>4} " + "".join(f"{cell:>18}" for cell in cells) + f"{total:>12.3f}")
        return "\n".join([*lines, *tables.table(self.operations, most)])

    def __repr__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        rows = []
        for rank, each in enumerate(self._milliseconds()):
            shares = each / (each.sum() or 1)
            cells = [f"{item:.3f} ({share:.0%})" for item, share in zip(each, shares)]
            rows.append([f"rank {rank}", *cells, f"{each.sum():.3f}"])
        title = f"Milliseconds per step, of {len(self.seconds)} steps, and the share of each rank's time"
        found = [self._picture(), _html.table(title, rows, ("", *CATEGORIES, "all"))]
        for function, own in tables.by_function(self.operations, 10).items():
            each_cells = map(tables.cells, own)
            found.append(_html.table(tables.title(function, own), each_cells, tables.HEADER))
        return "\n".join(filter(None, found))

    def _picture(self) -> str:
        """Return the timeline as an element of HTML; "" without matplotlib, or if there is none."""
        timeline = self._timeline(None)
        if timeline is None:
            return ""
        try:
            figure = draw_timeline(timeline, self._labels())
        except ImportError:
            return ""
        return _html.picture(figure, timeline.title)

    def _timeline(self, steps: slice | None) -> Timeline | None:
        each = self._milliseconds()
        waiting = each[:, CATEGORIES.index("wait")] / np.maximum(each.sum(axis=1), 1e-9)
        return make_timeline(self.events, waiting.tolist(), steps)

    def _milliseconds(self) -> AnyArray:
        """Return the time per step of each rank and category."""
        each: AnyArray = 1e3 * self.seconds.sum(axis=0) / max(len(self.seconds), 1)
        return each

    def save(self, path: PathLike) -> None:
        """Write the events as a Chrome trace, for https://ui.perfetto.dev or chrome://tracing.

        Arrows point from the rank that was waited for to the wait. If operations were timed, they are
        inside the calls of their functions, one after the other.

        Parameters
        ----------
        path : str or path-like
            The JSON file to write.

        Raises
        ------
        OSError
            If the file cannot be written.
        """
        trace = make_trace(self.events, self._labels(), self._measured)
        with open(path, "w", encoding="utf-8") as file:
            json.dump(trace, file)

    def plot(self, path: PathLike, most: int = 8, steps: slice | None = None) -> None:
        """Draw a timeline of each rank, how it spends a step, and the operations that take most of it.

        The operations are drawn if they were timed.

        Parameters
        ----------
        path : str or path-like
            The image to write, such as ``"profile.png"`` or ``"profile.svg"``.
        most : int, default: 8
            The number of operations to draw of each function.
        steps : slice, optional
            The steps of the timeline, such as ``slice(0, 3)``; by default five in the middle. If there
            are many events in them, only the first part is drawn.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        TypeError
            If `steps` is not a slice.
        OSError
            If the file cannot be written.
        """
        if not (steps is None or isinstance(steps, slice)):
            raise TypeError(f"Profile.plot: steps: expected a slice, such as slice(0, 3), got {steps!r}")
        timeline, labels = self._timeline(steps), self._labels()
        try:
            figure = make_figure(self.seconds, labels, self.operations, most, timeline)
        except ImportError as error:
            raise ImportError(
                "Profile.plot needs matplotlib: pip install matplotlib; or print the profile"
            ) from error
        figure.savefig(path, dpi=130)

    def _labels(self) -> list[str]:
        return [self._label(rank) for rank in range(len(self.events))]

    def _label(self, rank: int) -> str:
        return f"rank {rank} on {self.hosts[rank]}" if self._names_hosts else f"rank {rank}"


@contextlib.contextmanager
def profile(path: PathLike | None = None, operations: bool = False) -> Iterator[Profile]:
    """Measure how every rank spends its time in the block.

    Parameters
    ----------
    path : str or path-like, optional
        A file to which a Chrome trace is written at the end of the block.
    operations : bool, default: False
        Whether the operations of compiled functions are timed, too. This tells which of them take most
        of the time of ``gradient``, and whether this library has a fast kernel for them. Reading the
        clock for each takes about a microsecond per node of a graph. Nothing is compiled again, and
        results are the same.

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
    ValueError
        With `operations`, from the call of a function whose operations cannot be timed, as it is
        compiled as a whole: by Numba, JAX, or a linker of Theano other than its virtual machines.

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
    (3, 2, 6)
    >>> print(measured)  # doctest: +ELLIPSIS
    3 steps; milliseconds per step, and the share of each rank's time
    rank ...

    The operation that takes most of the time of a function:

    >>> y = T.dmatrix("y")
    >>> g = synk.function([y], (T.dot(y.T, y), "sum"), name="g")
    >>> with synk.profile(operations=True) as measured:
    ...     _ = g(np.ones((400, 300)))
    >>> one = measured.operations[0]
    >>> print(one.function, one.name, one.kind, one.nodes, one.kernel)
    g Dot22 theano.tensor.blas.Dot22 1 Theano's own
    >>> synk.close()
    """
    world = current_world()
    world.check_usable()
    if world.rank_state.log:
        raise FuseError(
            "profile(): already inside a profile() block, and blocks cannot be nested; remove the inner "
            "one: the outer block measures these calls, too"
        )
    operations = check_flag(operations, "profile(): operations")
    replicate(world)
    measured = Profile()
    try:
        begin = world.run(Ask(of_rank.begin, operations))[world.master_rank]
        log = world.rank_state.log
        log.events.clear()  # they are about the wait for the workers in that command
        log.replace(world, "run", COMMAND)
        yield measured
    finally:
        if world.rank_state.log:
            world.rank_state.log.stop()
        if world.broken is None and not world.closed:
            found, readings = zip(*world.run(Ask(of_rank.end)))
            measured._align(found, begin, readings[world.master_rank])
            if path is not None:
                measured.save(path)
        elif world.rank_state.log:  # no command can run, but this rank must stop measuring
            of_rank.stop(world.rank_state)
