"""Continuing when workers die in a program: a new rank replaces each dead one."""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import pickle
from typing import Iterator

import numpy as np

from synkhronos._errors import REMEDY, SynkhronosError, WorldBrokenError
from synkhronos.host.handler_errors import reraise_if_handlers
from synkhronos.world import generators
from synkhronos.world.world import World

_MOST_DEATHS = 3  # of a rank in one program

_logger = logging.getLogger("synkhronos")


class _Replacements(collections.Counter):
    """How often each rank of a world was replaced, so that no two replacements draw the same numbers."""


class Replacing:
    """Handles workers of this machine that die in a program; see `Transport.begin_program`.

    Parameters
    ----------
    world : World
        The world of the program.
    ended : numpy.ndarray
        For each rank, a number that becomes 1 if it has died and is not replaced.
    """

    def __init__(self, world: World, ended: np.ndarray) -> None:
        self._world, self._ended = world, ended
        self._deaths: collections.Counter = collections.Counter()
        self._lost: list[int] = []

    def __call__(self, dead: dict[int, str]) -> None:
        world, deaths = self._world, self._deaths
        for rank, cause in dead.items():
            deaths[rank] += 1
            if deaths[rank] > _MOST_DEATHS:
                world.transport.kill()
                raise WorldBrokenError(
                    f"rank {rank} died {deaths[rank]} times in a program, at last {cause}; the others "
                    f"were ended; {REMEDY}"
                )
            _logger.warning("rank %d died (%s); the other ranks continue", rank, cause)
            if world.transport.can_replace and world.rank_state.engine.survives_fork:
                world.part(_Replacements)[rank] += 1
                _replace(world, rank, cause, deaths[rank])
            else:
                self._lost.append(rank)
                self._ended[rank] = 1
                world.transport.answer_for(rank, pickle.dumps((None, None)))

    def complaint(self) -> str | None:
        """Return why the world cannot be used after the program, if it cannot."""
        if not self._lost:
            return None
        return f"these ranks died in a program: {self._lost}; {REMEDY}"


@contextlib.contextmanager
def replacing_dead(world: World, ended: np.ndarray) -> Iterator[Replacing]:
    """Return a function that handles the death of workers in a program in this block.

    The program continues, and dead workers are replaced if workers can be forked.
    """
    replacing = Replacing(world, ended)
    try:
        yield replacing
    finally:
        complaint = replacing.complaint()
        if complaint is not None and world.broken is None:
            world.mark_broken(complaint)
            world.transport.kill()


def _replace(world: World, rank: int, cause: str, restarts: int) -> None:
    state = world.rank_state
    try:
        state.engine.before_fork(world.transport.forks_all)
        world.transport.replace(rank, functools.partial(_prepare, world, restarts, state.stream_index))
    except (OSError, MemoryError, SynkhronosError) as error:
        reraise_if_handlers(error)
        world.transport.kill()
        if isinstance(error, WorldBrokenError):
            raise
        raise WorldBrokenError(
            f"rank {rank} died ({cause}), and no other process could take its place: {error}; the "
            f"others were ended; {REMEDY}"
        ) from error


def _prepare(world: World, restarts: int, forked_from: int, takes_part: bool) -> None:
    """Give a new worker, a copy of the rank whose stream index is `forked_from`, its own state."""
    state = world.rank_state
    state.find_rank()
    state.copy_out_of_store()  # where the other rank continues to write
    state.restarts = restarts if takes_part else 0
    replacements = world.part(_Replacements)[state.rank]
    generators.seed(generators.fingerprints(), state.rank, replacements)
    if state.log:
        state.log.events.clear()
    numbers = {id(shared): number for number, shared in state.shareds.items()}
    streams = {
        numbers[id(shared)]: shared
        for replica in state.functions.values()
        for shared in state.engine.random_streams(replica.compiled)
    }
    for number in sorted(streams):
        index = state.stream_index - forked_from + replacements * state.size
        state.engine.jump(streams[number], index)
