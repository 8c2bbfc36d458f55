"""The ranks that call a function with collectives in its graph.

At each collective the ranks first exchange where they are: the function, the number of the collective,
its operation, and the rows on which each rank computes. Ranks at different collectives get an error that
names both. Small arrays are part of this exchange. Each rank then reduces them itself, in the same
order, so the results are bit-identical. Large arrays are then reduced by the communicator.

A rank without rows computes like the others, with a row of another rank, so that no rank waits for it.
Its arrays are ignored.
"""

from __future__ import annotations

import functools
import math
import pickle
import struct
import weakref
from typing import Any, Callable, NamedTuple, Sequence

import numpy as np

from synkhronos._errors import SynkhronosError
from synkhronos._typing import Array
from synkhronos.arithmetic.operations import find_operation
from synkhronos.arithmetic.partition import Buckets
from synkhronos.comms.base import Communicator
from synkhronos.world.rank_state import RankState

_SMALL = 1 << 14  # bytes; arrays up to this size are part of the exchange
_NUMBERS = struct.Struct("3q")
_MOST_STAGES = (
    2  # stages for each collective: the last result may still be used when the next is computed
)


class _Place(NamedTuple):
    """Where a rank is, and with which array."""

    function: int
    number: int | None
    name: str
    shape: tuple[int, ...]
    dtype: str

    def text(self) -> str:
        """Return the place as text for an error message."""
        what = f"{self.name} of {np.dtype(self.dtype)} {self.shape}"
        return f"collective {self.number} of function {self.function}, {what}"


class _Item(NamedTuple):
    """The message of a rank to the others at a collective.

    Attributes
    ----------
    place : _Place
        The collective and the type of the array.
    weight : int
        The number of rows on which the rank computes.
    n_rows : int
        How many rows of the result the rank takes, if it takes only some.
    value : numpy.ndarray or None
        The array, if it is small.
    """

    place: _Place
    weight: int
    n_rows: int
    value: Any


class GraphPeers:
    """The `Peers` of a function on this rank.

    Parameters
    ----------
    function : int
        The number of the function.

    Attributes
    ----------
    weight : int
        The number of rows on which this rank computes now.
    is_whole : bool
        Whether these are all of its rows in the call, and not a slice.
    """

    size = 0  # for Theano's NanGuardMode: there are no numbers in it

    def __init__(self, state: RankState, function: int) -> None:
        self._rank_state, self._function, self.weight, self.is_whole = state, function, 0, True
        # For large arrays, in order of use, the most recent last
        self._stages: list[Stage] = []
        self._comm = state.transport.communicator()
        self._numbers: set[int | None] = set()  # of the collectives that have used them

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphPeers:
        return self  # Theano's DebugMode copies all values

    @property
    def is_master(self) -> bool:
        return self._rank_state.is_master

    def all_reduce(self, array: Array, op: str, number: int | None) -> Array:
        """See `synkhronos.engines.base.Peers`."""
        return self._reduce(self._meet(f"all_reduce {op!r}", number, array), array, op)

    def own_rows(self, array: Array, op: str, n_rows: int, number: int | None) -> Array:
        """See `synkhronos.engines.base.Peers`."""
        items = self._meet(f"all_reduce {op!r} of rows", number, array, n_rows)
        total = self._reduce(items, array, op)
        if not self.weight:
            return self._new(np.zeros((n_rows, *array.shape[1:]), array.dtype), array)
        start = sum(item.n_rows for item in items[: self._rank_state.rank] if item.weight)
        return total[start : start + n_rows].copy()

    def all_gather(self, array: Array, number: int | None) -> Array:
        """See `synkhronos.engines.base.Peers`."""
        items = self._meet("all_gather", number, array)
        if any([item.place.shape[1:] != array.shape[1:] for item in items]):
            raise ValueError(
                f"all_gather: expected shapes that are equal except for axis 0, got {_specs(items)}"
            )
        if _all_are_sent(items):
            values = [item.value for item in items if item.weight]
            return self._new(np.concatenate(values or [items[0].value[:0]]), array)
        gathered = self._on_copy(lambda stage: stage.comm.all_gather([stage.array]), number, array)
        chosen = [value for value, item in zip(gathered, items) if item.weight]
        return self._rank_state.engine.arithmetic.concatenate(chosen)

    def broadcast(self, array: Array, number: int | None) -> Array:
        """See `synkhronos.engines.base.Peers`."""
        items, root = self._meet("broadcast", number, array), self._rank_state.master_rank
        if _all_are_sent(items):
            return self._new(np.array(items[root].value), array)
        return self._on_copy(lambda stage: stage.broadcast(root)([stage.array]), number, array)

    def start(self, array: Array, buckets: Buckets, number: int) -> None:
        """See `synkhronos.engines.base.Peers`."""
        if self.is_whole and self._rank_state.overlap is not None:
            self._rank_state.overlap.start(buckets, number, array, self.weight, self._function)

    def zeros_like(self, array: Array) -> Array:
        """See `synkhronos.engines.base.Peers`."""
        return self._new(np.zeros(array.shape, array.dtype), array)

    def _meet(self, name: str, number: int | None, array: Array, n_rows: int = 0) -> list[_Item]:
        """Return the item of each rank, once all have come to this collective."""
        place = self._function, number, name, tuple(array.shape), array.dtype.str
        own, header = _Place(*place), pickle.dumps(place, pickle.HIGHEST_PROTOCOL)
        content, length = b"", array.size * array.dtype.itemsize
        if length <= _SMALL:
            content = np.asarray(self._rank_state.engine.to_host(array)).tobytes()
        numbers = _NUMBERS.pack(len(header), self.weight, n_rows)
        told = self._rank_state.transport.exchange(numbers + header + content)
        items = [self._read(item, own, header) for item in told]
        if not all([entry.place[:3] == own[:3] for entry in items]):  # the collective, in any type
            listed = "; ".join(f"rank {rank}: {entry.place.text()}" for rank, entry in enumerate(items))
            raise SynkhronosError(
                f"the ranks are at different collectives of their graphs: {listed}; let every rank call "
                f"the same functions in the same order"
            )
        return items

    def _read(self, item: bytes, own: _Place, header: bytes) -> _Item:
        length, weight, n_rows = _NUMBERS.unpack_from(item)
        start = _NUMBERS.size + length
        place = own
        if item[_NUMBERS.size : start] != header:
            place = _Place(*pickle.loads(item[_NUMBERS.size : start]))
        dtype, count = np.dtype(place.dtype), math.prod(place.shape)
        value = None
        if count * dtype.itemsize <= _SMALL:
            value = np.frombuffer(item, dtype, count, start).reshape(place.shape)
        return _Item(place, weight, n_rows, value)

    def _reduce(self, items: Sequence[_Item], array: Array, op: str) -> Array:
        if any([item.place != items[0].place for item in items]):
            raise ValueError(
                f"all_reduce {op!r}: expected the same shape and dtype on every rank, got "
                f"{_specs(items)}; use all_gather for unequal numbers of rows"
            )
        weights = [item.weight for item in items]
        if not any(weights):
            raise ValueError(f"all_reduce {op!r}: no rank has rows")
        op, factor, is_equal = _plain(op, weights, self.weight)
        if is_equal:
            weights = [min(weight, 1) for weight in weights]
        operation = find_operation(op)
        if _all_are_sent(items):
            active = [(item.value, weight) for item, weight in zip(items, weights) if weight]
            result = self._new(operation.reduce(*zip(*active)), array)
        else:
            weight = weights[self._rank_state.rank]

            def reduce(stage: Stage) -> Sequence[Array]:
                if not weight and not operation.weighted:
                    stage.array[...] = operation.neutral(array.dtype)
                return stage.reduction(operation.name)([stage.array], weight)

            result = self._on_copy(reduce, items[0].place.number, array)
        if factor != 1:
            result = self._rank_state.engine.arithmetic.multiply(result, factor)
        return result

    def _on_copy(
        self, collective: Callable[[Stage], Sequence[Any]], number: int | None, array: Array
    ) -> Any:
        """Return the result of a collective on a copy of an array; that of a NumPy array is kept."""
        if not isinstance(array, np.ndarray):
            return collective(Stage(array.copy("C"), self._rank_state.comm))[0]
        stage = self._take_stage(number, array)
        stage.array[...] = array
        [result] = collective(stage)
        return stage.lend() if result is stage.array else result

    def _take_stage(self, number: int | None, array: np.ndarray) -> Stage:
        """Return a free stage like `array`, for the collective `number`."""
        self._numbers.add(number)
        for stage in reversed(self._stages):  # the most recent may still be in the processor's cache
            held = stage.array
            if held.shape == array.shape and held.dtype == array.dtype and stage.is_free():
                self._stages.remove(stage)
                break
        else:
            most = _MOST_STAGES * len(self._numbers)
            del self._stages[: max(0, 1 + len(self._stages) - most)]  # before memory is allocated
            stage = Stage(self._rank_state.store.empty(array.shape, array.dtype), self._comm)
        self._stages.append(stage)
        return stage

    def _new(self, value: np.ndarray, like: Array) -> Array:
        """Return a NumPy array converted to the type of another array."""
        return value if isinstance(like, np.ndarray) else self._rank_state.engine.to_device(value)


def _plain(op: str, weights: Sequence[int], own: int) -> tuple[str, float, bool]:
    """Return a reduction as an operation, a factor of its result, and whether ranks weigh the same."""
    if op == "weighted_sum":
        if all(weight == own for weight in weights):
            return "sum", 1, False
        return "avg", sum(weights) / own if own else 0, False
    if op == "share_of_sum":  # an average, which does not overflow where the sum does
        return "avg", own * sum(map(bool, weights)) / sum(weights), True
    return op, 1, False


def _all_are_sent(items: Sequence[_Item]) -> bool:
    return all([item.value is not None for item in items])


def _specs(items: Sequence[_Item]) -> str:
    places = [item.place for item in items]
    return ", ".join(
        f"rank {rank}: {np.dtype(place.dtype)} {place.shape}" for rank, place in enumerate(places)
    )


# The memory in which large arrays are reduced; the graph gets it as the result


class Stage:
    """An array that collectives use again and again, and the prepared collectives.

    Attributes
    ----------
    array : numpy.ndarray
        The memory, in the store.
    comm : Communicator
        The communicator.
    broadcast, reduction : callable
        They prepare a collective, or return the one that was prepared before.
    """

    def __init__(self, array: Array, comm: Communicator) -> None:
        self.array, self.comm = array, comm
        self.broadcast = functools.lru_cache(None)(comm.prepare_broadcast)
        self.reduction = functools.lru_cache(None)(comm.prepare_reduction)
        self._borrower: Callable[[], Any] = lambda: None

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
