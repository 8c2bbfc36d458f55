"""`restart`: new workers in place of those that died or are running.

On the CPU, forked workers inherit everything that the master has. So a restart is a new transport in the
same store, and the start of the world once more: the objects of the script stay as they are.
"""

from __future__ import annotations

from synkhronos.world.devices import check_int
from synkhronos.world.world import World, current_world


def restart(n_parallel: int | None = None) -> int:
    """Replace the workers, those that died and those that are running.

    Functions, `Data`, data bound to variables and shared variables can be used as before. The new
    workers start with the next call that needs them. They then get the master's values of all shared
    variables, and random streams that are independent of each other.

    The values that only a worker had are lost: scatter again what was scattered. If a command was
    interrupted, each function in it has updated the master's variables completely or not at all; but
    a variable that a collective (``reduce``, ``all_reduce``, ``all_gather``) was writing may be partly
    new, and so may any if a second Ctrl-C ended the command inside a function. `load` a checkpoint to
    continue from values that are known.

    Parameters
    ----------
    n_parallel : int, optional
        The number of processes from now on, at most as many as ``fork()`` made; None: as many as now.
        If it is not above the master's rank, the master becomes the last rank.

    Returns
    -------
    int
        `n`.

    Raises
    ------
    NotForkedError, ClosedError
        If there is no world.
    TypeError, ValueError
        For a wrong number of processes.
    RuntimeError
        On GPUs, where no process can be forked any more: `load` a checkpoint in a new run. Inside a
        ``fuse()`` or ``profile()`` block, or in a process that was forked from the master.

    Examples
    --------
    >>> try:                                                     # doctest: +SKIP
    ...     train_minibatch(x, y, batch=rows)
    ... except synk.WorldBrokenError:
    ...     synk.restart()
    ...     position = synk.load("checkpoint.npz")
    """
    world = current_world()
    size = _check_size(world, n_parallel)
    _check_possible(world)
    world.renew(size, min(world.master_rank, size - 1))
    for function in world.registry.functions:
        function.forget_last_call()
    return size


def _check_size(world: World, n_parallel: int | None) -> int:
    if n_parallel is None:
        return world.size
    n_parallel = check_int(n_parallel, "restart: n_parallel")
    most = world.here.store.ranks
    if not 1 <= n_parallel <= most:
        raise ValueError(
            f"restart: n_parallel: expected 1 to {most}, the number of processes that fork() made, got "
            f"{n_parallel}"
        )
    return n_parallel


def _check_possible(world: World) -> None:
    """Raise if workers cannot be forked here and now."""
    if not world.workers_inherit:
        raise RuntimeError(
            "restart(): this process uses a GPU, and no worker can be forked from it any more; save() "
            "checkpoints, and load() the last one in a new run of the script"
        )
    if not world.transport.is_master_process():
        raise RuntimeError(
            "restart(): this process was forked from the master; only that one may use the ranks"
        )
    for block, is_open in (("fuse", world.is_recording), ("profile", world.here.log)):
        if is_open:
            raise RuntimeError(f"restart(): not inside a {block}() block; call it after the block")
