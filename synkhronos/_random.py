"""`reseed`: random streams begun anew on every rank."""

from __future__ import annotations

from typing import Any

from synkhronos import _world
from synkhronos._here import Command
from synkhronos._replicate import stream_index


class _Reseed(Command):
    """States of random streams become those of the master, moved to this rank's own streams."""

    def __init__(self, states):
        self.states = states  # by the number of the shared variable

    def run(self, here):
        if here.is_master:
            return
        for number, state in self.states.items():
            here.engine.store(here.shareds[number], state)
            here.engine.jump(here.shareds[number], stream_index(here))


def reseed(streams: Any, seed: int | None = None) -> None:
    """Seed random streams anew, as ``streams.seed(seed)`` does, on every rank.

    Each rank has a stream of its own again. After it the ranks draw what they would in a new run whose
    streams were made with this seed.

    Parameters
    ----------
    streams : MRG_RandomStreams or RandomStreams
    seed : int, optional
        None: the seed that they were made with.

    Raises
    ------
    NotForkedError
        Before ``fork()``.
    RuntimeError
        Inside ``fuse()``, where other calls of the block would run after it.
    TypeError
    """
    world = _world.current()
    world.check_usable()
    if world.fused is not None:
        raise RuntimeError("reseed(): call it before or after the fuse() block, not inside")
    if isinstance(seed, (bool, float, str)):
        raise TypeError(f"reseed: seed: expected an int, or None, got {seed!r}")
    here = world.here
    seeded = here.engine.seed(streams, seed)
    # What is not replicated yet will be, with the states that the master has then.
    numbers = {shared: world.shared_numbers.get(shared) for shared in seeded}
    states = {
        number: here.engine.storage(shared)
        for shared, number in numbers.items()
        if number is not None and number < world.replicated_shareds
    }
    if states:
        world.run(_Reseed(states))
