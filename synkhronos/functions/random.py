"""`reseed`: random streams seeded anew on every rank."""

from __future__ import annotations

from typing import Any

from synkhronos.world.here import Command
from synkhronos.world.world import current_world


class _Reseed(Command):
    """Set states of random streams to those of the master, moved to this rank's own substreams."""

    def __init__(self, states):
        self.states = states  # by the number of the shared variable

    def run(self, here):
        if here.is_master:
            return
        for number, state in self.states.items():
            here.engine.store(here.shareds[number], state)
            here.engine.jump(here.shareds[number], here.stream_index)


def reseed(streams: Any, seed: int | None = None) -> None:
    """Seed random streams anew, as ``streams.seed(seed)`` does, on every rank.

    The streams of the ranks are independent again. After it the ranks draw what they would draw in a
    new run whose streams were made with this seed.

    Parameters
    ----------
    streams : MRG_RandomStreams or RandomStreams
    seed : int, optional
        None: the seed with which they were made.

    Raises
    ------
    NotForkedError
        Before ``fork()``.
    RuntimeError
        Inside ``fuse()``, as the calls of the block would run after it.
    TypeError
        If `streams` are none of the compiler's, or `seed` is not an int.
    """
    world = current_world()
    world.check_usable()
    if world.is_recording:
        raise RuntimeError("reseed(): call it before or after the fuse() block, not inside")
    if isinstance(seed, (bool, float, str)):
        raise TypeError(f"reseed: seed: expected an int, or None, got {seed!r}")
    here = world.here
    seeded = here.engine.seed(streams, seed)
    # Those that are not replicated yet will be, with the states that the master has then.
    registry = world.registry
    states = {
        registry.numbers[shared]: here.engine.storage(shared)
        for shared in seeded
        if registry.numbers.get(shared, registry.replicated_shareds) < registry.replicated_shareds
    }
    if states:
        world.run(_Reseed(states))
