"""Wide residual networks, built with Keras 2.3.1 on Theano."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import theano

from synkhronos.extensions.keras_backend import import_keras
from synkhronos.extensions.zoo import data
from synkhronos.extensions.zoo.layers import scaled
from synkhronos.extensions.zoo.model import Graph, Head, Model

_FIRST = "channels_first"


def wide_resnet(
    pixels: int = 32,
    classes: int = 10,
    width: float = 1.0,
    channels: int = 3,
    depth: int = 28,
    widen: int = 10,
    dropout: float = 0.0,
) -> tuple[Any, Any]:
    """Return the wide residual network WRN-28-10, a model of Keras, and its input.

    36,479,194 trainable parameters for ten classes: with the scale and the shift of each batch
    normalization, without its running averages; the paper says 36.5 million.

    S. Zagoruyko and N. Komodakis, "Wide Residual Networks", BMVC 2016 (arXiv:1605.07146).

    Parameters
    ----------
    pixels : int
        Height and width of an image, at least 4.
    classes : int
        The number of outputs, which are probabilities.
    width : float
        A factor for the number of filters.
    channels : int
        The number of colors.
    depth : int
        The number of convolutions, and 1 for the last layer: 4 more than a multiple of 6.
    widen : int
        The paper's k: how many times as many filters as in the residual networks of He et al.
    dropout : float
        The probability to drop a number between the two convolutions of a block.

    Returns
    -------
    network : keras.models.Model
        It can be compiled, and trained on all ranks by
        `synkhronos.extensions.keras.parallelize`.
    input : variable
        Images: rows, channels, height, width.

    Raises
    ------
    ValueError
        If there are too few pixels, or there is no network of this depth.
    ImportError
        If Keras 2.3.1 is not installed.
    """
    if depth < 10 or (depth - 4) % 6:
        raise ValueError(f"depth: expected 10, 16, 22, 28, or 6 more and so on, got {depth}")
    if pixels < 4:
        raise ValueError(f"wide_resnet: expected at least 4 pixels, got {pixels}")
    keras = import_keras()
    layers = keras.layers
    conv = functools.partial(
        layers.Conv2D, padding="same", use_bias=False, kernel_initializer="he_normal", data_format=_FIRST
    )
    inputs = layers.Input((channels, pixels, pixels))
    layer = conv(scaled(16, width), 3)(inputs)
    for stage in range(3):
        for block in range((depth - 4) // 6):
            stride = 2 if stage > 0 and block == 0 else 1
            filters = scaled(16 * widen * 2**stage, width)
            layer = _block(keras, conv, layer, filters, stride, dropout)
    layer = layers.GlobalAveragePooling2D(data_format=_FIRST)(_preactivated(keras, layer))
    output = layers.Dense(classes, activation="softmax", kernel_initializer="he_normal")(layer)
    return keras.models.Model(inputs, output), inputs


def _preactivated(keras: Any, layer: Any) -> Any:
    # In float32, 0.00001 is less than Theano's least epsilon, which is the same number.
    normalized = keras.layers.BatchNormalization(axis=1, momentum=0.9, epsilon=1.001e-5)(layer)
    return keras.layers.Activation("relu")(normalized)


def _block(keras: Any, conv: Any, layer: Any, filters: int, stride: int, dropout: float) -> Any:
    """Add two convolutions of 3x3, each after batch normalization and a rectifier, to their input."""
    active = _preactivated(keras, layer)
    residual = conv(filters, 3, strides=stride)(active)
    residual = _preactivated(keras, residual)
    if dropout:
        residual = keras.layers.Dropout(dropout)(residual)
    residual = conv(filters, 3)(residual)
    if layer._keras_shape[1] != filters or stride > 1:
        layer = conv(filters, 1, strides=stride)(active)
    return keras.layers.add([layer, residual])


class WideResNet(Model):
    """WRN-28-10 with the paper's training: Nesterov momentum 0.9, rate 0.1, minibatches of 128."""

    defaults = {
        "pixels": 32, "batch_size": 128, "n_epochs": 200, "update_rule": "nesterov",
        "learning_rate": 0.1, "lr_epochs": (60, 120, 160), "lr_factor": 0.2, "weight_decay": 5e-4,
        "depth": 28, "widen": 10,
    }  # fmt: skip
    network = staticmethod(wide_resnet)
    read = staticmethod(data.cifar10)

    def network_options(self) -> dict[str, Any]:
        options = super().network_options()
        return {**options, "depth": self.options["depth"], "widen": self.options["widen"]}

    def build_graph(self) -> Graph:
        """Build the model of Keras, and its outputs for training and for evaluation."""
        backend = import_keras().backend
        np.random.seed(self.options["seed"])  # Keras draws the weights from it
        network, inputs = wide_resnet(**self.network_options())
        phase = backend.learning_phase()

        def during(value: int, variables: list[Any]) -> list[Any]:
            return theano.clone(variables, {phase: np.uint8(value)})

        averages = [variable for variable, _ in network.updates]
        prediction, *new = during(1, [network.output, *(value for _, value in network.updates)])
        (evaluated,) = during(0, [network.output])
        return Graph(
            network=network,
            input=inputs,
            heads=[Head(prediction, 1)],
            evaluated=evaluated,
            params=network.trainable_weights,
            averages=network.non_trainable_weights,
            average_updates=list(zip(averages, new)),
            decayed=network.trainable_weights,
        )
