"""``theanompi.models.lasagne_model_zoo.lsgan``: the zoo's least squares GAN."""

from synkhronos.extensions.zoo import LSGAN

__all__ = ["LSGAN"]
