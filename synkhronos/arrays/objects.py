"""Inputs that are not dense arrays: sparse matrices, and objects of any type."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import scipy.sparse

from synkhronos._typing import DTypeLike
from synkhronos.arrays.data import as_data
from synkhronos.host.handler_errors import reraise_if_handlers
from synkhronos.stores.handle import Composite, Handle
from synkhronos.world.world import World

_CLASSES = {"csr": scipy.sparse.csr_matrix, "csc": scipy.sparse.csc_matrix}


class SparseHandle(Composite):
    """Identifies a sparse matrix by the handles of its three arrays."""

    def __init__(self, format: str, shape: tuple[int, int], arrays: list[Handle]) -> None:
        self.format, self.shape, self.arrays = format, shape, arrays

    def open(self, store: Any) -> Any:
        data, indices, indptr = [store.get(handle) for handle in self.arrays]
        return _CLASSES[self.format]((data, indices, indptr), shape=self.shape, copy=False)

    def parts(self) -> list[Handle]:
        return self.arrays


class SparseData:
    """A sparse matrix in memory that every rank can access, for one call."""

    minibatch = False

    def __init__(self, world: World, matrix: Any) -> None:
        self.shape = matrix.shape
        self.data = [as_data(world, item) for item in (matrix.data, matrix.indices, matrix.indptr)]
        self._handle = SparseHandle(matrix.format, self.shape, [item.handle() for item in self.data])

    def handle(self) -> SparseHandle:
        return self._handle


def to_sparse(value: Any, format: str, dtype: DTypeLike, downcast: bool, label: str) -> Any:
    """Return `value` as a sparse matrix of this format and dtype, or raise ``TypeError``."""
    if not scipy.sparse.issparse(value):
        value = np.asarray(value)
        if value.dtype.kind not in "biufc" or value.ndim != 2:
            raise TypeError(
                f"{label}: expected a sparse {format} matrix or an array of 2 dimensions, got "
                f"{value.ndim} dimensions of {value.dtype}"
            )
    if value.dtype != dtype and not (downcast or np.can_cast(value.dtype, dtype, "safe")):
        raise TypeError(
            f"{label}: expected {np.dtype(dtype)}, got {value.dtype}, which cannot be cast safely; "
            f"convert it, or build the function with allow_input_downcast=True"
        )
    matrix = _CLASSES[format](value)
    return matrix if matrix.dtype == dtype else matrix.astype(dtype)


class ObjectHandle(Composite):
    """An object of any type, which is sent as a part of its handle."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def open(self, store: Any) -> Any:
        return self.value


class ObjectData:
    """An object of any type, for one call."""

    minibatch = False
    shape = ()

    def __init__(self, value: Any, label: str) -> None:
        try:
            pickle.dumps(value)
        except Exception as error:  # any exception that a class of the script raises
            reraise_if_handlers(error)
            raise TypeError(
                f"{label}: the value cannot be pickled, and so cannot be sent to the workers: {error}"
            ) from error
        self.data = value

    def handle(self) -> ObjectHandle:
        return ObjectHandle(self.data)
