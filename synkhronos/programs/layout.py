"""Where the items of several arrays are in the stripes of a center.

The items of all arrays with one dtype follow each other, in C order. They are divided into stripes, and
stripes into pieces. A piece is within one array, and short enough that the operands of an exchange stay
in the cache.
"""

from __future__ import annotations

import json
import math
from typing import NamedTuple, Sequence

import numpy as np

_STRIPE_BYTES = 1 << 20
_PIECE_BYTES = 1 << 18
_ALIGNMENT = 64


class Piece(NamedTuple):
    """Items of an array that are in one stripe."""

    array: int
    items: slice  # of the array
    places: slice  # of the stripe's items
    flat: slice  # among the items of all arrays with this dtype


class StripeContents(NamedTuple):
    """The contents of a stripe."""

    dtype: np.dtype
    pieces: list[Piece]


class Layout:
    """The division of arrays into stripes.

    Parameters
    ----------
    shapes : list of tuple of int
        The shapes of the arrays.
    dtypes : list of numpy.dtype
        Their dtypes.

    Attributes
    ----------
    stripes : list of StripeContents
        The contents of each stripe.
    nbytes : int
        The size of the largest stripe.
    totals, largest : dict
        For each dtype, the number of all items, and the number of items in the largest piece.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype]) -> None:
        self.shapes, self.dtypes = list(shapes), list(dtypes)
        self.stripes: list[StripeContents] = []
        self.totals: dict[np.dtype, int] = {}
        self.largest: dict[np.dtype, int] = {}
        self.nbytes = _ALIGNMENT
        for dtype in dict.fromkeys(dtypes):
            items, stop = _STRIPE_BYTES // dtype.itemsize, 0
            for number, shape in enumerate(shapes):
                if dtypes[number] == dtype:
                    start, stop = stop, stop + math.prod(shape)
                    self._cut(number, dtype, items, start, stop)
            self.totals[dtype] = stop
            self.largest[dtype] = min(stop, _PIECE_BYTES // dtype.itemsize)
            nbytes = min(stop, items) * dtype.itemsize
            self.nbytes = max(self.nbytes, -(-nbytes // _ALIGNMENT) * _ALIGNMENT)

    def _cut(self, number: int, dtype: np.dtype, items: int, start: int, stop: int) -> None:
        """Append the pieces of an array, whose items are items `start` to `stop` of its dtype."""
        first = start
        while start < stop:
            low = start % items
            if low == 0:
                self.stripes.append(StripeContents(dtype, []))
            end = min(stop, start - low + items, start + _PIECE_BYTES // dtype.itemsize)
            self.stripes[-1].pieces.append(
                Piece(
                    array=number,
                    items=slice(start - first, end - first),
                    places=slice(low, low + end - start),
                    flat=slice(start, end),
                )
            )
            start = end

    def encode(self) -> bytes:
        """Return the shapes and dtypes as bytes."""
        pairs = [[dtype.str, list(shape)] for shape, dtype in zip(self.shapes, self.dtypes)]
        return json.dumps(pairs).encode()

    def check(self, encoded: bytes, what: str, labels: Sequence[str]) -> None:
        """Raise if `encoded` describes other arrays; `what` and `labels` name them in the message."""
        there = [(tuple(shape), np.dtype(dtype)) for dtype, shape in json.loads(encoded)]
        if len(there) != len(labels):
            raise ValueError(
                f"{what} has {len(there)} variables, this rank asked for one with {len(labels)}; give "
                f"the same ones on every rank, or another name"
            )
        for label, ours, others in zip(labels, zip(self.shapes, self.dtypes), there):
            if ours != others:
                raise ValueError(
                    f"{what}: {label} has the shape {ours[0]} and the dtype {ours[1]}, and the center "
                    f"has {others[0]} and {others[1]} in its place; give the same variables in the same "
                    f"order on every rank, or another name"
                )
