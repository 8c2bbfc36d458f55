"""``theanompi.models.layers2``: a light library of layers, as models of Theano-MPI use them.

A layer is built on another one, or on a variable and its `input_shape`. It has ``output``, a variable,
and ``output_shape``, and, if it is trained, ``params`` and ``weight_type``. Images are in the order of
batch, channels, height, width (bc01), except in `Subtract`, `Crop`, `LRN` and `ConvPoolLRN`, whose order
is channels, height, width, batch (c01b).

`rng` draws initial weights. It has the same seed on every rank, so all begin with the same weights, and
a model may replace it. With ``printinfo=True`` a layer writes a line with its shapes.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any, Callable, Sequence

import numpy as np
import theano
import theano.tensor as tt
from theano.sandbox.rng_mrg import MRG_RandomStreams
from theano.tensor.signal.pool import pool_2d

__all__ = [
    "Constant", "Conv", "ConvPoolLRN", "Crop", "CrossChannelNormalization", "Dimshuffle", "Dropout",
    "FC", "Flatten", "GlorotNormal", "GlorotUniform", "HeNormal", "HeUniform", "LRN", "Layer", "Normal",
    "Pool", "Softmax", "Subtract", "Uniform", "Weight", "count_params", "get_layers", "get_params",
]  # fmt: skip

Shape = Sequence[int]
Variable = Any  # of Theano, which has no types

rng = np.random.RandomState(23455)


# Weights


class Weight:
    """A parameter with its initial value.

    Attributes
    ----------
    val : shared variable
        The parameter.
    shape : tuple of int
        Its shape.
    np_values : numpy.ndarray
        The initial value, or the value that was loaded last.
    """

    def __init__(self, shape: Shape, value: Any) -> None:
        self.shape = tuple(int(extent) for extent in shape)
        self.np_values = np.asarray(np.broadcast_to(value, self.shape), theano.config.floatX).copy()
        self.val = theano.shared(self.np_values)

    def save_weight(self, dir: str, name: str) -> None:
        """Write the value to ``<dir><name>.npy``; `dir` ends with a slash."""
        np.save(f"{dir}{name}.npy", self.val.get_value())

    def load_weight(self, dir: str, name: str) -> None:
        """Read the value that `save_weight` has written.

        Raises
        ------
        ValueError
            If it has another shape.
        """
        value = np.load(f"{dir}{name}.npy")
        if value.shape != self.shape:
            raise ValueError(f"load_weight: {name}: expected the shape {self.shape}, got {value.shape}")
        self.np_values = value.astype(self.val.dtype)
        self.val.set_value(self.np_values)


class Constant(Weight):
    """One number everywhere."""

    def __init__(self, shape: Shape, val: float = 0) -> None:
        super().__init__(shape, val)


class Normal(Weight):
    """A normal distribution."""

    def __init__(self, shape: Shape, mean: float = 0, std: float = 0.01) -> None:
        super().__init__(shape, rng.normal(mean, std, shape))


class Uniform(Weight):
    """A uniform distribution."""

    def __init__(self, shape: Shape, low: float, high: float) -> None:
        super().__init__(shape, rng.uniform(low, high, shape))


def _fans(shape: Shape) -> tuple[int, int]:
    """Return how many inputs a unit has, and how many outputs an input has, by Theano-MPI's count.

    A matrix counts as (outputs, inputs), as filters do.
    """
    if len(shape) not in (2, 4):
        raise ValueError(f"expected a shape of 2 or 4 axes, got {tuple(shape)}")
    field = int(np.prod(shape[2:]))
    return shape[1] * field, shape[0] * field


class GlorotNormal(Weight):
    r"""A normal distribution whose deviation is the limit of `GlorotUniform`, as in Theano-MPI.

    The paper has :math:`\sqrt 2` in place of :math:`\sqrt 6`.
    """

    def __init__(self, shape: Shape, gain: float = 2**0.5) -> None:
        super().__init__(shape, rng.normal(0, gain * (6 / sum(_fans(shape))) ** 0.5, shape))


class GlorotUniform(Weight):
    r"""Uniform up to :math:`g \sqrt{6 / (n_{in} + n_{out})}` (Glorot and Bengio, 2010)."""

    def __init__(self, shape: Shape, gain: float = 2**0.5) -> None:
        limit = gain * (6 / sum(_fans(shape))) ** 0.5
        super().__init__(shape, rng.uniform(-limit, limit, shape))


class HeNormal(Weight):
    r"""A normal distribution whose deviation is the limit of `HeUniform`, as in Theano-MPI.

    The paper has 1 in place of :math:`\sqrt 3`.
    """

    def __init__(self, shape: Shape, gain: float = 2**0.5) -> None:
        super().__init__(shape, rng.normal(0, gain * (3 / _fans(shape)[0]) ** 0.5, shape))


class HeUniform(Weight):
    r"""Uniform up to :math:`g \sqrt{3 / n_{in}}` (He et al., 2015)."""

    def __init__(self, shape: Shape, gain: float = 2**0.5) -> None:
        limit = gain * (3 / _fans(shape)[0]) ** 0.5
        super().__init__(shape, rng.uniform(-limit, limit, shape))


# Layers


class Layer:
    """The base class of layers, with the parameters that most layers take after those of their own.

    Parameters
    ----------
    input : Layer or variable
        What the layer is built on.
    printinfo : bool, default: True
        Whether to write a line with the shapes.
    input_shape : tuple of int, optional
        The shape of a variable. That of a layer is known.
    output_shape : tuple of int, optional
        By default it follows from the others.

    Attributes
    ----------
    input_layer : Layer
        The layer below; only if `input` is one.
    input, output : variable
    input_shape, output_shape : tuple of int
    params : list of shared variable
        Only if the layer is trained.
    weight_type : list of str
        ``"W"`` for weights, or ``"b"`` for biases, for each parameter.
    """

    input_layer: Layer
    output: Variable
    output_shape: tuple[int, ...]
    name = "Layer"

    def __init__(
        self,
        input: Any,
        printinfo: bool = True,
        input_shape: Shape | None = None,
        output_shape: Shape | None = None,
    ) -> None:
        self._printinfo, self._output_shape = printinfo, output_shape
        if hasattr(input, "output"):
            self.input_layer = input
            self.input, shape = input.output, input.output_shape
        elif input_shape is not None:
            self.input, shape = input, input_shape
        else:
            raise AttributeError(
                f"{type(self).__name__}: input: expected a layer, or a variable and its input_shape, "
                f"got {input!r}"
            )
        self.input_shape = tuple(int(extent) for extent in shape)

    def _finish(self, shape: Shape, name: str) -> None:
        """Set the shape of the output, unless it is given, and write a line if `printinfo` is true."""
        given = shape if self._output_shape is None else self._output_shape
        self.output_shape, self.name = tuple(int(extent) for extent in given), name
        if self._printinfo:
            self.print_shape()

    def _train(self, *pairs: tuple[Weight, Weight]) -> None:
        """Set the parameters: pairs of weights and biases."""
        self.params = [weight.val for pair in pairs for weight in pair]
        self.weight_type = ["W", "b"] * len(pairs)

    def print_shape(self) -> None:
        """Write the name and the shapes."""
        sys.stdout.write(f"Layer {self.name}\t in {self.input_shape} --> out {self.output_shape}\n")


class Subtract(Layer):
    """Subtracts an image, such as the mean of all, from each image (c01b).

    Parameters
    ----------
    input : Layer or variable
    subtract_arr : numpy.ndarray
        Of shape (channels, height, width, 1).
    *shapes, **layout
        As for `Layer`, as in the other layers.
    """

    def __init__(self, input: Any, subtract_arr: np.ndarray, *shapes: Any, **layout: Any) -> None:
        super().__init__(input, *shapes, **layout)
        if subtract_arr.shape != (*self.input_shape[:3], 1):
            raise ValueError(
                f"Subtract: subtract_arr: expected the shape {(*self.input_shape[:3], 1)}, got "
                f"{subtract_arr.shape}"
            )
        value = subtract_arr.astype(theano.config.floatX)
        self.sub_arr = theano.shared(value, broadcastable=(False, False, False, True))
        self.output = self.input - self.sub_arr
        self._finish(self.input_shape, "Subtract")


class Crop(Layer):
    """Cuts a random part out of images, and mirrors half of them (c01b). Switched off, the middle.

    Parameters
    ----------
    input : Layer or variable
    output_shape : tuple of int
        (channels, height, width, batch). Height and width are equal.
    input_shape : tuple of int, optional
    flag_batch : bool
        Whether one choice is made for a whole batch, and not for each image.
    printinfo : bool
    """

    layers: weakref.WeakSet[Crop] = weakref.WeakSet()

    def __init__(
        self,
        input: Any,
        output_shape: Shape,
        input_shape: Shape | None = None,
        flag_batch: bool = False,
        printinfo: bool = True,
    ) -> None:
        super().__init__(input, printinfo, input_shape)
        size, margin = int(output_shape[2]), (self.input_shape[2] - int(output_shape[2])) // 2
        if margin < 0:
            raise ValueError(
                f"Crop: output_shape: expected at most the images' {self.input_shape}, got "
                f"{output_shape}"
            )
        self.flag_on = theano.shared(np.asarray(1, theano.config.floatX))
        self.output = cut(self.input, self.input_shape, size, margin, self.flag_on, flag_batch)
        Crop.layers.add(self)
        self._finish(output_shape, "Crop")

    @staticmethod
    def SetRandCropOn() -> None:  # noqa: N802  # Theano-MPI's name
        """Let all layers cut at random."""
        _switch(Crop.layers, 1)

    @staticmethod
    def SetRandCropOff() -> None:  # noqa: N802
        """Let all layers cut out the middle."""
        _switch(Crop.layers, 0)


def _switch(layers: weakref.WeakSet[Any], value: float) -> None:
    for layer in layers:
        layer.flag_on.set_value(np.asarray(value, theano.config.floatX))


class Conv(Layer):
    """A convolution with rectified output (bc01).

    Parameters
    ----------
    input : Layer or variable
    convstride, padsize : int
    b : Weight
        Of shape (filters,).
    W : Weight, optional
        Of shape (filters, channels, height, width); by default normal with the deviation 0.1, of the
        shape `filter_shape`.
    filter_shape : tuple of int, optional
        The shape of `W`.
    lib_conv : str
        Accepted; Theano chooses the implementation.
    *shapes, **layout
    """

    def __init__(
        self,
        input: Any,
        convstride: int,
        padsize: Any,
        b: Weight,
        W: Weight | None = None,
        filter_shape: Shape | None = None,
        lib_conv: str = "cudnn",
        *shapes: Any,
        **layout: Any,
    ) -> None:
        super().__init__(input, *shapes, **layout)
        if W is None and filter_shape is None:
            raise AttributeError("Conv: expected W or filter_shape, got neither")
        self.W, self.b = W or Normal(filter_shape or (), std=0.1), b
        if filter_shape is not None and tuple(filter_shape) != self.W.shape:
            raise ValueError(f"Conv: W: expected the shape {tuple(filter_shape)}, got {self.W.shape}")
        self.filter_shape, self.convstride, self.padsize = self.W.shape, convstride, padsize
        self.output = convolution(self.input, self.W.val, b.val, convstride, padsize)
        self._train((self.W, b))
        sides = sides_of(self.input_shape[2:], self.W.shape[2:], convstride, padsize)
        shape = (self.input_shape[0], self.W.shape[0], *sides)
        self._finish(shape, f"Conv ({lib_conv})")


class Pool(Layer):
    """The largest value, or the mean, in windows (bc01).

    Parameters
    ----------
    input : Layer or variable
    poolsize, poolstride, poolpad : int
    mode : {"max", "sum", "average_inc_pad", "average_exc_pad"}
    *shapes, **layout
    """

    def __init__(
        self,
        input: Any,
        poolsize: int,
        poolstride: int,
        poolpad: int,
        mode: str = "max",
        *shapes: Any,
        **layout: Any,
    ) -> None:
        super().__init__(input, *shapes, **layout)
        self.poolsize, self.poolstride, self.poolpad = poolsize, poolstride, poolpad
        shape, window = self.input_shape, (poolsize, poolsize)
        self.output = self.input
        if poolsize != 1:
            stride, pad = (poolstride, poolstride), (poolpad, poolpad)
            self.output = pool_2d(self.input, window, True, stride=stride, pad=pad, mode=mode)
            shape = (*shape[:2], *sides_of(shape[2:], window, poolstride, poolpad))
        self._finish(shape, "Pool")


class LRN(Layer):
    """`CrossChannelNormalization` with its defaults (c01b).

    Parameters
    ----------
    input : Layer or variable
    input_shape : tuple of int, optional
    printinfo : bool
    """

    def __init__(self, input: Any, input_shape: Shape | None = None, printinfo: bool = True) -> None:
        super().__init__(input, printinfo, input_shape)
        self.lrn_func: Callable[[Variable], Variable] = CrossChannelNormalization()
        self.output = self.lrn_func(self.input)
        self._finish(self.input_shape, "LRN")


class ConvPoolLRN(Layer):
    """A convolution with rectified output, then a pooling and a normalization (c01b).

    With two groups, each half of the filters sees half of the channels.

    Parameters
    ----------
    input : Layer or variable
    convstride, padsize, poolsize, poolstride : int
        No pooling if `poolsize` is 1.
    group : {1, 2}
    b : float
        The initial value of the biases.
    W : None
        Accepted; the weights are normal with the deviation 0.01.
    filter_shape : tuple of int
        (channels, height, width, filters), of both groups together.
    poolpad : int
    mode : str
        As in `Pool`.
    lrn : bool
        Whether to normalize.
    lib_conv : str
        Accepted; Theano chooses the implementation.
    *shapes, **layout
    """

    def __init__(
        self,
        input: Any,
        convstride: int,
        padsize: Any,
        poolsize: int,
        poolstride: int,
        group: int,
        b: float,
        W: Any = None,
        filter_shape: Shape | None = None,
        poolpad: int = 0,
        mode: str = "max",
        lrn: bool = False,
        lib_conv: str = "cudnn",
        *shapes: Any,
        **layout: Any,
    ) -> None:
        super().__init__(input, *shapes, **layout)
        if filter_shape is None or group not in (1, 2):
            raise AttributeError(
                f"ConvPoolLRN: expected filter_shape, and group 1 or 2, got {filter_shape} and {group}"
            )
        channels, height, width, filters = (int(extent) for extent in filter_shape)
        self.filter_shape = (channels // group, height, width, filters // group)
        pairs = [(Normal(self.filter_shape), Constant(self.filter_shape[3:], b)) for _ in range(group)]
        if group == 1:
            ((self.W, self.b),) = pairs
        else:
            (self.W0, self.b0), (self.W1, self.b1) = pairs
        self._train(*pairs)
        W_of_all = tt.concatenate([item.val.dimshuffle(3, 0, 1, 2) for item, _ in pairs], axis=0)
        b_of_all = tt.concatenate([item.val for _, item in pairs])
        images = self.input.dimshuffle(3, 0, 1, 2)
        output = convolution(images, W_of_all, b_of_all, convstride, padsize, group)
        sides = sides_of(self.input_shape[1:3], (height, width), convstride, padsize)
        batch = self.input_shape[3]
        told = {"printinfo": False, "input_shape": (batch, filters, *sides)}
        pool = Pool(output, poolsize, poolstride, poolpad, mode, **told)
        self.output = pool.output.dimshuffle(1, 2, 3, 0)
        if lrn:
            self.output = CrossChannelNormalization()(self.output)
        shape = (filters, *pool.output_shape[2:], batch)
        self._finish(shape, f"ConvPoolLRN({lib_conv})")


class Dimshuffle(Layer):
    """The axes in another order.

    Parameters
    ----------
    input : Layer or variable
    new_axis_order : tuple of int
    *shapes, **layout
    """

    def __init__(self, input: Any, new_axis_order: Sequence[int], *shapes: Any, **layout: Any) -> None:
        super().__init__(input, *shapes, **layout)
        self.output = self.input.dimshuffle(*new_axis_order)
        shape = [self.input_shape[axis] for axis in new_axis_order]
        self._finish(shape, "Dimshuffle")


class Flatten(Layer):
    """The last axes as one.

    Parameters
    ----------
    input : Layer or variable
    axis : int
        The number of axes of the output.
    *shapes, **layout
    """

    def __init__(self, input: Any, axis: int, *shapes: Any, **layout: Any) -> None:
        super().__init__(input, *shapes, **layout)
        self.output = tt.flatten(self.input, axis)
        shape = (*self.input_shape[: axis - 1], int(np.prod(self.input_shape[axis - 1 :])))
        self._finish(shape, "Flatten")


class Dropout(Layer):
    """Sets numbers to 0 at random. Switched off, it scales all by the probability to keep one.

    Parameters
    ----------
    input : Layer or variable
    n_out : int
        Accepted; the output has the shape of the input.
    prob_drop : float
    *shapes, **layout
    """

    layers: weakref.WeakSet[Dropout] = weakref.WeakSet()

    def __init__(
        self,
        input: Any,
        n_out: int,
        prob_drop: float = 0.5,
        printinfo: bool = True,
        *shapes: Any,
        **layout: Any,
    ) -> None:
        super().__init__(input, printinfo, *shapes, **layout)
        self.prob_drop, self.prob_keep = prob_drop, 1 - prob_drop
        self.flag_on = theano.shared(np.asarray(1, theano.config.floatX))
        self.mask = streams.binomial(size=self.input.shape, p=self.prob_keep, dtype=theano.config.floatX)
        keep = np.asarray(self.prob_keep, theano.config.floatX)
        self.output = self.input * tt.switch(self.flag_on > 0, self.mask, keep)
        Dropout.layers.add(self)
        self._finish(self.input_shape, f"Dropout{prob_drop}")

    @staticmethod
    def SetDropoutOn() -> None:  # noqa: N802
        """Let all layers drop numbers, for training."""
        _switch(Dropout.layers, 1)

    @staticmethod
    def SetDropoutOff() -> None:  # noqa: N802
        """Let no layer drop numbers, for validation."""
        _switch(Dropout.layers, 0)


class _Dense(Layer):
    """A layer whose units see all inputs."""

    _std, _bias = 0.01, 0.0

    def __init__(
        self,
        input: Any,
        n_out: int,
        W: Weight | None = None,
        b: Weight | None = None,
        *shapes: Any,
        **layout: Any,
    ) -> None:
        super().__init__(input, *shapes, **layout)
        if W is None or b is None:
            W, b = Normal((self.input_shape[-1], n_out), std=self._std), Constant((n_out,), self._bias)
        self.W, self.b = W, b
        self.output = self._activate(tt.dot(self.input, W.val) + b.val)
        self._train((W, b))
        self._finish((*self.input_shape[:-1], n_out), type(self).__name__)

    def _activate(self, values: Variable) -> Variable:
        return tt.nnet.relu(values)


class FC(_Dense):
    """A fully connected layer with rectified output.

    Parameters
    ----------
    input : Layer or variable
    n_out : int
    W, b : Weight, optional
        Of shapes (inputs, n_out) and (n_out,). By default normal with the deviation 0.005, and 0.1.
    *shapes, **layout
    """

    _std, _bias = 0.005, 0.1


class Softmax(_Dense):
    """A layer of softmax units, with the loss and the errors for labels.

    Parameters
    ----------
    input : Layer or variable
    n_out : int
        The number of classes.
    W, b : Weight, optional
        Of shapes (inputs, n_out) and (n_out,). By default normal with the deviation 0.01, and 0.
    *shapes, **layout

    Attributes
    ----------
    p_y_given_x : matrix
        The probabilities of the classes, by row.
    y_pred : vector
        The most probable classes.
    """

    def _activate(self, values: Variable) -> Variable:
        self.p_y_given_x = tt.nnet.softmax(values)
        self.y_pred = tt.argmax(self.p_y_given_x, axis=1)
        return self.p_y_given_x

    def negative_log_likelihood(self, y: Variable) -> Variable:
        """Return the mean of the negative logarithms of the probabilities of the labels."""
        return tt.nnet.categorical_crossentropy(self.p_y_given_x, y).mean()

    def errors(self, y: Variable) -> Variable:
        """Return the part of the rows whose most probable class is not the label.

        Raises
        ------
        TypeError
            If `y` is no vector.
        NotImplementedError
            If it has no integers.
        """
        return tt.neq(self.y_pred, _labels(y)).mean()

    def errors_top_x(self, y: Variable, num_top: int = 5) -> Variable:
        """Return the part of the rows whose label is none of the most probable classes.

        Raises
        ------
        TypeError
            If `y` is no vector.
        NotImplementedError
            If it has no integers.
        """
        best = tt.argsort(self.p_y_given_x, axis=1)[:, -num_top:]
        return tt.neq(best, _labels(y).dimshuffle(0, "x")).all(axis=1).mean()


def _labels(y: Variable) -> Variable:
    if y.ndim != 1:
        raise TypeError(f"Softmax: y: expected a vector of labels, got {y.type}")
    if not y.dtype.startswith("int"):
        raise NotImplementedError(f"Softmax: y: expected integers, got {y.dtype}")
    return y


# Networks


def get_layers(lastlayer: Any) -> list[Layer]:
    """Return the layers of a network from the first to the last one."""
    layers = [lastlayer]
    while hasattr(layers[0], "input_layer"):
        layers.insert(0, layers[0].input_layer)
    return layers


def get_params(layers: Sequence[Any]) -> tuple[list[Any], list[str]]:
    """Return the parameters of layers, and whether each is ``"W"`` or ``"b"``."""
    trained = [layer for layer in layers if hasattr(layer, "params")]
    params = [param for layer in trained for param in layer.params]
    return params, [kind for layer in trained for kind in layer.weight_type]


def count_params(params: Sequence[Any], verbose: bool) -> int:
    """Return how many numbers parameters have; write their shapes and the number if `verbose`."""
    shapes = [param.get_value(borrow=True).shape for param in params]
    total = int(sum(np.prod(shape) for shape in shapes))
    if verbose:
        lines = [*map(str, shapes), f"model size {total / 2**20:.3f} M floats", ""]
        sys.stdout.write("\n".join(lines))
    return total


# What the layers for images compute

#: For parts of images and for dropout
streams = MRG_RandomStreams(23455)


def convolution(
    images: Variable, W: Variable, b: Variable, stride: int, pad: Any, groups: int = 1
) -> Variable:
    """Return the positive parts of a convolution with biases (bc01)."""
    output = tt.nnet.conv2d(images, W, border_mode=pad, subsample=(stride, stride), num_groups=groups)
    return tt.nnet.relu(output + b.dimshuffle("x", 0, "x", "x"))


def sides_of(sides: Sequence[int], sizes: Sequence[int], stride: int, pad: Any) -> list[int]:
    """Return height and width of the output of a convolution or a pooling."""
    found = []
    for side, size in zip(sides, sizes):
        margin = {"valid": 0, "full": size - 1, "half": size // 2}[pad] if isinstance(pad, str) else pad
        found.append((side + 2 * margin - size) // stride + 1)
    return found


class CrossChannelNormalization:
    r"""Local response normalization across channels (c01b).

    .. math:: y_i = x_i \Bigl(k + \alpha \sum_{|j - i| \le n / 2} x_j^2\Bigr)^{-\beta}

    after Krizhevsky, Sutskever and Hinton (2012), section 3.3.

    Parameters
    ----------
    alpha, k, beta : float
    n : int
        The number of channels in a sum; odd.
    """

    def __init__(self, alpha: float = 1e-4, k: float = 2, beta: float = 0.75, n: int = 5) -> None:
        if n % 2 == 0:
            raise ValueError(f"CrossChannelNormalization: n: expected an odd number, got {n}")
        self.alpha, self.k, self.beta, self.n = alpha, k, beta, n

    def __call__(self, c01b: Variable) -> Variable:
        """Return the normalized images."""
        squares, margin = tt.sqr(c01b), self.n // 2
        edge = tt.zeros((margin, *(c01b.shape[axis] for axis in (1, 2, 3))), squares.dtype)
        padded = tt.concatenate([edge, squares, edge], axis=0) if margin else squares
        channels = c01b.shape[0]
        total: Any = sum(padded[shift : shift + channels] for shift in range(self.n))
        return c01b * (self.k + self.alpha * total) ** -self.beta


def cut(
    images: Variable, shape: Shape, size: int, margin: int, flag_on: Variable, is_same: bool
) -> Variable:
    """Return a part of each image, of `size` lines on both axes (c01b); the middle if switched off.

    It may be mirrored. With `is_same` it is the same part of all images.
    """
    draws = streams.uniform(size=(3,) if is_same else (3, shape[3]), low=0.001, high=0.999)
    starts = tt.floor(draws[:2] * (2 * margin + 1))
    starts = tt.cast(tt.switch(flag_on > 0, starts, margin), "int64")
    mirror = tt.and_(flag_on > 0, draws[2] > 0.5)
    if is_same:
        row, column = starts[0], starts[1]
        part = images[:, row : row + size, column : column + size]
        return tt.switch(mirror, part[:, :, ::-1], part)
    lines = tt.arange(size)
    rows = starts[0].dimshuffle("x", "x", "x", 0) + lines.dimshuffle("x", 0, "x", "x")
    forward, backward = (item.dimshuffle(0, "x") for item in (lines, lines[::-1]))
    order = tt.switch(mirror.dimshuffle("x", 0), backward, forward)
    columns = (starts[1].dimshuffle("x", 0) + order).dimshuffle("x", "x", 0, 1)
    channels = tt.arange(shape[0]).dimshuffle(0, "x", "x", "x")
    return images[channels, rows, columns, tt.arange(shape[3]).dimshuffle("x", "x", "x", 0)]
