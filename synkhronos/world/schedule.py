"""Schedules: what is repeated is compiled, sent, and bound by each rank once. Blocks of `fuse`.

The first time, the master checks the arguments of a call, a collective or a training step, and compiles
them to a `Schedule`: commands, with the arrays that they take rows of. As long as the schedule is
current, a repetition sends its number, and a change: the rows of a call, for example.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import weakref
from threading import get_ident
from typing import Any, Callable, Iterable, Sequence

from synkhronos._errors import FuseError
from synkhronos._text import shortened
from synkhronos._typing import Batch, Finish
from synkhronos.stores.handle import RequiredRows
from synkhronos.world.rank_state import SCHEDULE_NUMBER, Command, FusedCommand, RankState
from synkhronos.world.world import World, current_world


class Schedule(Command):
    """What every rank does in a call, a collective or a step that is repeated.

    Once all ranks have it, it is also the command that runs it without a change. The ranks drop it when
    the script has no reference to it any more.

    Parameters
    ----------
    world : World
        The world whose ranks have it.
    command : Command
        The command, without its observers.
    values : list of Data
        The arguments of the call or step.
    is_whole : bool
        Whether the command is on all rows, without a batch.

    Attributes
    ----------
    is_sent : bool
        Whether all ranks have it.
    """

    def __init__(
        self, world: World, command: Command, values: Sequence[Any] = (), is_whole: bool = True
    ) -> None:
        self.command = command
        self.number = world.registry.add_schedule(self)
        self.is_sent = False
        # The world itself would be kept in a cycle.
        self._registry, self._version = world.registry, world.registry.version
        self._change_to = command.prepare_changes(world.size)
        self._handles, self._is_whole = [value.last_handle for value in values], is_whole
        self._payload = SCHEDULE_NUMBER.pack(self.number)  # the same object is not written again
        self.needs = command.needs  # type: ignore[method-assign]  # found once by other machines

    def again(self, values: Sequence[Any] = (), batch: Any = None) -> Schedule | ScheduledRun | None:
        """Return its run on a batch of these values, or None if they have to be checked and compiled.

        Functions or variables may have been added or dropped, the workers replaced, the world closed;
        a `Data` may be another one or have moved; and the next call of a function may be observed.

        Raises
        ------
        TypeError, IndexError
            For a wrong batch.
        ValueError
            If the script has changed the layout of an array.
        """
        if self._version is not self._registry.version or len(values) != len(self._handles):
            return None
        for value, handle in zip(values, self._handles):
            if getattr(value, "last_handle", None) is not handle:
                return None
            if value.is_shown:
                value.check_layout()
        if batch is None and self._is_whole:
            return self if self.is_sent else ScheduledRun(self)
        change = self._change_to(batch)
        return None if change is None else ScheduledRun(self, change)

    def sent(self) -> tuple[int]:
        return (self.number,)

    def packed(self) -> bytes:
        return self._payload

    def run(self, state: RankState) -> Any:
        bound = state.bound.get(self.number)
        return (bound or state.bind(self.number, self.command))(None)

    @property
    def plain(self) -> Command:
        return self.command

    def describe(self, state: RankState) -> str:
        return self.command.describe(state)


class ScheduledRun(Command):
    """A run of a schedule, changed as in `Command.changed`, or the first run, in which it is sent."""

    _plain: Command | None = None

    def __init__(self, schedule: Schedule, change: Any = None) -> None:
        self.schedule, self.change, self.schedules = schedule, change, (schedule,)

    def sent(self) -> tuple[Any, ...]:
        sent = self.schedule.number, self.change
        return sent if self.schedule.is_sent else (*sent, self.schedule.command)

    def packed(self) -> bytes:
        if not self.schedule.is_sent:
            return super().packed()
        return pickle.dumps((self.schedule.number, self.change), pickle.HIGHEST_PROTOCOL)

    def run(self, state: RankState) -> Any:
        schedule = self.schedule
        bound = state.bound.get(schedule.number)
        return (bound or state.bind(schedule.number, schedule.command))(self.change)

    def needs(self, ranks: range, size: int) -> Iterable[RequiredRows]:
        return self.plain.needs(ranks, size)

    @property
    def plain(self) -> Command:
        if self._plain is None:
            self._plain = self.schedule.command.changed(self.change)
        return self._plain

    def describe(self, state: RankState) -> str:
        return self.schedule.describe(state)


# Blocks


class Pending:
    """The pending result of a call inside a `fuse` block."""

    def __init__(self) -> None:
        self._results: tuple[Any] | None = None
        self._failed = False

    def result(self) -> Any:
        """Return the result of the call. It is available after the block.

        Raises
        ------
        FuseError
            Before the block has ended, or if it ended with an error.
        """
        if self._results is None:
            raise FuseError(
                "result(): the fuse() block of this call ended with an error, so there is no result"
                if self._failed
                else "result(): the fuse() block has not ended, and its calls run when it ends; ask for "
                "the result after the block"
            )
        return self._results[0]

    def __repr__(self) -> str:
        if self._results is not None:
            return f"<pending result: {shortened(self._results[0])}>"
        state = "its block ended with an error" if self._failed else "after the block, call result()"
        return f"<pending result: {state}>"

    def _refuse(self, *_: object) -> Any:
        raise FuseError(
            "this is the pending result of a call inside fuse(), and not a value; after the block, call "
            "result() and use its return value"
        )

    # Without these, Python and NumPy would use the object itself as a value and raise nothing.
    __array__ = __bool__ = __eq__ = __ne__ = __format__ = _refuse
    __hash__ = object.__hash__


class _Exit:
    """The method ``__exit__`` of a block, to which only the ``with`` statement has a reference.

    A signal handler may raise an exception at its start, before it does anything. Python then drops the
    reference, so the block is known to be over, even while the traceback keeps the block.
    """

    def __get__(self, block: _Block | None, owner: type[_Block]) -> Callable[..., None]:
        if block is None:
            return owner._end_block  # for `ExitStack`
        held = functools.partial(block._end_block)
        block._held = weakref.ref(held)
        return held


class _Block(contextlib.ContextDecorator):
    """A block that `fuse` begins. It records the calls, and runs them at the end.

    Attributes
    ----------
    instead : callable or None
        If it is set in the block, the commands are not run, but given to it.
    observers : list of callable
        They are called with the commands before these are run.
    """

    _held: Callable[[], Any] | None = None
    __exit__ = _Exit()

    def __enter__(self) -> _Block:
        self._world = world = current_world()
        self._calls: list[tuple[Command, Finish, Pending]] = []
        self._used: list[Any] = []
        self.observers: list[Callable[[list[Command]], None]] = []
        self.instead: Callable[[list[Command]], Any] | None = None
        has_begun = False
        try:
            with world.call_lock:
                world.check_usable()
                if world.is_recording:
                    raise FuseError(
                        "fuse(): already inside a fuse() block, and blocks cannot be nested; remove the "
                        "inner one: its calls are part of the outer block"
                    )
                has_begun = True
                world.call_lock.block = get_ident()
                world.recorder = self
            return self
        except BaseException:
            if has_begun:  # a signal handler has raised it
                self.leave()
            raise

    def leave(self) -> None:
        """Let commands run again."""
        self._world.recorder = None
        self._world.call_lock.block = 0

    def is_over(self) -> bool:
        """Whether the ``with`` statement has ended, although `__exit__` may not have run."""
        return self._held is not None and self._held() is None

    def _end_block(self, kind: type | None, *error: Any) -> None:
        with self._world.call_lock:
            self.leave()
            for _, _, pending in self._calls:
                pending._failed = True  # until there are results
            try:
                if kind is None and self._calls:
                    (self.instead or self._run)([command for command, _, _ in self._calls])
            finally:
                self._used.clear()
                self.observers.clear()

    def add(self, command: Command, finish: Finish, used: Any) -> Pending:
        pending = Pending()
        self._calls.append((command, finish, pending))
        self._used.append(used)
        return pending

    def notify(self, commands: list[Command]) -> None:
        """Call the observers."""
        for observe in self.observers:
            observe(commands)

    def _run(self, commands: list[Command]) -> None:
        self.notify(commands)
        results = finished(self.finishes, self._world.run(FusedCommand(commands)))
        for (_, _, pending), result in zip(self._calls, results):
            pending._results = (result,)

    @property
    def finishes(self) -> list[Finish]:
        """The functions that convert the results of the calls."""
        return [finish for _, finish, _ in self._calls]


def finished(finishes: Sequence[Finish], by_rank: Sequence[list[Any]]) -> list[Any]:
    """Return the results of the calls of a block, given the list of the results by rank."""
    found = []
    for finish, results in zip(finishes, zip(*by_rank)):
        found.append(finish(list(results)))
    return found


def fuse() -> contextlib.AbstractContextManager[Any]:
    """Combine the calls of functions and collectives in the block into one command.

    Every rank runs the calls in order at the end of the block, between one start and one finish barrier.
    Inside the block, a call returns an object whose ``result()`` is available after the block. Errors of
    the calls are raised at the end of the block.

    Raises
    ------
    FuseError
        If the block is inside another ``fuse()`` block, or if ``result()`` is called before its end.

    Examples
    --------
    >>> import numpy as np
    >>> import synkhronos as synk
    >>> import theano
    >>> import theano.tensor as T
    >>> synk.fork(2, use_gpu=False)
    2
    >>> x = T.dvector("x")
    >>> mean = theano.shared(0.0, name="mean")
    >>> compute = synk.function([x], (x.sum(), "sum"), updates=[(mean, x.mean())])
    >>> synk.distribute()
    >>> with synk.fuse():
    ...     pending = compute(np.arange(3.0))  # two rows on this process, one on the worker
    ...     _ = synk.all_reduce(mean, weights=compute)
    >>> mean.get_value()
    array(1.)
    >>> pending.result()
    array(3.)
    >>> synk.close()
    """
    return _Block()


class RepeatedStep:
    """A block that is repeated. On the same data it is a schedule, and only row numbers are sent.

    Parameters
    ----------
    functions : list of Function
        The functions that the step calls, in order. Collectives come only after the function with rows.
    place : int
        The index of the function that is called on rows.
    may_repeat : bool
        Whether a step on other rows differs only in the call of this function.
    name : str
        The name of the step.
    """

    def __init__(
        self, functions: Sequence[Any], place: int, may_repeat: bool = True, name: str = "step"
    ) -> None:
        self._functions, self._place, self._may_repeat = functions, place, may_repeat
        self._name = name
        self._schedule: Schedule | None = None
        self._finishes: list[Finish] = []  # of its calls

    def reported(self, take: Callable[..., Any], *arguments: Any) -> Any:
        """Return ``take(*arguments)``, a step, and report it if there are functions of `on_step`."""
        function = self._functions[self._place]
        world = function._world
        hooks = None if world is None else world.step_hooks
        if hooks is None or not hooks.are_due(world):
            return take(*arguments)
        return hooks.run(world, self._name, function.replica.number, lambda: take(*arguments))

    def take(
        self,
        make_calls: Callable[[], Any],
        values: Sequence[Any],
        batch: Batch | None,
        has_options: bool,
    ) -> list[Any]:
        """Return the results of the calls of a step. Checks are not repeated for the same data.

        Parameters
        ----------
        make_calls : callable
            Makes the calls of the step.
        values : list
            The value of each input.
        batch : batch or None
            The rows to use.
        has_options : bool
            Whether the call has options besides the batch.
        """
        function, schedule = self._functions[self._place], self._schedule
        world: World = function._world or function._usable_world()
        with world.call_lock:
            if world.before_command is not None:
                world.before_command()
            is_recording = world.recorder is not None and world.is_recording
            if schedule is not None and not has_options and not is_recording:
                run = schedule.again(values, batch)
                if run is not None:
                    return finished(self._finishes, world.run(run))
            function._usable_world()
            self._schedule = None
            may_repeat = self._may_repeat and not has_options and not self._is_observed()
            with fuse() as block:
                make_calls()
            are_stored = all([getattr(value, "last_handle", None) is not None for value in values])
            if may_repeat and are_stored and not self._is_observed():
                commands = FusedCommand([command.plain for command, *_ in block._calls], self._place)
                self._schedule = Schedule(world, commands, values, batch is None)
                self._finishes = block.finishes
            return [pending.result() for _, _, pending in block._calls]

    def _is_observed(self) -> bool:
        """Whether the next call of a function is observed, and so differs from later calls."""
        return any([function.watch is not None for function in self._functions])
