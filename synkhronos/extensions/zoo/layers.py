"""Layers that Lasagne 0.1 does not have, and convolutions without its copies.

All of them are ordinary layers of Lasagne, for images with channels on axis 1.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence, Tuple

import lasagne
import theano
import theano.tensor as tt

from synkhronos.extensions import batch_norm

Layer = Any  # of Lasagne, which has no types
Updates = Sequence[Tuple[Any, Any]]

_WEIGHTS = lasagne.init.HeNormal(gain="relu")  # the initial ones, by default


class BatchNormLayer(lasagne.layers.Layer):
    """Batch normalization: each channel with mean 0 and variance 1, then scaled and shifted.

    After S. Ioffe and C. Szegedy, "Batch Normalization", 2015 (arXiv:1502.03167). Training uses the mean
    and the variance of the current rows. These are the rank's own rows or a slice of them, so that no
    rank waits for the statistics of another one; or, if `synchronized`, the rows of all ranks or a slice
    of each, as if one process computed the whole minibatch. With ``deterministic=True`` the layer uses
    the running averages of both instead.

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
    **kwargs
        As for every layer: ``name``.

    Attributes
    ----------
    scale, shift : shared vectors
        The trainable parameters, often called gamma and beta.
    mean, variance, steps : shared vectors, shared scalar
        The running averages, tagged ``running_average``, and how many steps they have.
    updates : list of (shared variable, expression)
        The new running averages, of the latest output that was built for training.
    """

    def __init__(
        self,
        incoming: Any,
        weight: float = 0.1,
        epsilon: float = 1e-5,
        synchronized: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(incoming, **kwargs)
        self.weight, self.epsilon, self.synchronized = weight, epsilon, synchronized
        self.updates: Updates = []
        channels = self.input_shape[1:2]
        self.scale = self._param("scale", 1, channels)
        self.shift = self._param("shift", 0, channels)
        average = {"trainable": False, "running_average": True}
        self.mean = self._param("mean", 0, channels, **average)
        self.variance = self._param("variance", 1, channels, **average)
        self.steps = self._param("steps", 0, (), **average)

    def _param(self, name: str, value: float, shape: tuple[int, ...], **tags: bool) -> Any:
        initial = lasagne.init.Constant(value)
        return self.add_param(initial, shape, name, regularizable=False, **tags)

    def get_output_for(self, input: Any, deterministic: bool = False, **kwargs: Any) -> Any:
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
        scale = self.scale / tt.sqrt(variance + self.epsilon)
        return centred * scale.dimshuffle(pattern) + self.shift.dimshuffle(pattern)

    def _moments(self, input: Any, axes: list[int], pattern: list[Any]) -> tuple[Any, Any, Any]:
        """Return the mean, the variance, and how many numbers they are computed from."""
        if self.synchronized:
            return batch_norm.moments(input, axes)
        mean = input.mean(axes)
        variance = tt.sqr(input - mean.dimshuffle(pattern)).mean(axes)
        return mean, variance, input.size // input.shape[1]

    def _updates(self, mean: Any, variance: Any, numbers: Any) -> Updates:
        newest = tt.maximum(1 / (self.steps + 1), self.weight)
        unbiased = variance * tt.cast(numbers / (numbers - 1), variance.dtype)
        return [
            (self.mean, (1 - newest) * self.mean + newest * mean),
            (self.variance, (1 - newest) * self.variance + newest * unbiased),
            (self.steps, self.steps + 1),
        ]


class ConvLayer(lasagne.layers.Conv2DLayer):
    """A convolution that uses the options of Theano 1.0 to avoid copies, and that may be grouped.

    Lasagne 0.1 pads the images in a separate step and makes Theano flip the filters.

    Parameters
    ----------
    incoming : Layer or tuple
        Images: rows, channels, height, width.
    filters : int
        The number of channels of the output; a multiple of `groups`.
    size : int
        Height and width of a filter.
    stride : int
        The step between two positions of a filter.
    pad : int, optional
        Zeros around the image; by default ``size // 2``, which keeps the size if the stride is 1 and the
        filter is odd.
    groups : int
        Input and output channels are divided into as many groups, and each group of filters sees one
        group of channels (A. Krizhevsky et al., 2012).
    W, b : initializer, shared variable or array
        Weights of shape (filters, channels / groups, size, size), and biases; ``b=None`` for none.
    nonlinearity : callable, optional
        Applied to the output.
    **kwargs
        As for every layer: ``name``.

    Raises
    ------
    ValueError
        If `filters`, or the channels of the input, are no multiple of `groups`.
    """

    def __init__(
        self,
        incoming: Any,
        filters: int,
        size: int,
        stride: int = 1,
        pad: int | None = None,
        groups: int = 1,
        W: Any = None,
        b: Any = None,
        nonlinearity: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.groups = groups
        pad, W = size // 2 if pad is None else pad, _WEIGHTS if W is None else W
        options = {"W": W, "b": b, "nonlinearity": nonlinearity, **kwargs}
        super().__init__(incoming, filters, size, stride, pad, **options)

    def get_W_shape(self) -> tuple[int, ...]:  # noqa: N802  # Lasagne's name
        filters, channels, *size = super().get_W_shape()
        if filters % self.groups or channels % self.groups:
            raise ValueError(
                f"groups: expected a divisor of {channels} channels and {filters} filters, got "
                f"{self.groups}"
            )
        return (filters, channels // self.groups, *size)

    def get_output_for(self, input: Any, **kwargs: Any) -> Any:
        shapes = self.input_shape, self.get_W_shape()
        options = {"border_mode": self.pad, "subsample": self.stride, "num_groups": self.groups}
        output = tt.nnet.conv2d(input, self.W, *shapes, filter_flip=False, **options)
        return _activated(self, output)


class TransposedConvLayer(lasagne.layers.Layer):
    """A transposed convolution: the gradient of a convolution with respect to its input.

    Each number of the input multiplies a filter, and the output is the sum of these at distances of
    `stride` (V. Dumoulin and F. Visin, "A guide to convolution arithmetic for deep learning", 2016,
    arXiv:1603.07285, chapter 4). Its size is ``stride * (n - 1) + size - 2 * crop + extra`` for an input
    of size n.

    Parameters
    ----------
    incoming : Layer or tuple
        Images: rows, channels, height, width.
    filters : int
        The number of channels of the output.
    size, stride : int
        Height and width of a filter, and the distance between two of its positions in the output.
    crop : int, optional
        Lines that are removed at each border of the output; by default ``size // 2``.
    extra : int, optional
        Lines that are kept at the lower and right border all the same, less than `stride`. By default as
        many as make the output `stride` times as large as the input, if that is possible.
    W, b : initializer, shared variable or array
        Weights of shape (input channels, filters, size, size), and biases; ``b=None`` for none.
    nonlinearity : callable, optional
        Applied to the output.
    **kwargs
        As for every layer: ``name``.

    Raises
    ------
    ValueError
        If `crop` or `extra` are negative, `extra` is not less than `stride`, or nothing is left of the
        output.
    """

    def __init__(
        self,
        incoming: Any,
        filters: int,
        size: int,
        stride: int = 1,
        crop: int | None = None,
        extra: int | None = None,
        W: Any = None,
        b: Any = None,
        nonlinearity: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(incoming, **kwargs)
        self.filters, self.size, self.stride = filters, size, stride
        self.crop = size // 2 if crop is None else crop
        wanted = stride - size + 2 * self.crop  # makes the output `stride` times as large
        self.extra = min(max(wanted, 0), stride - 1) if extra is None else extra
        self.nonlinearity = nonlinearity or lasagne.nonlinearities.identity
        if self.crop < 0 or not 0 <= self.extra < stride:
            raise ValueError(
                f"expected a crop of 0 or more, and extra lines from 0 to {stride - 1}, fewer than the "
                f"stride, got {self.crop} and {self.extra}"
            )
        if min(self.output_shape[2:]) < 1:
            raise ValueError(
                f"expected an input from which a crop of {self.crop} leaves something, got "
                f"{self.input_shape}"
            )
        W = _WEIGHTS if W is None else W
        self.W = self.add_param(W, (self.input_shape[1], filters, size, size), "W")
        self.b = None if b is None else self.add_param(b, (filters,), "b", regularizable=False)

    def get_output_shape_for(self, input_shape: tuple[Any, ...]) -> tuple[Any, ...]:
        lost = 2 * self.crop - self.size - self.extra
        sides = [self.stride * (side - 1) - lost for side in input_shape[2:]]
        return (input_shape[0], self.filters, *sides)

    def get_output_for(self, input: Any, **kwargs: Any) -> Any:
        shapes = {
            "input_shape": (None, *self.output_shape[1:]),
            "filter_shape": (self.input_shape[1], self.filters, self.size, self.size),
        }
        options = {"border_mode": (self.crop, self.crop), "subsample": (self.stride, self.stride)}
        gradient = tt.nnet.abstract_conv.conv2d_grad_wrt_inputs
        output = gradient(input, self.W, filter_flip=False, **shapes, **options)
        return _activated(self, output)


def _activated(layer: Layer, output: Any) -> Any:
    """Add the biases of a layer for images, if it has any, and apply its nonlinearity."""
    if layer.b is not None:
        output = output + layer.b.dimshuffle("x", 0, "x", "x")
    return layer.nonlinearity(output)


class MaskLayer(lasagne.layers.Layer):
    """1 for each number that is not 0, and 0 for the others: where rows of words are not padding."""

    def get_output_for(self, input: Any, **kwargs: Any) -> Any:
        return tt.cast(tt.neq(input, 0), theano.config.floatX)


class MaskedMeanLayer(lasagne.layers.MergeLayer):
    """The mean over the times that a mask selects.

    Parameters
    ----------
    incoming : Layer
        Sequences: rows, times, features.
    mask : Layer
        Rows and times; 1 counts and 0 does not. A row without any 1 has the mean 0.
    """

    def __init__(self, incoming: Layer, mask: Layer, **kwargs: Any) -> None:
        super().__init__([incoming, mask], **kwargs)

    def get_output_shape_for(self, input_shapes: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
        rows, _, features = input_shapes[0]
        return (rows, features)

    def get_output_for(self, inputs: Sequence[Any], **kwargs: Any) -> Any:
        values, mask = inputs
        total = (values * mask.dimshuffle(0, 1, "x")).sum(axis=1)
        return total / tt.maximum(mask.sum(axis=1), 1).dimshuffle(0, "x")


def rectified(layer: Layer) -> Layer:
    """Return a layer of the positive parts of a layer's outputs."""
    return lasagne.layers.NonlinearityLayer(layer, lasagne.nonlinearities.rectify)


def scaled(number: int, width: float, multiple: int = 1) -> int:
    """Return a number of channels or units, times `width`, as a positive multiple of a number."""
    return max(1, round(number * width / multiple)) * multiple


def image_input(
    name: str, pixels: int, channels: int, input: Any = None, at_least: int = 1
) -> tuple[Any, Any]:
    """Return an input layer for square images, and its variable.

    Parameters
    ----------
    name : str
        Of the network, for errors.
    pixels, channels : int
        Height and width, and the number of colors.
    input : float tensor of 4 dimensions, optional
        An expression to be used instead of a new variable.
    at_least : int
        The fewest pixels of which the network leaves any.

    Raises
    ------
    ValueError
        If there are fewer pixels.
    """
    if pixels < at_least:
        raise ValueError(f"{name}: expected at least {at_least} pixels, got {pixels}")
    if input is None:
        input = tt.tensor4("images")
    return lasagne.layers.InputLayer((None, channels, pixels, pixels), input), input


def average_updates(network: Layer | Sequence[Layer]) -> list[tuple[Any, Any]]:
    """Return the updates of the running averages of all batch normalizations in a network.

    They belong to the latest output for training that was built.
    """
    layers = lasagne.layers.get_all_layers(network)
    return [pair for layer in layers if isinstance(layer, BatchNormLayer) for pair in layer.updates]


def count_params(network: Layer | Sequence[Layer]) -> int:
    """Return how many numbers the trainable parameters of a network have."""
    return int(lasagne.layers.count_params(network, trainable=True))
