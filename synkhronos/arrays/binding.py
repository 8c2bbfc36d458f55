"""`Data` bound to variables: written once, then used by calls that pass only the rows to use."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Sequence, overload

import numpy as np

from synkhronos._checks import check_oversize, check_pairs
from synkhronos._typing import AnyArray, ArrayLike, Variable
from synkhronos.arithmetic.conversion import condition
from synkhronos.arrays.data import Data
from synkhronos.world.world import World, current_world, with_call_lock


class _Bindings(weakref.WeakKeyDictionary):  # type: ignore[type-arg]  # Python 3.8 takes no types here
    """The `Data` bound to variables, by variable, for as long as the script has the variable."""


def bound_data(world: World, variable: Variable) -> Data | None:
    """Return the `Data` bound to a variable, or None."""
    return world.part(_Bindings).get(variable)


@with_call_lock
def set_shmems(
    vars_data: Mapping[Variable, Any] | Sequence[tuple[Variable, Any]],
    oversize: float | None = None,
) -> dict[Variable, Data]:
    """Bind data to variables. Calls then use it for inputs that are omitted, and `scatter` by default.

    Parameters
    ----------
    vars_data : dict, or list of pairs, of variable and array-like or Data
        The variables are inputs of functions, or shared variables. A `Data` is bound itself; an array
        is copied into the `Data` that is already bound, or into a new `Data`.
    oversize : float, default: 1
        The size of new memory, if it is needed, as a multiple of the size of the data, in [1, 2].

    Returns
    -------
    dict
        The `Data` bound to each variable.

    Raises
    ------
    TypeError
        If `vars_data` does not consist of such pairs, or a value has the wrong ndim or cannot be cast
        safely. No data is bound then.
    ValueError
        If `oversize` is out of range.
    MemoryError
        If there is too little shared memory.

    Examples
    --------
    >>> import numpy as np
    >>> import synkhronos as synk
    >>> import theano.tensor as T
    >>> synk.fork(2, use_gpu=False)
    2
    >>> x = T.dvector("x")
    >>> f = synk.function([x], (x.sum(), "sum"))
    >>> bound = synk.set_shmems({x: np.arange(4.0)})
    >>> f(), f(batch=[0, 3])
    (array(6.), array(3.))
    >>> bound[x] is synk.get_shmems(x)
    True
    >>> synk.free_shmems(x)
    >>> synk.close()
    """
    world = current_world()
    world.check_usable()
    pairs = check_pairs(vars_data, "set_shmems", "pairs (variable, data)")
    return bind(world, pairs, oversize, "set_shmems")


@overload
def get_shmems(variable: Variable, /) -> Data: ...


@overload
def get_shmems(first: Variable, second: Variable, /, *others: Variable) -> list[Data]: ...


@with_call_lock
def get_shmems(*variables: Variable) -> Any:
    """Return the `Data` bound to variables.

    Parameters
    ----------
    *variables : variable
        Inputs of functions, or shared variables.

    Returns
    -------
    Data or list of Data
        A list if several variables are given.

    Raises
    ------
    TypeError
        If no variable is given.
    ValueError
        If no data is bound to a variable.

    Examples
    --------
    See `set_shmems`.
    """
    datas = find_bound(current_world(), variables, "get_shmems")
    return datas[0] if len(variables) == 1 else datas


@with_call_lock
def free_shmems(*variables: Variable) -> None:
    """Unbind the `Data` of variables and free its memory.

    Parameters
    ----------
    *variables : variable
        Inputs of functions, or shared variables.

    Raises
    ------
    TypeError
        If no variable is given.
    ValueError
        If no data is bound to a variable. Nothing is freed then.
    """
    world = current_world()
    for data in find_bound(world, variables, "free_shmems"):
        data.free_memory()
    for variable in variables:
        world.part(_Bindings).pop(variable, None)  # it may have been given twice


def bind(
    world: World,
    pairs: Sequence[tuple[Variable, ArrayLike]],
    oversize: float | None,
    what: str,
) -> dict[Variable, Data]:
    """Bind data to variables. All pairs are checked before any is bound."""
    prepared = [(variable, _prepare(world, variable, value, what)) for variable, value in pairs]
    oversize = check_oversize(1 if oversize is None else oversize)
    bindings = world.part(_Bindings)
    for variable, value in prepared:
        if isinstance(value, Data):
            bindings[variable] = value
            continue
        data = bindings.get(variable)
        if data is None:
            kind = world.rank_state.engine.type_of(variable)
            data = Data(world, kind.dtype, kind.ndim, name=variable.name)
        data.set_value(value, oversize=oversize)
        bindings[variable] = data
    return {variable: bindings[variable] for variable, _ in prepared}


def rebind(world: World, pairs: Sequence[tuple[Variable, Variable]]) -> None:
    """Bind the data of variables to copies of the variables, too, unless these have data."""
    bindings = world.part(_Bindings)
    for variable, copy in pairs:
        if variable in bindings:
            bindings.setdefault(copy, bindings[variable])


def _prepare(world: World, variable: Variable, value: ArrayLike, what: str) -> Data | AnyArray:
    """Return the `Data`, or the array of its type, that is bound to a variable."""
    try:
        kind = world.rank_state.engine.type_of(variable)
    except TypeError as error:
        raise TypeError(f"{what}: {error}") from error
    if isinstance(value, Data):
        array = value.data
        if array.dtype != kind.dtype or array.ndim != kind.ndim:
            raise TypeError(
                f"{what}: {variable}: expected {kind.dtype} with {kind.ndim} dimensions, got Data "
                f"of {array.dtype} with {array.ndim}"
            )
        return value
    checked = condition(value, kind.dtype, kind.ndim, False, f"data for {variable}")
    return value if isinstance(value, np.memmap) else checked


def find_bound(world: World, variables: Sequence[Variable], what: str) -> list[Data]:
    """Return the list of the `Data` bound to variables, or raise if there is none."""
    if not variables:
        raise TypeError(f"{what}: expected at least one variable")
    bindings = world.part(_Bindings)
    for variable in variables:
        try:
            unknown = variable not in bindings
        except TypeError:
            unknown = True
        if unknown:
            raise ValueError(f"{what}: no data is bound to {variable}; bind it with set_shmems()")
    return [bindings[variable] for variable in variables]
