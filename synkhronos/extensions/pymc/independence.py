"""Whether a log-probability is a sum over rows that do not depend on each other: tried on some rows."""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np

from synkhronos._typing import AnyArray
from synkhronos.extensions.pymc.serial import SerialSum


def is_finite_sum(serial: SerialSum, values: Sequence[Any]) -> bool:
    """Return whether a log-probability is finite; raise if it, or its gradient, is no sum over the rows.

    The sums over two parts of the rows must add up to the sum over all: over the two halves, and over
    every other row. At most 1000 of the rows are tried, in this process.

    Parameters
    ----------
    serial : SerialSum
        The log-probability.
    values : list of array
        The values of the parameters.

    Returns
    -------
    bool
        Whether the point could be used: False if the log-probability is not finite there.

    Raises
    ------
    ValueError
        If it is finite, and it or a finite derivative is not a sum over the rows.
    """
    rows = serial.sample()
    half = len(rows[0]) // 2
    divisions = [(slice(half), slice(half, None)), (slice(None, None, 2), slice(1, None, 2))]
    try:
        whole = serial.of(rows, values)
        if not np.isfinite(whole[0]):
            return False
        divided = [
            [serial.of([one[part] for one in rows], values) for part in division]
            for division in (divisions if half else ())
        ]
    except (ValueError, IndexError, TypeError, AssertionError) as error:
        raise ValueError(
            f"{serial.name}: the log-probability cannot be computed for a part of the rows. Every array "
            f"of the data with an item for each row has to have the rows on axis 0, and of a parameter "
            f"each row has to select its item, as in theta[row]. With a part of the rows: "
            f"{str(error).splitlines()[0]}"
        ) from error
    for parts in divided:
        _check(serial, values, len(rows[0]), whole, parts)
    return True


def _check(
    serial: SerialSum, values: Sequence[Any], length: int, whole: AnyArray, parts: Sequence[AnyArray]
) -> None:
    kinds = {np.dtype(one).name for one in (whole.dtype, *serial.computed_with)}
    rtol = 1e-4 if "float32" in kinds else 1e3 * np.finfo(whole.dtype).eps ** 0.75  # rounded sums
    with np.errstate(invalid="ignore"):
        apart = abs(sum(parts) - whole)  # not a number, or infinite, if a part is not finite
        finite = np.isfinite(whole)
        wrong = finite & ~np.less_equal(apart, rtol * abs(whole))
    if wrong.any():  # terms of both signs may nearly cancel each other
        scale = np.maximum(abs(whole), serial.magnitudes(values))
        scale[~np.isfinite(scale)] = 0
        wrong = finite & ~np.less_equal(apart, rtol * scale + least_difference(scale))
    if not wrong.any():
        return
    entry = int(np.argmax(wrong))
    what = serial.label(entry, values)
    raise ValueError(
        f"{serial.name}: the log-probability is not a sum over the rows: of {length} rows "
        f"{what if entry else 'it'} is {whole[entry]:.10g}, of two parts of them {parts[0][entry]:.10g} "
        f"and {parts[1][entry]:.10g}. The terms of different rows must not depend on each other, as "
        f"they do if they are correlated, or contain a mean over the rows: compute that from the data "
        f"before"
    )


def least_difference(scale: AnyArray) -> float:
    """Return the difference that rounding may make in an entry whose terms cancel each other exactly."""
    return 64 * float(np.finfo(scale.dtype).eps * scale.max())
