"""Where each of several arrays is in one long vector."""

from __future__ import annotations

from typing import Iterator, Sequence

import numpy

from synkhronos.engines import names
from synkhronos.engines.names import SharedVariable, Variable
from synkhronos.engines.names import tensor as tt


class Layout:
    """Arrays of fixed shapes, flattened and joined in their order.

    Parameters
    ----------
    shapes : list of tuple of int
    broadcastable : list of tuple of bool
        The broadcast pattern of each array.

    Attributes
    ----------
    size : int
        The length of the vector.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], broadcastable: Sequence[tuple[bool, ...]]
    ) -> None:
        self._shapes, self._broadcastable = shapes, broadcastable
        sizes = [int(numpy.prod(shape, dtype=numpy.int64)) for shape in shapes]
        self._ends = [int(end) for end in numpy.cumsum(sizes)]
        self.size = self._ends[-1]

    def new_vector(self, dtype: str, name: str) -> SharedVariable:
        """Return a shared vector of zeros for the arrays. It knows their shapes."""
        vector = names.shared(numpy.zeros(self.size, dtype), name, (False,))
        vector.tag.pieces = tuple(tuple(map(int, shape)) for shape in self._shapes)
        return vector

    def pieces(self, vector: Variable) -> Iterator[Variable]:
        """Yield each array's part of `vector`, in the array's shape."""
        start = 0
        for shape, broadcastable, end in zip(self._shapes, self._broadcastable, self._ends):
            piece = tt.reshape(vector[start:end], shape, ndim=len(shape))
            yield names.with_pattern(piece, broadcastable)
            start = end

    def filled(self, vector: Variable, expressions: Sequence[Variable]) -> Variable:
        """Return `vector` with the values of `expressions` in it, written in place."""
        start, expressions = 0, list(expressions)
        for expression, end in zip(expressions, self._ends):
            # A concatenation would create a new array each time, which would have to be copied to
            # shared memory.
            vector = tt.set_subtensor(vector[start:end], expression.flatten())
            start = end
        vector.tag.filled_with = expressions
        return vector
