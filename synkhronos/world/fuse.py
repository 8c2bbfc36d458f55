"""`fuse`: combine several calls into one command, with a single pair of barriers."""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Mapping

from synkhronos._errors import FuseError, SynkhronosError
from synkhronos._typing import Finish
from synkhronos.stores.needs import Need
from synkhronos.world.here import Command, Here
from synkhronos.world.world import current_world


class FusedCommand(Command):
    """Several commands, run in order."""

    is_rehearsed = True

    def __init__(self, commands: list[Command]) -> None:
        self.commands = commands

    def __reduce__(self) -> tuple:
        return FusedCommand, (self.commands,)

    def parted(self) -> tuple[Command, Any]:
        """Return no commands, and the parts of each: the ranks often have most from the last one."""
        if not self.commands:
            return self, None
        parted = [command.parted() for command in self.commands]
        return _NO_COMMANDS, [(base.packed(), rest) for base, rest in parted]

    def joined(self, rest: Any, here: Here) -> FusedCommand:
        commands = []
        for packed, further in rest:
            base = here.kept(packed)
            commands.append(base if further is None else base.joined(further, here))
        return FusedCommand(commands)

    def run(self, here: Here) -> list:
        return [command.run(here) for command in self.commands]

    def rehearse(self, here: Here) -> None:
        for command in self.commands[:1]:  # the first one's work empties the caches again
            command.rehearse(here)

    def needs(self, ranks: range, size: int) -> list[Need]:
        return [need for command in self.commands for need in command.needs(ranks, size)]

    def describe(self, here: Here) -> str:
        return " + ".join(command.describe(here) for command in self.commands)


_NO_COMMANDS = FusedCommand([])


class Pending:
    """The pending result of a call inside a `fuse` block."""

    def __init__(self) -> None:
        self._results: tuple | None = None
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

    def _refuse(self, *_: object) -> Any:
        raise FuseError(
            "this is the pending result of a call inside fuse(), and not a value; after the block, call "
            "result() and use its return value"
        )

    # Without these, Python and NumPy would use the object itself as a value and raise nothing.
    __array__ = __bool__ = __eq__ = __ne__ = __format__ = _refuse  # type: ignore[assignment]
    __hash__ = object.__hash__


class _Block(contextlib.ContextDecorator):
    """A block that `fuse` begins. It records the calls, and runs them at the end."""

    def __enter__(self) -> _Block:
        self._world = world = current_world()
        world.check_usable()
        if world.is_recording:
            raise FuseError(
                "fuse(): already inside a fuse() block, and blocks cannot be nested; remove the inner "
                "one: its calls are part of the outer block"
            )
        self._calls: list[tuple[Command, Finish]] = []
        self._pending: list[Pending] = []
        self._used: list[Any] = []
        self._thread = threading.get_ident()
        self._n_functions = 0
        world.record(self)
        return self

    def __exit__(self, kind: type | None, *error: Any) -> None:
        self._world.record(None)
        for pending in self._pending:
            pending._failed = True  # until there are results
        try:
            if kind is None and self._calls:
                self._run()
        finally:
            self._used.clear()

    def add(self, command: Command, finish: Finish, used: Any) -> Pending:
        if threading.get_ident() != self._thread:
            raise SynkhronosError(
                "another thread is in a fuse() block; use the processes from one thread at a time"
            )
        pending = Pending()
        self._calls.append((command, finish))
        self._pending.append(pending)
        self._used.append(used)
        return pending

    def _run(self):
        world = self._world
        by_rank = world.run(FusedCommand([command for command, _ in self._calls]))
        self._n_functions = world.registry.n_functions
        for (_, finish), pending, results in zip(self._calls, self._pending, zip(*by_rank)):
            pending._results = (finish(list(results)),)

    def take_results(self) -> list[Any]:
        """Return the results of the calls, which the block does not keep."""
        pending, self._pending = self._pending, []
        return [one.result() for one in pending]

    def repeat(self, changed: Mapping[int, Command]) -> list[Any] | None:
        """Run the calls again, after the block, without recording them; return their results.

        Parameters
        ----------
        changed : dict of int to Command
            What is run in place of the command of a call, by the number of the call in the block.

        Returns
        -------
        list or None
            None, without having run anything, if the calls have to be recorded again: the world cannot
            run them now, or has functions that it did not have.
        """
        world = self._world
        registry = world.registry
        if world.closed or world.is_recording or registry.may_have_new or registry.unsent:
            return None
        if self._n_functions != registry.n_functions:
            return None
        commands = [command for command, _ in self._calls]
        for place, command in changed.items():
            commands[place] = command
        by_rank = world.run(FusedCommand(commands))
        return [finish(results) for (_, finish), results in zip(self._calls, zip(*by_rank))]


def fuse() -> contextlib.AbstractContextManager[Any]:
    """Combine the calls of functions and collectives in the block into one command.

    Every rank runs the calls in order at the end of the block, between one start and one finish barrier.
    Inside the block, a call returns an object whose ``result()`` is available after the block.

    Raises
    ------
    NotForkedError, ClosedError, WorldBrokenError
        If there are no processes that can be used.
    FuseError
        If the block is inside another ``fuse()`` block, or if ``result()`` is called before its end.
    WorkerError
        At the end of the block, if a worker raised an exception.

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
