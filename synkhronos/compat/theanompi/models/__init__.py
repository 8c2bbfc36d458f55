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
import sys as _sys
import types as _types
from typing import Any as _Any

#: The modules of Theano-MPI's models, with the names there and in the zoo
_MODELS = {
    "alex_net": ("AlexNet", "AlexNet"),
    "cifar10": ("Cifar10_model", "Cifar10CNN"),
    "googlenet": ("GoogLeNet", "GoogLeNet"),
    "keras_model_zoo": (),
    "keras_model_zoo.wresnet": ("Wide_ResNet", "WideResNet"),
    "lasagne_model_zoo": (),
    "lasagne_model_zoo.lsgan": ("LSGAN", "LSGAN"),
    "lasagne_model_zoo.resnet152": ("ResNet152", "ResNet152"),
    "lasagne_model_zoo.resnet50": ("ResNet50", "ResNet50"),
    "lasagne_model_zoo.vgg16": ("VGG16", "VGG16"),
    "lasagne_model_zoo.wgan": ("WGAN", "WGAN"),
}


class _OfZoo(_types.ModuleType):
    """A module with a model of the zoo, which needs Lasagne when it is first used; or a folder."""

    __all__: _Any

    def __getattr__(self, name: str) -> _Any:
        there, of_zoo = _MODELS[self.__name__[len(__name__) + 1 :]] or ("", "")
        if name != there:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(_importlib.import_module("synkhronos.extensions.zoo"), of_zoo)


for _name, _names in _MODELS.items():
    _made = _sys.modules[f"{__name__}.{_name}"] = _OfZoo(f"{__name__}.{_name}")
    if _names:
        _made.__all__ = [_names[0]]
    else:
        _made.__path__ = []
    _folder, _, _own = f"{__name__}.{_name}".rpartition(".")
    setattr(_sys.modules[_folder], _own, _made)


def __getattr__(name: str) -> _Any:
    for module, names in _MODELS.items():
        if name in names[:1] and "." not in module:
            return getattr(_sys.modules[f"{__name__}.{module}"], name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
