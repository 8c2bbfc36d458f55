"""The residual network with its data: the graph of its loss and accuracy.

The layers come from the zoo, `synkhronos.extensions.zoo`. This module does not depend on ranks, except
for batch norm with statistics of all of them. A model includes the updates of the running averages of
batch norm; the function that computes the gradient has to perform them.
"""

if __name__ == "__main__":
    raise SystemExit(f"{__doc__}\nScripts use this file; run train_resnet.py.")

import functools
from typing import NamedTuple

import synkhronos  # noqa: F401  # before Theano and Lasagne, which otherwise cannot be imported
import lasagne
import numpy as np
import theano
import theano.tensor as T
from images import LoadImages
from synkhronos.extensions.zoo import resnet
from synkhronos.extensions.zoo.layers import BatchNormLayer, average_updates

theano.config.floatX = "float32"
FILTERS = 64  # of the first stage, at the zoo's full width


class Model(NamedTuple):
    x: T.TensorVariable
    y: T.TensorVariable
    params: list  # to be trained
    averages: list  # the running averages of batch norm
    loss: T.TensorVariable
    average_updates: list
    valid_loss: T.TensorVariable
    accuracy: T.TensorVariable


def build_model(options, images=None):
    """Build the network, its graph and its parameters. The initial weights depend only on the seed.

    With `images`, the input `x` contains row numbers, and the graph begins by loading these images.
    """
    lasagne.random.set_rng(np.random.RandomState(options.seed))
    y = T.ivector("y")
    if images is None:
        x = pixels = T.tensor4("x")
    else:
        x = T.ivector("rows")
        pixels = LoadImages(images, options.size)(x)
    norm = functools.partial(BatchNormLayer, synchronized=options.sync_batch_norm)
    network, _ = resnet(
        options.size,
        options.classes,
        options.width / FILTERS,
        input=pixels,
        blocks=options.blocks,
        norm=norm,
    )
    cross_entropy = lasagne.objectives.categorical_crossentropy
    loss = cross_entropy(lasagne.layers.get_output(network), y).mean()
    prediction = lasagne.layers.get_output(network, deterministic=True)
    return Model(
        x=x,
        y=y,
        params=lasagne.layers.get_all_params(network, trainable=True),
        averages=lasagne.layers.get_all_params(network, running_average=True),
        loss=loss,
        average_updates=average_updates(network),
        valid_loss=cross_entropy(prediction, y).mean(),
        accuracy=T.eq(prediction.argmax(axis=1), y).mean(dtype=theano.config.floatX),
    )
