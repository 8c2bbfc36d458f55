"""``theanompi.models.cifar10``: the zoo's network for CIFAR-10."""

from synkhronos.extensions.zoo import Cifar10CNN as Cifar10_model

__all__ = ["Cifar10_model"]
