"""`fuse`: several calls as one command, so that the barriers are crossed once."""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Iterator

from synkhronos import _world
from synkhronos._errors import FuseError, SynkhronosError
from synkhronos._here import Command, Here
from synkhronos._typing import Finish
from synkhronos._world import World


class Sequence(Command):
    """A command made of commands."""

    def __init__(self, commands: list[Command]) -> None:
        self.commands = commands

    def __reduce__(self) -> tuple:
        return Sequence, (self.commands,)

    def run(self, here: Here) -> list:
        return [command.run(here) for command in self.commands]


class Pending:
    """What a call inside `fuse` returns: its result, once the block has ended."""

    def __init__(self) -> None:
        self._results: tuple | None = None
        self._failed = False

    def result(self) -> Any:
        """Return what the call would have returned outside the block.

        Raises
        ------
        FuseError
            Before the block has ended, or if it ended with an error.
        """
        if self._results is None:
            raise FuseError(
                "result(): the fuse() block of this call ended with an error, so there is no result"
                if self._failed
                else "result(): the fuse() block has not ended, and its calls run as it ends; ask for "
                "the result after the block"
            )
        return self._results[0]

    def _refuse(self, *_: object) -> Any:
        raise FuseError(
            "this is what a call inside fuse() returns, and no number or array yet; after the block, "
            "call its result() and use what that returns"
        )

    # What one would do to a result. Its truth, order and length would be wrong without a word, too.
    __array__ = __float__ = __int__ = __index__ = __complex__ = __bool__ = __len__ = _refuse
    __getitem__ = __iter__ = __format__ = _refuse
    __neg__ = __pos__ = __abs__ = __round__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _refuse
    __pow__ = __rpow__ = __matmul__ = __rmatmul__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _refuse  # type: ignore[assignment]
    __hash__ = object.__hash__


class _Fused:
    """The calls that an open `fuse` block has gathered."""

    def __init__(self) -> None:
        self._calls: list[tuple[Command, Finish, Pending]] = []
        self._thread = threading.get_ident()

    def add(self, command: Command, finish: Finish) -> Pending:
        if threading.get_ident() != self._thread:
            raise SynkhronosError(
                "another thread is in a fuse() block; use the processes from one thread at a time"
            )
        pending = Pending()
        self._calls.append((command, finish, pending))
        return pending

    def drop(self) -> None:
        """Say to the calls that they will never have a result."""
        for _, _, pending in self._calls:
            pending._failed = True

    def run(self, world: World) -> None:
        if not self._calls:
            return
        self.drop()  # unless it comes to the result
        by_rank = world.run(Sequence([command for command, _, _ in self._calls]))
        for position, (_, finish, pending) in enumerate(self._calls):
            pending._results = (finish([results[position] for results in by_rank]),)


@contextlib.contextmanager
def fuse() -> Iterator[None]:
    """Gather the calls of replicated functions and collectives in the block into one command.

    Every rank runs them in order, at the block's end, between one start and one finish barrier. Inside
    the block a call returns an object whose ``result()`` is there after it.

    Raises
    ------
    FuseError
        For a block inside a block.

    Examples
    --------
    >>> with synk.fuse():                                # doctest: +SKIP
    ...     loss = gradient(x, y, batch=rows)
    ...     synk.all_reduce(flat, weights=gradient)
    ...     update()
    >>> loss.result()                                    # doctest: +SKIP
    """
    world = _world.current()
    world.check_usable()
    if world.fused is not None:
        raise FuseError(
            "fuse(): already inside a fuse() block, and blocks cannot be nested; the calls here are "
            "part of the outer one, so leave the inner one out"
        )
    world.fused = fused = _Fused()
    try:
        yield
    except BaseException:
        fused.drop()
        raise
    finally:
        world.fused = None
    fused.run(world)
