"""``theanompi.models.googlenet``: the zoo's GoogLeNet."""

from synkhronos.extensions.zoo import GoogLeNet

__all__ = ["GoogLeNet"]
