"""The reduction operations, as pure arithmetic on arrays.

Only this module defines ``"avg"``, ``"max"`` and the others; outputs, slices, collectives and
communicators use it. To add an operation, add a row to ``OPERATIONS``.

Averages of finite floating-point numbers are finite, although sums may overflow. The processor has a
flag for overflow, which NumPy reads after each operation anyway. Only if it is set are the numbers at
these places averaged again, divided by a power of two. Until then they must not be overwritten, so a sum
is computed in memory of its own. Each number of an average depends on the operands at its place alone.
So it has the same bits wherever it is computed.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from typing import Any, Callable, Iterable, NamedTuple, Sequence

import numpy as np

from synkhronos._checks import check_choice
from synkhronos._typing import DTypeLike

#: The part of each array that is processed at a time, so that it stays in the cache.
PIECE_BYTES = 1 << 18
#: The same for averages, which need memory for the sum besides two operands.
AVERAGED_BYTES = 3 << 16

_LARGE = 2.0**100  # weights are divided by the largest if that is larger, or smaller than the reciprocal
_STEP = 2.0**-8  # divides a sum that overflows while it grows


class _Raise:
    """As ``numpy.errstate(over="raise")``, which takes ten times as long with NumPy 1."""

    def __enter__(self) -> None:
        self._former = list(np.geterrobj())
        size, flags, handler = self._former
        shift = np.SHIFT_OVERFLOW
        np.seterrobj([size, flags & ~(7 << shift) | np.ERR_RAISE << shift, handler])

    def __exit__(self, *_: object) -> None:
        np.seterrobj(self._former)


#: A context in which an overflow raises a ``FloatingPointError``
raising_overflow: Any = functools.partial(np.errstate, over="raise")
if hasattr(np, "geterrobj"):
    raising_overflow = _Raise


def pieces(start: int, stop: int, itemsize: int, nbytes: int = PIECE_BYTES) -> list[slice]:
    """Split the items from `start` to `stop` into pieces of `nbytes` bytes, which fit in the cache."""
    step = max(1, nbytes // itemsize)
    return [slice(begin, min(begin + step, stop)) for begin in range(start, stop, step)]


def are_equal(weights: Sequence[float]) -> bool:
    """Whether all weights are the same, so that none is needed."""
    return all([weight == weights[0] for weight in weights])


def normalized(weights: Sequence[float]) -> Sequence[float]:
    """Return weights whose sum neither overflows nor vanishes: the same, unless they are extreme."""
    largest = max(weights)
    if 1 / _LARGE < largest < _LARGE or not largest:
        return weights
    return [weight / largest for weight in weights]


def scaled(weights: Sequence[float]) -> tuple[list[float], float]:
    """Return factors for a sum that cannot overflow, and the number by which to divide it.

    The factors are the weights, times a power of two.
    """
    weights = [1.0] * len(weights) if are_equal(weights) else normalized(weights)
    total = sum(weights)
    scale = power_of_two_below(1 / total)
    return [weight * scale for weight in weights], total * scale


def power_of_two_below(number: float) -> float:
    """Return the largest power of two that is not larger than a positive number."""
    return 2.0 ** (math.frexp(number)[1] - 1)


def average_floats(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the average of Python floats, in double precision, weighted by numbers of rows."""
    average = sum([value * weight for value, weight in zip(values, weights) if weight]) / sum(weights)
    if average - average == 0:  # it is finite
        return average
    result: Any = np.array(average)
    active = [(np.array(value), weight) for value, weight in zip(values, weights) if weight]
    _restore(result, *zip(*active))
    return float(result)


def average(arrays: Sequence[np.ndarray], weights: Sequence[float] | None = None) -> np.ndarray:
    """Return the average of arrays of equal shape and dtype as a new array. They are not changed."""
    out = np.empty(arrays[0].shape, arrays[0].dtype)
    if weights is None or are_equal(weights):
        try:
            with raising_overflow():
                _equally(out, arrays, out)
            return out
        except FloatingPointError:
            pass
    average_each([(out, arrays, ())], weights)
    return out


def average_each(
    parts: Iterable[tuple[np.ndarray, Sequence[np.ndarray], Sequence[np.ndarray]]],
    weights: Sequence[float] | None = None,
) -> None:
    """Compute several averages.

    Parameters
    ----------
    parts : iterable of (out, arrays, copies)
        For each average: the array to set to it, which may be one of the operands; the operands, of
        equal shape and dtype; and further arrays to set to it.
    weights : list of float, optional
        A weight for each operand. Operands of weight zero are ignored.
    """
    compute: Any = _equally
    if weights is not None and not are_equal(weights):
        compute = functools.partial(_weighted, normalized(weights))
    total = np.empty(0)  # memory that is used again for the next average of the same shape
    with raising_overflow():
        for out, arrays, copies in parts:
            if total.shape != out.shape or total.dtype != wide_dtype(out.dtype):
                total = np.empty(out.shape, wide_dtype(out.dtype))
            try:
                compute(out, arrays, total)
            except FloatingPointError:
                with np.errstate(over="ignore", invalid="ignore"):
                    _average_again(compute, out, arrays, weights, total)
            for copy in copies:
                copy[...] = out


def wide_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype in which numbers are added up: half precision in single."""
    return np.dtype(np.float32) if dtype == np.float16 else dtype


def _equally(out: np.ndarray, arrays: Sequence[np.ndarray], total: np.ndarray) -> None:
    """Set `out` to the average of arrays. `total` is memory for the sum, which may be `out`."""
    count, dtype = len(arrays), out.dtype
    if count == 1:
        if out is not arrays[0]:
            out[...] = arrays[0]
        return
    if dtype == np.float16 and total is out:
        total = np.empty(out.shape, np.float32)
    wide = total.dtype
    np.add(arrays[0], arrays[1], out=total, dtype=wide)
    for array in arrays[2:]:
        np.add(total, array, out=total)
    if wide.kind == "f" and not count & (count - 1):
        # By a power of two, a multiplication has the same bits and is faster.
        np.multiply(total, np.array(1 / count, wide), out=out)
    else:
        np.divide(total, np.array(count, wide), out=out)


def _weighted(
    weights: Sequence[float], out: np.ndarray, arrays: Sequence[np.ndarray], total: np.ndarray
) -> None:
    wide = total.dtype
    product = np.empty(total.shape, wide)
    total[...] = 0
    for array, weight in zip(arrays, weights):
        if weight:
            np.multiply(array, np.array(weight, wide), out=product, dtype=wide)
            np.add(total, product, out=total)
    np.divide(total, np.array(sum(weights), wide), out=out)


def _average_again(
    compute: Callable[..., None],
    out: np.ndarray,
    arrays: Sequence[np.ndarray],
    weights: Sequence[float] | None,
    total: np.ndarray,
) -> None:
    """Compute an average whose sum overflows at some places."""
    result = np.empty_like(out)
    compute(result, arrays, total)
    pairs = zip(arrays, weights or [1] * len(arrays))
    _restore(result, *zip(*[(array, weight) for array, weight in pairs if weight]))
    out[...] = result


def _restore(result: np.ndarray, arrays: Sequence[np.ndarray], weights: Sequence[float]) -> None:
    """Correct an average at the places at which it is not finite, although all operands are."""
    if result.dtype.kind == "c":
        for part in ("real", "imag"):
            _restore(getattr(result, part), [getattr(array, part) for array in arrays], weights)
        return
    lost = ~np.isfinite(result)
    for array in arrays:
        lost &= np.isfinite(array)
    if np.any(lost):
        result[lost] = _scaled_average([array[lost] for array in arrays], weights)


def _scaled_average(arrays: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    """Return the average of arrays of finite numbers of any size."""
    dtype, largest = arrays[0].dtype, max(weights)
    wide, shares = wide_dtype(dtype).type, [weight / largest for weight in weights]
    scale = power_of_two_below(0.5 / len(arrays))
    total = sum([
        np.multiply(array, wide(scale), dtype=wide) * wide(share)
        for array, share in zip(arrays, shares)
    ])  # fmt: skip
    limit = wide(np.finfo(dtype).max) * wide(scale)
    found: np.ndarray = _within(total / wide(sum(shares)), limit) / wide(scale)
    return found


class GrowingSum:
    """A sum of arrays of floating-point numbers to which arrays are added one by one.

    When it would overflow, it is divided by a power of two, and so are the arrays added later.

    Parameters
    ----------
    first : numpy.ndarray
        Its memory is used.
    """

    def __init__(self, first: np.ndarray) -> None:
        self.shape, self._sum, self._scale = first.shape, first.reshape(-1), 1.0

    def add(self, array: np.ndarray, factor: float) -> None:
        """Add the product of an array of the same shape and dtype, and a number."""
        flat = array.reshape(-1)
        with raising_overflow():
            for piece in pieces(0, flat.size, flat.itemsize, AVERAGED_BYTES):
                while not self._could_add(piece, flat[piece], factor * self._scale):
                    self._sum *= flat.dtype.type(_STEP)
                    self._scale *= _STEP

    def _could_add(self, piece: slice, terms: np.ndarray, factor: float) -> bool:
        try:
            if factor != 1:
                terms = terms * terms.dtype.type(factor)
            self._sum[piece] = self._sum[piece] + terms
        except FloatingPointError:
            return False
        return True

    def divided(self, divisor: float, dtype: Any) -> np.ndarray:
        """Return the quotient of the sum and a number of at least 1, in a dtype; the sum is lost."""
        quotient = self._sum
        if divisor != 1:
            quotient /= quotient.dtype.type(divisor)
        if self._scale != 1:
            parts = quotient.view(np.finfo(quotient.dtype).dtype)  # of complex numbers
            scale = parts.dtype.type(self._scale)
            finite = np.isfinite(parts)
            parts[finite] = _within(parts[finite], np.finfo(dtype).max * scale)
            parts /= scale
        return quotient.reshape(self.shape).astype(dtype, copy=False)


def _within(numbers: np.ndarray, limit: Any) -> np.ndarray:
    """Return averages within the limit, which rounding may have made larger."""
    return np.clip(numbers, -limit, limit)


# Operations

#: Modes that an output may have besides the reductions.
GATHER = "gather"


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

    def reduce(self, arrays: Sequence[np.ndarray], weights: Sequence[float] | None = None) -> np.ndarray:
        """Reduce a list of arrays of equal shape to a new array, in the order of the list.

        Parameters
        ----------
        arrays : list of numpy.ndarray
            At least one. They are not changed.
        weights : list of float, optional
            One per array, used by ``"avg"`` only. Arrays of weight zero are ignored.
        """
        if self.weighted:
            return average(arrays, weights)
        out = np.array(arrays[0])
        self._fold(out, arrays)
        return out

    def reduce_floats(self, values: Sequence[float], weights: Sequence[float]) -> float:
        """Like `reduce`, for Python floats, in double precision."""
        if self.weighted:
            return average_floats(values, weights)
        return sum(values) if self.combine is np.add else self.combine.reduce(values)

    def reduce_each(
        self,
        parts: Iterable[tuple[np.ndarray, Sequence[np.ndarray], Sequence[np.ndarray]]],
        weights: Sequence[float] | None = None,
    ) -> None:
        """Like `reduce`, for each ``(out, arrays, copies)``, into `out`, and the copies of it.

        `out` may be ``arrays[0]``, but no other item.
        """
        if self.weighted:
            average_each(parts, weights)
            return
        for out, arrays, copies in parts:
            self._fold(out, arrays)
            for copy in copies:
                copy[...] = out

    def reduce_in_pieces(
        self,
        out: np.ndarray,
        arrays: Sequence[np.ndarray],
        weights: Sequence[float] | None = None,
    ) -> np.ndarray:
        """Like `reduce_each`, for C-contiguous arrays larger than the cache, with identical bits."""
        if len(arrays) == 1 and out is arrays[0]:
            return out
        flat, flats = out.reshape(-1), [array.reshape(-1) for array in arrays]
        parts = [
            (flat[piece], [item[piece] for item in flats], ())
            for piece in self.pieces(0, out.size, out.itemsize)
        ]
        self.reduce_each(parts, weights)
        return out

    def pieces(self, start: int, stop: int, itemsize: int) -> list[slice]:
        """Split the items from `start` to `stop` into pieces that fit in the cache."""
        return pieces(start, stop, itemsize, AVERAGED_BYTES if self.weighted else PIECE_BYTES)

    def _fold(self, out: np.ndarray, arrays: Sequence[np.ndarray]) -> None:
        if len(arrays) == 1:
            if out is not arrays[0]:
                out[...] = arrays[0]
            return
        self.combine(arrays[0], arrays[1], out=out)
        for array in arrays[2:]:
            self.combine(out, array, out=out)


class Arithmetic:
    """Arithmetic on NumPy arrays. An engine may have its own arithmetic.

    Methods return their result, which may use the memory of their first argument.
    """

    def own(self, value: Any) -> Any:
        """Return a value of a compiled function as an array."""
        return np.asarray(value)

    def astype(self, array: Any, dtype: DTypeLike) -> Any:
        """Return `array` itself if it has this dtype, else a converted copy."""
        return array if array.dtype == dtype else array.astype(dtype)

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


class DeviceArithmetic(Arithmetic, ABC):
    """Arithmetic on the arrays of a device, and on NumPy arrays.

    Parameters
    ----------
    kind : type
        The class of the device's arrays.
    """

    def __init__(self, kind: type) -> None:
        self._kind = kind

    @abstractmethod
    def compute(self, function: np.ufunc, array: Any, other: Any) -> Any:
        """Return a function of an array of the device and another one, or a number."""

    @abstractmethod
    def join(self, arrays: Sequence[Any], axis: int) -> Any:
        """Concatenate arrays of the device."""

    def own(self, value: Any) -> Any:
        return value if isinstance(value, self._kind) else super().own(value)

    def multiply(self, array: Any, factor: float) -> Any:
        if isinstance(array, self._kind):
            return self.compute(np.multiply, array, factor)
        return super().multiply(array, factor)

    def divide(self, array: Any, divisor: float) -> Any:
        if isinstance(array, self._kind):
            return self.compute(np.divide, array, divisor)
        return super().divide(array, divisor)

    def combine(self, operation: Operation, array: Any, other: Any) -> Any:
        if isinstance(array, self._kind):
            return self.compute(operation.combine, array, other)
        return super().combine(operation, array, other)

    def concatenate(self, arrays: Sequence[Any], axis: int = 0) -> Any:
        if all(isinstance(array, self._kind) for array in arrays):
            return self.join(arrays, axis)
        return super().concatenate(arrays, axis)


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
    most : int
        The largest number of values that will be added.
    """

    def __init__(
        self,
        mode: str | None,
        arithmetic: Arithmetic = NUMPY,
        label: str = "an output",
        remedy: str = "'gather'",
        axis: int = 0,
        most: int = 1,
    ) -> None:
        self._mode, self._axis = mode, axis
        self._label, self._remedy = label, remedy
        self._operation = None if mode is None else OPERATIONS.get(mode)
        self._arithmetic = arithmetic
        self._value: Any = None
        self._weight: float = 0
        self._unit: float = 0
        self._parts: list[Any] = []
        self._count = self._nones = 0
        # Sums of arrays that are not in NumPy are scaled in any case, as nothing tells if they overflow.
        self._scale = power_of_two_below(1 / most)

    @property
    def is_empty(self) -> bool:
        """Whether no value was added."""
        return not self._count

    def add(self, value: Any, weight: float) -> None:
        """Add a value that was computed from `weight` rows, and may be scaled; None is no array.

        Its memory may be reused afterwards: some operations of PyTensor write where they did before.
        """
        self._count += 1
        if self._mode is None:
            self._value = value
        elif value is None:
            self._nones += 1
        elif self._mode == GATHER:
            self._parts.append(self._arithmetic.own(value).copy())
        else:
            self._fold(self._operation, self._arithmetic.own(value), weight)

    def _fold(self, operation: Any, value: Any, weight: float) -> None:
        if operation.weighted:
            # Relative to the first weight, so that slices of equal length need no multiplication.
            self._unit = self._unit or weight
            self._weight += weight
            value = self._arithmetic.astype(value, np.promote_types(value.dtype, np.float32))
        if self._value is not None and self._value.shape != value.shape:
            raise ValueError(
                f"operation {operation.name!r} of {self._label}: the slices' values have unequal "
                f"shapes, {self._value.shape} and {value.shape}; use {self._remedy}"
            )
        if operation.weighted:
            self._add_up(operation, value, weight / self._unit)
        elif self._value is None:
            self._value = value.copy()
        else:
            self._value = self._arithmetic.combine(operation, self._value, value)

    def _add_up(self, operation: Operation, value: Any, factor: float) -> None:
        if isinstance(self._value, GrowingSum):
            self._value.add(value, factor)
        elif isinstance(value, np.ndarray):
            self._value = GrowingSum(value.copy())
        elif self._value is None:
            self._value = self._arithmetic.multiply(value.copy(), self._scale)
        else:
            value = self._arithmetic.multiply(value, factor * self._scale)
            self._value = self._arithmetic.combine(operation, self._value, value)

    def result(self, dtype: DTypeLike) -> Any:
        """Return the reduction of all values; None if all are None.

        Raises
        ------
        ValueError
            If only some of them are None.
        """
        if self._nones == self._count or self._mode is None:
            return self._value
        if self._nones:
            raise ValueError(
                f"{self._label} is None in {self._nones} of {self._count} slices: an operation of its "
                f"graph returns no array for some rows"
            )
        if self._mode == GATHER:
            return self._arithmetic.concatenate(self._parts, self._axis)
        quotient = self._weight / self._unit if self._unit else 1
        if isinstance(self._value, GrowingSum):
            return self._value.divided(quotient, dtype)
        if self._unit and quotient * self._scale != 1:
            self._value = self._arithmetic.divide(self._value, quotient * self._scale)
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
    return OPERATIONS[check_choice(op, label, OPERATIONS)]


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
