"""Import Keras 2.3.1 on its Theano back end, repaired for current versions of Python and h5py."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import synkhronos  # noqa: F401  # has Theano find a BLAS, and repairs Keras

_REMEDY = "install it by: python -m synkhronos install keras"


def import_keras() -> ModuleType:
    """Return the module ``keras``.

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
    return keras
