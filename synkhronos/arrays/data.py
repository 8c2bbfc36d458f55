"""`Data`: an array in memory that every rank can access without a copy."""

from __future__ import annotations

import math
import weakref
from typing import Any

import numpy as np

from synkhronos import _html
from synkhronos._checks import check_dtype, check_extent, check_flag, check_oversize, check_shape
from synkhronos._errors import ClosedError
from synkhronos._typing import AnyArray, ArrayLike, DTypeLike, Shape, Variable
from synkhronos.arithmetic.conversion import as_array, condition
from synkhronos.stores.handle import Handle, locate_in_file
from synkhronos.world.world import World, current_world


class _OpenDatas:
    """All `Data` of a world. Their memory is freed when the world is closed."""

    def __init__(self) -> None:
        # Several threads may change it at the same time, unlike a `WeakSet`.
        self._references: set[weakref.ref[Data]] = set()

    def add(self, data: Data) -> None:
        self._references.add(weakref.ref(data, self._references.discard))

    def close(self) -> None:
        for reference in list(self._references):
            data = reference()
            if data is not None:
                data.free_memory()


class Data:
    """An array of fixed dtype and ndim in memory shared by all ranks. Create it with `data`.

    Read and write it with NumPy's indexing, or through the view `data`. A function call uses the values
    that the array has at the time of the call.
    """

    constant = False
    is_shown = False  # whether the script may have the view itself, and so change its shape
    name: str | None = None
    _view: Any = None  # None if the memory was freed
    _kept: Any = None  # another view of it, which the script never has
    _items: Any = None  # 1-d, all allocated items; None if freed or mapped from a file
    _file: Handle | None = None  # the file, if it is a numpy.memmap
    last_handle: Handle | None = None  # a new object whenever the array has moved

    def __init__(
        self, world: World, dtype: DTypeLike, ndim: int, minibatch: bool = False, name: str | None = None
    ) -> None:
        self._world, self.name = world, name
        self._dtype, self._minibatch = np.dtype(dtype), bool(minibatch)
        self._shape = (0,) * ndim  # no rows after the memory was freed
        world.part(_OpenDatas).add(self)
        self._reserve(self._shape)
        self._view[...] = 0

    @classmethod
    def of_array(cls, world: World, array: AnyArray, minibatch: bool, name: str | None) -> Data:
        """Return a `Data` for an array in the store that another rank allocated."""
        made = cls.__new__(cls)
        made._world, made._dtype, made._minibatch, made.name = world, array.dtype, minibatch, name
        made._hold(array)
        return made

    # Properties

    @property
    def data(self) -> AnyArray:
        """The array, as a NumPy view. Views from before it grew remain valid, but are not updated.

        Its shape, strides and dtype cannot be set; set them on another view, ``data.data.view()``.
        """
        view = self._allocated()
        self.is_shown = True
        return view

    @property
    def stored(self) -> Any:
        """The array of the handle, which has to live as long as the handle is used."""
        return self._view

    @property
    def minibatch(self) -> bool:
        """Whether it holds the rows of a single batch only."""
        return self._minibatch

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._dtype

    @property
    def ndim(self) -> int:
        return len(self._shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._allocated().shape

    @property
    def size(self) -> int:
        return self._allocated().size

    @property
    def alloc_size(self) -> int:
        """The number of items for which memory is allocated."""
        view = self._allocated()
        return view.size if self._items is None else self._items.size

    def __len__(self) -> int:
        view = self._allocated()
        if not self.ndim:
            raise TypeError("len() of 0-dimensional Data")
        return len(view)

    def __getitem__(self, index: Any) -> Any:
        return self._allocated()[index]

    def __setitem__(self, index: Any, value: ArrayLike) -> None:
        self._allocated()[index] = value

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> AnyArray:
        view = self._allocated()
        array = view.view() if dtype is None else view.astype(dtype, copy=False)
        if copy is False and array.dtype != view.dtype:
            raise ValueError(f"{self._label()}: it cannot be used as {array.dtype} without a copy")
        return array.copy() if copy and np.may_share_memory(array, view) else array

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self._label()}: it cannot be copied or pickled, as it belongs to the memory of these "
            f"processes; copy its array: numpy.array(data)"
        )

    def __repr__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        if self._view is None:
            return f"<Data{name}: freed>"
        return f"<Data{name}: {self._dtype} {self._view.shape}>"

    def _repr_html_(self) -> str:
        rows: list[tuple[Any, ...]] = [("dtype", self._dtype)]
        if self._view is None:
            rows.append(("memory", "freed"))
        else:
            held = "a file" if self._items is None else f"{self._items.nbytes:,} bytes, shared"
            rows += [("shape", self._view.shape), ("memory", held)]
            if self._minibatch:
                rows.append(("rows", "one batch"))
            rows.append(("values", np.array2string(self._view, threshold=20, edgeitems=2)))
        return _html.table(f"Data {self.name or ''}".strip(), rows)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__()} - _INTERNAL)

    # Changes

    def set_value(self, value: ArrayLike, force_cast: bool = False, oversize: float = 1) -> None:
        """Replace the contents. New memory is allocated only if the present memory is too small.

        Parameters
        ----------
        value : array-like
            The new contents, of the same ndim and any shape. A ``numpy.memmap`` of the same dtype is not
            copied: every rank maps the file.
        force_cast : bool, default: False
            Whether to cast values that cannot be cast safely.
        oversize : float, default: 1
            The size of new memory, if it is needed, as a multiple of the size of the array, in [1, 2].

        Raises
        ------
        TypeError
            If `value` has another ndim, or cannot be cast safely and `force_cast` is not set.
        ValueError
            If `oversize` is out of range.
        MemoryError
            If there is too little shared memory.
        """
        oversize = check_oversize(oversize)
        self._check_open()
        self._check_changeable("set_value")
        if self._map(value):
            return
        value = self.condition_data(value, force_cast)
        self._reserve(value.shape, oversize)
        self._view[...] = value

    def set_length(self, length: int, oversize: float = 1) -> None:
        """Change the number of rows. Existing rows are kept; new rows are zero.

        Parameters
        ----------
        length : int
            The new extent of axis 0.
        oversize : float, default: 1
            As in `set_value`.

        Raises
        ------
        TypeError
            If `length` is not an int.
        ValueError
            If `length` is negative, `oversize` is out of range, or the ndim is 0.
        MemoryError
            If there is too little shared memory.
        """
        length = check_extent(length, "length")
        if not self.ndim:
            raise ValueError("set_length: this Data has no axis 0")
        self.set_shape((length, *self._shape[1:]), oversize)

    def set_shape(self, shape: Shape, oversize: float = 1) -> None:
        """Change the shape. Items whose indices exist in both shapes are kept; all others are zero.

        Parameters
        ----------
        shape : tuple of int
            The new shape, of the same ndim.
        oversize : float, default: 1
            As in `set_value`.

        Raises
        ------
        TypeError
            If `shape` is not a tuple of ints.
        ValueError
            If an extent is negative, the ndim differs, or `oversize` is out of range.
        MemoryError
            If there is too little shared memory.
        """
        self._check_changeable("set_shape")
        oversize = check_oversize(oversize)
        shape = check_shape(shape)
        if len(shape) != self.ndim:
            raise ValueError(f"set_shape: expected {self.ndim} extents, got shape {shape}")
        self._check_open()
        self.check_layout()
        old, old_shape = self._view, self._shape
        if old is not None and shape == old_shape:
            return
        in_place = self._has_room(shape)
        if in_place and shape[1:] == old_shape[1:]:
            self._reserve(shape, oversize)
            self._view[len(old) :] = 0
            return
        kept = tuple(slice(0, min(before, after)) for before, after in zip(old_shape, shape))
        saved = None if old is None else old[kept]
        if saved is not None and (in_place or self._items is None):
            saved = saved.copy()
        self._reserve(shape, oversize)
        self._view[...] = 0
        if saved is not None:
            self._view[kept] = saved

    def condition_data(self, value: ArrayLike, force_cast: bool = False) -> AnyArray:
        """Return `value` as an array of this dtype and ndim.

        Parameters
        ----------
        value : array-like
            The value to convert.
        force_cast : bool, default: False
            Whether to cast values that cannot be cast safely.

        Returns
        -------
        numpy.ndarray
            Possibly `value` itself.

        Raises
        ------
        TypeError
            If the dtype cannot be cast safely and `force_cast` is not set, or the ndim differs.
        """
        remedy = "convert it, or set force_cast=True"
        return condition(value, self._dtype, self.ndim, force_cast, self._label(), remedy)

    def free_memory(self) -> None:
        """Free the memory. `set_value`, `set_length` and `set_shape` allocate new memory."""
        self._items = self._view = self._kept = self._file = self.last_handle = None
        self._shape = (0, *self._shape[1:]) if self._shape else ()
        self._world.rank_state.store.trim()

    # Internal

    def _label(self) -> str:
        return f"Data {self.name!r}" if self.name else "Data"

    def _check_open(self) -> None:
        if self._world.closed:
            raise ClosedError(f"{self._label()}: its processes were closed")

    def _check_changeable(self, method: str) -> None:
        if self.constant:
            raise ValueError(f"{method}: {self._label()} is constant; create another Data")

    def freeze(self) -> None:
        """Make it constant."""
        self.constant = True
        view = self._allocated().view()
        view.flags.writeable = False
        self._hold(view)

    def check_layout(self) -> None:
        """Raise ``ValueError`` if the script has set the shape, strides or dtype of the view."""
        got, kept = self._view, self._kept
        if got is None or (got.shape, got.strides, got.dtype) == self._layout:
            return
        self._hold(kept)
        raise ValueError(
            f"{self._label()}: expected its array to keep its layout, {kept.dtype} {kept.shape} with "
            f"strides {kept.strides}, got {got.dtype} {got.shape} with strides {got.strides}, which the "
            f"script has set; this was undone. Call set_shape() or set_value(), or set the layout of "
            f"another view: data.data.view()"
        )

    def _hold(self, view: AnyArray) -> None:
        """Take this array as the contents."""
        self._view, self._kept, self._shape = view, view.view(), view.shape
        self._layout = view.shape, view.strides, view.dtype
        self.is_shown = False

    def _allocated(self) -> AnyArray:
        if self._view is None:
            self._check_open()
            raise ValueError(
                f"{self._label()}: its memory was freed by free_memory(); call set_value() or "
                f"set_shape() first"
            )
        if self.is_shown:
            self.check_layout()
        view: AnyArray = self._view
        return view

    def handle(self) -> Handle:
        """Return a handle by which other ranks access the array."""
        if self.last_handle is None:
            view = self._allocated()
            self.last_handle = self._file or self._world.rank_state.store.put(view, self.constant)
        return self.last_handle

    def _has_room(self, shape: tuple[int, ...]) -> bool:
        return self._items is not None and math.prod(shape) <= self._items.size

    def _reserve(self, shape: tuple[int, ...], oversize: float = 1) -> None:
        """Take this shape. If new memory is needed, it is uninitialized."""
        size = math.prod(shape)
        if not self._has_room(shape):
            self._items = self._world.rank_state.store.empty((int(size * oversize),), self._dtype)
        self._file = self.last_handle = None
        self._hold(self._items[:size].reshape(shape))

    def _map(self, value: Any) -> bool:
        """Map the file of a ``numpy.memmap`` and return True; return False if ranks cannot map it."""
        place = locate_in_file(value)
        if place is None or value.dtype != self._dtype or value.ndim != self.ndim:
            return False
        self._items = self.last_handle = None
        self._file = place
        self._hold(value.view())
        return True


#: Used by the package itself; not shown by completion.
_INTERNAL = {"check_layout", "freeze", "handle", "is_shown", "last_handle", "of_array", "stored"}


def as_data(world: World, value: AnyArray | Data) -> Data:
    """Return `value` if it is a `Data`, else a temporary `Data` with a copy of the array."""
    if type(value) is Data:
        return value
    made = Data(world, value.dtype, value.ndim)
    made.set_value(value)
    return made


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
    if check_flag(constant, "data: constant") and value is None:
        raise ValueError("data: constant=True needs a value, as it cannot be set later")
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
        dtype, ndim, *_ = world.rank_state.engine.type_of(var)
    except TypeError as error:
        raise TypeError(f"data: var: {error}") from error
    return dtype, ndim, name or var.name
