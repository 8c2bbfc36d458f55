"""Wire formats: the formats in which arrays are sent between machines."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any, Sequence, Union

import numpy as np

from synkhronos._checks import check_int, check_number
from synkhronos._text import listed
from synkhronos.comms.coded import CODES, CodedWire
from synkhronos.comms.low_rank import LowRankWire, check_shapes
from synkhronos.comms.sparse import SparseWire
from synkhronos.comms.wires import Wire


@dataclass(frozen=True)
class PowerSGD:
    """A wire format that sends a matrix as the product of two narrow matrices [1]_.

    The error of the product is kept on each machine and added the next time (error feedback). Each
    right factor is the starting point of the next. Vectors, and matrices that are too small to
    benefit, are sent as they are.

    Parameters
    ----------
    rank : int, default: 4
        The number of columns of the narrow matrices.
    shapes : list of tuple of int, optional
        For a vector that holds several arrays, one after the other: their shapes. The gradient vectors
        of `synkhronos.extensions` know their shapes. An array of more than two dimensions counts as a
        matrix with its first axis as rows.
    exact_steps : int, default: 0
        How often an array is sent as it is before the first product. Gradients change fastest in the
        first steps of training.
    min_saving : float, default: 1
        A matrix is sent as a product only if this takes less than ``1 / min_saving`` of its numbers.
        With the default, this is every matrix for which the product has fewer numbers. A larger value
        keeps small matrices exact, which costs few bytes in a network whose large matrices have most of
        the numbers.

    References
    ----------
    .. [1] Vogels, T., Karimireddy, S. P., & Jaggi, M. (2019): PowerSGD: Practical low-rank gradient
           compression for distributed optimization. arXiv:1905.13727.

    Examples
    --------
    >>> import synkhronos as synk
    >>> synk.PowerSGD(2)
    PowerSGD(rank=2)
    >>> synk.PowerSGD(8, exact_steps=100)
    PowerSGD(rank=8, exact_steps=100)

    A product of rank 4 has a 26th of the numbers of a matrix of shape (576, 128). For (64, 288) it has a
    13th, so this format sends such a matrix as it is:

    >>> synk.PowerSGD(4, min_saving=20)
    PowerSGD(rank=4, min_saving=20.0)
    """

    rank: int = 4
    shapes: Sequence[Sequence[int]] | None = None
    exact_steps: int = 0
    min_saving: float = 1

    def __post_init__(self) -> None:
        check_int(self.rank, "PowerSGD: rank", 1)
        check_int(self.exact_steps, "PowerSGD: exact_steps", 0)
        min_saving = check_number(self.min_saving, "PowerSGD: min_saving")
        if not 1 <= min_saving < math.inf:
            raise ValueError(
                f"PowerSGD: min_saving: expected a finite number, at least 1, got {self.min_saving!r}"
            )
        object.__setattr__(self, "min_saving", min_saving)  # leaders compare the repr
        if self.shapes is not None:
            try:
                shapes = tuple(tuple(operator.index(item) for item in shape) for shape in self.shapes)
            except TypeError:
                raise TypeError(
                    f"PowerSGD: shapes: expected a list of shapes, such as [(20, 10), (10,)], got "
                    f"{self.shapes!r}"
                ) from None
            object.__setattr__(self, "shapes", shapes)

    def __repr__(self) -> str:
        shapes = "" if self.shapes is None else f", shapes={list(self.shapes)}"
        exact_steps = f", exact_steps={self.exact_steps}" if self.exact_steps else ""
        min_saving = f", min_saving={self.min_saving}" if self.min_saving != 1 else ""
        return f"PowerSGD(rank={self.rank}{shapes}{exact_steps}{min_saving})"


@dataclass(frozen=True)
class TopK:
    """A wire format that sends only the numbers with the largest absolute values.

    The other numbers are kept on each machine and added the next time (error feedback), until they are
    among the largest [1]_.

    Parameters
    ----------
    fraction : float, default: 0.01
        The share of the numbers of an array that each machine sends, above 0 and at most 1.

    References
    ----------
    .. [1] Stich, S. U., Cordonnier, J.-B., & Jaggi, M. (2018): Sparsified SGD with memory.
           arXiv:1809.07599.

    Examples
    --------
    >>> import synkhronos as synk
    >>> synk.TopK(0.001)
    TopK(fraction=0.001)
    """

    fraction: float = 0.01

    def __post_init__(self) -> None:
        check_number(self.fraction, "TopK: fraction")
        if not 0 < self.fraction <= 1:
            raise ValueError(
                f"TopK: fraction: expected a number above 0 and at most 1, got {self.fraction!r}"
            )


#: The values of the argument ``wire``
Format = Union[str, PowerSGD, TopK]

_OPS = ("avg", "sum")


def check_format(wire: Any, op: str) -> Format | None:
    """Return a wire format, or raise if `wire` is not one or cannot be used for an operation."""
    if wire is None:
        return None
    if not isinstance(wire, (PowerSGD, TopK)) and not (isinstance(wire, str) and wire in CODES):
        error = ValueError if isinstance(wire, str) else TypeError
        raise error(
            f"wire: expected one of {[*CODES]}, synkhronos.PowerSGD(rank), synkhronos.TopK(fraction) or "
            f"None, got {wire!r}"
        )
    if op not in _OPS:
        raise ValueError(
            f"wire: {wire!r} is for the operations {' and '.join(map(repr, _OPS))}, got {op!r}; leave "
            f"out wire="
        )
    return wire


def check_arrays(
    wire: Format,
    names: Sequence[Any],
    arrays: Sequence[Any],
    pieces: Sequence[Sequence[Sequence[int]] | None],
) -> None:
    """Raise if arrays cannot be sent in a format.

    Parameters
    ----------
    wire : Format
        The format.
    names : list
        The names of the arrays, for messages.
    arrays : list of arrays
        The arrays to send.
    pieces : list of (list of tuple of int, or None)
        For each array the shapes of its parts, if it is a vector that is known to hold several arrays.
    """
    for name, array in zip(names, arrays):
        if np.dtype(array.dtype) != np.float32:
            raise TypeError(
                f"wire: {wire!r} is for arrays of float32, got {name} of dtype {array.dtype}; compute "
                f"in float32 (THEANO_FLAGS=floatX=float32), or leave out wire="
            )
    if not isinstance(wire, PowerSGD):
        return
    if wire.shapes is not None:
        for array in arrays:
            check_shapes(wire.shapes, math.prod(array.shape))
    elif all(len(array.shape) < 2 and piece is None for array, piece in zip(arrays, pieces)):
        raise ValueError(
            f"wire: {wire!r} is for matrices, got vectors only: {listed(names)}; if they "
            f"hold the elements of several arrays, give the shapes of these: PowerSGD({wire.rank}, "
            f"shapes=[...])"
        )


def to_json(wire: Format) -> Any:
    """Return a value for JSON, from which `from_json` makes the format."""
    if isinstance(wire, PowerSGD):
        return ["PowerSGD", int(wire.rank), wire.shapes, int(wire.exact_steps), wire.min_saving]
    return ["TopK", float(wire.fraction)] if isinstance(wire, TopK) else wire


def from_json(value: Any) -> Format:
    """Return the format that `to_json` was given. The value is not trusted."""
    if isinstance(value, list):
        name, *arguments = value
        value = {"PowerSGD": PowerSGD, "TopK": TopK}[name](*arguments)
    wire = check_format(value, "sum")
    if wire is None:
        raise ValueError("no wire format")
    return wire


def make_wire(wire: Format, pieces: Sequence[Sequence[int]]) -> Wire:
    """Return a new `Wire` for an array that holds arrays of the shapes `pieces`."""
    if isinstance(wire, PowerSGD):
        return LowRankWire(wire, pieces if wire.shapes is None else wire.shapes)
    return SparseWire(wire) if isinstance(wire, TopK) else CodedWire(wire)
