"""`Data`: an array in shared memory that every rank reads without a copy."""

from __future__ import annotations

from typing import Any

import numpy as np

from synkhronos import _world
from synkhronos._conversion import (
    as_array,
    check_dtype,
    check_extent,
    check_oversize,
    check_shape,
    condition,
)
from synkhronos._errors import ClosedError
from synkhronos._references import locate_in_file
from synkhronos._typing import ArrayLike, DTypeLike, Reference, Shape, Variable
from synkhronos._world import World


class Data:
    """An array of fixed dtype and ndim in memory that every rank shares. Made by `data`.

    Reads and writes go through NumPy's indexing, or through the view `data`. What other ranks read in
    a function call is what the array holds at that moment.
    """

    def __init__(
        self,
        world: World,
        dtype: DTypeLike,
        ndim: int,
        minibatch: bool = False,
        name: str | None = None,
    ) -> None:
        self._world = world
        self._dtype = np.dtype(dtype)
        self._ndim = ndim
        self._minibatch = bool(minibatch)
        self.name = name
        self._store: Any = None  # 1-d: all allocated items
        self._view: Any = None
        self._file: Reference | None = None  # where the ranks map a numpy.memmap from
        # Another object whenever the array is at another place
        self.last_reference: Reference | None = None
        world.datas.add(self)
        self._reserve(0 if ndim else 1, (0,) * ndim)
        self._alive()[...] = 0

    # What it is

    @property
    def data(self) -> np.ndarray:
        """The array, as a NumPy view. Views taken earlier stay valid, but not current, as it grows."""
        return self._alive()

    @property
    def minibatch(self) -> bool:
        """Whether it holds the rows of one batch only."""
        return self._minibatch

    @property
    def dtype(self) -> np.dtype:
        return self._dtype

    @property
    def ndim(self) -> int:
        return self._ndim

    @property
    def shape(self) -> tuple[int, ...]:
        return self._alive().shape

    @property
    def size(self) -> int:
        return self._alive().size

    @property
    def alloc_size(self) -> int:
        """Items that the allocated memory has room for."""
        view = self._alive()
        return view.size if self._store is None else self._store.size

    def __len__(self) -> int:
        view = self._alive()
        if not self._ndim:
            raise TypeError("len() of 0-dimensional Data")
        return view.shape[0]

    def __getitem__(self, index: Any) -> Any:
        return self._alive()[index]

    def __setitem__(self, index: Any, value: ArrayLike) -> None:
        self._alive()[index] = value

    def __array__(self, dtype: DTypeLike = None) -> np.ndarray:
        view = self._alive()
        return view if dtype is None else view.astype(dtype, copy=False)

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self._label()}: it cannot be copied or pickled, as it lies in the memory of these "
            f"processes; take its array, numpy.array(data)"
        )

    def __repr__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        if self._view is None:
            return f"<Data{name}: freed>"
        return f"<Data{name}: {self._dtype} {self._view.shape}>"

    # Changing it

    def set_value(self, value: ArrayLike, force_cast: bool = False, oversize: float = 1) -> None:
        """Replace the contents; memory is kept where it has room.

        Parameters
        ----------
        value : array-like
        force_cast : bool
            Whether to cast a dtype that cannot be cast safely.
        oversize : float
            In [1, 2]: how much room to allocate, times the size, if new memory is needed.
        """
        oversize = check_oversize(oversize)
        self._alive()
        if self._map(value):
            return
        value = self.condition_data(value, force_cast)
        self._reserve(value.size, value.shape, oversize)
        self._view[...] = value

    def set_length(self, length: int, oversize: float = 1) -> None:
        """Change the extent of axis 0. Old rows are kept; new ones are zero.

        Parameters
        ----------
        length : int
        oversize : float
        """
        length = check_extent(length, "length")
        if not self._ndim:
            raise ValueError("set_length: this Data has no axis 0")
        self.set_shape((length, *self.shape[1:]), oversize)

    def set_shape(self, shape: Shape, oversize: float = 1) -> None:
        """Change the shape. What lies in the old and the new shape is kept; the rest is zero.

        Parameters
        ----------
        shape : tuple of int
        oversize : float
        """
        oversize = check_oversize(oversize)
        shape = check_shape(shape)
        if len(shape) != self._ndim:
            raise ValueError(f"set_shape: expected {self._ndim} extents, got shape {shape}")
        old = self._alive()
        if shape == old.shape:
            return
        size = _size(shape)
        stays = shape[1:] == old.shape[1:] and self._store is not None and size <= self.alloc_size
        kept = tuple(slice(0, min(before, after)) for before, after in zip(old.shape, shape))
        if stays:
            self._reserve(size, shape, oversize)
            self._view[len(old) :] = 0
            return
        saved = old[kept].copy() if self._store is None or size <= self.alloc_size else old[kept]
        self._reserve(size, shape, oversize)
        self._view[...] = 0
        self._view[kept] = saved

    def condition_data(self, value: ArrayLike, force_cast: bool = False) -> np.ndarray:
        """Return `value` as an array of this dtype and ndim.

        Parameters
        ----------
        value : array-like
        force_cast : bool

        Raises
        ------
        TypeError
            If the dtype cannot be cast safely and `force_cast` is not set, or the ndim differs.
        """
        remedy = "convert it, or set force_cast=True"
        return condition(value, self._dtype, self._ndim, force_cast, self._label(), remedy)

    def free_memory(self) -> None:
        """Give the memory back; this object cannot be used any more."""
        self._store = self._view = self._file = self.last_reference = None
        self._world.here.memory.trim()

    # Inside

    def _label(self) -> str:
        return f"Data {self.name!r}" if self.name else "Data"

    def _is_freed(self) -> bool:
        return self._view is None

    def _alive(self) -> np.ndarray:
        if self._view is None:
            if self._world.closed:
                raise ClosedError(f"{self._label()}: its world was closed")
            raise ValueError(f"{self._label()}: its memory was freed by free_memory()")
        return self._view

    def reference(self) -> Reference:
        """Return what `open_reference` needs on another rank."""
        if self.last_reference is None:
            view = self._alive()
            self.last_reference = self._file or self._world.here.memory.reference(view)
        return self.last_reference

    def _reserve(self, size: int, shape: tuple[int, ...], oversize: float = 1) -> None:
        if self._store is None or size > self._store.size:
            room = int(size * oversize)
            self._store = self._world.here.memory.empty((room,), self._dtype)
        self._file = self.last_reference = None
        self._view = self._store[:size].reshape(shape)

    def _map(self, value: Any) -> bool:
        """Use the file of a ``numpy.memmap``, if `value` is one that every rank can map alike."""
        place = locate_in_file(value)
        if place is None or value.dtype != self._dtype or value.ndim != self._ndim:
            return False
        self._store, self.last_reference = None, None
        self._file, self._view = place, value
        return True


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
) -> Data:
    """Make an array in shared memory, to be used as an input of functions.

    Parameters
    ----------
    value : array-like, optional
        Its first contents. A ``numpy.memmap`` is not copied: every rank maps the file.
    var : variable, optional
        Gives dtype and ndim.
    dtype, ndim : optional
        Instead of `var`; the value's own where neither is given.
    shape : tuple of int, optional
        Instead of `value`: the array begins with zeros.
    minibatch : bool
        Whether it holds the rows of one batch only: `batch` is then counted from the batch's start.
    force_cast : bool
        Whether to cast a value whose dtype cannot be cast safely.
    oversize : float
        In [1, 2]: room to allocate, times the size.
    name : str, optional

    Returns
    -------
    Data

    Raises
    ------
    TypeError, ValueError
        If the arguments contradict each other, or leave dtype or ndim open.
    """
    world = _world.current()
    world.check_usable()
    oversize = check_oversize(oversize)
    if name is not None and not isinstance(name, str):
        raise TypeError(f"data: name must be a string, got {name!r}")
    if value is not None and shape is not None:
        raise ValueError("data: give value or shape, not both")
    if var is not None:
        if dtype is not None or ndim is not None:
            raise ValueError("data: give var, or dtype and ndim, not both")
        try:
            dtype, ndim, _ = world.here.engine.type_of(var)
        except TypeError as error:
            raise TypeError(f"data: var: {error}") from error
        name = name or var.name
    if shape is not None:
        shape = check_shape(shape)
        ndim = len(shape) if ndim is None else check_extent(ndim, "ndim")
        if len(shape) != ndim:
            raise ValueError(f"data: ndim is {ndim}, but shape {shape} has {len(shape)} extents")
    array: Any = None if value is None else as_array(value, dtype, "data")
    if dtype is None and array is not None:
        dtype = array.dtype
    if ndim is None and array is not None:
        ndim = array.ndim
    if dtype is None or ndim is None:
        raise ValueError("data: give a value, a var, or dtype and ndim (or shape)")
    result = Data(world, check_dtype(dtype), check_extent(ndim, "ndim"), minibatch, name)
    if value is not None:
        result.set_value(array if isinstance(value, Data) else value, force_cast, oversize)
    elif shape is not None:
        result.set_shape(shape, oversize)
    return result


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size
