"""`in_sync`: whether the replicas of shared variables are equal."""

from __future__ import annotations

from synkhronos._errors import MismatchError
from synkhronos._text import listed
from synkhronos._typing import SharedVariables
from synkhronos.arithmetic.comparison import difference
from synkhronos.functions.comparing.replicas import find_different
from synkhronos.functions.replica_tracker import expected_equal, label
from synkhronos.variables.arguments import numbers_of, resolve
from synkhronos.variables.collectives import Gather
from synkhronos.world.world import World, current_world, with_call_lock

_MOST_MEASURED = 10  # variables whose values are fetched, too
_MOST_LISTED = 20  # variables in the message


@with_call_lock
def in_sync(shared_vars: SharedVariables | None = None) -> bool:
    """Check that all ranks have the same values of shared variables, bit for bit.

    Each rank sends digests of its replicas, so little data is transferred, regardless of their size.

    Parameters
    ----------
    shared_vars : shared variable, or list of these, optional
        Each must be used by a function built with `function`. By default all such variables, except the
        states of random streams, and variables that hold each rank's own rows because they were
        scattered or are sliceable.

    Returns
    -------
    bool
        True. Before the workers are started, there are no replicas that could differ.

    Raises
    ------
    MismatchError
        If replicas differ. It names the variables, the ranks that differ from the master, and by how
        much.
    TypeError
        If a variable is not a shared tensor.
    ValueError
        If no function uses a variable, or a variable is given twice.
    RuntimeError
        Inside a ``fuse()`` block.

    Examples
    --------
    >>> import numpy as np
    >>> import synkhronos as synk
    >>> import theano
    >>> synk.fork(2, use_gpu=False)
    2
    >>> w = theano.shared(np.zeros(3), name="w")
    >>> f = synk.function([], w.mean())
    >>> synk.distribute()
    >>> synk.in_sync()
    True
    >>> w.set_value(np.ones(3))  # the master's replica only
    >>> try:
    ...     synk.in_sync(w)
    ... except synk.MismatchError as error:
    ...     print(error)
    replicas that differ from the master's (make them equal with synk.broadcast() or synk.all_reduce()):
    - w: rank 1, by up to 1 (1 of the largest value)
    >>> synk.broadcast(w)
    >>> synk.in_sync(w)
    True
    >>> synk.close()
    """
    world = current_world()
    world.check_usable()
    if world.is_recording:
        raise RuntimeError("in_sync(): not inside a fuse() block; call it after the block")
    if shared_vars is None:
        numbers = expected_equal(world)
    else:
        _, variables, _ = resolve(shared_vars)
        replicated = world.registry.replicated
        numbers = [item for item in numbers_of(world, variables) if item < replicated]
    kept = [
        world.rank_state.shareds[item] for item in numbers
    ]  # Python's collector may run before they are compared
    if not world.started or world.size == 1 or not numbers:
        return True
    found = find_different(world, numbers)
    del kept
    if not found:
        return True
    names = [label(world, number) for number in found]
    lines: list[str] = []
    for name, (number, ranks) in zip(names[:_MOST_LISTED], found.items()):
        line = f"- {listed([name])}: rank {listed(ranks)}"
        if len(lines) < _MOST_MEASURED:
            line += f", {_amount(world, number)}"
        lines.append(line)
    if len(names) > _MOST_LISTED:
        lines.append(f"- {len(names) - _MOST_LISTED} more")
    raise MismatchError(
        "replicas that differ from the master's (make them equal with synk.broadcast() or "
        "synk.all_reduce()):\n" + "\n".join(lines),
        names,
    )


def _amount(world: World, number: int) -> str:
    """Return by how much replicas differ from the master's."""
    by_rank = world.run(Gather([number], to_all=False, nccl=False))[world.master_rank]
    (arrays,) = by_rank
    own = arrays[world.master_rank]
    if any(array.shape != own.shape for array in arrays):
        return f"in their shapes: {[array.shape for array in arrays]} by rank"
    return str(max(difference(array, own) for array in arrays))
