"""Reductions in pairs of ranks, whose bits do not depend on the algorithm of an all-reduce.

The ranks form a binary tree. If their number is not a power of two, the first ranks are folded: ranks 0
and 1 form a pair, then ranks 2 and 3, until the pairs and the other ranks, together the *core*, are a
power of two. Then neighbours in the core are combined, then neighbouring pairs of these, and so on. An
algorithm may combine all arrays on one rank, or let ranks exchange partial results: if it keeps this
order, and the operand of the lower ranks is the first, the bits of the result are the same.

A sum of the operands of an average is scaled, so that it cannot overflow: each operand is multiplied by
its weight times a power of two, and the sum is divided in the end. A multiplication by a power of two
has no rounding error, except for numbers that become subnormal.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Sequence

import numpy as np

from synkhronos.arithmetic.operations import Operation, raising_overflow, scaled, wide_dtype


class Operand(NamedTuple):
    """An array of a rank, or the combination of the arrays of neighbours.

    Attributes
    ----------
    array : numpy.ndarray
        A flat array.
    rank : int or None
        The rank, if the array is this rank's array as it is; None for a combination.
    """

    array: np.ndarray
    rank: int | None = None


#: None if the arrays of all these ranks are ignored
MaybeOperand = Optional[Operand]


class Core(NamedTuple):
    """The places of the core, for a number of ranks.

    Attributes
    ----------
    size : int
        The number of places, a power of two.
    pairs : int
        The number of pairs that are folded; they have the first places.
    """

    size: int
    pairs: int

    def ranks(self, place: int) -> range:
        """Return the rank or the two ranks at a place."""
        first = place + min(place, self.pairs)
        return range(first, first + 1 + (place < self.pairs))


def core_of(size: int) -> Core:
    """Return the core of `size` ranks."""
    power = 1 << (size.bit_length() - 1)
    return Core(power, size - power)


class PairwiseReduction:
    """The arithmetic of a reduction in pairs.

    Parameters
    ----------
    operation : Operation
        The operation.
    weights : list of float
        The weight of each rank. In an average, arrays of weight zero are ignored.
    """

    def __init__(self, operation: Operation, weights: Sequence[float]) -> None:
        self.operation, self.weights, self.size = operation, weights, len(weights)
        self.active = [bool(weight) or not operation.weighted for weight in weights]
        self.core = core_of(self.size)
        self._factors, self._divisor = [1.0] * self.size, 1.0
        if operation.weighted and self.size > 2:
            active = [weight for weight in weights if weight]
            factors, divisor = scaled(active)
            # The sum of the factors is at most 1/2, so rounding cannot make the sum overflow either.
            halves = iter([factor / 2 for factor in factors])
            self._factors = [next(halves) if weight else 0.0 for weight in weights]
            self._divisor = divisor / 2
        self._memory = [np.empty(0, np.uint8) for _ in range(2)]

    def dtype(self, dtype: np.dtype) -> np.dtype:
        """Return the dtype of combinations of arrays of a dtype."""
        return wide_dtype(dtype) if self.operation.weighted else dtype

    def combine(self, low: MaybeOperand, high: MaybeOperand, out: np.ndarray) -> bool:
        """Set `out`, which may be one of the arrays, to the combination of two operands.

        Parameters
        ----------
        low, high : Operand or None
            `low` is of the lower ranks.
        out : numpy.ndarray
            Memory of the dtype of combinations.

        Returns
        -------
        bool
            Whether there is a combination: False if both operands are None.
        """
        if low is not None and high is not None:
            arrays = [self._term(item, out, turn) for turn, item in enumerate((low, high))]
            self.operation.combine(*arrays, out=out)
            return True
        only = high if low is None else low
        if only is None:
            return False
        term = self._term(only, out, 0)
        if term is not out:
            out[...] = term
        return True

    def _term(self, operand: Operand, out: np.ndarray, turn: int) -> np.ndarray:
        """Return an operand as part of a combination: multiplied by its factor, if it is an array."""
        array, rank = operand
        if rank is None or not self.operation.weighted:
            return array
        term = self._scratch(turn, out)
        parts = _parts(term)
        factor = parts.dtype.type(self._factors[rank])
        np.multiply(_parts(array), factor, out=parts, dtype=parts.dtype)
        return term

    def _scratch(self, turn: int, like: np.ndarray) -> np.ndarray:
        """Return memory for an array, which is used again."""
        if self._memory[turn].size < like.nbytes:
            self._memory[turn] = np.empty(like.nbytes, np.uint8)
        return self._memory[turn][: like.nbytes].view(like.dtype)

    def finish(self, total: np.ndarray, out: np.ndarray) -> None:
        """Set `out`, which may be `total`, to the result, given the combination of all arrays."""
        if not self.operation.weighted:
            if out is not total:
                out[...] = total
            return
        parts, result = _parts(total), _parts(out)
        divisor = parts.dtype.type(self._divisor)
        with raising_overflow():
            for piece in self.operation.pieces(0, parts.size, parts.itemsize):
                quotient = self._scratch(0, parts[piece])
                try:
                    np.divide(parts[piece], divisor, out=quotient)
                except FloatingPointError:
                    quotient = _finite_quotient(parts[piece], divisor, result.dtype)
                result[piece] = quotient

    def reduce(self, out: np.ndarray, arrays: Sequence[np.ndarray | None]) -> None:
        """Reduce flat arrays, by rank, into `out`, which may be one of them.

        Arrays that are ignored may be None. The others are not changed. There is only one order of one
        or two arrays, so `Operation.reduce_in_pieces` reduces them.
        """
        if self.size <= 2:
            used = [(a, w) for a, w, is_active in zip(arrays, self.weights, self.active) if is_active]
            self.operation.reduce_in_pieces(out, *zip(*used))
            return
        width = self.dtype(out.dtype)
        for piece in self.operation.pieces(0, out.size, width.itemsize):
            parts = [None if array is None else array[piece] for array in arrays]
            self._reduce_piece(out[piece], parts, width)

    def _reduce_piece(
        self, out: np.ndarray, arrays: Sequence[np.ndarray | None], width: np.dtype
    ) -> None:
        stack: list[_Partial] = []
        for place in range(self.core.size):
            ranks = self.core.ranks(place)
            partial = self._own(arrays, ranks[0])
            if len(ranks) > 1:
                partial = self._merge(partial, self._own(arrays, ranks[1]), out.size, width)
            partial = partial._replace(places=1)
            while stack and stack[-1].places == partial.places:
                partial = self._merge(stack.pop(), partial, out.size, width)
            stack.append(partial)
        [(_, total, memory)] = stack
        if total is not None:
            memory = np.empty(out.size, width) if memory is None else memory
            self.combine(total, None, memory)
            self.finish(memory, out)

    def _own(self, arrays: Sequence[np.ndarray | None], rank: int) -> _Partial:
        array = arrays[rank] if self.active[rank] else None
        return _Partial(1, None if array is None else Operand(array, rank), None)

    def _merge(self, low: _Partial, high: _Partial, size: int, width: np.dtype) -> _Partial:
        """Combine two partial results, in the memory of either if they have any."""
        places = low.places + high.places
        if low.operand is None or high.operand is None:
            return (high if low.operand is None else low)._replace(places=places)
        memory = low.memory if low.memory is not None else high.memory
        if memory is None:
            memory = np.empty(size, width)
        self.combine(low.operand, high.operand, memory)
        return _Partial(places, Operand(memory), memory)


class _Partial(NamedTuple):
    """The combination of the arrays at some places, or the array at a single place."""

    places: int
    operand: MaybeOperand
    memory: np.ndarray | None


def _parts(array: np.ndarray) -> np.ndarray:
    """Return the real and imaginary parts of complex numbers as one array of floats."""
    return array.view(np.finfo(array.dtype).dtype) if array.dtype.kind == "c" else array


def _finite_quotient(total: np.ndarray, divisor: Any, dtype: np.dtype) -> np.ndarray:
    """Return ``total / divisor``, in which finite numbers are finite: only rounding made others."""
    limit = np.finfo(dtype).max
    with np.errstate(over="ignore"):
        quotient: np.ndarray = total / divisor
    finite = np.isfinite(total)
    quotient[finite] = np.clip(quotient[finite], -limit, limit)
    return quotient
