"""What models of Theano-MPI are made of, and its own models, which are those of the zoo here.

``layers2``
    Layers.
``data``
    ``utils`` for classes of data.
``alex_net``, ``cifar10``, ``googlenet``, and the folders ``lasagne_model_zoo`` and ``keras_model_zoo``
    Models, with the options and the data of `synkhronos.extensions.zoo`. They exchange parameters, so
    BSP uses ``sync_type="avg"``.
"""

import importlib as _importlib
from typing import Any as _Any

_MODELS = {"AlexNet": "alex_net", "Cifar10_model": "cifar10"}


def __getattr__(name: str) -> _Any:
    # The models need Lasagne, and the layers do not.
    if name not in _MODELS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_importlib.import_module(f"{__name__}.{_MODELS[name]}"), name)
