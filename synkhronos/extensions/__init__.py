"""Tools for training and inference, built on the public names of Synkhronos and the graph compiler's.

``batch_norm``
    Batch normalization over the rows of all ranks.
``updates``
    Update rules that keep the gradient of all parameters in one flat vector.
``train``
    Training steps, built from a loss, its parameters and any update rule, or from the arguments of a
    script's own ``theano.function`` or ``pytensor.function``.
``loading``
    Minibatches that are read and augmented by other processes while the ranks compute.
``rules``
    Training rules for ranks that train at their own pace, and the loop for them.
``session``
    Models of Theano-MPI's kind on all ranks, with any of these rules.
``keras``
    Models of Keras 2.3.1 on all ranks.
``pymc``
    Models of PyMC 5 and 6 on all ranks.
``zoo``
    Well-known networks, and models that train them on real data, with Lasagne and Keras.

``keras`` and ``zoo`` are for Theano, ``pymc`` for PyTensor, and the others for both.

Each module is imported when it is first used, as ``synk.extensions.train`` or by an ``import``. So Keras
is needed only for ``keras``, and Lasagne only for ``zoo``. ``train`` uses the folder ``steps``, and
``loading`` the folder ``loaders``.
"""

import importlib as _importlib
import typing as _typing

from synkhronos.host import compiler as _compiler

#: The modules, and the compiler that a module is for.
_MODULES = {
    "batch_norm": None,
    "keras": "Theano",
    "loading": None,
    "pymc": "PyTensor",
    "rules": None,
    "session": None,
    "train": None,
    "updates": None,
    "zoo": "Theano",
}

if _typing.TYPE_CHECKING:
    from synkhronos.extensions import batch_norm as batch_norm
    from synkhronos.extensions import keras as keras
    from synkhronos.extensions import loading as loading
    from synkhronos.extensions import pymc as pymc
    from synkhronos.extensions import rules as rules
    from synkhronos.extensions import session as session
    from synkhronos.extensions import train as train
    from synkhronos.extensions import updates as updates
    from synkhronos.extensions import zoo as zoo
else:

    def __getattr__(name: str) -> _typing.Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        title = _MODULES[name]
        if title is not None and _compiler.TITLE != title:
            raise ImportError(
                f"{__name__}.{name} builds graphs of {title}, and {_compiler.TITLE} is used"
            )
        return _importlib.import_module(f"{__name__}.{name}")


def __dir__() -> _typing.List[str]:
    # Completion in IPython evaluates what is listed, so it would import Keras, or PyTensor.
    return [name for name in _MODULES if name not in ("keras", "pymc") or name in globals()]
