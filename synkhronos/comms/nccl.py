"""The communicator for arrays of CUDA devices: NCCL, through pygpu.

Before the ranks call NCCL, they exchange the shapes and dtypes of their arrays through the transport. A
rank that has failed, or a different shape, is detected there and raises an error on every rank. All
arrays of one dtype are transferred as one flat array, in one call.

Arrays that NCCL does not support go through shared memory: NumPy arrays, other dtypes, and the results
of ``gather``, which are in the memory of the master anyway.
"""

from __future__ import annotations

import functools
import math
import pickle
from typing import TYPE_CHECKING, Any, Callable, Iterator, Sequence, Tuple

import numpy as np
import pygpu
from pygpu.collectives import GpuComm, GpuCommCliqueId
from pygpu.gpuarray import GpuArray, GpuArrayException

from synkhronos._errors import text_of
from synkhronos.arithmetic.operations import Arithmetic, Operation, find_operation, scaled
from synkhronos.comms.base import ArraySpec, Broadcast, Communicator, Group, Reduction

if TYPE_CHECKING:
    from synkhronos._typing import Array, DTypeLike

# The dtypes that libgpuarray 0.7 supports in NCCL. It counts the items of a call in an int.
_DTYPES = tuple(np.dtype(name) for name in "int8 int32 int64 uint64 float16 float32 float64".split())
_MOST_ITEMS = 1 << 30

#: The specs of every rank's arrays, by rank, and the weights
_Specs = Tuple[Sequence[Sequence[ArraySpec]], Sequence[float]]
_Open = Callable[..., _Specs]


class CannotJoinError(Exception):
    """These ranks cannot use NCCL. The message, identical on every rank, says why."""


def join(staged: Communicator, context: Any, arithmetic: Arithmetic) -> NcclCommunicator:
    """Return a communicator. All ranks must call this together.

    Parameters
    ----------
    staged : StagedCommunicator
        The communicator for arrays that NCCL does not support.
    context : pygpu.gpuarray.GpuContext
        The device of this rank.
    arithmetic : Arithmetic
        The arithmetic on the device's arrays.

    Raises
    ------
    CannotJoinError
        On every rank, if one rank cannot join.
    """
    group = staged.group
    identifier = _run_on_all(group, lambda: bytes(GpuCommCliqueId(context).comm_id))[0]
    cliques = []

    def join_clique() -> bytes:
        clique = GpuCommCliqueId(context, bytearray(identifier))
        cliques.append(GpuComm(clique, group.size, group.rank))
        return b""

    _run_on_all(group, join_clique)
    return NcclCommunicator(cliques[0], staged, context, arithmetic)


def _run_on_all(group: Group, step: Callable[[], bytes]) -> list[bytes]:
    """Run a step on every rank. Return the bytes of each rank, or raise if one rank failed."""
    try:
        outcome: tuple[bool, Any] = True, step()
    except (GpuArrayException, RuntimeError, ValueError) as error:
        outcome = False, f"rank {group.rank}: {text_of(error)}"
    outcomes = [pickle.loads(item) for item in group.exchange(pickle.dumps(outcome))]
    for succeeded, result in outcomes:
        if not succeeded:
            raise CannotJoinError(result)
    return [result for _, result in outcomes]


class NcclCommunicator(Communicator):
    """Collectives on arrays of this rank's CUDA device. Created by `join`."""

    reduces_in_place = True

    def __init__(self, clique: Any, staged: Communicator, context: Any, arithmetic: Arithmetic) -> None:
        super().__init__(staged.group)
        self._clique = clique
        self._staged = staged
        self._context = context
        self._arithmetic = arithmetic

    @property
    def over_cpu(self) -> Communicator:
        return self._staged

    def takes(self, array: Array) -> bool:
        return isinstance(array, GpuArray) and array.dtype in _DTYPES

    def prepare_broadcast(self, root: int) -> Broadcast:
        by_nccl = functools.partial(self._broadcast, functools.lru_cache(1)(_opened), root)
        over_cpu = self._staged.prepare_broadcast(root)
        return lambda arrays: self._split(arrays, by_nccl, over_cpu)

    def gather(self, arrays: Sequence[Array], root: int) -> list[list[Array]] | None:
        return self._staged.gather(arrays, root)

    def all_gather(self, arrays: Sequence[Array]) -> list[list[Array]]:
        return self._split(arrays, self._all_gather, self._staged.all_gather)

    def prepare_reduction(self, op: str, root: int | None = None) -> Reduction:
        opened, over_cpu = functools.lru_cache(1)(_opened), self._staged.prepare_reduction(op, root)
        by_nccl = functools.partial(self._reduce, opened, find_operation(op), root)

        def reduce(
            arrays: Sequence[Array], weight: float = 1, wires: Sequence[Any] = ()
        ) -> Sequence[Array]:
            return self._split(arrays, by_nccl, over_cpu, weight)

        return reduce

    def _split(
        self,
        arrays: Sequence[Array],
        by_nccl: Callable[..., Sequence[Any]],
        over_cpu: Callable[..., Sequence[Any]],
        *args: Any,
    ) -> list[Any]:
        """Reduce supported arrays with NCCL, others through the CPU; return all in order."""
        places = [place for place, array in enumerate(arrays) if self.takes(array)]
        others = [place for place in range(len(arrays)) if place not in places]
        results: list[Any] = [None] * len(arrays)
        for collective, chosen in ((by_nccl, places), (over_cpu, others)):
            if chosen:
                for place, item in zip(chosen, collective([arrays[place] for place in chosen], *args)):
                    results[place] = item
        return results

    # The methods below get arrays that NCCL supports. All steps that allocate memory, and so can fail on
    # one rank, come before the last barrier: otherwise the other ranks would wait inside NCCL forever.

    def _broadcast(self, opened: _Open, root: int, arrays: Sequence[Array]) -> Sequence[Array]:
        by_rank, _ = self._meet(opened, arrays)
        arrays = [
            array if array.shape == spec.shape else self._empty(spec.shape, array.dtype)
            for array, spec in zip(arrays, by_rank[root])
        ]
        flats = self._flats(arrays)
        self.group.barrier()
        for flat in flats:
            for piece in _pieces(flat.array):
                self._clique.broadcast(piece, root)
            if self.rank != root:
                flat.unpack()
        return arrays

    def _reduce(
        self,
        opened: _Open,
        operation: Operation,
        root: int | None,
        arrays: Sequence[Array],
        weight: float,
    ) -> Sequence[Array]:
        """Reduce to rank `root`, or to every rank if it is None."""
        flats = self._flats(arrays, widen=operation.weighted)
        by_rank, weights = self._meet(opened, arrays, weight)
        self.check_reducible(operation.name, by_rank, weights)
        is_target, divisor = root in (None, self.rank), 1.0
        if operation.weighted:
            factors, divisor = scaled(weights)
            self._weigh(flats, factors[self.rank], is_target)
            self.group.barrier()
        for flat in flats:
            self._reduce_flat(flat.array, operation, root)
            if is_target:
                if divisor != 1:
                    flat.array = self._arithmetic.divide(flat.array, divisor)
                flat.unpack()
        return arrays

    def _weigh(self, flats: Sequence[_Flat], factor: float, is_target: bool) -> None:
        for flat in flats:
            if not factor:
                flat.clear()  # its values may be NaN
            elif factor != 1:
                if not is_target:
                    flat.own()  # the arrays of these ranks do not change
                flat.array = self._arithmetic.multiply(flat.array, factor)

    def _reduce_flat(self, flat: Array, operation: Operation, root: int | None) -> None:
        name = "sum" if operation.weighted else operation.name
        for piece in _pieces(flat):
            if root is None:
                self._clique.all_reduce(piece, name, piece)
            elif root == self.rank:
                self._clique.reduce(piece, name, piece, root)
            else:
                self._clique.reduce(piece, name, root=root)

    def _all_gather(self, arrays: Sequence[Array]) -> list[list[Array]]:
        by_rank, _ = self._meet(_opened, arrays)
        gathered: list[list[Array]] = [[] for _ in arrays]
        flats = self._flats(arrays)
        shapes = [[[specs[place].shape for place in flat.places] for specs in by_rank] for flat in flats]
        sizes = [[sum(map(math.prod, own)) for own in all_shapes] for all_shapes in shapes]
        rooms = [self._empty((sum(every),), flat.array.dtype) for flat, every in zip(flats, sizes)]
        self.group.barrier()
        for flat, room, all_shapes, every in zip(flats, rooms, shapes, sizes):
            self._all_gather_flat(flat.array, room, every)
            stop = 0
            for own in all_shapes:
                for place, shape in zip(flat.places, own):
                    start, stop = stop, stop + math.prod(shape)
                    part = room[start:stop]
                    whole = part.reshape(shape) if part.size else self._empty(shape, part.dtype)
                    gathered[place].append(whole)
        return gathered

    def _all_gather_flat(self, flat: Array, room: Array, sizes: Sequence[int]) -> None:
        """Gather every rank's flat array in `room`; sizes may differ."""
        if len(set(sizes)) == 1 and 0 < flat.size <= _MOST_ITEMS:
            self._clique.all_gather(flat, room)
            return
        stop = 0
        for rank, size in enumerate(sizes):
            start, stop = stop, stop + size
            if size and rank == self.rank:
                room[start:stop] = flat
            for piece in _pieces(room[start:stop]):
                self._clique.broadcast(piece, rank)

    def _meet(self, opened: _Open, arrays: Sequence[Array], weight: float = 1) -> _Specs:
        """Return the specs of every rank's arrays, by rank, and the weights."""
        specs = [ArraySpec(array.shape, array.dtype) for array in arrays]
        return opened(*self.group.exchange(pickle.dumps((specs, weight))))

    def _flats(self, arrays: Sequence[Array], widen: bool = False) -> list[_Flat]:
        """Join the arrays to a flat array per dtype; `widen` converts half to single precision."""
        places: dict[np.dtype, list[int]] = {}
        for place, array in enumerate(arrays):
            places.setdefault(array.dtype, []).append(place)
        return [
            _Flat(
                self._context,
                [arrays[place] for place in chosen],
                chosen,
                np.promote_types(dtype, np.float32) if widen else dtype,
            )
            for dtype, chosen in places.items()
        ]

    def _empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        return pygpu.empty(shape, dtype, context=self._context)


def _opened(*received: bytes) -> _Specs:
    """Return what all ranks have sent. A collective that is repeated keeps it for equal bytes."""
    by_rank, weights = zip(*map(pickle.loads, received))
    for entry in zip(*by_rank):
        if len({spec.dtype for spec in entry}) > 1:
            raise ValueError(f"expected one dtype, got {entry} by rank")
    return by_rank, weights


class _Flat:
    """Several arrays, joined to `array`. A single contiguous array is not copied."""

    def __init__(
        self, context: Any, parts: Sequence[Array], places: Sequence[int], dtype: np.dtype
    ) -> None:
        self.places = places
        self._parts = parts
        first = parts[0]
        self._is_view = len(parts) == 1 and first.dtype == dtype and first.flags["C_CONTIGUOUS"]
        if self._is_view:
            self.array = first.reshape((first.size,))
            return
        size = sum(part.size for part in parts)
        self.array = pygpu.empty((size,), dtype, context=context)
        for segment, part in self._segments():
            segment[...] = part.reshape((part.size,))

    def own(self) -> None:
        """Copy the items, unless they have been copied."""
        if self._is_view:
            self.array, self._is_view = self.array.copy(), False

    def clear(self) -> None:
        """Replace the items with zeros, in separate memory."""
        array = self.array
        self.array = pygpu.zeros(array.shape, array.dtype, context=array.context)
        self._is_view = False

    def unpack(self) -> None:
        """Copy the items back into the original arrays."""
        if not self._is_view:
            for segment, part in self._segments():
                part[...] = segment.reshape(part.shape)

    def _segments(self) -> Iterator[tuple[Array, Array]]:
        start = 0
        for part in self._parts:
            if part.size:
                # pygpu cannot assign to a 0-d array.
                yield self.array[start : start + part.size], part if part.shape else part.reshape((1,))
            start += part.size


def _pieces(flat: Array) -> list[Array]:
    """Split a flat array into views that are short enough for one call."""
    number = math.ceil(flat.size / _MOST_ITEMS)
    return [flat[i * _MOST_ITEMS : (i + 1) * _MOST_ITEMS] for i in range(number)]
