"""``theanompi.models.alex_net``: the zoo's AlexNet."""

from synkhronos.extensions.zoo import AlexNet

__all__ = ["AlexNet"]
