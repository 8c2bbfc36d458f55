"""``theanompi.models.lasagne_model_zoo.vgg16``: the zoo's VGG16."""

from synkhronos.extensions.zoo import VGG16

__all__ = ["VGG16"]
