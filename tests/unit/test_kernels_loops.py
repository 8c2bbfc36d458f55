"""Tests of the operations that replace Theano's elementwise operations, sums and batch normalization.

Theano's own operations are the specification. Which of them are joined is tested with the linker that
computes in Python, which compiles nothing.
"""

import itertools

import numpy as np
import pytest
import theano
import theano.tensor as tt
from hypothesis import given, strategies as st
from kernels import fast, kernels_are_used, plain  # noqa: F401
from oracle import examples
from theano import scalar
from theano.tensor.nnet.bn import AbstractBatchNormTrainGrad

from synkhronos.engines.theano.kernels import registration
from synkhronos.engines.theano.kernels.loops import DTYPES, FastLoop

ALL_BUT_CHANNELS = (0, 2, 3)


def both(inputs, outputs, linker="cvm"):
    """Return the same function with and without the library's operations."""
    return [
        theano.function(inputs, outputs, mode=mode(linker), on_unused_input="ignore")
        for mode in (fast, plain)
    ]


def loops_of(function):
    return [node for node in function.maker.fgraph.toposort() if isinstance(node.op, FastLoop)]


def assert_close(results, expected, tolerance=1e-6):
    for one, other in zip(results, expected):
        assert one.dtype == other.dtype and one.shape == other.shape
        np.testing.assert_allclose(one, other, tolerance, tolerance)


def tensor4(name="x", dtype="float32", pattern=(False,) * 4):
    return tt.TensorType(dtype, pattern)(name)


def identity_loop(dtype, axes):
    number = scalar.get_scalar_type(dtype).make_variable()
    return FastLoop(scalar.Composite([number], [scalar.identity(number)]), (axes,))


SUMMED = [axes for n in range(1, 4) for axes in itertools.combinations(range(3), n)]
LAYOUTS = {
    "contiguous": lambda array: array,
    "strided": lambda array: np.repeat(array, 2, axis=-1)[..., ::2],
    "reversed": lambda array: np.ascontiguousarray(array[::-1])[::-1],
    "transposed": lambda array: np.asfortranarray(array),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("axes", SUMMED)
def test_a_sum_over_axes_is_that_of_numpy(axes, dtype):
    x = tt.TensorType(dtype, (False,) * 3)("x")
    f = theano.function([x], identity_loop(dtype, axes)(x))
    random = np.random.RandomState(0)
    for shape in [(3, 5, 7), (2, 1, 600), (1, 600, 1), (600, 1, 1), (2, 3, 1025), (0, 3, 2), (2, 0, 0)]:
        array = random.standard_normal(shape).astype(dtype)
        expected = array.sum(axes, dtype="float64")
        for layout in LAYOUTS.values():
            result = f(layout(array))
            assert result.dtype == dtype and result.shape == expected.shape
            np.testing.assert_allclose(result, expected.astype(dtype), 1e-6, 1e-6)


def test_a_float32_sum_is_accumulated_in_double_precision():
    x = tt.fvector("x")
    f = theano.function([x], identity_loop("float32", (0,))(x))
    array = np.full(1 << 20, np.float32(0.1))
    assert f(array) == np.float32(array.sum(dtype="float64"))


def test_in_debug_mode():
    """Theano compares the implementations, and tests that what is overwritten is declared."""
    x, w = tt.fmatrix("x"), theano.shared(np.ones((3, 3), "f"), "w")
    result = tt.nnet.relu(tt.dot(x, w) - x.mean()) * tt.sgn(x)
    f = theano.function([x], [result, result.sum(0)], updates=[(w, w * tt.sgn(w - 2))], mode="DebugMode")
    assert sum(len(node.op.inplace) for node in loops_of(f)) == 2
    f(np.random.RandomState(0).standard_normal((4, 3)).astype("f"))


def test_results_and_sums_of_broadcast_arrays():
    x, row, y = tensor4("x"), tensor4("row", "float64", (True, False, True, True)), tensor4("y", "int8")
    product = (x - row) * y
    outputs = [product, product.sum(ALL_BUT_CHANNELS), tt.sqr(x - row).sum((1, 3)), x.sum()]
    f, expected = both([x, row, y], outputs)
    assert len(loops_of(f)) == 1
    random = np.random.RandomState(0)
    for shape in [(4, 3, 5, 6), (1, 1, 1, 1), (2, 3, 1, 1), (1, 5, 1, 7), (3, 1, 40, 30), (2, 0, 3, 4)]:
        arrays = random.standard_normal(shape).astype("f"), random.standard_normal((1, shape[1], 1, 1))
        arrays += (random.randint(-3, 4, shape).astype("int8"),)
        assert_close(f(*arrays), expected(*arrays))
        turned = arrays[0].transpose(3, 1, 0, 2), arrays[1], arrays[2].transpose(3, 1, 0, 2)
        assert_close(f(*turned), expected(*turned))


def test_extents_that_differ_are_an_error():
    x, y = tt.fmatrices("xy")
    f = theano.function([x, y], (x * y).sum(0))
    with pytest.raises(ValueError, match=r"Input dimension mis-match.*shape\[1\] = 3.*shape\[1\] = 4"):
        f(np.zeros((2, 3), "f"), np.zeros((2, 4), "f"))
    with pytest.raises(ValueError, match="Input dimension mis-match"):
        f(np.zeros((2, 3), "f"), np.zeros((2, 1), "f"))  # of a variable that is not broadcastable


def test_a_division_of_integers_by_zero_stays_an_error():
    x, y = tt.lmatrices("xy")
    quotient, rest = (x // y).astype("float64"), (x % y).astype("float64")
    f = theano.function([x, y], [quotient.sum(0), (quotient * tt.sgn(rest)).sum()])
    seven, zero = np.full((2, 3), 7), np.zeros((2, 3), "int64")
    assert f(seven, seven - 5)[0].tolist() == [6, 6, 6]
    with pytest.raises(ZeroDivisionError):
        f(seven, zero)
    assert f(seven, seven)[0].tolist() == [2, 2, 2]


def test_an_error_shows_the_line_that_the_result_is_from():
    x, y = tt.fmatrices("xy")
    with theano.change_flags(**{"traceback.limit": 8}):
        product = x * tt.sgn(y)
    f = theano.function([x, y], product.sum(0))
    with pytest.raises(ValueError, match="test_an_error_shows_the_line"):
        f(np.zeros((2, 3), "f"), np.zeros((3, 3), "f"))


def test_all_types_of_numbers():
    inputs = [tt.TensorType(dtype, (False, False))() for dtype in DTYPES]
    f, expected = both(inputs, [sum(one.astype("float64") for one in inputs).sum(0)])
    arrays = [np.arange(6).reshape(2, 3).astype(dtype) for dtype in DTYPES]
    assert_close(f(*arrays), expected(*arrays))


@given(st.data())
@examples(60)
def test_special_values(data):
    """Not a number, infinities, zeros of both signs: as of Theano's operations, bit for bit."""
    numbers = st.sampled_from([0.0, -0.0, 1.5, -2.0, np.inf, -np.inf, np.nan, 1e-45])
    arrays = [np.array(data.draw(st.lists(numbers, min_size=17, max_size=17)), "f") for _ in range(2)]
    for one, other in zip(*(f(*[array[None] for array in arrays]) for f in special_functions())):
        np.testing.assert_array_equal(one, other)
        finite = ~np.isnan(one)
        np.testing.assert_array_equal(np.signbit(one[finite]), np.signbit(other[finite]))


SPECIAL = []


def special_functions():
    if not SPECIAL:
        x, y = tt.fmatrices("xy")
        outputs = [
            tt.nnet.relu(x) * y, tt.sgn(x) + y, tt.maximum(x, y), tt.minimum(x, y), tt.clip(x, y, 1),
            tt.switch(x > y, x, -y), abs(x) - y, tt.eq(x, y).astype("float32"), tt.inv(x) / y,
        ]  # fmt: skip
        # What is summed as well is computed in a loop.
        SPECIAL.extend(both([x, y], [*outputs, *(one.sum(0) for one in outputs)]))
        assert len(loops_of(SPECIAL[0])) >= 1
    return SPECIAL


class Graph:
    """Draws graphs of elementwise operations, sums and other operations on arrays of one shape."""

    UNARY = (tt.neg, tt.sqr, tt.sgn, tt.exp, abs, tt.nnet.relu, tt.tanh)
    BINARY = (tt.add, tt.sub, tt.mul, tt.maximum)

    def __init__(self, draw):
        self.inputs = [tt.dmatrix(name) for name in "abc"]
        self.pool = list(self.inputs)
        for _ in range(draw(st.integers(2, 14))):
            self.pool.append(self.add(draw))
        chosen = draw(st.lists(st.sampled_from(self.pool[3:]), min_size=1, max_size=4))
        self.outputs = [one.sum(0) if draw(st.booleans()) else one for one in chosen]

    def add(self, draw):
        one, other = (draw(st.sampled_from(self.pool)) for _ in range(2))
        kind = draw(st.sampled_from(["unary", "binary", "binary", "centre", "rows", "other"]))
        if kind == "unary":
            return draw(st.sampled_from(self.UNARY))(one / 4)
        if kind == "centre":
            return one - other.mean(draw(st.sampled_from([None, 0, 1])), keepdims=True)
        if kind == "rows":
            return one * other.sum(0)
        if kind == "other":  # no elementwise operation
            return one[::-1] * one.shape[0]
        return draw(st.sampled_from(self.BINARY))(one, other)


@given(st.data())
@examples(50)
def test_any_graph_has_the_same_results(data):
    graph = Graph(data.draw)
    f, expected = both(graph.inputs, graph.outputs, "py")
    arrays = [np.random.RandomState(number).uniform(-1, 1, (4, 3)) for number in range(3)]
    copies = [array.copy() for array in arrays]
    results = f(*arrays)
    for one, other in zip(results, expected(*copies)):
        np.testing.assert_allclose(one, other, 1e-9, 1e-9)
    np.testing.assert_array_equal(arrays, copies)
    again = f(*arrays)
    for one, other in zip(results, again):
        np.testing.assert_array_equal(one, other)


def streams(node):
    """Return how many arrays of the size of the loop a node reads, and how many it writes."""
    pattern = tuple(all(flags) for flags in zip(*(one.broadcastable for one in node.inputs)))
    read = {one for one in node.inputs if one.broadcastable == pattern}
    return len(read), sum(one is None for one in node.op.axes)


def test_the_gradient_of_a_rectified_batch_normalization_passes_over_memory_six_times():
    x, gradient, scale, shift = tensor4("x"), tensor4("g"), tt.fvector("scale"), tt.fvector("shift")
    mean, variance = (one(x, ALL_BUT_CHANNELS, keepdims=True) for one in (tt.mean, tt.var))
    along = [one.dimshuffle("x", 0, "x", "x") for one in (scale, shift)]
    y = (x - mean) * (along[0] * tt.inv(tt.sqrt(variance + np.float32(1e-4)))) + along[1]
    # As in a network, the gradient depends on the result.
    out = tt.nnet.relu(y)
    known = {out: gradient * out.max()}
    gradients = theano.grad(None, [x, scale, shift], known_grads=known)
    f, expected = both([x, gradient, scale, shift], gradients, "py")
    found = [streams(node) for node in loops_of(f)]
    # Sums of x and of its squares; the output; the sums of the gradient; one that depends on them; the
    # gradient of x. The product with the maximum is a part of the loops.
    assert sorted(found) == [(1, 0), (1, 0), (1, 1), (2, 0), (2, 1)]
    random = np.random.RandomState(0)
    arrays = [random.standard_normal((4, 3, 6, 5)).astype("f") for _ in range(2)]
    arrays += [random.standard_normal(3).astype("f") for _ in range(2)]
    assert_close(f(*arrays), expected(*arrays), 1e-5)


def test_what_takes_long_is_not_computed_twice():
    x, y = tt.fmatrices("xy")
    costly = tt.exp(x) + y
    f = theano.function([x, y], [(costly * x).sum(0), (costly * y[::-1]).sum(0)])
    exponentials = [node for node in loops_of(f) if "exp" in str(node.op)]
    exponentials += [node for node in f.maker.fgraph.toposort() if "Elemwise" in type(node.op).__name__]
    assert len([one for one in exponentials if "exp" in str(one.op)]) == 1


def test_a_variance_takes_one_pass_and_is_as_exact():
    x = tensor4()
    outputs = [x.mean(ALL_BUT_CHANNELS), x.var(ALL_BUT_CHANNELS)]
    f = theano.function([x], outputs, mode=fast())
    assert [streams(node) for node in loops_of(f)] == [(1, 0)]
    random = np.random.RandomState(0)
    for offset in (0, 100, 1e4, -1e6):
        array = (random.standard_normal((4, 3, 20, 20)) + offset).astype("f")
        double = array.astype("float64")
        expected = double.mean(ALL_BUT_CHANNELS), double.var(ALL_BUT_CHANNELS)
        for one, other in zip(f(array), expected):
            # The mean itself is rounded to a float32.
            np.testing.assert_allclose(one, other, 1e-6 + (6e-8 * offset) ** 2)
    assert f(np.full((2, 3, 4, 4), 1e6, "f"))[1].tolist() == [0, 0, 0]


def test_the_same_graph_has_the_same_loops_each_time():
    """Their results differ by rounding from those of others, and Theano would compile others again."""

    def signatures():
        arrays = [tt.fmatrix() for _ in range(5)]
        costly = [tt.tanh(one) for one in arrays]
        chained = [costly[i - 1][::-1] * costly[i] + costly[i - 2] for i in range(5)]
        outputs = [tt.exp(one).sum(0) for one in chained] + [one.sum(1) for one in costly] + chained
        f = theano.function(arrays, outputs, mode=fast("py"))
        return [node.op.synkhronos_key for node in loops_of(f)]

    first, kept = signatures(), []
    assert len(first) > 3
    for _ in range(10):
        kept.append([object() for _ in range(1000)])  # so that objects get other addresses
        assert signatures() == first


def test_inputs_and_what_is_used_later_are_not_overwritten():
    x, w = tt.fmatrix("x"), theano.shared(np.ones((3, 3), "f"), "w")
    product = tt.dot(x, w)
    rectified = tt.nnet.relu(product)
    f, expected = both([x], [rectified, tt.dot(product, w), product.sum(0), rectified.sum(0)])
    array = np.random.RandomState(0).standard_normal((4, 3)).astype("f")
    copy = array.copy()
    assert_close(f(array), expected(copy))
    np.testing.assert_array_equal(array, copy)
    assert (w.get_value() == 1).all()


def test_an_updated_variable_is_overwritten():
    v, w = (theano.shared(np.ones((3, 3), "f"), name) for name in "vw")
    g = tt.fmatrix("g")
    new = np.float32(0.9) * v - np.float32(0.1) * g
    f = theano.function([g], updates=[(v, new), (w, w + np.float32(0.9) * new - np.float32(0.1) * g)])
    (loop,) = loops_of(f)
    assert len(loop.op.inplace) == 2
    gradient = np.full((3, 3), 2, "f")
    f(gradient)
    f(gradient)
    np.testing.assert_allclose(v.get_value(), 0.9 * 0.7 - 0.2, 1e-6)
    np.testing.assert_allclose(w.get_value(), 1 + 0.43 + 0.187, 1e-6)


def normalization(dtype, pattern="spatial"):
    """Return inputs, and all results of Theano's batch normalization with a rectifier, and gradients."""
    x, gradient = tensor4("x", dtype), tensor4("g", dtype)
    kept = 1 if pattern == "spatial" else 3
    scale, shift = (tt.TensorType(dtype, (False,) * kept)(name) for name in ("scale", "shift"))
    shape = (5,) if kept == 1 else (5, 4, 3)
    averages = [theano.shared(np.full(shape, value, dtype)) for value in (1, 2)]
    y, *statistics = tt.nnet.bn.batch_normalization_train(
        x, scale, shift, pattern, running_mean=averages[0], running_var=averages[1]
    )
    out = tt.nnet.relu(y)
    gradients = theano.grad(None, [x, scale, shift], known_grads={out: gradient})
    return [x, gradient, scale, shift], [out, *statistics, *gradients]


def normalization_arrays(dtype, pattern):
    random = np.random.RandomState(0)
    shape = (6, 5, 4, 3)
    kept = shape[1:2] if pattern == "spatial" else shape[1:]
    arrays = [3 + 2 * random.standard_normal(shape), random.standard_normal(shape)]
    arrays += [random.uniform(1, 2, kept), random.standard_normal(kept)]
    return [one.astype(dtype) for one in arrays]


@pytest.mark.parametrize("pattern", ["spatial", "per-activation"])
def test_batch_normalization_is_that_of_theano_in_double_precision(pattern):
    _, expected = both(*normalization("float64", pattern), "py")
    expected = expected(*normalization_arrays("float64", pattern))
    for dtype, tolerance in (("float64", 1e-12), ("float32", 2e-5)):
        with theano.change_flags(floatX=dtype):
            inputs, outputs = normalization(dtype, pattern)
            f = theano.function(inputs, outputs, mode=fast("py"))
        assert not any("BatchNorm" in type(node.op).__name__ for node in f.maker.fgraph.apply_nodes)
        for one, other in zip(f(*normalization_arrays(dtype, pattern)), expected):
            assert one.dtype == dtype
            np.testing.assert_allclose(one, other, tolerance, tolerance)


def test_batch_normalization_of_float32_with_another_floatX():
    """Theano does not expand it, as the formula of the average would be float64."""
    with theano.change_flags(floatX="float64"):
        f = theano.function(*normalization("float32"), mode=fast("py"))
    assert not any("BatchNorm" in type(node.op).__name__ for node in f.maker.fgraph.apply_nodes)


def test_a_gradient_of_batch_normalization_by_another_mean():
    x, gradient = tensor4("x", "float64"), tensor4("g", "float64")
    scale, mean, invstd = (tensor4(name, "float64", (True, False, True, True)) for name in "smi")
    outputs = AbstractBatchNormTrainGrad(ALL_BUT_CHANNELS)(x, gradient, scale, mean, invstd, 1e-4)
    f, expected = both([x, gradient, scale, mean, invstd], outputs, "py")
    random = np.random.RandomState(0)
    arrays = [random.standard_normal((2, 3, 4, 5)) for _ in range(2)]
    arrays += [random.uniform(1, 2, (1, 3, 1, 1)) for _ in range(3)]
    for one, other in zip(f(*arrays), expected(*arrays)):
        np.testing.assert_allclose(one, other, 1e-12, 1e-12)


def test_an_optimization_can_be_excluded_by_its_name():
    x = tt.fmatrix("x")
    assert loops_of(theano.function([x], x.sum(0)))
    for name in ("synkhronos_loops", "synkhronos"):
        assert not loops_of(theano.function([x], x.sum(0), mode=fast().excluding(name)))


def test_theanos_operations_can_be_chosen():
    x = tt.fmatrix("x")
    registration.use(False)
    assert not loops_of(theano.function([x], x.sum(0)))
    registration.use(True)
    registration.use(True)
    assert loops_of(theano.function([x], x.sum(0)))
