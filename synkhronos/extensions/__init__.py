"""Tools for training, built on the public names of Synkhronos and those of the graph compiler.

``batch_norm``
    Batch normalization over the rows of all ranks.
``updates``
    Update rules that keep the gradient of all parameters in one flat vector.
``train``
    Training steps, built from a loss, its parameters and any update rule, or from the arguments of a
    script's own ``theano.function`` or ``pytensor.function``.
``rules``
    Training rules for ranks that train at their own pace, and the loop for them.
``keras``
    Models of Keras 2.3.1 on all ranks.

Each module is imported when it is first used, as ``synk.extensions.train`` or by an ``import``. So Keras
is needed only for ``keras``. ``train`` uses the folder ``steps``, and ``keras`` the folder
``keras_backend``.
"""

import importlib as _importlib
import typing as _typing

from synkhronos.host import compiler as _compiler

_MODULES = ("batch_norm", "keras", "rules", "train", "updates")

if _typing.TYPE_CHECKING:
    from synkhronos.extensions import batch_norm as batch_norm
    from synkhronos.extensions import keras as keras
    from synkhronos.extensions import rules as rules
    from synkhronos.extensions import train as train
    from synkhronos.extensions import updates as updates
else:

    def __getattr__(name):
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name == "keras" and _compiler.NAME != "theano":
            used = _compiler.TITLE
            raise ImportError(f"{__name__}.{name} builds graphs of Theano, and {used} is used")
        return _importlib.import_module(f"{__name__}.{name}")


def __dir__():
    # Completion in IPython evaluates what is listed, so it would import Keras.
    return [name for name in _MODULES if name != "keras" or name in globals()]
