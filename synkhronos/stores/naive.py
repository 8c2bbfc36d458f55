"""The store as an executable specification: a dictionary of arrays in one process.

Its ranks are threads. A rank gets copies, as if it received them from another machine.
"""

from __future__ import annotations

import itertools
import weakref

import numpy as np

from synkhronos.stores.base import Store
from synkhronos.stores.handle import Handle


class NaiveHandle(Handle):
    """The number of an array in the dictionary."""

    __slots__ = ("number", "shape", "dtype", "copy")

    def __init__(self, number, shape, dtype, copy=None):
        self.number, self.shape, self.dtype = number, shape, dtype
        self.copy = copy  # keeps the copy made by `put` alive

    def __reduce__(self):
        return NaiveHandle, (self.number, self.shape, self.dtype)


class NaiveStore(Store):
    """Arrays by number. All ranks use the same store object."""

    def __init__(self, ranks):
        super().__init__()
        self.ranks = ranks
        self._numbers = itertools.count()
        self._arrays = weakref.WeakValueDictionary()
        self._made = weakref.WeakValueDictionary()  # by id, the arrays returned by `empty`

    def empty(self, shape, dtype):
        array = np.empty(shape, dtype)
        self._made[id(array)] = array
        return array

    def put(self, array):
        copy = None if array in self else np.array(array, order="C")
        number = next(self._numbers)
        self._arrays[number] = array if copy is None else copy
        return NaiveHandle(number, array.shape, array.dtype.str, copy)

    def _get(self, handle):
        return self._arrays[handle.number].copy()

    def free(self, handle):
        handle.copy = None

    def __contains__(self, array):
        owner = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        return array.flags.c_contiguous and self._made.get(id(owner)) is owner
