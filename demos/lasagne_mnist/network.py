"""The two networks of Lasagne's MNIST tutorial, as graphs."""

if __name__ == "__main__":
    raise SystemExit(f"{__doc__}\nScripts use this file; run train_mnist_cpu_data.py.")

from typing import NamedTuple

import synkhronos  # noqa: F401  (before Theano and Lasagne, which otherwise cannot be imported)
import lasagne
import numpy as np
import theano
import theano.tensor as T

theano.config.floatX = "float32"


class Model(NamedTuple):
    x: T.TensorVariable
    y: T.TensorVariable
    params: list
    losses: T.TensorVariable  # of each training row, with dropout
    valid_loss: T.TensorVariable
    accuracy: T.TensorVariable


def build_model(options):
    """Build a network of Lasagne's MNIST tutorial: its graph and its parameters.

    The initial weights depend only on the seed, with and without dropout.
    """
    lasagne.random.set_rng(np.random.RandomState(options.seed))
    x, y = T.tensor4("x"), T.ivector("y")
    network = NETWORKS[options.model](x, drop=not options.no_dropout)
    cross_entropy = lasagne.objectives.categorical_crossentropy
    prediction = lasagne.layers.get_output(network, deterministic=True)
    return Model(
        x=x,
        y=y,
        params=lasagne.layers.get_all_params(network, trainable=True),
        losses=cross_entropy(lasagne.layers.get_output(network), y),
        valid_loss=cross_entropy(prediction, y).mean(),
        accuracy=T.eq(prediction.argmax(axis=1), y).mean(dtype=theano.config.floatX),
    )


def build_mlp(x, drop):
    """Build a network with two hidden layers of 800 units."""
    layers = lasagne.layers
    layer = layers.InputLayer((None, 1, 28, 28), x)
    layer = layers.DropoutLayer(layer, 0.2 * drop)
    for _ in range(2):
        layer = layers.DenseLayer(layer, 800, nonlinearity=lasagne.nonlinearities.rectify)
        layer = layers.DropoutLayer(layer, 0.5 * drop)
    return layers.DenseLayer(layer, 10, nonlinearity=lasagne.nonlinearities.softmax)


def build_cnn(x, drop):
    """Build two convolutions (32 filters of 5x5), each with 2x2 pooling, and a hidden layer of 256."""
    layers, rectify = lasagne.layers, lasagne.nonlinearities.rectify
    layer = layers.InputLayer((None, 1, 28, 28), x)
    for _ in range(2):
        layer = layers.Conv2DLayer(layer, 32, (5, 5), nonlinearity=rectify)
        layer = layers.MaxPool2DLayer(layer, (2, 2))
    layer = layers.DenseLayer(layers.DropoutLayer(layer, 0.5 * drop), 256, nonlinearity=rectify)
    layer = layers.DropoutLayer(layer, 0.5 * drop)
    return layers.DenseLayer(layer, 10, nonlinearity=lasagne.nonlinearities.softmax)


NETWORKS = {"cnn": build_cnn, "mlp": build_mlp}
