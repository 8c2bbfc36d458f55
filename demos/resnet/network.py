"""The residual network: its layers, and the graph of its loss and accuracy.

This module does not depend on ranks, except for batch norm with statistics of all of them. A model
includes the updates of the running averages of batch norm; the function that computes the gradient has
to perform them.
"""

import functools
from typing import NamedTuple

import synkhronos  # noqa: F401  # before Theano and Lasagne, which otherwise cannot be imported
import lasagne
import numpy as np
import theano
import theano.tensor as T
from images import LoadImages
from synkhronos.extensions import batch_norm

theano.config.floatX = "float32"


class BatchNormLayer(lasagne.layers.Layer):
    """Batch normalization: each channel with mean 0 and variance 1, then scaled and shifted.

    Training uses the mean and the variance of the current rows. These are the rank's own rows or a slice
    of them, so that no rank waits for the statistics of another one; or, if `synchronized`, the rows of
    all ranks or a slice of each, as if one process computed the whole minibatch. With
    ``deterministic=True`` the layer uses the running averages of both instead.

    When the output for training is built, `updates` gets the updates of the running averages. The
    function that computes the gradient has to perform them, each rank with its own rows. If
    `synchronized`, they are the same on every rank.

    A running average is the mean of all steps so far; from the tenth step on the newest step has the
    weight 0.1. The average of the variance uses the unbiased estimate, so its limit does not depend on
    the number of rows of a rank.

    Parameters
    ----------
    incoming : Layer or tuple
        Channels are on axis 1. All other axes are normalized over.
    weight : float
        Minimum weight of the newest step in the running averages.
    epsilon : float
        Added to the variance.
    synchronized : bool
        Whether the mean and the variance are computed over all ranks.
    """

    def __init__(self, incoming, weight=0.1, epsilon=1e-5, synchronized=False, **kwargs):
        super().__init__(incoming, **kwargs)
        self.weight, self.epsilon, self.synchronized = weight, epsilon, synchronized
        self.updates = []
        channels = self.input_shape[1:2]
        self.scale = self._param("scale", 1, channels)
        self.shift = self._param("shift", 0, channels)
        average = {"trainable": False, "running_average": True}
        self.mean = self._param("mean", 0, channels, **average)
        self.variance = self._param("variance", 1, channels, **average)
        self.steps = self._param("steps", 0, (), **average)

    def _param(self, name, value, shape, **tags):
        value = lasagne.init.Constant(value)
        return self.add_param(value, shape, name, regularizable=False, **tags)

    def get_output_for(self, input, deterministic=False, **kwargs):
        axes = [axis for axis in range(input.ndim) if axis != 1]
        pattern = [0 if axis == 1 else "x" for axis in range(input.ndim)]
        if deterministic:
            mean, variance = self.mean, self.variance
            centred = input - mean.dimshuffle(pattern)
        else:
            # Theano's own batch_normalization_train computes squares as powers, which makes a step of
            # the whole network a quarter slower.
            mean, variance, numbers = self._moments(input, axes, pattern)
            centred = input - mean.dimshuffle(pattern)
            self.updates = self._updates(mean, variance, numbers)
        scale = self.scale / T.sqrt(variance + self.epsilon)
        return centred * scale.dimshuffle(pattern) + self.shift.dimshuffle(pattern)

    def _moments(self, input, axes, pattern):
        """Return the mean, the variance, and how many numbers they are computed from."""
        if self.synchronized:
            return batch_norm.moments(input, axes)
        mean = input.mean(axes)
        variance = T.sqr(input - mean.dimshuffle(pattern)).mean(axes)
        return mean, variance, input.size // input.shape[1]

    def _updates(self, mean, variance, numbers):
        newest = T.maximum(1 / (self.steps + 1), self.weight)
        unbiased = variance * T.cast(numbers / (numbers - 1), variance.dtype)
        return [
            (self.mean, (1 - newest) * self.mean + newest * mean),
            (self.variance, (1 - newest) * self.variance + newest * unbiased),
            (self.steps, self.steps + 1),
        ]


class ConvLayer(lasagne.layers.Conv2DLayer):
    """A convolution without bias, which uses the options of Theano 1.0 to avoid copies.

    Lasagne 0.1 pads the images in a separate step and makes Theano flip the filters.
    """

    def __init__(self, incoming, filters, size, stride=1):
        weights = lasagne.init.HeNormal(gain="relu")
        super().__init__(incoming, filters, size, stride, pad=size // 2, W=weights, b=None)

    def get_output_for(self, input, **kwargs):
        return T.nnet.conv2d(
            input,
            self.W,
            self.input_shape,
            self.get_W_shape(),
            border_mode=self.pad,
            subsample=self.stride,
            filter_flip=False,
        )


def rectified(layer):
    return lasagne.layers.NonlinearityLayer(layer, lasagne.nonlinearities.rectify)


def build_bottleneck(layer, width, stride, norm=BatchNormLayer):
    """Build convolutions of 1x1 to `width` channels, 3x3, and 1x1 to ``4 * width``, plus the input."""
    residual = rectified(norm(ConvLayer(layer, width, 1, stride)))
    residual = rectified(norm(ConvLayer(residual, width, 3)))
    residual = norm(ConvLayer(residual, 4 * width, 1))
    if layer.output_shape != residual.output_shape:
        layer = norm(ConvLayer(layer, 4 * width, 1, stride))
    return rectified(lasagne.layers.ElemwiseSumLayer([layer, residual]))


def build_resnet(x, size, classes, blocks=(3, 4, 6, 3), width=64, norm=BatchNormLayer):
    """Build the residual network of He et al., "Deep residual learning for image recognition" (2015).

    Each number in `blocks` is the number of bottlenecks of a stage. A stage has half the resolution and
    twice the width of the stage before. The defaults give the network with 50 layers. Each batch
    normalization is ``norm(layer)``.
    """
    layer = lasagne.layers.InputLayer((None, 3, size, size), x)
    layer = rectified(norm(ConvLayer(layer, width, 7, stride=2)))
    layer = lasagne.layers.MaxPool2DLayer(layer, 3, stride=2, pad=1)
    for stage, length in enumerate(blocks):
        for block in range(length):
            stride = 2 if stage > 0 and block == 0 else 1
            layer = build_bottleneck(layer, width * 2**stage, stride, norm)
    layer = lasagne.layers.GlobalPoolLayer(layer)
    return lasagne.layers.DenseLayer(layer, classes, nonlinearity=lasagne.nonlinearities.softmax)


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
    network = build_resnet(pixels, options.size, options.classes, options.blocks, options.width, norm)
    cross_entropy = lasagne.objectives.categorical_crossentropy
    loss = cross_entropy(lasagne.layers.get_output(network), y).mean()
    prediction = lasagne.layers.get_output(network, deterministic=True)
    norms = [one for one in lasagne.layers.get_all_layers(network) if hasattr(one, "updates")]
    return Model(
        x=x,
        y=y,
        params=lasagne.layers.get_all_params(network, trainable=True),
        averages=lasagne.layers.get_all_params(network, running_average=True),
        loss=loss,
        average_updates=[update for norm in norms for update in norm.updates],
        valid_loss=cross_entropy(prediction, y).mean(),
        accuracy=T.eq(prediction.argmax(axis=1), y).mean(dtype=theano.config.floatX),
    )
