"""`Data` bound to variables: written once, then used by calls that pass row indices only."""

from collections.abc import Mapping

from synkhronos import _world
from synkhronos._data import bind, find_bound


def set_shmems(vars_data, oversize=None):
    """Make, or refill, the `Data` bound to variables.

    Parameters
    ----------
    vars_data : dict, or list of pairs, of variable and array-like or Data
        The variables are inputs of functions, or shared variables. A `Data` is bound itself; an array
        is copied into the `Data` that is bound already, or into a new one.
    oversize : float, optional
        Room for new memory, in [1, 2], times the size.

    Returns
    -------
    dict
        The `Data` of each variable.
    """
    world = _world.current()
    world.check_usable()
    if isinstance(vars_data, Mapping):
        pairs = list(vars_data.items())
    elif isinstance(vars_data, (list, tuple)):
        pairs = list(vars_data)
    else:
        raise TypeError(f"set_shmems: expected a dict or a list of pairs, got {vars_data!r}")
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"set_shmems: expected pairs (variable, data), got {pair!r}")
    bind(world, pairs, oversize, "set_shmems")
    return {variable: world.bound[variable] for variable, _ in pairs}


def get_shmems(*variables):
    """Return the `Data` bound to variables: one, or a list for several.

    Raises
    ------
    ValueError
        If a variable has none.
    """
    datas = find_bound(_world.current(), variables, "get_shmems")
    return datas[0] if len(variables) == 1 else datas


def free_shmems(*variables):
    """Unbind the `Data` of variables, and free its memory.

    Raises
    ------
    ValueError
        If a variable has none.
    """
    world = _world.current()
    for data in find_bound(world, variables, "free_shmems"):
        data.free_memory()
    for variable in variables:
        del world.bound[variable]
