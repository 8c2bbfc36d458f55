"""The store as an executable specification: a dictionary of arrays in one process.

Its ranks are threads. A rank gets copies, as if it received them from another machine.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Sequence

import numpy as np

from synkhronos._typing import DTypeLike
from synkhronos.stores.base import Store
from synkhronos.stores.named_memory import NamedMemory, Lock, check_index, check_same, checked
from synkhronos.stores.handle import Handle


class NaiveHandle(Handle):
    """The number of an array in the dictionary."""

    __slots__ = ("number", "shape", "dtype", "copy")

    def __init__(
        self, number: int, shape: tuple[int, ...], dtype: str, copy: np.ndarray | None = None
    ) -> None:
        self.number, self.shape, self.dtype = number, shape, dtype
        self.copy = copy  # keeps the copy made by `put` alive

    def __reduce__(self) -> tuple:
        return NaiveHandle, (self.number, self.shape, self.dtype)


class NaiveStore(Store):
    """Arrays by number. All ranks use the same store object."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks
        self._numbers = itertools.count()
        self._arrays: weakref.WeakValueDictionary[int, np.ndarray] = weakref.WeakValueDictionary()
        # By id, the arrays returned by `empty`
        self._made: weakref.WeakValueDictionary[int, np.ndarray] = weakref.WeakValueDictionary()
        self.named_memory = NaiveNamedMemory()

    def empty(self, shape: Sequence[int], dtype: DTypeLike) -> np.ndarray:
        array = np.empty(shape, dtype)
        self._made[id(array)] = array
        return array

    def put(self, array: np.ndarray, constant: bool = False) -> NaiveHandle:
        copy = None if array in self else np.array(array, order="C")
        number = next(self._numbers)
        self._arrays[number] = array if copy is None else copy
        return NaiveHandle(number, array.shape, array.dtype.str, copy)

    def _get(self, handle: NaiveHandle) -> np.ndarray:
        return self._arrays[handle.number].copy()

    def free(self, handle: NaiveHandle) -> None:
        handle.copy = None

    def __contains__(self, array: np.ndarray) -> bool:
        owner = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        return array.flags.c_contiguous and self._made.get(id(owner)) is owner


class NaiveNamedMemory(NamedMemory):
    """Arrays by name, and the thread that holds each lock. No thread is killed while it holds a lock."""

    def __init__(self) -> None:
        self._arrays: dict[str, np.ndarray] = {}
        # By number of each held lock: the thread, and an object of its own
        self._holders: dict[int, tuple[int, object]] = {}
        self._one = threading.Lock()

    def array(self, name: str, shape: int | Sequence[int], dtype: DTypeLike) -> np.ndarray:
        asked = checked(name, shape, dtype)
        with self._one:
            array = self._arrays.setdefault(name, np.zeros(*asked))
        check_same(name, (array.shape, array.dtype), asked)
        return array

    def lock(self, index: int) -> NaiveLock:
        return NaiveLock(self._holders, check_index(index))

    def release_locks(self) -> None:
        own = threading.get_ident()
        for index in [index for index, holder in list(self._holders.items()) if holder[0] == own]:
            self._holders.pop(index, None)

    def close(self) -> None:
        pass

    def clear(self) -> None:
        with self._one:
            for array in self._arrays.values():
                array[...] = 0
            self._arrays.clear()


class NaiveLock(Lock):
    """An entry of a dictionary; each of its methods is atomic for all threads."""

    __slots__ = ("_holders", "_index")

    def __init__(self, holders: dict[int, tuple[int, object]], index: int) -> None:
        self._holders, self._index = holders, index

    def try_acquire(self) -> bool:
        own = threading.get_ident(), object()
        return self._holders.setdefault(self._index, own) is own

    def release(self) -> None:
        if self._holders.get(self._index, (None,))[0] != threading.get_ident():
            raise RuntimeError(f"named memory: the lock {self._index} is not held by this rank")
        del self._holders[self._index]

    def is_free(self) -> bool:
        return self._index not in self._holders
