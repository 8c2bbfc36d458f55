"""AlexNet, VGG16, GoogLeNet, residual networks, a small one for CIFAR-10, and an LSTM."""

from __future__ import annotations

from typing import Any, Callable, Sequence

import lasagne
import theano.tensor as tt
from lasagne import layers as _layers

from synkhronos.extensions.zoo import data
from synkhronos.extensions.zoo.layers import (
    BatchNormLayer,
    ConvLayer,
    Layer,
    MaskedMeanLayer,
    MaskLayer,
    image_input,
    rectified,
    scaled,
)
from synkhronos.extensions.zoo.model import Head, Model

_rectify, _softmax = lasagne.nonlinearities.rectify, lasagne.nonlinearities.softmax


#: How the papers train: the height and width of images, the rows of a minibatch, the epochs, the
#: learning rate, the epochs from which on it is lower, and the weight decay.
_COLUMNS = ("pixels", "batch_size", "n_epochs", "learning_rate", "lr_epochs", "weight_decay")
_TRAINING = {
    name: dict(zip(_COLUMNS, row))
    for name, row in {
        # The rate is lower three times, when the validation error stops improving.
        "AlexNet": (227, 128, 90, 0.01, (30, 60, 80), 5e-4),
        "VGG16": (224, 256, 74, 0.01, (20, 40, 60), 5e-4),  # three times in 74 epochs
        "GoogLeNet": (224, 32, 60, 0.01, tuple(range(8, 60, 8)), 2e-4),
        "ResNet50": (224, 256, 120, 0.1, (30, 60, 90), 1e-4),  # 600,000 minibatches
        "Cifar10CNN": (32, 100, 140, 0.001, (120, 130), 0.004),
    }.items()
}
#: VGG16, configuration D of the paper's table 1: how many convolutions of how many filters a stage has.
_VGG_STAGES = ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))
#: GoogLeNet, the paper's table 1, by stage: filters of 1x1; of 1x1 before 3x3, and of 3x3; of 1x1 before
#: 5x5, and of 5x5; and of 1x1 after the pooling.
_INCEPTION = {
    "3": {"a": (64, 96, 128, 16, 32, 32), "b": (128, 128, 192, 32, 96, 64)},
    "4": {
        "a": (192, 96, 208, 16, 48, 64),
        "b": (160, 112, 224, 24, 64, 64),
        "c": (128, 128, 256, 24, 64, 64),
        "d": (112, 144, 288, 32, 64, 64),
        "e": (256, 160, 320, 32, 128, 128),
    },
    "5": {"a": (256, 160, 320, 32, 128, 128), "b": (384, 192, 384, 48, 128, 128)},
}
_WITH_HEADS = ("inception_4a", "inception_4d")


def _same_pool(layer: Any) -> Any:
    """Take the maximum of windows of 3x3 at distances of 2: half the size, rounded up.

    The papers' frameworks let windows reach over the border. Padding gives the same sizes.
    """
    return _layers.MaxPool2DLayer(layer, 3, stride=2, pad=1)


def _average_pool(layer: Any) -> Any:
    """Take the mean of windows of 3x3 at distances of 2, of which the last may reach over the border."""
    mode = "average_exc_pad"
    return _layers.Pool2DLayer(layer, 3, stride=2, ignore_border=False, mode=mode)


def alexnet(
    pixels: int = 227, classes: int = 1000, width: float = 1.0, channels: int = 3, input: Any = None
) -> tuple[Layer, Any]:
    """Return the network of Krizhevsky et al. (2012), and its input.

    Five convolutions, of which the second, fourth and fifth have two groups, as in the paper, which
    trained one group on each of two GPUs; and three fully connected layers. 60,965,224 parameters; the
    paper says 60 million. The weights begin with a normal distribution with the paper's deviation,
    0.01, divided by the square root of `width`, which keeps the variance of the outputs.

    A. Krizhevsky, I. Sutskever and G. Hinton, "ImageNet Classification with Deep Convolutional Neural
    Networks", NIPS 2012.

    Parameters
    ----------
    pixels : int
        Height and width of an image, at least 67. The paper's 224 do not fit its own sizes; with 227
        they do.
    classes : int
        The number of outputs, which are probabilities.
    width : float
        A factor for the number of filters and of hidden units.
    channels : int
        The number of colors: 3, or 1 for gray.
    input : float tensor of 4 dimensions, optional
        An expression to be used as input; by default a new variable.

    Returns
    -------
    network : lasagne.layers.Layer
        The output layer.
    input : variable
        Images: rows, channels, height, width.
    """
    weights = lasagne.init.Normal(0.01 / width**0.5)

    def conv(layer: Layer, filters: int, size: int, bias: int, **options: int) -> Layer:
        filters = scaled(filters, width, multiple=2)
        initial = {"W": weights, "b": lasagne.init.Constant(bias)}
        return ConvLayer(layer, filters, size, nonlinearity=_rectify, **initial, **options)

    layer, input = image_input("alexnet", pixels, channels, input, at_least=67)
    layer = _layers.LocalResponseNormalization2DLayer(conv(layer, 96, 11, 0, stride=4, pad=0))
    layer = _layers.MaxPool2DLayer(layer, 3, stride=2)
    layer = _layers.LocalResponseNormalization2DLayer(conv(layer, 256, 5, 1, groups=2))
    layer = _layers.MaxPool2DLayer(layer, 3, stride=2)
    layer = conv(layer, 384, 3, 0)
    layer = conv(layer, 384, 3, 1, groups=2)
    layer = _layers.MaxPool2DLayer(conv(layer, 256, 3, 1, groups=2), 3, stride=2)
    for _ in range(2):
        units, bias = scaled(4096, width), lasagne.init.Constant(1)
        layer = _layers.DenseLayer(layer, units, W=weights, b=bias, nonlinearity=_rectify)
        layer = _layers.DropoutLayer(layer, 0.5)
    return _layers.DenseLayer(layer, classes, W=weights, nonlinearity=_softmax), input


class AlexNet(Model):
    """AlexNet with the paper's training: momentum 0.9, weight decay 0.0005, minibatches of 128."""

    defaults = _TRAINING["AlexNet"]
    network = staticmethod(alexnet)
    read = staticmethod(data.imagenet)


def vgg16(
    pixels: int = 224, classes: int = 1000, width: float = 1.0, channels: int = 3, input: Any = None
) -> tuple[Layer, Any]:
    """Return configuration D of Simonyan and Zisserman (2015), and its input.

    Thirteen convolutions of 3x3, and three fully connected layers. 138,357,544 parameters; the paper's
    table 2 says 138 million. The weights begin as X. Glorot and Y. Bengio (2010) propose, which the
    paper found to work without training a smaller network first.

    K. Simonyan and A. Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition",
    ICLR 2015 (arXiv:1409.1556).

    Parameters
    ----------
    pixels : int
        Height and width of an image, at least 32.
    classes, width, channels, input
        As for :func:`~synkhronos.extensions.zoo.networks.alexnet`.

    Returns
    -------
    network : lasagne.layers.Layer
        The output layer.
    input : variable
        Images: rows, channels, height, width.
    """
    weights, bias = lasagne.init.GlorotUniform(gain="relu"), lasagne.init.Constant(0)
    layer, input = image_input("vgg16", pixels, channels, input, at_least=32)
    for length, filters in _VGG_STAGES:
        for _ in range(length):
            layer = ConvLayer(layer, scaled(filters, width), 3, W=weights, b=bias, nonlinearity=_rectify)
        layer = _layers.MaxPool2DLayer(layer, 2)
    for _ in range(2):
        layer = _layers.DenseLayer(layer, scaled(4096, width), W=weights, nonlinearity=_rectify)
        layer = _layers.DropoutLayer(layer, 0.5)
    return _layers.DenseLayer(layer, classes, nonlinearity=_softmax), input


class VGG16(Model):
    """VGG16 with the paper's training: momentum 0.9, weight decay 0.0005, minibatches of 256."""

    defaults = _TRAINING["VGG16"]
    network = staticmethod(vgg16)
    read = staticmethod(data.imagenet)


def googlenet(
    pixels: int = 224, classes: int = 1000, width: float = 1.0, channels: int = 3, input: Any = None
) -> tuple[Layer, Any]:
    """Return the network of Szegedy et al. (2015), without auxiliary classifiers, and its input.

    22 layers with parameters, in nine Inception modules. 6,998,552 parameters, with biases: the network
    of the paper's table 1 as Caffe's model ``bvlc_googlenet`` has it. (The table's own column adds up to
    about 6.8 million.) The two auxiliary classifiers are built by :func:`auxiliary_heads`.

    C. Szegedy et al., "Going Deeper with Convolutions", CVPR 2015 (arXiv:1409.4842).

    Parameters
    ----------
    pixels : int
        Height and width of an image, at least 32.
    classes, width, channels, input
        As for :func:`~synkhronos.extensions.zoo.networks.alexnet`.

    Returns
    -------
    network : lasagne.layers.Layer
        The output layer. The layers of the Inception modules' outputs have names: ``inception_3a`` to
        ``inception_5b``.
    input : variable
        Images: rows, channels, height, width.
    """
    layer, input = image_input("googlenet", pixels, channels, input, at_least=32)
    layer = _same_pool(_conv(layer, scaled(64, width), 7, stride=2))
    layer = _conv(_layers.LocalResponseNormalization2DLayer(layer), scaled(64, width), 1)
    layer = _layers.LocalResponseNormalization2DLayer(_conv(layer, scaled(192, width), 3))
    for stage, modules in _INCEPTION.items():
        layer = _same_pool(layer)
        for letter, filters in modules.items():
            numbers = [scaled(number, width) for number in filters]
            layer = _inception(layer, numbers, f"inception_{stage}{letter}")
    layer = _layers.DropoutLayer(_layers.GlobalPoolLayer(layer), 0.4)
    weights = lasagne.init.GlorotUniform()
    return _layers.DenseLayer(layer, classes, W=weights, nonlinearity=_softmax), input


def auxiliary_heads(network: Layer, classes: int = 1000, width: float = 1.0) -> list[Layer]:
    """Return the two auxiliary classifiers of GoogLeNet, which are only used for training.

    They see the outputs of the modules 4a and 4d. Their losses count 0.3 in the loss of the whole.
    6,379,728 parameters at full width and 224 pixels.

    Parameters
    ----------
    network : lasagne.layers.Layer
        From :func:`googlenet`, for at least 65 pixels.
    classes, width
        As given to :func:`googlenet`.

    Returns
    -------
    list of lasagne.layers.Layer
        The output layer of each.

    Raises
    ------
    ValueError
        If the images are too small for the pooling of 5x5.
    """
    heads = []
    for layer in _layers.get_all_layers(network):
        if layer.name in _WITH_HEADS:
            if layer.output_shape[2] < 5:
                raise ValueError(
                    f"auxiliary_heads: expected images of at least 65 pixels, which leave 5 of "
                    f"{layer.name}, got {layer.output_shape[2]} there"
                )
            head = _layers.Pool2DLayer(layer, 5, stride=3, mode="average_exc_pad")
            head = _conv(head, scaled(128, width), 1)
            head = _layers.DenseLayer(head, scaled(1024, width), nonlinearity=_rectify)
            head = _layers.DropoutLayer(head, 0.7)
            heads.append(_layers.DenseLayer(head, classes, nonlinearity=_softmax))
    return heads


def _conv(layer: Layer, filters: int, size: int, stride: int = 1) -> Layer:
    bias = lasagne.init.Constant(0.2)
    return ConvLayer(layer, filters, size, stride, b=bias, nonlinearity=_rectify)


def _inception(layer: Layer, filters: Sequence[int], name: str) -> Layer:
    direct, reduced_3, filters_3, reduced_5, filters_5, pooled = filters
    branches = [
        _conv(layer, direct, 1),
        _conv(_conv(layer, reduced_3, 1), filters_3, 3),
        _conv(_conv(layer, reduced_5, 1), filters_5, 5),
        _conv(_layers.MaxPool2DLayer(layer, 3, stride=1, pad=1), pooled, 1),
    ]
    return _layers.ConcatLayer(branches, name=name)


class GoogLeNet(Model):
    """GoogLeNet, with the paper's momentum of 0.9 and a rate that falls by 4% every 8 epochs.

    With ``heads=True``, which needs 65 pixels, the auxiliary classifiers are trained, too.
    """

    defaults = {**_TRAINING["GoogLeNet"], "lr_factor": 0.96, "heads": False}
    network = staticmethod(googlenet)
    read = staticmethod(data.imagenet)

    def heads_of(self, network: Layer) -> list[Head]:
        if not self.options["heads"]:
            return []
        built = auxiliary_heads(network, self.options["classes"], self.options["width"])
        return [Head(layer, 0.3) for layer in built]


def resnet(
    pixels: int = 224,
    classes: int = 1000,
    width: float = 1.0,
    channels: int = 3,
    input: Any = None,
    blocks: Sequence[int] = (3, 4, 6, 3),
    norm: Callable[[Layer], Layer] = BatchNormLayer,
) -> tuple[Layer, Any]:
    """Return a residual network of bottlenecks, and its input.

    A stage has half the resolution and twice the width of the stage before. The first convolution of a
    stage has the stride, as in the paper.

    K. He, X. Zhang, S. Ren and J. Sun, "Deep Residual Learning for Image Recognition", CVPR 2016
    (arXiv:1512.03385).

    Parameters
    ----------
    pixels : int
        Height and width of an image, at least 1.
    classes, width, channels, input
        As for :func:`~synkhronos.extensions.zoo.networks.alexnet`.
    blocks : sequence of int
        The number of bottlenecks of each stage: the network has ``2 + 3 * sum(blocks)`` layers.
    norm : callable
        ``norm(layer)`` adds a batch normalization.

    Returns
    -------
    network : lasagne.layers.Layer
        The output layer.
    input : variable
        Images: rows, channels, height, width.
    """
    filters = scaled(64, width)
    layer, input = image_input("resnet", pixels, channels, input)
    layer = _same_pool(rectified(norm(ConvLayer(layer, filters, 7, stride=2))))
    for stage, length in enumerate(blocks):
        for block in range(length):
            stride = 2 if stage > 0 and block == 0 else 1
            layer = bottleneck(layer, filters * 2**stage, stride, norm)
    layer = _layers.GlobalPoolLayer(layer)
    return _layers.DenseLayer(layer, classes, nonlinearity=_softmax), input


def bottleneck(
    layer: Layer, width: int, stride: int, norm: Callable[[Layer], Layer] = BatchNormLayer
) -> Layer:
    """Return convolutions of 1x1 to `width` channels, 3x3, and 1x1 to ``4 * width``, plus the input."""
    residual = rectified(norm(ConvLayer(layer, width, 1, stride)))
    residual = rectified(norm(ConvLayer(residual, width, 3)))
    residual = norm(ConvLayer(residual, 4 * width, 1))
    if layer.output_shape != residual.output_shape:
        layer = norm(ConvLayer(layer, 4 * width, 1, stride))
    return rectified(_layers.ElemwiseSumLayer([layer, residual]))


def resnet50(
    pixels: int = 224, classes: int = 1000, width: float = 1.0, **options: Any
) -> tuple[Layer, Any]:
    """Return the :func:`resnet` with 50 layers, and its input; the other arguments are the same.

    25,557,032 trainable parameters, as torchvision's ``resnet50`` has: with the scale and the shift of
    each batch normalization, and without its running averages.
    """
    return resnet(pixels, classes, width, blocks=(3, 4, 6, 3), **options)


def resnet152(
    pixels: int = 224, classes: int = 1000, width: float = 1.0, **options: Any
) -> tuple[Layer, Any]:
    """Return the :func:`resnet` with 152 layers, and its input; the other arguments are the same.

    60,192,808 trainable parameters, as torchvision's ``resnet152`` has: with the scale and the shift of
    each batch normalization, and without its running averages.
    """
    return resnet(pixels, classes, width, blocks=(3, 8, 36, 3), **options)


class ResNet50(Model):
    """ResNet-50 with the paper's training: momentum 0.9, weight decay 0.0001, minibatches of 256."""

    defaults = _TRAINING["ResNet50"]
    network = staticmethod(resnet50)
    read = staticmethod(data.imagenet)


class ResNet152(ResNet50):
    """ResNet-152, with the training of :class:`ResNet50`."""

    network = staticmethod(resnet152)


def cifar10_cnn(
    pixels: int = 32, classes: int = 10, width: float = 1.0, channels: int = 3, input: Any = None
) -> tuple[Layer, Any]:
    """Return the network of cuda-convnet for CIFAR-10, with an error of 18%, and its input.

    Three convolutions of 5x5, one maximum pooling and two average poolings. 89,578 parameters, as in
    Caffe's ``cifar10_full``, which has this network. Responses are normalized across channels, as in
    AlexNet, instead of over positions.

    A. Krizhevsky, "cuda-convnet", ``layers-18pct.cfg``, 2011,
    https://code.google.com/archive/p/cuda-convnet/.

    Parameters
    ----------
    pixels : int
        Height and width of an image, at least 8.
    classes, width, channels, input
        As for :func:`~synkhronos.extensions.zoo.networks.alexnet`.

    Returns
    -------
    network : lasagne.layers.Layer
        The output layer.
    input : variable
        Images: rows, channels, height, width.
    """

    def conv(layer: Layer, filters: int, deviation: float) -> Layer:
        # As in alexnet(), outputs have the same variance at every width.
        weights = lasagne.init.Normal(deviation / width**0.5)
        return ConvLayer(layer, scaled(filters, width), 5, W=weights, b=lasagne.init.Constant(0))

    layer, input = image_input("cifar10_cnn", pixels, channels, input, at_least=8)
    # The original has 0.0001 for pixels with a deviation of about 64, which is 1 here.
    layer = rectified(_same_pool(conv(layer, 32, 0.0064 * width**0.5)))
    layer = _layers.LocalResponseNormalization2DLayer(layer, alpha=5e-5, k=1, n=3)
    layer = _average_pool(rectified(conv(layer, 32, 0.01)))
    layer = _layers.LocalResponseNormalization2DLayer(layer, alpha=5e-5, k=1, n=3)
    layer = _average_pool(rectified(conv(layer, 64, 0.01)))
    weights = lasagne.init.Normal(0.01 / width**0.5)
    return _layers.DenseLayer(layer, classes, W=weights, nonlinearity=_softmax), input


class Cifar10CNN(Model):
    """The network of cuda-convnet with its training: momentum 0.9, rate 0.001, minibatches of 100."""

    defaults = _TRAINING["Cifar10CNN"]
    network = staticmethod(cifar10_cnn)
    read = staticmethod(data.cifar10)


def lstm(
    pixels: int | None = None,
    classes: int = 2,
    width: float = 1.0,
    channels: int = 1,
    input: Any = None,
    words: int = 10_000,
) -> tuple[Layer, Any]:
    """Return the network of the Deep Learning Tutorials for the sentiment of reviews, and its input.

    A vector for each word, LSTM cells without peepholes, the mean of their outputs over the words, and a
    softmax. 1,411,842 parameters with 10,000 words and 128 cells, as in the tutorial. With `pixels`, the
    cells read the rows of an image instead, from the top.

    P. L. Carrier and K. Cho, "LSTM Networks for Sentiment Analysis",
    http://deeplearning.net/tutorial/lstm.html; the cells are those of S. Hochreiter and J. Schmidhuber,
    "Long Short-Term Memory", 1997, with the forget gate of F. Gers et al., 2000.

    Parameters
    ----------
    pixels : int, optional
        Height and width of an image; by default the input are reviews.
    classes : int
        The number of outputs, which are probabilities.
    width : float
        A factor for the 128 cells.
    channels : int
        With `pixels`: the number of colors.
    input : tensor, optional
        An expression to be used as input; by default a new variable.
    words : int
        Without `pixels`: how many numbers of words there are. 0 is padding.

    Returns
    -------
    network : lasagne.layers.Layer
        The output layer.
    input : variable
        int32 numbers of words: rows, times; or images: rows, channels, height, width.
    """
    cells = scaled(128, width)
    if pixels is None:
        input = tt.imatrix("words") if input is None else input
        layer = _layers.InputLayer((None, None), input)
        mask = MaskLayer(layer)
        vectors = _layers.EmbeddingLayer(layer, words, cells, W=lasagne.init.Uniform(0.01))
        outputs = MaskedMeanLayer(_cells(vectors, cells, mask), mask)
    else:
        layer, input = image_input("lstm", pixels, channels, input)
        layer = _layers.DimshuffleLayer(layer, (0, 2, 1, 3))  # the height is the time
        outputs = _cells(_layers.ReshapeLayer(layer, ([0], pixels, channels * pixels)), cells)
        outputs = _layers.SliceLayer(outputs, -1, axis=1)
    return _layers.DenseLayer(outputs, classes, nonlinearity=lasagne.nonlinearities.softmax), input


def _cells(layer: Layer, cells: int, mask: Layer | None = None) -> Layer:
    sigmoid, tanh = lasagne.nonlinearities.sigmoid, lasagne.nonlinearities.tanh
    gate, candidate, forget = (
        _layers.Gate(W_in=lasagne.init.Orthogonal(), W_hid=lasagne.init.Orthogonal(), W_cell=None,
                     nonlinearity=item, b=lasagne.init.Constant(bias))
        for item, bias in ((sigmoid, 0), (tanh, 0), (sigmoid, 1))  # at first, nothing is forgotten
    )  # fmt: skip
    return _layers.LSTMLayer(
        layer, cells, gate, forget, candidate, gate, peepholes=False, mask_input=mask
    )


class LSTM(Model):
    """The LSTM with Adam, on reviews in the folder `folder`, or on the rows of digits without it.

    The options ``words`` and ``length`` are the size of the vocabulary, and the most words of a review
    that are read.
    """

    defaults = {
        "pixels": None, "batch_size": 16, "n_epochs": 100, "update_rule": "adam", "learning_rate": 0.001,
        "lr_epochs": (), "words": 10_000, "length": 100,
    }  # fmt: skip
    network = staticmethod(lstm)

    def read_data(self) -> data.DataSet:
        """Return the reviews in a folder, or else scikit-learn's digits."""
        if self.options["folder"] is None:
            return data.digits()
        return data.reviews(self.options["folder"], self.options["words"], self.options["length"])

    def network_options(self) -> dict[str, Any]:
        options = super().network_options()
        if self.dataset.channels is None:
            return {**options, "pixels": None, "channels": 1, "words": self.dataset.n_words}
        return {**options, "pixels": options["pixels"] or self.dataset.pixels}
