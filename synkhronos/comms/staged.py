"""The communicator, through CPU memory, for arrays of devices that cannot communicate directly.

Each rank copies its arrays into shared memory. A communicator for NumPy arrays works on these copies in
place, and each rank copies the results back. A prepared collective uses the same memory again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Sequence

import numpy as np

from synkhronos.comms.base import Broadcast, Communicator, Reduction

if TYPE_CHECKING:
    from synkhronos._typing import Array
    from synkhronos.stores.base import Store


class StagedCommunicator(Communicator):
    """Collectives on arrays of a device and on NumPy arrays.

    Parameters
    ----------
    comm : Communicator
        For NumPy arrays.
    store : Store
        Where the copies are.
    read : callable
        ``read(array, out)`` copies an array of the device into a NumPy array.
    to_device : callable
        ``to_device(value)`` copies a NumPy array to a new array on the device.
    overwrite : callable
        ``overwrite(array, value)`` copies a NumPy array to a given array on the device, if that can be
        changed and has the same shape, else to a new array, and returns the array that has the values.
    """

    def __init__(
        self,
        comm: Communicator,
        store: Store,
        read: Callable[[Array, np.ndarray], object],
        to_device: Callable[[np.ndarray], Array],
        overwrite: Callable[[Array, np.ndarray], Array],
    ) -> None:
        super().__init__(comm.group)
        self._comm, self._store = comm, store
        self._read, self._to_device, self._overwrite = read, to_device, overwrite

    def prepare_broadcast(self, root: int) -> Broadcast:
        stages, broadcast = _Stages(self._store, self._read), self._comm.prepare_broadcast(root)

        def run(arrays: Sequence[Array]) -> list[Array]:
            values = broadcast(stages.fill(arrays))
            if self.rank != root:
                return self._copy_back(arrays, values)
            return [
                value if isinstance(array, np.ndarray) else array for array, value in zip(arrays, values)
            ]

        return run

    def gather(self, arrays: Sequence[Array], root: int) -> list[list[Array]] | None:
        return self._comm.gather(_Stages(self._store, self._read).fill(arrays), root)

    def all_gather(self, arrays: Sequence[Array]) -> list[list[Array]]:
        gathered = self._comm.all_gather(_Stages(self._store, self._read).fill(arrays))
        return [
            by_rank if isinstance(array, np.ndarray) else [self._to_device(item) for item in by_rank]
            for array, by_rank in zip(arrays, gathered)
        ]

    def prepare_reduction(self, op: str, root: int | None = None) -> Reduction:
        stages, reduce = _Stages(self._store, self._read), self._comm.prepare_reduction(op, root)

        def run(arrays: Sequence[Array], weight: float = 1, *wires: Sequence[Any]) -> Sequence[Array]:
            reduced = reduce(stages.fill(arrays), weight, *wires)
            return self._copy_back(arrays, reduced) if root in (None, self.rank) else arrays

        return run

    @property
    def has_wires(self) -> bool:  # type: ignore[override]  # nothing sets it
        return self._comm.has_wires

    def _copy_back(self, arrays: Sequence[Array], values: Sequence[np.ndarray]) -> list[Array]:
        """Return the values, copied back to the device where necessary."""
        return [
            value if isinstance(array, np.ndarray) else self._overwrite(array, value)
            for array, value in zip(arrays, values)
        ]


class _Stages:
    """Memory of the store, for copies of a device's arrays that are made again and again."""

    def __init__(self, store: Store, read: Callable[[Array, np.ndarray], object]) -> None:
        self._store, self._read = store, read
        self._stages: list[np.ndarray | None] = []  # by position

    def fill(self, arrays: Sequence[Array]) -> list[np.ndarray]:
        """Return the arrays, with device arrays replaced by copies in shared memory."""
        kept, self._stages = self._stages, [None] * len(arrays)
        staged = list(arrays)
        for place, array in enumerate(arrays):
            if not isinstance(array, np.ndarray):
                stage = kept[place] if place < len(kept) else None
                if stage is None or (stage.shape, stage.dtype) != (array.shape, array.dtype):
                    stage = self._store.empty(array.shape, array.dtype)
                self._read(array, stage)
                staged[place] = self._stages[place] = stage
        return staged
