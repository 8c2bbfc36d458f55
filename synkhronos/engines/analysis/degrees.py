"""The degrees of elementwise operations; see `rows`."""

from typing import FrozenSet, NamedTuple, Optional

from synkhronos.engines.names import Constant, Reciprocal, scalar

_MOST = 4  # a value with more degrees counts as unknown


class Rows(NamedTuple):
    """How a value depends on the number of rows.

    Attributes
    ----------
    axis : int or None
        The axis of rows.
    degrees : frozenset of int or float
        The degrees of its terms; empty if it is zero.
    """

    axis: Optional[int]
    degrees: FrozenSet

    def times(self, other):
        """Return the degrees of the product with another value."""
        return frozenset(one + two for one in self.degrees for two in other.degrees)


ZERO, FIXED, LENGTH = (Rows(None, frozenset(degrees)) for degrees in ((), (0,), (1,)))

_SAME = (scalar.Neg, scalar.Cast, scalar.Identity)
_SUMS = (scalar.Add, scalar.Sub)
_CHOICES = (scalar.Maximum, scalar.Minimum)


def elementwise(op, values, inputs, broadcastable):
    """Return the `Rows` of an elementwise operation, None if they are not known.

    Parameters
    ----------
    op : scalar operation
    values : list of Rows or None
    inputs : list of variables
    broadcastable : list of tuple of bool
        The broadcast pattern of each input.
    """
    if None in values:
        return None
    axes = {value.axis for value in values} - {None}
    if len(axes) > 1:
        return None
    axis = axes.pop() if axes else None
    if axis is not None:
        for value, pattern in zip(values, broadcastable):
            if value.axis is None and not pattern[axis]:
                return None
    degrees = _degrees(op, values, inputs)
    return None if degrees is None or len(degrees) > _MOST else Rows(axis, frozenset(degrees))


def _degrees(op, values, inputs):
    degrees = [value.degrees for value in values]
    if isinstance(op, _SAME):
        return degrees[0]
    if isinstance(op, scalar.Second):
        return degrees[1]
    if isinstance(op, _SUMS):
        return frozenset().union(*degrees)
    if isinstance(op, scalar.Switch):
        return degrees[1] | degrees[2]
    if isinstance(op, scalar.Mul):
        product = FIXED
        for value in values:
            product = Rows(None, product.times(value))
        return product.degrees
    if isinstance(op, scalar.Sqr):
        return values[0].times(values[0])
    if all(one <= {0} for one in degrees):
        return FIXED.degrees
    return _of_single_degrees(op, degrees, inputs)


def _of_single_degrees(op, degrees, inputs):
    """Return the degree of an operation that is known only for operands with one term each."""
    if isinstance(op, scalar.TrueDiv) and len(degrees[1]) == 1:
        (divisor,) = degrees[1]
        return {one - divisor for one in degrees[0]}
    if any(len(one) != 1 for one in degrees):
        return None
    (first,), *others = degrees
    if isinstance(op, scalar.Abs):
        return {first}
    if isinstance(op, Reciprocal):
        return {-first}
    if isinstance(op, scalar.Sqrt):
        return {first / 2}
    if isinstance(op, _CHOICES) and others[0] == {first}:
        return {first}
    if isinstance(op, scalar.LogicalComparison) and others[0] == {first}:
        return FIXED.degrees
    if isinstance(op, scalar.Pow) and isinstance(inputs[1], Constant):
        exponent = inputs[1].data
        return {first * float(exponent.reshape(-1)[0])} if exponent.size == 1 else None
    return None
