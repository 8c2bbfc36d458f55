"""Memory in which the arrays of a collective in a graph are reduced; the graph gets it as the result."""

from __future__ import annotations

import weakref
from typing import Any, Callable

import numpy as np

from synkhronos.comms.base import Communicator
from synkhronos.comms.repeating import RepeatingCommunicator
from synkhronos.stores.base import Store

_MOST = 2  # stages for each collective: the last result may still be used when the next is computed


class Stage:
    """An array that other ranks can access, and the communicator that reduces it again and again.

    Attributes
    ----------
    array : numpy.ndarray
        The memory, in the store.
    comm : RepeatingCommunicator
        The communicator that reduces it.
    """

    def __init__(self, array: np.ndarray, comm: Communicator) -> None:
        self.array, self.comm = array, RepeatingCommunicator(comm)
        self._borrower: Callable[[], Any] = lambda: None

    def is_like(self, array: np.ndarray) -> bool:
        """Whether the stage has exactly the size of this array."""
        return self.array.shape == array.shape and self.array.dtype == array.dtype

    def is_free(self) -> bool:
        """Whether no lent array is in use."""
        return self._borrower() is None

    def lend(self) -> np.ndarray:
        """Return an array in the same memory. The stage is free once no view of it is left."""
        borrower = _Borrower(self.array)
        self._borrower = weakref.ref(borrower)
        return np.asarray(borrower)


class _Borrower:
    """The base of a lent array and of all its views."""

    __slots__ = ("_owner", "__array_interface__", "__weakref__")

    def __init__(self, array: np.ndarray) -> None:
        self._owner, self.__array_interface__ = array, array.__array_interface__


class Stages:
    """The stages of the collectives of a function, in order of use, the most recent last.

    Parameters
    ----------
    store : Store
        Allocates the arrays.
    comm : Communicator
        The communicator of all ranks.
    """

    def __init__(self, store: Store, comm: Communicator) -> None:
        self._store, self._comm = store, comm
        self._stages: list[Stage] = []
        self._numbers: set[int | None] = set()

    def take(self, number: int | None, array: np.ndarray) -> Stage:
        """Return a free stage like `array`, for the collective `number`."""
        self._numbers.add(number)
        for stage in reversed(self._stages):  # the most recent may still be in the processor's cache
            if stage.is_like(array) and stage.is_free():
                self._stages.remove(stage)
                break
        else:
            most = _MOST * len(self._numbers)
            del self._stages[: max(0, 1 + len(self._stages) - most)]  # before memory is allocated
            stage = Stage(self._store.empty(array.shape, array.dtype), self._comm)
        self._stages.append(stage)
        return stage
