"""Conversion of the user's values to arrays of the required form."""

from __future__ import annotations

import warnings
from typing import Any, Sequence

import numpy as np

from synkhronos._text import listed
from synkhronos._typing import ArrayLike, DTypeLike
from synkhronos.arithmetic.partition import RaggedWarning


def condition(
    value: ArrayLike,
    dtype: DTypeLike,
    ndim: int,
    force_cast: bool,
    label: str,
    remedy: str = "convert it",
) -> np.ndarray:
    """Return `value` as an array of `dtype` and `ndim`, or raise ``TypeError`` naming `label`."""
    array = as_array(value, dtype, label)
    if array.dtype != dtype:
        if not force_cast and not np.can_cast(array.dtype, dtype, "safe"):
            raise TypeError(
                f"{label}: expected {np.dtype(dtype)}, got {array.dtype}, which cannot be cast "
                f"safely; {remedy}"
            )
        array = array.astype(dtype)
    if array.ndim != ndim:
        raise TypeError(f"{label}: expected {ndim} dimensions, got {array.ndim} ({array.shape})")
    return array


def as_array(value: ArrayLike, dtype: DTypeLike | None, label: str) -> np.ndarray:
    """Return an array. Python numbers get the requested dtype if it can represent them."""
    array: np.ndarray
    if isinstance(value, np.memmap):
        array = value  # not copied: every rank can map its file
    elif hasattr(value, "__array__") and not isinstance(value, np.generic):
        array = np.asarray(value)
    else:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", RaggedWarning)
                array = np.array(value)
        except (ValueError, RaggedWarning) as error:
            raise TypeError(f"{label}: not an array: {error}") from error
        if dtype is not None and array.dtype.kind in "biufc":
            array = _fit(array, np.dtype(dtype), isinstance(value, np.generic))
    if array.dtype.kind not in "biufc":
        raise TypeError(f"{label}: expected numbers, got dtype {array.dtype} from {type(value)}")
    return array


def in_order_of(dims: Sequence[str], value: Any, label: str) -> Any:
    """Return a value whose axes have names, as of ``xarray.DataArray``, in the order of these names."""
    own = getattr(value, "dims", None) if dims else None
    if own is None:
        return value
    if {*own} != {*dims}:
        raise ValueError(f"{label}: expected the dimensions {listed(dims)}, got {listed(own)}")
    return value.transpose(*dims)


def usable(value: Any) -> Any:
    """Return an array that compiled code can use: the given array, or a copy.

    Code in C and BLAS need aligned items whose strides are whole numbers of items, and none of them zero
    except on axes of one item, as they divide by them. They take negative strides. A sparse matrix gets
    such arrays; other objects are returned as they are.
    """
    if isinstance(value, np.ndarray):
        return value if _is_usable(value) else np.array(value, value.dtype.newbyteorder("="), order="C")
    for name in ("data", "indices", "indptr") if hasattr(value, "indptr") else ():
        setattr(value, name, usable(getattr(value, name)))
    return value


def _is_usable(array: np.ndarray) -> bool:
    flags = array.flags
    if not flags.aligned or not array.dtype.isnative:
        return False
    if flags.forc:  # contiguous in the order of C or of Fortran
        return True
    steps = [step for step, extent in zip(array.strides, array.shape) if extent > 1]
    return all([step and not step % array.itemsize for step in steps])


def _fit(array: np.ndarray, wanted: np.dtype, exactly: bool) -> np.ndarray:
    """Return an array in the requested dtype if that can represent its numbers, else unchanged.

    Python floats are rounded. With `exactly`, as for NumPy scalars, numbers must not change.
    """
    integers = array.dtype.kind in "iu" and wanted.kind in "iu"
    if array.size and not integers and not np.can_cast(array.dtype, wanted, "same_kind"):
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        cast = array.astype(wanted)
    if exactly or wanted.kind in "iu":
        fits = np.array_equal(cast, array, equal_nan=True)
    else:
        fits = np.array_equal(np.isfinite(cast), np.isfinite(array))
    return cast if fits else array
