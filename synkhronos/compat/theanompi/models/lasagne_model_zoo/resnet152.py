"""``theanompi.models.lasagne_model_zoo.resnet152``: the zoo's ResNet-152."""

from synkhronos.extensions.zoo import ResNet152

__all__ = ["ResNet152"]
