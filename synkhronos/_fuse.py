"""`fuse`: several calls as one command, so that the barriers are crossed once."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator

from synkhronos import _world
from synkhronos._typing import Finish
from synkhronos._world import Command, Here, World


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

    def result(self) -> Any:
        """Return what the call would have returned outside the block."""
        if self._results is None:
            raise RuntimeError("result(): the fuse() block has not ended, or ended with an error")
        return self._results[0]


class _Fused:
    """The calls that an open `fuse` block has gathered."""

    def __init__(self) -> None:
        self._calls: list[tuple[Command, Finish, Pending]] = []

    def add(self, command: Command, finish: Finish) -> Pending:
        pending = Pending()
        self._calls.append((command, finish, pending))
        return pending

    def run(self, world: World) -> None:
        if not self._calls:
            return
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
    RuntimeError
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
        raise RuntimeError("fuse(): already inside a fuse() block; blocks cannot be nested")
    world.fused = fused = _Fused()
    try:
        yield
    finally:
        world.fused = None
    fused.run(world)
