"""`restart` replaces all workers; in a program, a new rank replaces each dead one.

A restart creates a new transport for the same store and starts the world again. On one machine, the
forked workers inherit the state of the master; workers on other machines receive all of it again. The
objects of the script do not change.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import pickle
from typing import Counter, Iterator

from synkhronos._checks import check_int
from synkhronos._errors import REMEDY, SynkhronosError, WorldBrokenError
from synkhronos._typing import AnyArray
from synkhronos.host.handler_errors import reraise_if_handlers
from synkhronos.world import generators
from synkhronos.world.world import World, current_world, with_call_lock


@with_call_lock
def restart(n_parallel: int | None = None) -> int:
    """Replace all workers, whether they died or are running.

    Functions, `Data`, bound data and shared variables can be used as before. The new workers start with
    the next call that needs them. They get the master's values of all shared variables, and independent
    random streams.

    Values that only a worker had are lost: scatter such data again. If a call was interrupted, each
    function in it has updated all of the master's variables or none. There are two exceptions: a
    variable that a collective (`reduce`, `all_reduce` or `all_gather`) was writing may be partly
    updated; and so may any variable if a second Ctrl-C ended the call inside a function. To continue
    from known values, `load` a checkpoint.

    Parameters
    ----------
    n_parallel : int, optional
        The new number of processes, at most the number that `fork` set up, and at least one for each
        machine; by default unchanged. If it is not larger than the master's rank, the master becomes the
        last rank. If machines have left the job, the default is the number of remaining ranks; the
        master then has the largest possible rank up to its own.

    Returns
    -------
    int
        The number of processes.

    Raises
    ------
    TypeError, ValueError
        If the number of processes is not an int, or out of range.
    RuntimeError
        On GPUs and with JAX, where the process cannot be forked again; `load` a checkpoint in a new run
        instead. Also inside a ``fuse()`` or ``profile()`` block, or in a process forked from the master.

    Examples
    --------
    >>> import multiprocessing
    >>> import numpy as np
    >>> import synkhronos as synk
    >>> import theano.tensor as T
    >>> synk.fork(2, use_gpu=False)
    2
    >>> x = T.dvector("x")
    >>> total = synk.function([x], (x.sum(), "sum"))
    >>> synk.distribute()
    >>> multiprocessing.active_children()[0].kill()
    >>> try:
    ...     total(np.arange(4.0))
    ... except synk.WorldBrokenError:
    ...     synk.restart()
    2
    >>> total(np.arange(4.0))
    array(6.)
    >>> synk.close()
    """
    world = current_world()
    _check_possible(world)
    size = _check_size(world, n_parallel)
    world.renew(size, min(world.master_rank, size - 1))
    if not world.workers_inherit:
        world.start()
    for function in list(world.registry.functions.values()):
        function.watch = function.watcher
    return size


def _check_size(world: World, n_parallel: int | None) -> int:
    possible = world.transport.possible_sizes()
    if n_parallel is None:
        return min(world.size, possible[-1])
    n_parallel = check_int(n_parallel, "restart: n_parallel")
    if n_parallel not in possible:
        raise ValueError(
            f"restart: n_parallel: expected {possible[0]} to {possible[-1]}, from one process per "
            f"machine to as many as fork() made, got {n_parallel}"
        )
    return n_parallel


def _check_possible(world: World) -> None:
    """Raise if workers cannot be forked now."""
    if not world.rank_state.engine.survives_fork:
        raise RuntimeError(
            f"restart(): this process uses {world.rank_state.engine.in_use}, so no worker can be forked "
            f"from it any more; save() checkpoints, and load() the last one in a new run of the script"
        )
    if not world.transport.is_master_process():
        raise RuntimeError(
            "restart(): this process was forked from the master, and only the master may use the workers"
        )
    for block, is_open in (("fuse", world.is_recording), ("profile", world.rank_state.log)):
        if is_open:
            raise RuntimeError(f"restart(): not inside a {block}() block; call it after the block")


# Continuing when workers die in a program


_MOST_DEATHS = 3  # of a rank in one program

_logger = logging.getLogger("synkhronos")


class _Replacements(Counter[int]):
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

    def __init__(self, world: World, ended: AnyArray) -> None:
        self._world, self._ended = world, ended
        self._deaths: Counter[int] = Counter()
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
def replacing_dead(world: World, ended: AnyArray) -> Iterator[Replacing]:
    """Return a function that handles the death of workers in a program in this block.

    The program continues, and dead workers are replaced if workers can be forked.
    """
    replacing = Replacing(world, ended)
    try:
        yield replacing
    finally:
        complaint = replacing.complaint()
        if complaint is not None and world.broken is None:
            world.broken = complaint
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
