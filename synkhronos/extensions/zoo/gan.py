"""Generative adversarial networks: WGAN and LS-GAN, with generator and critic trained and exchanged."""

from __future__ import annotations

from typing import Any, Callable

import lasagne
import numpy as np
import theano
import theano.tensor as tt
from lasagne.layers import DenseLayer, InputLayer, ReshapeLayer

from synkhronos.extensions.zoo import data
from synkhronos.extensions.zoo.layers import (
    BatchNormLayer,
    ConvLayer,
    Layer,
    TransposedConvLayer,
    average_updates,
    image_input,
    rectified,
    scaled,
)
from synkhronos.extensions.zoo.model import Model

_leaky, _tanh = lasagne.nonlinearities.LeakyRectify(0.2), lasagne.nonlinearities.tanh


def wgan_generator(
    pixels: int = 64, channels: int = 3, width: float = 1.0, noise: int = 100, input: Any = None
) -> tuple[Layer, Any]:
    """Return the generator of Arjovsky et al. (2017), which is that of DCGAN, and its input.

    Noise is projected to 1,024 maps of 4x4, which transposed convolutions of 5x5 double until they have
    the size of an image, with half as many maps each time. 18,855,043 parameters for 64x64 pixels: the
    network of figure 1 of Radford et al., with the scale and the shift of batch normalization, and
    without biases before it.

    M. Arjovsky, S. Chintala and L. Bottou, "Wasserstein Generative Adversarial Networks", ICML 2017
    (arXiv:1701.07875); A. Radford, L. Metz and S. Chintala, "Unsupervised Representation Learning with
    Deep Convolutional Generative Adversarial Networks", ICLR 2016 (arXiv:1511.06434).

    Parameters
    ----------
    pixels : int
        Height and width of an image: 8, 16, 32, 64 and so on. Smaller images need fewer layers, of which
        the first are left out.
    channels : int
        The number of colors.
    width : float
        A factor for the number of maps.
    noise : int
        How many random numbers an image is made of.
    input : float matrix, optional
        An expression to be used as input; by default a new variable.

    Returns
    -------
    network : lasagne.layers.Layer
        Images with values from -1 to 1.
    input : variable
        Noise: rows, numbers.
    """
    maps = _maps("wgan_generator", pixels, width)[::-1]
    layer, input = _noise_input(noise, input)
    layer = _projected(layer, maps[0], 4)
    for number in maps[1:]:
        layer = rectified(BatchNormLayer(_transposed(layer, number, 5, 2)))
    return _image(layer, channels, 5, 2), input


def wgan_critic(
    pixels: int = 64, channels: int = 3, width: float = 1.0, input: Any = None
) -> tuple[Layer, Any]:
    """Return the critic of Arjovsky et al. (2017), and its input.

    The mirror image of :func:`wgan_generator`, as in DCGAN, with strided convolutions and leaky
    rectifiers, and one unbounded number for each image. 17,232,897 parameters for 64x64 pixels.

    Parameters
    ----------
    pixels, channels, width, input
        As for :func:`wgan_generator`; `input` are images.

    Returns
    -------
    network : lasagne.layers.Layer
        One column.
    input : variable
        Images with values from -1 to 1: rows, channels, height, width.
    """
    maps = _maps("wgan_critic", pixels, width)
    layer, input = image_input("wgan_critic", pixels, channels, input)
    return _critic(layer, maps), input


def lsgan_generator(
    pixels: int = 112, channels: int = 3, width: float = 1.0, noise: int = 1024, input: Any = None
) -> tuple[Layer, Any]:
    """Return the generator of Mao et al. (2017), and its input.

    Noise is projected to 256 maps; six transposed convolutions of 3x3, four of them with a stride of 2,
    and one that makes the image. 15,577,667 parameters for 112x112 pixels: the network of the paper's
    figure for the LSUN scenes, counted as for :func:`wgan_generator`.

    X. Mao et al., "Least Squares Generative Adversarial Networks", ICCV 2017 (arXiv:1611.04076).

    Parameters
    ----------
    pixels : int
        Height and width of an image: a multiple of 16.
    channels, width, noise, input
        As for :func:`wgan_generator`.

    Returns
    -------
    network : lasagne.layers.Layer
        Images with values from -1 to 1.
    input : variable
        Noise: rows, numbers.
    """
    _check_sixteen("lsgan_generator", pixels)
    layer, input = _noise_input(noise, input)
    layer = _projected(layer, scaled(256, width), pixels // 16)
    for maps, stride in ((256, 2), (256, 1), (256, 2), (256, 1), (128, 2), (64, 2)):
        layer = rectified(BatchNormLayer(_transposed(layer, scaled(maps, width), 3, stride)))
    return _image(layer, channels, 3, 1), input


def lsgan_critic(
    pixels: int = 112, channels: int = 3, width: float = 1.0, input: Any = None
) -> tuple[Layer, Any]:
    """Return the discriminator of Mao et al. (2017), and its input.

    Four strided convolutions of 5x5 with 64 to 512 maps, and one unbounded number for each image.
    4,332,545 parameters for 112x112 pixels.

    Parameters
    ----------
    pixels, channels, width, input
        As for :func:`lsgan_generator`; `input` are images.

    Returns
    -------
    network : lasagne.layers.Layer
        One column.
    input : variable
        Images with values from -1 to 1: rows, channels, height, width.
    """
    _check_sixteen("lsgan_critic", pixels)
    layer, input = image_input("lsgan_critic", pixels, channels, input)
    return _critic(layer, [scaled(maps, width) for maps in (64, 128, 256, 512)]), input


def _maps(name: str, pixels: int, width: float) -> list[int]:
    """Return the numbers of maps from the images to the maps of 4x4."""
    count = (pixels // 4).bit_length() - 1
    if count < 1 or pixels != 4 * 2**count:
        raise ValueError(f"{name}: expected 8, 16, 32, 64 pixels and so on, got {pixels}")
    return [scaled(128 * 2**number, width) for number in range(count)]


def _check_sixteen(name: str, pixels: int) -> None:
    if pixels < 16 or pixels % 16:
        raise ValueError(f"{name}: expected a multiple of 16 pixels, got {pixels}")


def _noise_input(noise: int, input: Any) -> tuple[Layer, Any]:
    input = tt.matrix("noise") if input is None else input
    return InputLayer((None, noise), input), input


def _normal() -> Any:
    return lasagne.init.Normal(0.02)  # as in DCGAN


def _projected(layer: Layer, maps: int, side: int) -> Layer:
    layer = DenseLayer(layer, maps * side * side, W=_normal(), b=None, nonlinearity=None)
    return rectified(BatchNormLayer(ReshapeLayer(layer, ([0], maps, side, side))))


def _transposed(layer: Layer, maps: int, size: int, stride: int) -> Layer:
    return TransposedConvLayer(layer, maps, size, stride, W=_normal())


def _image(layer: Layer, channels: int, size: int, stride: int) -> Layer:
    bias = lasagne.init.Constant(0)
    return TransposedConvLayer(layer, channels, size, stride, W=_normal(), b=bias, nonlinearity=_tanh)


def _critic(layer: Layer, maps: list[int]) -> Layer:
    bias = lasagne.init.Constant(0)
    layer = ConvLayer(layer, maps[0], 5, 2, W=_normal(), b=bias, nonlinearity=_leaky)
    for number in maps[1:]:
        layer = BatchNormLayer(ConvLayer(layer, number, 5, 2, W=_normal()))
        layer = lasagne.layers.NonlinearityLayer(layer, _leaky)
    return DenseLayer(layer, 1, W=_normal(), nonlinearity=None)


class AdversarialModel(Model):
    """A generator and a critic, trained in turn; subclasses have the losses.

    An iteration trains the critic on a minibatch and as many images of the generator, and every
    `n_critic`-th iteration then trains the generator. `params` are the parameters of both, so a session
    exchanges both: the critics of all ranks see the images of one generator, and each generator learns
    from the critic of all rows. Averaging keeps the bounds of clipped parameters.

    A training iteration reports the loss of the critic as the cost, and the last loss of the generator
    as the error; a validation does so too, for new noise and with running averages, with 0 as the third
    number.

    Further options are ``noise``, ``n_critic`` and ``clip``, the bound of the critic's parameters, or
    None.

    Attributes
    ----------
    generator_params, critic_params : list of shared variables
        The two parts of `params`.
    """

    defaults = {"noise": 100, "n_critic": 1, "clip": None}
    symmetric = True
    critic: Any = None

    def read_data(self) -> data.DataSet:
        """Return the images in a folder, or else digits of MNIST."""
        folder = self.options["folder"]
        return data.mnist() if folder is None else data.imagenet(folder)

    @staticmethod
    def critic_loss(real: Any, fake: Any) -> Any:
        """Return the critic's loss for its outputs on real images and on the generator's."""
        raise NotImplementedError

    @staticmethod
    def generator_loss(fake: Any) -> Any:
        """Return the generator's loss for the critic's outputs on its images."""
        raise NotImplementedError

    def build(self) -> None:
        """Build the two networks."""
        both = {name: self.options[name] for name in ("pixels", "width")}
        both["channels"] = self.dataset.channels
        self.network, self.input = type(self).network(**both, noise=self.options["noise"])
        self.critic, self.images = type(self).critic(**both)
        networks = self.network, self.critic
        self.generator_params, self.critic_params = (
            lasagne.layers.get_all_params(network, trainable=True) for network in networks
        )
        self.params = [*self.generator_params, *self.critic_params]
        self.averages = lasagne.layers.get_all_params(networks, running_average=True)
        self._random = np.random.RandomState([self.options["seed"], self.rank])
        self._iteration, self._generator_loss = 0, 0.0

    def compile_iter_fns(self, function: Callable[..., Any] = theano.function) -> None:
        """Compile the functions that train the critic and the generator, measure and generate."""
        get_output, clip = lasagne.layers.get_output, self.options["clip"]
        generated = get_output(self.network)
        generator_averages = average_updates(self.network)
        on_generated = get_output(self.critic, generated)
        loss = self.critic_loss(get_output(self.critic), on_generated)
        critic_averages = average_updates(self.critic)  # of the real images, whose output is the latest
        updates = self.step_updates(loss, self.critic_params)
        if clip is not None:
            clipped = {*self.critic_params}
            updates = [(v, tt.clip(new, -clip, clip) if v in clipped else new) for v, new in updates]
        self.train_iter_fn = function(
            [self.images, self.input], loss, updates=[*updates, *critic_averages], name="train_critic"
        )
        loss = self.generator_loss(on_generated)
        updates = [*self.step_updates(loss, self.generator_params), *generator_averages]
        self.generator_iter_fn = function([self.input], loss, updates=updates, name="train_generator")

        generated = get_output(self.network, deterministic=True)
        on_generated = get_output(self.critic, generated, deterministic=True)
        on_real = get_output(self.critic, deterministic=True)
        losses = [self.critic_loss(on_real, on_generated), self.generator_loss(on_generated)]
        self.val_iter_fn = function([self.images, self.input], losses, name="validate")
        self.generate_fn = function([self.input], generated, name="generate")

    def train_step(self, rows: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
        """Train the critic, and the generator if it is its turn; return their losses."""
        cost = self.train_iter_fn(rows, self._noise(len(rows)))
        self._iteration += 1
        if self._iteration % self.options["n_critic"] == 0:
            self._generator_loss = float(self.generator_iter_fn(self._noise(len(rows))))
        return float(cost), self._generator_loss

    def val_step(self, rows: np.ndarray, labels: np.ndarray) -> tuple[float, float, float]:
        """Return the losses of critic and generator, and 0."""
        cost, other = self.val_iter_fn(rows, self._noise(len(rows)))
        return float(cost), float(other), 0.0

    def generate(self, number: int) -> np.ndarray:
        """Return new images, with values from -1 to 1: rows, channels, height, width."""
        return self.generate_fn(self._noise(number))

    def cleanup(self) -> None:
        """Release the functions; the parameters and the networks are kept."""
        super().cleanup()
        self.generator_iter_fn = self.generate_fn = None

    def _noise(self, rows: int) -> np.ndarray:
        return self._random.normal(size=(rows, self.options["noise"])).astype(theano.config.floatX)


class WGAN(AdversarialModel):
    """The Wasserstein GAN with the paper's training: RMSprop, rate 0.00005, five steps of the critic.

    The critic's loss is the negative estimate of the distance. Its parameters are clipped to 0.01.
    """

    defaults = {
        "pixels": 64, "batch_size": 64, "n_epochs": 25, "update_rule": "rmsprop", "learning_rate": 5e-5,
        "n_critic": 5, "clip": 0.01,
    }  # fmt: skip
    network = staticmethod(wgan_generator)
    critic = staticmethod(wgan_critic)

    @staticmethod
    def critic_loss(real: Any, fake: Any) -> Any:
        return fake.mean() - real.mean()

    @staticmethod
    def generator_loss(fake: Any) -> Any:
        return -fake.mean()


class LSGAN(AdversarialModel):
    """The least squares GAN with the paper's training: Adam with beta1 0.5, rate 0.001.

    The critic aims at 1 for real images and 0 for others, the generator at 1: the paper's equation 9.
    """

    defaults = {
        "pixels": 112, "batch_size": 64, "n_epochs": 25, "update_rule": "adam", "learning_rate": 0.001,
        "momentum": 0.5, "noise": 1024,
    }  # fmt: skip
    network = staticmethod(lsgan_generator)
    critic = staticmethod(lsgan_critic)

    @staticmethod
    def critic_loss(real: Any, fake: Any) -> Any:
        return (tt.sqr(real - 1).mean() + tt.sqr(fake).mean()) / 2

    @staticmethod
    def generator_loss(fake: Any) -> Any:
        return tt.sqr(fake - 1).mean() / 2
