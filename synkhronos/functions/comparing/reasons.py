"""The usual reasons why a result differs from the serial result, found by trying alternatives."""

from __future__ import annotations

from typing import Callable, Collection, NamedTuple, Sequence

import numpy as np

from synkhronos.arithmetic.operations import GATHER, OPERATIONS
from synkhronos.engines.analysis.difference_causes import (
    ACROSS,
    CLIPPED,
    CONSTANT,
    DIFFERENCE_CAUSES,
    FIXED_BATCH,
    NONLINEAR,
    QUOTIENT,
    RECURRENT,
    SPACED,
    STATISTICS,
)
from synkhronos.engines.base import PARTLY_SUM

_Allows = Callable[[np.ndarray, np.ndarray], bool]


class Reason(NamedTuple):
    """Why a result differs, and what to do; or that no reduction would make it right."""

    text: str
    is_found: bool = True


#: The causes in a graph
_OF_GRAPHS = {
    CONSTANT: "a sum over the rows that is divided by a constant, such as a batch size: divide it by "
    "the number of rows, x.shape[0], or take the mean",
    QUOTIENT: "a quotient of two sums over the rows, such as a mean of what a mask selects: return both "
    "sums and divide them, or combine each in the graph with synk.ops.all_reduce(total, 'sum')",
    STATISTICS: "statistics over the batch, as in batch normalization, which each rank computes of its "
    "own rows: combine them in the graph, see synkhronos.extensions.batch_norm",
    NONLINEAR: "a nonlinear function of a value of all rows, such as the root of a mean: combine the "
    "value in the graph first, with synk.ops.all_reduce, or compute the function after the call",
    ACROSS: "a value that depends on several rows, or on the places of rows, such as the largest of "
    "the rows, a part of them, their order, or all pairs of them: combine the rows in the graph first, "
    "with synk.ops.all_gather, or gather them and compute it after the call",
    SPACED: "rows at equal distances, such as x[::2], counted from the first row of each rank: give as "
    "many rows that the share of each rank is a multiple of the distance",
    CLIPPED: "bounds for values inside the gradient (grad_clip), which are as large for a mean over the "
    "rows of a rank: bound the gradient after it was averaged, or give loss_op='sum'",
    RECURRENT: "a loop along the axis that is divided among the ranks, such as theano.reduce, which "
    "begins anew on each: if the rows are on another axis, say so with synk.In(x, axis=1)",
    FIXED_BATCH: "a batch size that is fixed in the graph, such as that of input_shape or reshape: use "
    "None, -1 or x.shape[0] for it",
}


def of_graph(suspects: Collection[str]) -> str:
    """Return the causes to look for if no reduction gives a serial value.

    Parameters
    ----------
    suspects : collection of str
        The causes in the graph, as of `synkhronos.engines.analysis.difference_causes.DIFFERENCE_CAUSES`.
    """
    found = "; ".join(_OF_GRAPHS[item] for item in DIFFERENCE_CAUSES if item in suspects or not suspects)
    return f"The graph has {found}." if suspects else f"Usual reasons: {found}."


def of_output(
    mode: str,
    by_rank: Sequence[np.ndarray] | None,
    weights: Sequence[int],
    serial: np.ndarray,
    allows: _Allows,
    extent: str | None = None,
) -> Reason:
    """Return why an output differs, and what to do.

    Parameters
    ----------
    mode : str
        The operation by which it was reduced.
    by_rank : list of numpy.ndarray or None
        The values of the ranks that had rows.
    weights : list of int
        The number of rows of each of these ranks.
    serial : numpy.ndarray
        The serial value.
    allows : callable
        ``allows(value, serial)`` tells whether a value is close enough to the serial value.
    extent : str or None
        How it depends on the number of rows, as of `Analysis`.
    """
    if extent == PARTLY_SUM:
        return Reason(
            "it contains a sum over the rows, and terms that do not depend on their number: divide the "
            "sum by the number of rows, or make the terms separate outputs"
        )
    for op in ("sum", GATHER, "avg", "max", "min", "prod"):
        if by_rank is None or op == mode:
            continue
        if _equals(combined(op, by_rank, weights), serial, allows):
            what = "the concatenation" if op == GATHER else f"the {op}"
            return Reason(
                f"its op is {mode!r}, but {what} of the ranks' values equals the serial value: give it "
                f"as (output, {op!r})"
            )
    text = f"its op is {mode!r}, but no op gives the serial value"
    if by_rank is not None and serial.dtype.kind in "fiu":
        exact = combined(mode, [np.asarray(value, np.float64) for value in by_rank], weights)
        if (
            exact is not None
            and exact.shape == serial.shape
            and _is_inexact(serial, exact, sum(weights))
        ):
            return Reason(
                f"{text}. The serial value may be the wrong one: {serial.dtype} is too narrow for a sum "
                f"of this many rows, or of this size; compare with a graph in float64 or int64"
            )
    return Reason(text, False)


def _is_inexact(serial: np.ndarray, exact: np.ndarray, n_rows: int) -> bool:
    """Whether a serial sum may have lost this much, as its dtype is narrow.

    The gradient of indexing adds rows one by one. Numba computes products of integers in floating point.
    """
    if serial.dtype.kind == "f":
        lost = np.abs(exact - serial)
        return bool((lost <= np.abs(exact) * n_rows * np.finfo(serial.dtype).eps / 2).all())
    digits = 53 if serial.dtype.itemsize == 8 else 24
    return bool(np.abs(exact).max(initial=0) > min(np.iinfo(serial.dtype).max, 2.0**digits))


def of_reduced(value: np.ndarray, serial: np.ndarray, size: int, allows: _Allows) -> Reason:
    """Return why a value that a step has reduced differs, and what to do."""
    same_shape = value.shape == serial.shape
    if same_shape and allows(np.multiply(value, size, dtype=value.dtype), serial):
        return Reason(
            "the serial value is the sum of the ranks' values, not their average: the loss is a sum "
            "over the rows, perhaps divided by a number; make it a mean, or give loss_op='sum'"
        )
    if same_shape and allows(np.divide(value, size).astype(value.dtype), serial):
        return Reason(
            "the serial value is the average of the ranks' values, not their sum: the loss is a mean "
            "over the rows; leave out loss_op='sum'"
        )
    return Reason("no reduction of the ranks' values gives the serial one", False)


def of_update(
    values: Sequence[np.ndarray],
    weights: Sequence[int],
    serial: np.ndarray,
    allows: _Allows,
) -> Reason:
    """Return why the new values of a shared variable differ, and what to do.

    Parameters
    ----------
    values : list of numpy.ndarray
        The new value on each rank.
    weights : list of int
        The number of rows of each rank.
    serial, allows
        As in `of_output`.
    """
    why = "each rank updates it from its own rows"
    for op, call in (
        ("avg", "synk.all_reduce(variable, weights=function)"),
        ("sum", "synk.all_reduce(variable, 'sum')"),
    ):
        if _equals(combined(op, values, weights), serial, allows):
            return Reason(
                f"{why}; their {op} equals the serial value: call {call} after each call, or build a "
                f"training step with synkhronos.extensions.train.make_train_function()"
            )
    return Reason(
        f"{why}, and neither their average nor their sum equals the serial value. A training step has "
        f"to average the gradients, not the parameters: build it with "
        f"synkhronos.extensions.train.parallel_function() or make_train_function(), or call "
        f"synk.all_reduce() on the gradients"
    )


def combined(
    op: str, values: Sequence[np.ndarray], weights: Sequence[int], axis: int = 0
) -> np.ndarray | None:
    """Return the reduction or concatenation of values; None if it is not possible."""
    shapes = {value.shape for value in values}
    if op == GATHER:
        if values[0].ndim <= axis or len({shape[:axis] + shape[axis + 1 :] for shape in shapes}) > 1:
            return None
        return np.concatenate(values, axis)
    if len(shapes) > 1 or not OPERATIONS[op].is_defined_for(values[0].dtype):
        return None
    return OPERATIONS[op].reduce(values, weights)


def _equals(value: np.ndarray | None, serial: np.ndarray, allows: _Allows) -> bool:
    return value is not None and value.shape == serial.shape and allows(value, serial)
