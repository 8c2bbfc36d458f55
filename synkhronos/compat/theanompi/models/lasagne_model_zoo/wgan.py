"""``theanompi.models.lasagne_model_zoo.wgan``: the zoo's Wasserstein GAN."""

from synkhronos.extensions.zoo import WGAN

__all__ = ["WGAN"]
