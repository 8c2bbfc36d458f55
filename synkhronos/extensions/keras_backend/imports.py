"""Import Keras 2.3.1 on its Theano back end, with current versions of Python and h5py."""

from __future__ import annotations

import functools
import importlib
import os
from types import ModuleType
from typing import Any, Callable, Mapping

import numpy

import synkhronos  # noqa: F401  # has Theano find a BLAS, and repairs Keras

_REMEDY = "install it by: python -m synkhronos install keras"


def import_keras() -> ModuleType:
    """Return the module ``keras``, made to work.

    Raises
    ------
    ImportError
        If Keras is not installed, is another version, or uses another back end than Theano.
    """
    chosen = os.environ.setdefault("KERAS_BACKEND", "theano")
    if chosen != "theano":
        raise ImportError(
            f"KERAS_BACKEND: expected 'theano', got {chosen!r}; unset this variable before Keras is "
            f"imported"
        )
    try:
        keras = importlib.import_module("keras")
    except ModuleNotFoundError as error:
        if error.name != "keras":
            raise
        raise ImportError(f"Keras is not installed; {_REMEDY}") from error
    if keras.__version__ != "2.3.1":
        raise ImportError(f"keras: expected version 2.3.1, got {keras.__version__}; {_REMEDY}")
    if keras.backend.backend() != "theano":
        raise ImportError(
            f"Keras was imported with the back end {keras.backend.backend()!r}; set "
            f"KERAS_BACKEND=theano in the environment, or import synkhronos.extensions.keras first"
        )
    _read_text_as_bytes()
    return keras


def _read_text_as_bytes() -> None:
    """Let Keras read its files with h5py 3, which returns text where earlier versions returned bytes."""
    try:
        h5py = importlib.import_module("h5py")
    except ImportError:  # Keras works without it, but cannot save models
        return
    if int(h5py.__version__.partition(".")[0]) < 3:
        return
    saving = importlib.import_module("keras.engine.saving")
    for name in ("load_weights_from_hdf5_group", "load_weights_from_hdf5_group_by_name"):
        setattr(saving, name, _taking_group(getattr(saving, name)))
    h5dict = importlib.import_module("keras.utils.io_utils").H5Dict
    h5dict.__getitem__ = _returning_bytes(h5dict.__getitem__)


class _Attributes:
    """The attributes of a group, with bytes in place of text."""

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        self._attributes = attributes

    def __contains__(self, name: str) -> bool:
        return name in self._attributes

    def __getitem__(self, name: str) -> Any:
        return _encoded(self._attributes[name])


class _Group:
    """A group of a file, with bytes in place of text in its attributes."""

    def __init__(self, group: Any) -> None:
        self._group, self.attrs = group, _Attributes(group.attrs)

    def __getitem__(self, name: str) -> Any:
        item = self._group[name]
        return _Group(item) if hasattr(item, "keys") else item  # else an array


def _encoded(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf8")
    is_array = isinstance(value, (list, numpy.ndarray)) and numpy.shape(value)[:1] > (0,)
    return [_encoded(item) for item in value] if is_array and isinstance(value[0], str) else value


def _taking_group(load: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of Keras that reads a group, for h5py 3."""
    if hasattr(load, "__wrapped__"):
        return load

    @functools.wraps(load)
    def load_group(group: Any, *args: Any, **kwargs: Any) -> Any:
        return load(_Group(group), *args, **kwargs)

    return load_group


def _returning_bytes(get: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    if hasattr(get, "__wrapped__"):
        return get

    @functools.wraps(get)
    def getitem(self: Any, name: str) -> Any:
        value = get(self, name)
        return value if isinstance(self.data, dict) else _encoded(value)

    return getitem
