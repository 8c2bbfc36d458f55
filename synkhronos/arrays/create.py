"""`data`: create a `Data`."""

from __future__ import annotations

from typing import Any

from synkhronos._checks import check_dtype, check_extent, check_flag, check_oversize, check_shape
from synkhronos._typing import ArrayLike, DTypeLike, Shape, Variable
from synkhronos.arithmetic.conversion import as_array
from synkhronos.arrays.data import Data
from synkhronos.world.world import World, current_world


def data(
    value: ArrayLike | None = None,
    var: Variable | None = None,
    dtype: DTypeLike | None = None,
    ndim: int | None = None,
    shape: Shape | None = None,
    minibatch: bool = False,
    force_cast: bool = False,
    oversize: float = 1,
    name: str | None = None,
    constant: bool = False,
) -> Data:
    """Create an array in shared memory, for use as an input of functions.

    Parameters
    ----------
    value : array-like, optional
        The initial contents. A ``numpy.memmap`` is not copied: every rank maps the file.
    var : variable, optional
        A Theano variable that determines dtype, ndim and the default name.
    dtype : dtype, optional
        A dtype of numbers; by default the dtype of `value`. Not together with `var`.
    ndim : int, optional
        The number of dimensions; by default the number of dimensions of `value` or `shape`. Not together
        with `var`.
    shape : tuple of int, optional
        The shape of an array of zeros, instead of `value`.
    minibatch : bool, default: False
        Whether the array holds the rows of a single batch only. Its first row then belongs to the first
        row of `batch` in a call.
    force_cast : bool, default: False
        Whether to cast values that cannot be cast safely.
    oversize : float, default: 1
        The size of the allocated memory, as a multiple of the size of the array, in [1, 2].
    name : str, optional
        A name for messages.
    constant : bool, default: False
        Whether the array never changes; its views are read-only then. On several machines, each machine
        keeps a constant array that it has received.

    Returns
    -------
    Data
        An array with the shape of `value`, with `shape`, or else without rows.

    Raises
    ------
    TypeError
        If `value` is not an array of numbers, has the wrong ndim, or cannot be cast safely.
    ValueError
        If arguments contradict each other, do not determine dtype and ndim, or are out of range.
    MemoryError
        If there is too little shared memory.

    Examples
    --------
    >>> import numpy as np
    >>> import synkhronos as synk
    >>> synk.fork(2, use_gpu=False)
    2
    >>> rows = synk.data(np.arange(6.0).reshape(3, 2), name="rows")
    >>> rows
    <Data 'rows': float64 (3, 2)>
    >>> rows[1] = 0
    >>> rows.set_length(4)  # the old rows are kept
    >>> rows.data
    array([[0., 1.],
           [0., 0.],
           [4., 5.],
           [0., 0.]])
    >>> synk.close()
    """
    world = current_world()
    world.check_usable()
    oversize = check_oversize(oversize)
    if value is not None and shape is not None:
        raise ValueError("data: give value or shape, not both")
    _check_constant(constant, value)
    shape = None if shape is None else check_shape(shape)
    dtype, ndim, name = _kind(world, var, dtype, ndim, name)
    array: Any = None if value is None else as_array(value, dtype, "data")
    if array is not None:
        dtype, ndim = array.dtype if dtype is None else dtype, array.ndim if ndim is None else ndim
    elif shape is not None:
        ndim = len(shape) if ndim is None else check_extent(ndim, "ndim")
        if len(shape) != ndim:
            raise ValueError(f"data: ndim is {ndim}, but shape {shape} has {len(shape)} extents")
    if dtype is None or ndim is None:
        raise ValueError("data: give a value, a var, or dtype and ndim (or shape)")
    result = Data(world, check_dtype(dtype), check_extent(ndim, "ndim"), minibatch, name)
    if value is not None:
        result.set_value(array if isinstance(value, Data) else value, force_cast, oversize)
    elif shape is not None:
        result.set_shape(shape, oversize)
    if constant:
        result.freeze()
    return result


def _kind(
    world: World, var: Variable | None, dtype: DTypeLike | None, ndim: int | None, name: str | None
) -> tuple[DTypeLike | None, int | None, str | None]:
    """Return the dtype, the ndim and the name, taken from a variable if there is one."""
    if name is not None and not isinstance(name, str):
        raise TypeError(f"data: name must be a string, got {name!r}")
    if var is None:
        return dtype, ndim, name
    if dtype is not None or ndim is not None:
        raise ValueError("data: give var, or dtype and ndim, not both")
    try:
        dtype, ndim, _ = world.rank_state.engine.type_of(var)
    except TypeError as error:
        raise TypeError(f"data: var: {error}") from error
    return dtype, ndim, name or var.name


def _check_constant(constant: bool, value: ArrayLike | None) -> None:
    if check_flag(constant, "data: constant") and value is None:
        raise ValueError("data: constant=True needs a value, as it cannot be set later")
