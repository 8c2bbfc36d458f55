"""``theanompi.models.keras_model_zoo.wresnet``: the zoo's wide residual network."""

from synkhronos.extensions.zoo import WideResNet as Wide_ResNet

__all__ = ["Wide_ResNet"]
