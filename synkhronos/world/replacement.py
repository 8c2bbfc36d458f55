"""Going on when workers die in a program: a fresh rank takes the place of a dead one."""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import pickle
from typing import Iterator

import numpy as np

from synkhronos._errors import REMEDY, SynkhronosError, WorldBrokenError
from synkhronos.world.world import World

_MOST_DEATHS = 3  # of a rank in one program

_logger = logging.getLogger("synkhronos")


@contextlib.contextmanager
def replacing_dead(world: World, ended: np.ndarray) -> Iterator[None]:
    """Go on if workers die in a program in the block, and replace them if workers can be forked.

    `ended` has a number for each rank, which becomes 1 if it has died and is not replaced.
    """
    deaths: collections.Counter = collections.Counter()
    lost: list[int] = []

    def on_death(dead: dict[int, str]) -> None:
        for rank, cause in dead.items():
            deaths[rank] += 1
            if deaths[rank] > _MOST_DEATHS:
                world.transport.kill()
                raise WorldBrokenError(
                    f"rank {rank} died {deaths[rank]} times in a program, at last {cause}; the others "
                    f"were ended; {REMEDY}"
                )
            _logger.warning("rank %d died (%s); the other ranks go on", rank, cause)
            if world.workers_inherit:
                _replace(world, rank, cause, deaths[rank])
            else:
                lost.append(rank)
                ended[rank] = 1
                world.transport.answer_for(rank, pickle.dumps((None, None)))

    world.transport.on_death = on_death
    try:
        yield
    finally:
        world.transport.on_death = None
        if lost and world.broken is None:
            world.mark_broken(f"these ranks died in a program: {lost}; {REMEDY}")
            world.transport.kill()


def _replace(world, rank, cause, restarts):
    try:
        world.here.engine.before_fork()
        world.transport.replace(rank, functools.partial(_prepare, world, restarts))
    except (OSError, MemoryError, SynkhronosError) as error:
        world.transport.kill()
        if isinstance(error, WorldBrokenError):
            raise
        raise WorldBrokenError(
            f"rank {rank} died ({cause}), and no other process could take its place: {error}; the "
            f"others were ended; {REMEDY}"
        ) from error


def _prepare(world, restarts, takes_part):
    """In a new worker, which has begun as a copy of the master: make its state its own."""
    world.here.copy_out_of_store()  # where the master continues to write
    here = world.here
    here.restarts = restarts if takes_part else 0
    if here.log:
        here.log.events.clear()
    streams = {
        world.registry.numbers[shared]: shared
        for replica in here.functions.values()
        for shared in here.engine.random_streams(replica.compiled)
    }
    for number in sorted(streams):
        here.engine.jump(streams[number], here.stream_index + restarts * here.size)
