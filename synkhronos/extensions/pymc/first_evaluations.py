"""The first evaluations on all ranks, compared with the same on one process."""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np

import synkhronos as synk
from synkhronos._typing import AnyArray
from synkhronos.arithmetic.comparison import tolerance
from synkhronos.extensions.pymc.independence import least_difference
from synkhronos.extensions.pymc.serial import PlainSum, SerialSum

_COMPARED = 3  # evaluations that are finite
_TRIED = 20  # and those that are not
_LARGE = 1 << 30  # bytes of rows; of more, one evaluation is compared


class FirstEvaluations:
    """Compares the first evaluations with a model's own, or with the sum of parts of the rows.

    Parameters
    ----------
    serial : SerialSum
        The sum on one process.
    plain : PlainSum or None
        What the model computes without ranks.
    """

    def __init__(self, serial: SerialSum, plain: PlainSum | None) -> None:
        self._serial, self._plain = serial, plain
        self._left = _COMPARED if serial.n_bytes <= _LARGE else 1
        self._tried = _TRIED

    @property
    def are_over(self) -> bool:
        """Whether no more evaluations are compared."""
        return not self._left

    def compare(self, values: Sequence[Any], result: AnyArray) -> None:
        """Compare a result, with or without a gradient, and raise MismatchError if it differs.

        Parameters
        ----------
        values : list of array
            The values of the parameters.
        result : array
            The sum over all rows, or the vector that also has its gradient.
        """
        result = np.atleast_1d(result)
        serial = (self._plain or self._serial).of_all(values)[: len(result)]
        rtol = tolerance(serial.dtype, self._serial.dtypes)
        finite = np.isfinite(serial)
        with np.errstate(invalid="ignore"):
            apart = np.where(finite, abs(result - serial), 0)
        wrong = (finite != np.isfinite(result)) | ~(apart <= rtol * np.where(finite, abs(serial), 0))
        if wrong.any():
            self._complain(values, result, serial, apart, rtol)
        if finite[0]:
            self._left -= 1
        else:
            self._tried -= 1
            self._left *= bool(self._tried)
        if self.are_over:
            self._plain = None  # it holds the model's data

    def _complain(
        self, values: Sequence[Any], result: AnyArray, serial: AnyArray, apart: AnyArray, rtol: float
    ) -> None:
        """Raise unless the terms nearly cancel each other, so that rounding explains the difference."""
        finite = np.isfinite(serial)
        scale = np.maximum(abs(serial), self._serial.magnitudes(values)[: len(serial)])
        scale[~np.isfinite(scale)] = 0
        allowed = rtol * scale + least_difference(scale)
        wrong = (finite != np.isfinite(result)) | ~(apart <= allowed)
        if not wrong.any():
            return
        entry = int(np.argmax(wrong))
        what, name = self._serial.label(entry, values), self._serial.name
        other = "the model without ranks" if self._plain else "one process"
        raise synk.MismatchError(
            f"{name}: {what}, computed by {synk.size()} rank(s), differs from that of {other}: "
            f"{result[entry]:.10g} and {serial[entry]:.10g}. An array of the model that is as long as "
            f"the observed values may belong to something else: name the arrays with rows by `data`",
            [what],
        )
