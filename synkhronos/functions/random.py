"""`reseed`: seed random streams on every rank."""

from __future__ import annotations

from typing import Any

from synkhronos.functions.changes import Carry
from synkhronos.functions.replica_tracker import replica_tracker_of
from synkhronos.world.entry import with_call_lock
from synkhronos.world.world import current_world


@with_call_lock
def reseed(streams: Any, seed: int | None = None) -> None:
    """Seed random streams on every rank, as ``streams.seed(seed)`` does on the master.

    The streams of the ranks remain independent. The ranks then draw the same numbers as in a new run
    whose streams were created with this seed.

    Parameters
    ----------
    streams : MRG_RandomStreams or RandomStreams
        The streams to seed. With PyTensor, a ``RandomStream``, a shared random generator, or a list of
        shared generators.
    seed : int, optional
        By default, the seed with which the streams were created.

    Raises
    ------
    NotForkedError, ClosedError, WorldBrokenError
        If there are no processes that can be used.
    RuntimeError
        Inside a ``fuse()`` block, whose calls would run after the seeding.
    TypeError
        If `streams` is not an object of one of these classes, or `seed` is not an int.

    Examples
    --------
    >>> import synkhronos as synk
    >>> from theano.sandbox.rng_mrg import MRG_RandomStreams
    >>> synk.fork(2, use_gpu=False)
    2
    >>> streams = MRG_RandomStreams(1)
    >>> draw = synk.function([], (streams.uniform((2,)), "gather"))
    >>> first = draw()
    >>> synk.reseed(streams, 1)
    >>> bool((draw() == first).all())
    True
    >>> synk.close()
    """
    world = current_world()
    world.check_usable()
    if world.is_recording:
        raise RuntimeError("reseed(): call it before or after the fuse() block, not inside")
    if isinstance(seed, (bool, float, str)):
        raise TypeError(f"reseed: seed: expected an int, or None, got {seed!r}")
    state = world.rank_state
    seeded = state.engine.seed(streams, seed)
    # Streams that are not replicated yet will be replicated with the master's new states.
    registry = world.registry
    states = {
        registry.numbers[shared]: state.engine.storage(shared)
        for shared in seeded
        if registry.numbers.get(shared, registry.replicated) < registry.replicated
    }
    if states:
        replica_tracker_of(world).restored(states)
        world.run(Carry({}, states, {}))
