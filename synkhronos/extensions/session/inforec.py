"""Reading pickles of Theano-MPI and of its data, without running what a pickle may contain.

A pickle can call any function that it names. This one may name only what NumPy needs for arrays and
numbers, and gets functions of this module in their place, which build arrays of numbers only.
"""

from __future__ import annotations

import math
import pickle
from typing import Any, Callable, TypeVar

import numpy

from synkhronos._typing import AnyArray, PathLike

_MOST_BYTES = 1 << 30  # of one array
_KEYS = ("train_info", "val_info", "all_time", "epoch_time", "lr")

_Converted = TypeVar("_Converted")


class _DType:
    """A dtype of numbers in the making: NumPy pickles its name, then its state with the byte order."""

    def __init__(self, name: Any, align: Any = 0, copy: Any = 1) -> None:
        self.dtype = numpy.dtype(_text(name))
        if self.dtype.kind not in "biuf":
            raise pickle.UnpicklingError(f"expected numbers, got the dtype {self.dtype}")

    def __setstate__(self, state: Any) -> None:
        if _text(state[1]) == ">":
            self.dtype = self.dtype.newbyteorder(">")


class _Array:
    """An array in the making."""

    array: AnyArray

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, is_fortran, data = state
        if not isinstance(kind, _DType):
            raise pickle.UnpicklingError("expected an array of numbers, got another one")
        shape = tuple(int(extent) for extent in shape)
        if min(shape, default=0) < 0 or math.prod(shape) * kind.dtype.itemsize > _MOST_BYTES:
            raise pickle.UnpicklingError(f"expected an array, got the shape {shape}")
        flat = numpy.frombuffer(_bytes(data), kind.dtype)
        self.array = flat.reshape(shape, order="F" if is_fortran else "C")


def _scalar(kind: Any, data: Any = None) -> Any:
    if not isinstance(kind, _DType):
        raise pickle.UnpicklingError("expected a number, got another object")
    return numpy.frombuffer(_bytes(data), kind.dtype)[0]


def _encode(text: str, encoding: str = "latin1") -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"expected bytes in latin1, got {encoding!r}")
    return text.encode("latin1")


_REPLACED: dict[tuple[str, str], Any] = {
    ("numpy", "dtype"): _DType,
    ("numpy", "ndarray"): None,  # an argument, which is not used
    ("multiarray", "_reconstruct"): lambda *args: _Array(),
    ("multiarray", "scalar"): _scalar,
    ("_codecs", "encode"): _encode,
}
_MULTIARRAY = ("numpy.core.multiarray", "numpy._core.multiarray")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        key = ("multiarray" if module in _MULTIARRAY else module, name)
        if key not in _REPLACED:
            raise pickle.UnpicklingError(f"expected arrays and numbers only, got {module}.{name}")
        return _REPLACED[key]

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("expected arrays and numbers only, got a reference")


def read_arrays(path: PathLike) -> Any:
    """Return what a pickle contains: arrays, numbers and strings, in lists, tuples and dicts.

    Such are the files of CIFAR-10. Strings and keys of Python 2 become strings.

    Parameters
    ----------
    path : path
        A pickle, written by Python 2 or 3.

    Raises
    ------
    ValueError
        If the file contains anything else, or is damaged.
    """
    return _read(path, _plain, "expected a pickle of arrays, numbers and strings")


def _plain(value: Any) -> Any:
    if isinstance(value, _Array):
        return value.array.copy()
    if isinstance(value, dict):
        return {_text(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value))
    if isinstance(value, bytes):
        return _text(value)
    if value is None or isinstance(value, (str, int, float, numpy.generic)):
        return value
    raise ValueError(f"expected arrays, numbers and strings, got {type(value).__name__}")


def read_inforec(path: PathLike) -> dict[str, list[list[float]]]:
    """Return the lists of a file of Theano-MPI, each of rows of numbers.

    Parameters
    ----------
    path : path
        ``inforec.pkl``, written by Python 2 or 3.

    Raises
    ------
    ValueError
        If it is not such a file, or contains anything else than arrays and numbers.
    """
    return _read(path, _lists, "Recorder.from_inforec: expected a file of Theano-MPI's recorder")


def _read(path: PathLike, convert: Callable[[Any], _Converted], expected: str) -> _Converted:
    """Return what `convert` makes of the content of a pickle, or raise a `ValueError`."""
    with open(path, "rb") as file:
        try:
            return convert(_Unpickler(file, encoding="latin1").load())
        except (MemoryError, KeyboardInterrupt):
            raise
        except Exception as error:  # a damaged pickle raises almost anything
            raise ValueError(f"{expected}, got {path!r}: {error}") from error


def _lists(loaded: Any) -> dict[str, list[list[float]]]:
    named = _plain(loaded)
    if not isinstance(named, dict):
        raise ValueError(f"expected a dict, got {type(named).__name__}")
    if not {"train_info", "val_info"} <= named.keys():
        raise ValueError(f"expected train_info and val_info, got {sorted(named)}")
    return {name: [list(map(one_number, row)) for row in named.get(name, ())] for name in _KEYS}


def one_number(value: Any, label: str = "") -> float:
    """Return a number that may be in an array; raise a `ValueError`, which begins with `label`."""
    array = numpy.asarray(value)
    if array.size != 1 or array.dtype.kind not in "biuf":
        raise ValueError(f"{label}expected one number, got {array.dtype} {list(array.shape)}")
    return float(array.reshape(()))


def _text(value: Any) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)


def _bytes(value: Any) -> bytes:
    return value.encode("latin1") if isinstance(value, str) else bytes(value)
