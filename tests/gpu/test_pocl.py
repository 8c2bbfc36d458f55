"""Tests of operations on an OpenCL device: those that the engine fixes, and those that still fail."""

import numpy as np
import pytest
import theano
import theano.tensor as tt
from oracle import ON_CPU, assert_same

from .pocl import UNSUPPORTED


@pytest.fixture(autouse=True)
def on_opencl(world, devices):
    if not devices[0].startswith("opencl"):
        pytest.skip("about OpenCL devices")


def both(inputs, outputs):
    on_device = theano.function(inputs, [output.transfer(None) for output in outputs])
    return on_device, theano.function(inputs, outputs, mode=ON_CPU)


@pytest.mark.parametrize("one", UNSUPPORTED, ids=lambda one: one.name)
def test_what_is_listed_as_unsupported_is_an_error_that_says_why(one):
    x = tt.matrix("x", dtype=one.dtype)
    with pytest.raises(Exception, match=one.message):
        theano.function([x], one.make(x.transfer(None)))(np.ones((3, 3), one.dtype))


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_maximum_and_minimum_are_computed_on_the_device_and_propagate_nan(dtype):
    x, y = tt.matrix("x", dtype=dtype), tt.matrix("y", dtype=dtype)
    outputs = [tt.maximum(x, y), tt.minimum(2 * x, y) + 1]
    on_device, on_cpu = both([x, y], outputs)
    a, b = np.random.default_rng(0).integers(-3, 4, (2, 5, 3)).astype(dtype)
    if dtype == "float32":
        a[0, 0] = b[1, 1] = np.nan
    for got, expected in zip(on_device(a, b), on_cpu(a, b)):
        assert_same(got, expected, dtype)
    kinds = [type(node.op).__name__ for node in on_device.maker.fgraph.apply_nodes]
    assert "GpuElemwise" in kinds and "Elemwise" not in kinds


def test_whole_quotients_and_casts_to_bool_are_computed_on_the_device():
    x, y = tt.fmatrix("x"), tt.fmatrix("y")
    outputs = [tt.int_div(x, y), tt.cast(x - 1, "bool")]
    on_device, on_cpu = both([x, y], outputs)
    a, b = np.random.default_rng(0).integers(-3, 4, (2, 5, 3)).astype("float32")
    for got, expected in zip(on_device(a, b + 0.5), on_cpu(a, b + 0.5)):
        assert_same(got, expected, expected.dtype)
    kinds = [type(node.op).__name__ for node in on_device.maker.fgraph.apply_nodes]
    assert "Elemwise" not in kinds


def test_softmax_cross_entropy_and_its_gradient_are_computed_on_the_device():
    x, y = tt.fmatrix("x"), tt.ivector("y")
    softmax = tt.nnet.softmax(x)
    loss = tt.nnet.categorical_crossentropy(softmax, y)
    on_device, on_cpu = both([x, y], [loss, softmax, tt.grad(loss.mean(), x)])
    rng = np.random.default_rng(0)
    values = rng.normal(size=(37, 11)).astype("float32"), rng.integers(0, 11, 37).astype("int32")
    for got, expected in zip(on_device(*values), on_cpu(*values)):
        assert_same(got, expected, "float32")
    kinds = [type(node.op).__name__ for node in on_device.maker.fgraph.apply_nodes]
    assert "GpuCrossentropySoftmaxArgmax1HotWithBias" in kinds


class Wrong(theano.scalar.UnaryScalarOp):
    def impl(self, x):
        return x

    def c_code(self, node, name, inputs, outputs, sub):
        return f"{outputs[0]} = no_such_function({inputs[0]});"


def test_an_elementwise_kernel_that_does_not_compile_is_an_error_and_no_crash():
    x = tt.fvector("x")
    wrong = tt.Elemwise(Wrong(theano.scalar.same_out, name="wrong"))
    with pytest.raises(RuntimeError, match="[Cc]ould not initialize elemwise"):
        theano.function([x], wrong(x).transfer(None))
