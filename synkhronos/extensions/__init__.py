"""Tools for training and inference, built only on the public names of Synkhronos.

``batch_norm``
    Batch normalization over the rows of all ranks.
``updates``
    Update rules that keep the gradient of all parameters in one flat vector.
``train``
    Training steps, built from a loss, its parameters and any update rule, or from the arguments of a
    script's own ``theano.function``.
``rules``
    Training rules for ranks that train at their own pace, and the loop for them.
``keras``
    Models of Keras 2.3.1 on all ranks.
``pymc``
    Models of PyMC 5 on all ranks. This module is for PyTensor, and the others for Theano.

Each module is imported when it is first used, as ``synk.extensions.train`` or by an ``import``. So Keras
is needed only for ``keras``. ``train`` uses the folder ``steps``, and ``keras`` the folder
``keras_backend``.
"""

import importlib as _importlib
import typing as _typing
from importlib.util import find_spec as _find_spec

_THEANO, _PYTENSOR = ("theano", "Theano"), ("pytensor", "PyTensor")
_MODULES = {
    "batch_norm": _THEANO,
    "keras": _THEANO,
    "pymc": _PYTENSOR,
    "rules": _THEANO,
    "train": _THEANO,
    "updates": _THEANO,
}

if _typing.TYPE_CHECKING:
    from synkhronos.extensions import batch_norm as batch_norm
    from synkhronos.extensions import keras as keras
    from synkhronos.extensions import pymc as pymc
    from synkhronos.extensions import rules as rules
    from synkhronos.extensions import train as train
    from synkhronos.extensions import updates as updates
else:

    def __getattr__(name):
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        package, title = _MODULES[name]
        if _find_spec(package) is None:
            raise ImportError(f"{__name__}.{name} builds graphs of {title}, which is not installed")
        return _importlib.import_module(f"{__name__}.{name}")


def __dir__():
    # Completion in IPython evaluates what is listed, so it would import Keras, or PyTensor.
    return [name for name in _MODULES if name not in ("keras", "pymc") or name in globals()]
