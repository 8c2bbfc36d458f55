"""``theanompi.models.lasagne_model_zoo.resnet50``: the zoo's ResNet-50."""

from synkhronos.extensions.zoo import ResNet50

__all__ = ["ResNet50"]
