"""The reduction operations, as pure arithmetic on arrays.

Only this module defines ``"avg"``, ``"max"`` and the others; outputs, slices, collectives and
communicators use it. To add an operation, add a row to ``OPERATIONS``.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

import numpy as np

from synkhronos._typing import DTypeLike

#: Modes that an output may have besides the reductions.
GATHER = "gather"

#: The part of each array that is processed at a time, so that it stays in the cache.
PIECE_BYTES = 1 << 18


class Operation(NamedTuple):
    """A reduction of the values of several ranks or slices to one value."""

    name: str
    combine: np.ufunc
    weighted: bool
    kinds: str  # the kinds of dtypes for which it is defined

    def is_defined_for(self, dtype: DTypeLike) -> bool:
        """Whether the operation is defined for `dtype`."""
        return np.dtype(dtype).kind in self.kinds

    def check_dtype(self, dtype: DTypeLike, what: object) -> None:
        """Raise ``TypeError`` if it is not defined for `dtype`; `what` names the value."""
        if not self.is_defined_for(dtype):
            raise TypeError(
                f"operation {self.name!r} of {what}: not defined for dtype {dtype}; cast it to a "
                f"float, or use another operation"
            )

    def neutral(self, dtype: DTypeLike) -> Any:
        """Return the number that has no effect on a sum, product, minimum or maximum."""
        if self.combine.identity is not None:
            return self.combine.identity
        is_least = self.combine is np.minimum
        dtype = np.dtype(dtype)
        if dtype.kind == "b":
            return is_least
        if dtype.kind == "f":
            return np.inf if is_least else -np.inf
        return np.iinfo(dtype).max if is_least else np.iinfo(dtype).min

    def reduce(
        self, arrays: Sequence[np.ndarray], weights: Sequence[float] | None = None
    ) -> np.ndarray:
        """Reduce a list of arrays of equal shape to a new array, in the order of the list.

        Parameters
        ----------
        arrays : list of numpy.ndarray
            At least one. They are not changed.
        weights : list of float, optional
            One per array, used by ``"avg"`` only. Arrays of weight zero are ignored.
        """
        result = np.array(arrays[0])
        return self.reduce_into(result, [result, *arrays[1:]], weights)

    def reduce_floats(self, values: Sequence[float], weights: Sequence[float]) -> float:
        """Like `reduce`, for Python floats, in double precision."""
        if not self.weighted:
            return sum(values) if self.combine is np.add else self.combine.reduce(values)
        total = sum([value * weight for value, weight in zip(values, weights) if weight])
        return total / sum(weights)

    def reduce_into(
        self,
        out: np.ndarray,
        arrays: Sequence[np.ndarray],
        weights: Sequence[float] | None = None,
    ) -> np.ndarray:
        """Like `reduce`, into `out`, which may be ``arrays[0]`` but no other item."""
        if not self.weighted:
            return self._fold(out, arrays)
        if weights is None or are_equal(weights):
            if out.dtype == np.float16:
                return _weighted_mean(out, arrays, [1.0] * len(arrays))
            return _divide(self._fold(out, arrays), len(arrays))
        return _weighted_mean(out, arrays, weights)

    def reduce_in_pieces(
        self,
        out: np.ndarray,
        arrays: Sequence[np.ndarray],
        weights: Sequence[float] | None = None,
    ) -> np.ndarray:
        """Like `reduce_into`, for C-contiguous arrays larger than the cache, with identical bits."""
        flat, flats = out.reshape(-1), [array.reshape(-1) for array in arrays]
        for piece in pieces(0, out.size, out.itemsize):
            self.reduce_into(flat[piece], [one[piece] for one in flats], weights)
        return out

    def _fold(self, out: np.ndarray, arrays: Sequence[np.ndarray]) -> np.ndarray:
        if len(arrays) == 1:
            if out is not arrays[0]:
                out[...] = arrays[0]
            return out
        self.combine(arrays[0], arrays[1], out=out)
        for array in arrays[2:]:
            self.combine(out, array, out=out)
        return out


def are_equal(weights: Sequence[float]) -> bool:
    """Whether all weights are the same, so that none is needed."""
    return all([weight == weights[0] for weight in weights])


def _divide(array: np.ndarray, divisor: int) -> np.ndarray:
    """Divide an array in place."""
    if array.dtype.kind == "f" and not divisor & (divisor - 1):
        # By a power of two, a multiplication has the same bits and is faster.
        return np.multiply(array, 1 / divisor, out=array, casting="same_kind")
    return np.divide(array, divisor, out=array, casting="same_kind")


def pieces(start: int, stop: int, itemsize: int, nbytes: int = PIECE_BYTES) -> list[slice]:
    """Split the items from `start` to `stop` into pieces of `nbytes` bytes, which fit in the cache."""
    step = max(1, nbytes // itemsize)
    return [slice(begin, min(begin + step, stop)) for begin in range(start, stop, step)]


def _weighted_mean(
    out: np.ndarray, arrays: Sequence[np.ndarray], weights: Sequence[float]
) -> np.ndarray:
    """``sum(w * a) / sum(w)``; half precision is accumulated in single."""
    wide = np.promote_types(out.dtype, np.float32)
    total = np.zeros(out.shape, wide)
    for array, weight in zip(arrays, weights):
        if weight:
            total += np.multiply(array, wide.type(weight), dtype=wide)
    total /= wide.type(sum(weights))
    out[...] = total
    return out


class Arithmetic:
    """Arithmetic on NumPy arrays. An engine may have its own arithmetic.

    Methods return their result, which may use the memory of their first argument.
    """

    def own(self, value: Any) -> Any:
        """Return a value of a compiled function as an array."""
        return np.asarray(value)

    def astype(self, array: Any, dtype: DTypeLike) -> Any:
        """Return `array` itself if it has this dtype, else a converted copy."""
        return array.astype(dtype, copy=False)

    def multiply(self, array: Any, factor: float) -> Any:
        """Return the product of an array of floats and a number."""
        array *= array.dtype.type(factor)
        return array

    def divide(self, array: Any, divisor: float) -> Any:
        """Return the quotient of an array of floats and a number."""
        array /= array.dtype.type(divisor)
        return array

    def combine(self, operation: Operation, array: Any, other: Any) -> Any:
        """Return ``operation(array, other)``."""
        return operation.combine(array, other, out=array)

    def concatenate(self, arrays: Sequence[Any], axis: int = 0) -> Any:
        """Concatenate arrays along an axis; scalars become the items of a vector."""
        return np.concatenate([np.atleast_1d(array) for array in arrays], axis)


#: The arithmetic on NumPy arrays.
NUMPY = Arithmetic()


class Accumulator:
    """Reduces values one by one, without keeping all of them.

    Parameters
    ----------
    mode : str or None
        The name of an `Operation`, ``"gather"``, or None to keep the last value.
    arithmetic : Arithmetic
        The arithmetic for the type of the values.
    label, remedy : str
        For error messages: a name for the values, and what to do if their shapes differ.
    axis : int
        With ``"gather"``, the axis along which the values are concatenated.
    """

    def __init__(
        self,
        mode: str | None,
        arithmetic: Arithmetic = NUMPY,
        label: str = "an output",
        remedy: str = "'gather'",
        axis: int = 0,
    ) -> None:
        self._mode, self._axis = mode, axis
        self._label, self._remedy = label, remedy
        self._operation = None if mode is None else OPERATIONS.get(mode)
        self._arithmetic = arithmetic
        self._value: Any = None
        self._weight: float = 0
        self._unit: float = 0
        self._parts: list[Any] = []

    @property
    def is_empty(self) -> bool:
        """Whether no value was added."""
        return self._value is None and not self._parts

    def add(self, value: Any, weight: float) -> None:
        """Add a value that was computed from `weight` rows, and may be scaled.

        Its memory may be reused afterwards: some operations of PyTensor write where they did before.
        """
        if self._mode == GATHER:
            self._parts.append(self._arithmetic.own(value).copy())
        elif self._operation is None:
            self._value = value
        else:
            self._fold(self._operation, self._arithmetic.own(value), weight)

    def _fold(self, operation: Operation, value: Any, weight: float) -> None:
        if operation.weighted:
            # Relative to the first weight, so that slices of equal length need no multiplication.
            self._unit = self._unit or weight
            self._weight += weight
            value = self._arithmetic.astype(value, np.promote_types(value.dtype, np.float32))
            if weight != self._unit:
                value = self._arithmetic.multiply(value, weight / self._unit)
        if self._value is None:
            self._value = value.copy()
        elif self._value.shape != value.shape:
            raise ValueError(
                f"operation {operation.name!r} of {self._label}: the slices' values have unequal "
                f"shapes, {self._value.shape} and {value.shape}; use {self._remedy}"
            )
        else:
            self._value = self._arithmetic.combine(operation, self._value, value)

    def result(self, dtype: DTypeLike) -> Any:
        """Return the reduction of all values."""
        if self._mode == GATHER:
            return self._arithmetic.concatenate(self._parts, self._axis)
        if self._operation is None:
            return self._value
        if self._operation.weighted and self._weight != self._unit:
            self._value = self._arithmetic.divide(self._value, self._weight / self._unit)
        return self._arithmetic.astype(self._value, dtype)


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation("avg", np.add, True, "fc"),
        Operation("sum", np.add, False, "iufc"),
        Operation("prod", np.multiply, False, "iufc"),
        Operation("min", np.minimum, False, "biufc"),
        Operation("max", np.maximum, False, "biufc"),
    )
}


def find_operation(op: str, label: str = "op") -> Operation:
    """Return the `Operation` named `op`, or raise a ``ValueError`` that lists the names."""
    if isinstance(op, str) and op in OPERATIONS:
        return OPERATIONS[op]
    error = ValueError if isinstance(op, str) else TypeError
    raise error(f"{label}: expected one of {sorted(OPERATIONS)}, got {op!r}")


def parse_output_mode(mode: str | None) -> tuple[str | None, bool]:
    """Split an output's mode into ``(name, over_cpu)``: ``"c_sum"`` is ``("sum", True)``."""
    if mode is None:
        return None, False
    if isinstance(mode, str):
        name = mode[2:] if mode.startswith("c_") else mode
        if name in OPERATIONS or name == GATHER:
            return name, name != mode
    error = ValueError if isinstance(mode, str) else TypeError
    raise error(
        f"output op: expected one of {sorted([*OPERATIONS, GATHER])}, one of these with 'c_' "
        f"before it, or None; got {mode!r}"
    )
