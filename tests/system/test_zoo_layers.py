"""Tests of the zoo's layers against NumPy, and of their gradients against finite differences."""

import numpy as np
import pytest
import theano
import theano.tensor as tt
from demo_modules import need

import synkhronos  # noqa: F401  # before Lasagne

need("lasagne")

import lasagne

from synkhronos.extensions.zoo import layers

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lasagne")
random = np.random.RandomState(11)


@pytest.fixture(autouse=True)
def float64(monkeypatch):
    """Configuration with ``floatX=float64``."""
    monkeypatch.setattr(theano.config, "floatX", "float64")


def output_of(layer, x):
    """Return what a layer with one input computes."""
    variable = tt.TensorType(str(x.dtype), [False] * x.ndim)("x")
    return theano.function([variable], layer.get_output_for(variable))(x)


def norm_layer(shape, seed=3):
    """Return a batch normalization layer with random parameters, and a random input."""
    rng = np.random.RandomState(seed)
    layer = layers.BatchNormLayer((None, *shape[1:]))
    for param in (layer.scale, layer.shift, layer.mean, layer.variance):
        param.set_value(rng.uniform(0.5, 2, shape[1]).astype(param.dtype))
    return layer, rng.normal(3, 2, shape).astype(theano.config.floatX)


def normalised(x, layer, mean, variance):
    def by_channel(vector):
        return vector.reshape(1, -1, *[1] * (x.ndim - 2))

    centred = (x - by_channel(mean)) / np.sqrt(by_channel(variance) + layer.epsilon)
    return by_channel(layer.scale.get_value()) * centred + by_channel(layer.shift.get_value())


@pytest.mark.parametrize("shape", [(5, 4, 3, 2), (7, 3), (2, 1, 4, 4)])
def test_training_normalises_by_the_rows_at_hand_and_updates_the_averages(in_python, shape):
    layer, x = norm_layer(shape)
    axes = (0, *range(2, x.ndim))
    variable = tt.TensorType("float64", [False] * x.ndim)("x")
    output = layer.get_output_for(variable)
    step = theano.function([variable], output, updates=layer.updates)
    mean, variance = layer.mean.get_value(), layer.variance.get_value()
    for number in range(1, 13):
        np.testing.assert_allclose(step(x), normalised(x, layer, x.mean(axes), x.var(axes)))
        weight = max(1 / number, 0.1)
        mean = (1 - weight) * mean + weight * x.mean(axes)
        variance = (1 - weight) * variance + weight * x.var(axes, ddof=1)
        np.testing.assert_allclose(layer.mean.get_value(), mean)
        np.testing.assert_allclose(layer.variance.get_value(), variance)
        x = x * 1.5 + 1


def test_inference_normalises_by_the_running_averages_and_leaves_them(in_python):
    layer, x = norm_layer((5, 4, 3, 2))
    variable = tt.tensor4("x")
    evaluate = theano.function([variable], layer.get_output_for(variable, deterministic=True))
    averages = layer.mean.get_value(), layer.variance.get_value()
    np.testing.assert_allclose(evaluate(x), normalised(x, layer, *averages))
    np.testing.assert_array_equal(layer.mean.get_value(), averages[0])


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_gradient_through_batch_norm_is_that_of_finite_differences(in_python, deterministic):
    layer, x = norm_layer((3, 2, 2, 2))
    given = np.random.RandomState(4).normal(size=x.shape)

    def weighted(x, scale, shift):
        layer.scale, layer.shift = scale, shift
        return (layer.get_output_for(x, deterministic) * given).sum()

    values = [x, layer.scale.get_value(), layer.shift.get_value()]
    theano.gradient.verify_grad(weighted, values, rng=np.random.RandomState(5))


def test_the_updates_of_all_batch_norms_in_a_network_are_found():
    first = layers.BatchNormLayer(lasagne.layers.InputLayer((None, 3)))
    second = layers.BatchNormLayer(lasagne.layers.DenseLayer(first, 4))
    lasagne.layers.get_output(second, tt.matrix())
    updated = [variable for variable, _ in layers.average_updates(second)]
    assert updated == lasagne.layers.get_all_params(second, running_average=True)
    assert len(updated) == 6


def naive_convolution(x, W, stride, pad):
    """Return the products of the filters with all windows, without flipping the filters."""
    x = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    size = W.shape[2]
    sides = [(side - size) // stride + 1 for side in x.shape[2:]]
    out = np.zeros((len(x), len(W), *sides))
    for row in range(sides[0]):
        for column in range(sides[1]):
            top, left = row * stride, column * stride
            window = x[:, :, top : top + size, left : left + size]
            out[:, :, row, column] = np.einsum("ncij,fcij->nf", window, W)
    return out


def naive_transposed(x, W, stride, crop, extra):
    """Return the sum of the filters, each times a number of the input, at distances of the stride."""
    rows, _, height, width = x.shape
    _, filters, size, _ = W.shape
    out = np.zeros((rows, filters, (height - 1) * stride + size + extra,
                    (width - 1) * stride + size + extra))  # fmt: skip
    for row in range(height):
        for column in range(width):
            top, left = row * stride, column * stride
            summand = np.einsum("nc,cfij->nfij", x[:, :, row, column], W)
            out[:, :, top : top + size, left : left + size] += summand
    ends = out.shape[2] - crop, out.shape[3] - crop
    return out[:, :, crop : ends[0], crop : ends[1]]


@pytest.mark.parametrize("size, stride, pad", [(3, 1, None), (1, 2, None), (5, 2, 0), (2, 1, 1)])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_is_the_naive_one(size, stride, pad, groups):
    layer = layers.ConvLayer((None, 4, 6, 7), 6, size, stride, pad, groups, b=random.normal(size=6))
    x = random.normal(size=(2, 4, 6, 7))
    W, pad = layer.W.get_value(), size // 2 if pad is None else pad
    assert W.shape == (6, 4 // groups, size, size)
    expected = np.concatenate([
        naive_convolution(part, filters, stride, pad)
        for part, filters in zip(np.split(x, groups, axis=1), np.split(W, groups))
    ], axis=1)  # fmt: skip
    expected += layer.b.get_value()[:, None, None]
    got = output_of(layer, x)
    np.testing.assert_allclose(got, expected)
    assert got.shape[1:] == layer.output_shape[1:]


CASES = [
    (5, 2, None, None),
    (3, 1, None, None),
    (3, 2, None, None),
    (4, 2, 1, None),
    (3, 3, 0, 2),
    (2, 2, 0, 0),
]


@pytest.mark.parametrize("size, stride, crop, extra", CASES)
def test_a_transposed_convolution_is_the_naive_one(size, stride, crop, extra):
    bias = random.normal(size=2)
    layer = layers.TransposedConvLayer((None, 3, 4, 5), 2, size, stride, crop, extra, b=bias)
    x = random.normal(size=(2, 3, 4, 5))
    expected = naive_transposed(x, layer.W.get_value(), stride, layer.crop, layer.extra)
    got = output_of(layer, x)
    np.testing.assert_allclose(got, expected + bias[:, None, None])
    assert got.shape == (2, *layer.output_shape[1:])
    if extra is None:
        assert layer.output_shape == (None, 2, 4 * stride, 5 * stride)


@pytest.mark.parametrize("make", [
    lambda: layers.TransposedConvLayer((None, 2, 2, 3), 2, 3, 2, b=lasagne.init.Constant(0.3)),
    lambda: layers.ConvLayer((None, 4, 4, 3), 2, 3, 2, groups=2, b=lasagne.init.Constant(0.3)),
], ids=["transposed", "grouped"])  # fmt: skip
def test_the_gradient_through_a_convolution_is_that_of_finite_differences(make):
    layer = make()
    x = random.normal(size=(2, *layer.input_shape[1:]))
    given = random.normal(size=(2, *layer.output_shape[1:]))

    def weighted(x, W, b):
        layer.W, layer.b = W, b
        return (layer.get_output_for(x) * given).sum()

    values = [x, layer.W.get_value(), layer.b.get_value()]
    theano.gradient.verify_grad(weighted, values, rng=np.random.RandomState(5))


@pytest.mark.parametrize("crop, extra, message", [
    (-1, 0, "got -1 and 0"),
    (0, 2, "extra lines from 0 to 1, fewer than the stride, got 0 and 2"),
    (5, 0, r"a crop of 5 leaves something, got \(None, 3, 4, 4\)"),
])  # fmt: skip
def test_impossible_transposed_convolutions_are_refused(crop, extra, message):
    with pytest.raises(ValueError, match=message):
        layers.TransposedConvLayer((None, 3, 4, 4), 2, 3, 2, crop, extra)


@pytest.mark.parametrize("channels, filters", [(3, 4), (4, 3)])
def test_groups_have_to_divide_channels_and_filters(channels, filters):
    with pytest.raises(ValueError, match="groups: expected a divisor of .*, got 2"):
        layers.ConvLayer((None, channels, 4, 4), filters, 3, groups=2)


def test_the_mean_is_taken_where_the_mask_is_1():
    words = np.array([[5, 3, 0, 0], [1, 2, 3, 4], [0, 0, 0, 0]], "int32")
    values = random.normal(size=(3, 4, 2))
    mask = layers.MaskLayer((None, 4))
    layer = layers.MaskedMeanLayer(lasagne.layers.InputLayer((None, 4, 2)), mask)
    np.testing.assert_array_equal(output_of(mask, words), words != 0)
    variables = tt.tensor3(), tt.matrix()
    got = theano.function(variables, layer.get_output_for(variables))(values, (words != 0) * 1.0)
    np.testing.assert_allclose(got, [values[0, :2].mean(0), values[1].mean(0), [0, 0]])
    assert layer.output_shape == (None, 2)
