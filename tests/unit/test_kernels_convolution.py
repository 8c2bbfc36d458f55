"""Tests of the convolutions in C++, against Theano's own in double precision."""

import numpy as np
import pytest
import theano
import theano.tensor as tt
from hypothesis import given, strategies as st
from kernels import fast, kernels_are_used, plain  # noqa: F401
from oracle import examples
from theano.compile.mode import Mode
from theano.tensor.nnet import corr
from threadpoolctl import threadpool_limits

from synkhronos.engines.theano.kernels import images

FAST = {
    corr.CorrMM: images.FastCorrMM,
    corr.CorrMM_gradWeights: images.FastCorrMM_gradWeights,
    corr.CorrMM_gradInputs: images.FastCorrMM_gradInputs,
}
KINDS = list(FAST)
PLAIN = Mode("cvm", None)


def function_of(kind, dtype, **options):
    """Return a function of two arrays, and of the height and width that a gradient needs."""
    a, b, size = tt.tensor4(dtype=dtype), tt.tensor4(dtype=dtype), tt.lvector()
    op = kind(**options)
    if issubclass(kind, corr.CorrMM):
        return theano.function([a, b], op(a, b), mode=PLAIN)
    return theano.function([a, b, size], op(a, b, size), mode=PLAIN)


def arguments_of(kind, images, filters, output):
    if issubclass(kind, corr.CorrMM):
        return [images, filters]
    if issubclass(kind, corr.CorrMM_gradWeights):
        return [images, output, np.array(filters.shape[2:])]
    return [filters, output, np.array(images.shape[2:])]


def absolute(arguments):
    return [abs(one) for one in arguments]


def compare(images, filters, dtype, layout=np.ascontiguousarray, threads=1, **options):
    """Compare the three operations with Theano's, twice, so that the second call reuses memory.

    With several threads of BLAS, there is always a matrix of columns.
    """
    rng = np.random.RandomState(1)
    images, filters = rng.randn(*images), rng.randn(*filters)
    output = function_of(corr.CorrMM, "float64", **options)(images, filters)
    output = rng.randn(*output.shape)
    for kind, own in FAST.items():
        arguments = [
            one.astype(dtype) if one.ndim == 4 else one
            for one in arguments_of(kind, images, filters, output)
        ]
        theanos = function_of(kind, "float64", **options)
        precise = [one.astype("float64") if one.ndim == 4 else one for one in arguments]
        expected = theanos(*precise)
        # A rounding error is relative to the terms, not to their sum.
        most = np.max(theanos(*absolute(precise)), initial=1)
        ours = function_of(own, dtype, **options)
        for _ in range(2):
            with threadpool_limits(threads, user_api="blas"):
                found = ours(*[layout(one) for one in arguments])
            assert found.dtype == dtype and found.shape == expected.shape
            assert np.abs(found - expected).max(initial=0) <= 10 * np.finfo(dtype).eps * most


def every_other(array):
    """Return an array of the same elements that are not next to each other."""
    apart = np.zeros([2 * size for size in array.shape], array.dtype)
    apart[tuple([slice(None, None, 2)] * array.ndim)] = array
    return apart[tuple([slice(None, None, 2)] * array.ndim)]


LAYOUTS = {
    "contiguous": np.ascontiguousarray,
    "Fortran": np.asfortranarray,
    "flipped": lambda array: array[..., ::-1].copy()[..., ::-1],
    "strided": every_other,
}


@st.composite
def convolutions(draw):
    """Draw shapes of images and of filters, and options of the operations."""
    groups = draw(st.integers(1, 3))
    channels, filters = draw(st.integers(0, 3)), draw(st.integers(0, 4))
    pair = st.tuples(st.integers(0, 4), st.integers(0, 4))
    border = draw(st.sampled_from(["valid", "half", "full"]) | st.integers(0, 3) | st.tuples(pair, pair))
    kernel = draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    dilation = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    extent = [(size - 1) * step + 1 for size, step in zip(kernel, dilation)]
    more = draw(st.tuples(st.integers(0, 30), st.integers(0, 30)))
    images = (draw(st.integers(0, 5)), groups * channels, extent[0] + more[0], extent[1] + more[1])
    return {
        "images": images, "filters": (groups * filters, channels, *kernel), "border_mode": border,
        "subsample": draw(st.tuples(st.integers(1, 3), st.integers(1, 3))), "filter_dilation": dilation,
        "num_groups": groups,
    }  # fmt: skip


@examples(60)
@given(
    convolutions(),
    st.sampled_from(["float32", "float64"]),
    st.sampled_from(sorted(LAYOUTS)),
    st.sampled_from([1, 2]),
)
def test_results_are_those_of_theanos_own(options, dtype, layout, threads):
    compare(dtype=dtype, layout=LAYOUTS[layout], threads=threads, **options)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "images, filters, options",
    [
        ((2, 8, 56, 56), (5, 8, 3, 3), {"border_mode": 1}),  # rows of an image, as one run each
        ((2, 3, 70, 66), (4, 3, 7, 7), {"border_mode": 3, "subsample": (2, 2)}),  # rows of an image
        ((9, 6, 8, 8), (7, 6, 5, 5), {}),  # some images at a time, the last time fewer
        ((33, 6, 7, 7), (120, 6, 3, 3), {"border_mode": "half"}),
        ((3, 20, 40, 40), (9, 20, 1, 1), {}),  # an image is the matrix of columns
        ((6, 130, 6, 6), (150, 130, 1, 1), {}),
        ((4, 12, 14, 14), (16, 6, 1, 1), {"subsample": (2, 2), "num_groups": 2}),
        ((2, 64, 9, 11), (64, 1, 3, 3), {"border_mode": 1, "num_groups": 64}),
        # Without a matrix, on processors with wide vectors: in tiles that do and do not overlap,
        # with filters and pixels to spare, and with padding on any side.
        ((3, 5, 12, 16), (32, 5, 5, 5), {}),
        ((2, 32, 9, 13), (30, 32, 3, 3), {"border_mode": "half", "filter_dilation": (2, 1)}),
        ((2, 20, 8, 29), (60, 10, 2, 3), {"border_mode": ((1, 0), (0, 2)), "num_groups": 2}),
        ((2, 29, 11, 14), (64, 29, 3, 1), {"border_mode": "full"}),
        ((1, 16, 9, 9), (16, 16, 3, 3), {"border_mode": ((4, 0), (0, 0))}),
        ((2, 4, 30, 12), (33, 4, 4, 5), {"subsample": (2, 3), "border_mode": 1}),
        ((2, 5, 40, 24), (31, 5, 7, 7), {"filter_dilation": (2, 1)}),
        ((2, 3, 5, 2), (4, 3, 3, 7), {"border_mode": ((1, 1), (3, 3))}),  # narrower than the padding
    ],
)
def test_every_division_into_blocks_gives_the_same(images, filters, options, dtype, threads):
    compare(images, filters, dtype, threads=threads, **options)


@pytest.mark.parametrize("kind", [corr.CorrMM_gradWeights, corr.CorrMM_gradInputs])
@pytest.mark.parametrize("border", ["valid", "full", ((1, 2), (0, 1))])
def test_sizes_that_are_not_given_are_inferred(kind, border):
    if kind is corr.CorrMM_gradWeights and isinstance(border, tuple):
        shapes = (2, 3, 9, 8), (2, 4, 8, 6)
    elif kind is corr.CorrMM_gradWeights:
        shapes = (2, 3, 6, 8), (2, 4, *([4, 7] if border == "valid" else [8, 9]))
    else:
        shapes = (4, 3, 3, 2), (2, 4, 9, 8)
    rng = np.random.RandomState(2)
    arguments = [rng.randn(*shape) for shape in shapes]
    a, b = tt.dtensor4(), tt.dtensor4()
    expected, found = (
        theano.function([a, b], one(border_mode=border)(a, b), mode=PLAIN)(*arguments)
        for one in (kind, FAST[kind])
    )
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_a_compiled_function_and_its_gradients_have_the_new_operations():
    x, w = tt.ftensor4(), tt.ftensor4()
    y = tt.nnet.conv2d(x, w, border_mode="half", filter_dilation=(2, 1))
    function = theano.function([x, w], [y, *theano.grad(tt.sqr(y).sum(), [x, w])], mode=fast())
    kinds = {type(node.op) for node in function.maker.fgraph.apply_nodes}
    assert kinds & {*FAST, *FAST.values()} == set(FAST.values())
    theanos = theano.function([x, w], [y], mode=plain())
    images, filters = np.ones((2, 3, 6, 6), "f"), np.ones((4, 3, 3, 3), "f")
    for found, expected in zip(function(images, filters), theanos(images, filters)):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_filters_that_are_not_shared_and_openmp_are_left_to_theano():
    x, w = tt.dtensor4(), tt.TensorType("float64", [False] * 6)()
    outputs = [corr.CorrMM(unshared=True)(x, w), corr.CorrMM(openmp=True)(x, tt.dtensor4())]
    for output in outputs:
        replacing, _ = images.OPTIMIZATIONS
        graph = theano.gof.FunctionGraph(theano.gof.graph.inputs([output]), [output])
        replacing.optimizer.optimize(graph)
        assert type(graph.outputs[0].owner.op) is corr.CorrMM


def wrong(kind, images=(2, 4, 6, 6), filters=(4, 2, 3, 3), output=(2, 4, 4, 4), **options):
    arrays = [np.zeros(shape) for shape in (images, filters, output)]
    options = {"num_groups": 2, **options}
    function_of(FAST[kind], "float64", **options)(*arguments_of(kind, *arrays))


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_shapes_are_explained(kind):
    wrong(kind)
    with pytest.raises(ValueError, match=r"not larger than padded images.*\n.*2 x 4 x 6 x 6|need"):
        wrong(kind, filters=(4, 2, 7, 3))
    if kind is not corr.CorrMM:
        with pytest.raises(ValueError, match="2 x 4 x 4 x 3, expected 2 x 4 x 4 x 4"):
            wrong(kind, output=(2, 4, 4, 3))
    if kind is not corr.CorrMM_gradWeights:
        with pytest.raises(ValueError, match="divisible by the number of groups"):
            wrong(kind, filters=(3, 2, 3, 3), output=(2, 3, 4, 4))
    if kind is corr.CorrMM:
        with pytest.raises(ValueError, match=r"need the channels.*\n.*\n *filters: 4 x 3 x 3 x 3, in 2"):
            wrong(kind, filters=(4, 3, 3, 3))
    if kind is corr.CorrMM_gradWeights:
        with pytest.raises(ValueError, match="expected 2 x 4 x 4 x 4"):
            wrong(kind, output=(3, 4, 4, 4))
