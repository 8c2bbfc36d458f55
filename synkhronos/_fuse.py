"""`fuse`: several calls as one command, so that the barriers are crossed once."""

import contextlib

from synkhronos import _world
from synkhronos._world import Command


class Sequence(Command):
    """A command made of commands."""

    def __init__(self, commands):
        self.commands = commands

    def __reduce__(self):
        return Sequence, (self.commands,)

    def run(self, here):
        return [command.run(here) for command in self.commands]


class Pending:
    """What a call inside `fuse` returns: its result, once the block has ended."""

    def __init__(self):
        self._results = None

    def result(self):
        """Return what the call would have returned outside the block."""
        if self._results is None:
            raise RuntimeError("result(): the fuse() block has not ended, or ended with an error")
        return self._results[0]


class _Fused:
    """The calls that an open `fuse` block has gathered."""

    def __init__(self):
        self._calls = []

    def add(self, command, finish):
        pending = Pending()
        self._calls.append((command, finish, pending))
        return pending

    def run(self, world):
        if not self._calls:
            return
        by_rank = world.run(Sequence([command for command, _, _ in self._calls]))
        for position, (_, finish, pending) in enumerate(self._calls):
            pending._results = (finish([results[position] for results in by_rank]),)


@contextlib.contextmanager
def fuse():
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
