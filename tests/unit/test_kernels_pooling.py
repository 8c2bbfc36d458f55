"""Tests of pooling in C++ against Theano's own, whose results it has to have bit for bit."""

import functools
import itertools

import numpy as np
import pytest
import theano
import theano.tensor as tt
from hypothesis import given, strategies as st
from kernels import fast, kernels_are_used, plain  # noqa: F401
from oracle import examples
from theano.tensor.signal.pool import AveragePoolGrad, MaxPoolGrad, Pool, pool_2d, pool_3d

from synkhronos.engines.theano.kernels.images import (
    OPTIMIZATIONS,
    FastAveragePoolGrad,
    FastMaxPoolGrad,
    FastPool,
)

THEANOS, OURS = plain(), fast()
FAST = (FastPool, FastMaxPoolGrad, FastAveragePoolGrad)

MODES = ["max", "sum", "average_inc_pad", "average_exc_pad"]
#: Of the mode, the dtype, and whether the border is ignored. Each is two modules to compile.
POOLS = [
    *itertools.product(MODES, ["float32"], [True, False]),
    ("max", "float64", True),
    ("average_inc_pad", "float64", True),
]
#: Special values, many ties, and sums that depend on the order.
VALUES = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 2.0, 0.1, 1e8, -3e-7]


def ops(function):
    return [type(node.op) for node in function.maker.fgraph.toposort()]


def both(inputs, output):
    """Return two functions: of Theano's operations and of those in C++."""
    theanos, ours = (theano.function(inputs, output, mode=mode) for mode in (THEANOS, OURS))
    assert not set(ops(theanos)) & set(FAST) and set(ops(ours)) & set(FAST)
    return theanos, ours


def array(dtype, dims=4):
    return tt.TensorType(dtype, (False,) * dims)()


@functools.lru_cache(maxsize=None)
def pools(mode, dtype, ignore_border):
    """Return both functions of images and of the windows, strides and padding."""
    inputs = [array(dtype), tt.lvector(), tt.lvector(), tt.lvector()]
    return both(inputs, Pool(ignore_border, mode)(*inputs))


@functools.lru_cache(maxsize=None)
def gradients(mode, dtype):
    """Return both functions of images, of maxima if it is the mode, their gradient, and the windows."""
    arrays = [array(dtype) for _ in range(3 if mode == "max" else 2)]
    inputs = [*arrays, tt.lvector(), tt.lvector(), tt.lvector()]
    return both(inputs, (MaxPoolGrad(True) if mode == "max" else AveragePoolGrad(True, mode))(*inputs))


def assert_same_bits(ours, theanos):
    assert ours.shape == theanos.shape and ours.dtype == theanos.dtype
    bits = f"i{ours.itemsize}"
    same = np.ascontiguousarray(ours).view(bits) == np.ascontiguousarray(theanos).view(bits)
    assert (same | (np.isnan(ours) & np.isnan(theanos))).all()


def laid_out(values, layout):
    """Return an array that is equal, with other strides."""
    if layout == "transposed":
        return np.ascontiguousarray(values.transpose(1, 3, 0, 2)).transpose(2, 0, 3, 1)
    if layout == "strided":
        wider = np.zeros([2 * size for size in values.shape], values.dtype)
        wider[::2, ::2, ::2, ::2] = values
        return wider[::2, ::2, ::2, ::2]
    if layout == "reversed":
        return np.ascontiguousarray(values[:, ::-1, ::-1, ::-1])[:, ::-1, ::-1, ::-1]
    return values


LAYOUTS = st.sampled_from(["contiguous", "contiguous", "transposed", "strided", "reversed"])


def drawn(seed, shape, dtype, special):
    """Return drawn values, of which some, all or none are special."""
    rng = np.random.RandomState(seed)
    is_special = rng.uniform(size=shape) < special
    return np.where(is_special, rng.choice(VALUES, shape), rng.normal(size=shape)).astype(dtype)


@st.composite
def images_and_windows(draw, padded=True):
    """Draw a shape of images, windows, strides and padding. Usual ones are more frequent."""
    window = draw(st.tuples(*[st.sampled_from([1, 2, 2, 3, 3, 4, 5, 7])] * 2))
    stride = draw(st.one_of(st.just(window), st.tuples(*[st.sampled_from([1, 2, 2, 3, 5, 8])] * 2)))
    pad = tuple(draw(st.integers(0, size - 1)) if padded else 0 for size in window)
    image = (draw(st.integers(1, 12)), draw(st.integers(1, 40)))
    return (draw(st.integers(0, 3)), draw(st.integers(1, 6)), *image), (window, stride, pad)


SEEDS = st.integers(0, 2**31)
SPECIAL = st.sampled_from([0, 0.3, 1])


@pytest.mark.parametrize(("mode", "dtype", "ignore_border"), POOLS)
def test_pooling_has_the_same_bits(mode, dtype, ignore_border):
    theanos, ours = pools(mode, dtype, ignore_border)

    @examples(150)
    @given(images_and_windows(padded=ignore_border), SEEDS, SPECIAL, LAYOUTS)
    def check(shape_and_windows, seed, special, layout):
        shape, windows = shape_and_windows
        x = laid_out(drawn(seed, shape, dtype, special), layout)
        assert_same_bits(ours(x, *windows), theanos(x, *windows))

    check()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_gradient_of_a_maximum_has_the_same_bits(dtype):
    theanos, ours = gradients("max", dtype)
    pool, _ = pools("max", dtype, True)

    @examples(300)
    @given(images_and_windows(), SEEDS, SPECIAL, LAYOUTS, LAYOUTS, st.booleans())
    def check(shape_and_windows, seed, special, of_x, of_gz, maxima):
        shape, windows = shape_and_windows
        x = laid_out(drawn(seed, shape, dtype, special), of_x)
        z = pool(x, *windows)
        gz = laid_out(drawn(seed + 1, z.shape, dtype, special / 2), of_gz)
        if not maxima:  # but any values
            z = laid_out(drawn(seed + 2, z.shape, dtype, special), of_x)
        assert_same_bits(ours(x, z, gz, *windows), theanos(x, z, gz, *windows))

    check()


@pytest.mark.parametrize(
    ("mode", "dtype"), [*itertools.product(MODES[1:], ["float32"]), ("average_inc_pad", "float64")]
)
def test_the_gradient_of_a_sum_has_the_same_bits(mode, dtype):
    theanos, ours = gradients(mode, dtype)

    @examples(150)
    @given(images_and_windows(mode != "average_exc_pad"), SEEDS, SPECIAL, LAYOUTS, st.data())
    def check(shape_and_windows, seed, special, layout, data):
        (*outer, rows, columns), windows = shape_and_windows
        x = np.zeros([*outer, rows, columns], dtype)
        counts = [
            max(0, (size + 2 * pad - window) // stride + 1 + data.draw(st.integers(-2, 3)))
            for size, window, stride, pad in zip((rows, columns), *windows)
        ]
        gz = laid_out(drawn(seed, (*outer, *counts), dtype, special), layout)
        assert_same_bits(ours(x, gz, *windows), theanos(x, gz, *windows))

    check()


@pytest.mark.parametrize(
    ("mode", "windows"),
    [
        ("max", ((2, 2), (2, 2), (0, 0))),
        ("max", ((3, 3), (2, 2), (1, 1))),
        ("max", ((2, 3), (1, 1), (0, 2))),
        ("average_inc_pad", ((3, 2), (2, 2), (1, 1))),
        ("sum", ((2, 9), (9, 9), (0, 0))),
    ],
)
def test_windows_that_are_known_have_the_same_bits(mode, windows):
    x = array("float32")
    ws, stride, pad = windows
    z = pool_2d(x, ws, ignore_border=True, stride=stride, pad=pad, mode=mode)
    gz = array("float32")
    ours = theano.function([x, gz], [z, tt.grad(None, x, known_grads={z: gz})], mode=OURS)
    assert len(set(ops(ours)) & set(FAST)) == 2
    pool, gradient = pools(mode, "float32", True)[0], gradients(mode, "float32")[0]

    @examples(60)
    @given(st.tuples(*[st.integers(1, 40)] * 2), SEEDS, SPECIAL)
    def check(shape, seed, special):
        x = drawn(seed, (2, 5, *shape), "float32", special)
        z = pool(x, *windows)
        gz = drawn(seed + 1, z.shape, "float32", special)
        maxima = [z] if mode == "max" else []
        pooled, of_pooled = ours(x, gz)
        assert_same_bits(pooled, z)
        assert_same_bits(of_pooled, gradient(x, *maxima, gz, *windows))

    check()


@pytest.mark.parametrize("dims", [2, 3, 5])
def test_arrays_of_any_number_of_axes_are_pooled(dims):
    x = array("float32", dims)
    z = pool_2d(x, (2, 3), ignore_border=True, stride=(2, 1), pad=(1, 1))
    function = theano.function([x], [z, tt.grad((z**2).sum(), x)], mode=OURS)
    assert {FastPool, FastMaxPoolGrad} <= set(ops(function))
    values = drawn(0, (2, 3, 4, 7, 9)[-dims:], "float32", 0.1)
    pool, gradient = pools("max", "float32", True)[0], gradients("max", "float32")[0]
    flat = values.reshape(-1, 1, *values.shape[-2:])
    windows = (2, 3), (2, 1), (1, 1)
    pooled = pool(flat, *windows)
    maxima, of_values = function(values)
    assert_same_bits(maxima.reshape(pooled.shape), pooled)
    assert_same_bits(of_values.reshape(flat.shape), gradient(flat, pooled, 2 * pooled, *windows))


def thunk_of(op, *arrays):
    """Return what computes an operation's output by its C code, and where the output is kept."""
    node = op(*map(tt.constant, arrays)).owner
    storage = {one: [getattr(one, "data", None)] for one in node.inputs + node.outputs}
    computed = {one: [one in node.inputs] for one in storage}
    return op.make_thunk(node, storage, computed, [], impl="c"), storage[node.outputs[0]]


@pytest.mark.parametrize("op", [FastPool(True), FastMaxPoolGrad(True), FastAveragePoolGrad(True)])
def test_the_memory_of_the_last_output_is_reused_if_it_suits(op):
    x, z = drawn(0, (2, 3, 6, 20), "float32", 0), drawn(1, (2, 3, 3, 10), "float32", 0)
    arrays = {FastPool: [x], FastMaxPoolGrad: [x, z, z], FastAveragePoolGrad: [x, z]}[type(op)]
    thunk, output = thunk_of(op, *arrays, (2, 2), (2, 2), (0, 0))
    thunk()
    expected = output[0].copy()
    suits = output[0]
    for reused in (suits, suits[:1].copy(), suits.copy(order="F"), suits[..., ::-1]):
        reused[:] = 5
        output[0] = reused
        thunk()
        assert (output[0] is reused) == (reused is suits)
        assert_same_bits(output[0], expected)


@pytest.mark.parametrize("mode", ["max", "average_inc_pad"])
def test_second_derivatives_remain(mode):
    x, along = array("float32"), array("float32")
    z = pool_2d(x, (2, 2), ignore_border=True, mode=mode)
    first = tt.grad((z**3).sum(), x)
    outputs = [tt.grad((first * along).sum(), x), tt.Rop(z, x, along)]
    functions = [theano.function([x, along], outputs, mode=one) for one in (THEANOS, OURS)]
    assert set(ops(functions[1])) & set(FAST)
    arrays = drawn(0, (2, 1, 6, 9), "float32", 0), drawn(1, (2, 1, 6, 9), "float32", 0)
    for theanos, ours in zip(*(function(*arrays) for function in functions)):
        assert_same_bits(ours, theanos)


def test_other_pooling_remains():
    cube, integers = array("float32", 5), array("int64")
    of_threads = Pool(True, openmp=False)
    of_threads.openmp = True
    x = array("float32")
    of_other_dtype = MaxPoolGrad(True)(x, x, array("float64"), (2, 2))
    outputs = [
        pool_3d(cube, (2, 2, 2), ignore_border=True),
        pool_2d(integers, (2, 2), ignore_border=True),
        of_threads(x, (2, 2)),
        of_other_dtype,
    ]
    graph = theano.gof.FunctionGraph(theano.gof.graph.inputs(outputs), outputs, clone=False)
    OPTIMIZATIONS[1].optimizer.optimize(graph)
    assert not {type(node.op) for node in graph.apply_nodes} & set(FAST)


ERRORS = [
    ((0, 2), (2, 2), (0, 0), r"windows and strides of at least 1, but got ws = \(0, 2\)"),
    ((2, 2), (2, 0), (0, 0), r"at least 1, but got .*stride = \(2, 0\)"),
    ((2, 2), (2, 2), (2, 0), r"less than the window, but got pad = \(2, 0\) and ws = \(2, 2\)"),
    ((2, 2), (2, 2), (0, -1), r"from 0 .* got pad = \(0, -1\)"),
    ((2, 2, 2), (2, 2), (0, 0), "expects ws as a vector of 2 numbers.* got 3"),
    ((2, 2), (2,), (0, 0), "expects stride as a vector of 2 numbers.* got 1"),
    ((2, 2), (2, 2), (), "expects pad as a vector of 2 numbers.* got 0"),
]


@pytest.mark.parametrize(("ws", "stride", "pad", "message"), ERRORS)
def test_windows_that_cannot_be_are_an_error(ws, stride, pad, message):
    x = np.zeros((1, 1, 4, 4), "float32")
    windows = [np.array(one, "int64") for one in (ws, stride, pad)]
    functions_and_arrays = [
        (pools("max", "float32", True)[1], [x]),
        (gradients("max", "float32")[1], [x, x, x]),
        (gradients("sum", "float32")[1], [x, x]),
    ]
    for function, arrays in functions_and_arrays:
        with pytest.raises(ValueError, match=message):
            function(*arrays, *windows)


def test_padding_with_a_border_is_an_error():
    x = np.zeros((1, 1, 4, 4), "float32")
    with pytest.raises(ValueError, match="expects ignore_border=True"):
        pools("sum", "float32", False)[1](x, (2, 2), (2, 2), (1, 1))
    with pytest.raises(ValueError, match="'average_exc_pad' expects no padding"):
        gradients("average_exc_pad", "float32")[1](x, x, (2, 2), (2, 2), (1, 1))


def test_images_without_elements_have_no_maximum():
    function = pools("max", "float32", True)[1]
    empty = np.zeros((1, 1, 0, 4), "float32")
    with pytest.raises(ValueError, match="got a shape of 0 x 4: there is no maximum"):
        function(empty, (2, 2), (2, 2), (1, 1))
    assert function(empty, (2, 2), (2, 2), (0, 0)).shape == (1, 1, 0, 2)
    assert function(empty[:0], (2, 2), (2, 2), (1, 1)).shape == (0, 1, 1, 3)
    assert not pools("sum", "float32", True)[1](empty, (2, 9), (2, 1), (1, 8)).any()
    z = np.zeros((1, 1, 1, 3), "float32")
    assert not gradients("max", "float32")[1](empty, z, z, (2, 2), (2, 2), (1, 1)).size


def test_gradients_of_other_shapes_are_an_error():
    x, z = np.zeros((2, 1, 4, 4), "float32"), np.zeros((2, 1, 2, 2), "float32")
    windows = (2, 2), (2, 2), (0, 0)
    with pytest.raises(ValueError, match="maxima and their gradient to have the same shape"):
        gradients("max", "float32")[1](x, z, z[..., :1], *windows)
    with pytest.raises(ValueError, match="as many images in the gradient"):
        gradients("max", "float32")[1](x, z[:1], z[:1], *windows)
    with pytest.raises(ValueError, match="as many images in the gradient"):
        gradients("sum", "float32")[1](x, z[:1], *windows)
