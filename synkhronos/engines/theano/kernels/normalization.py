"""Batch normalization, means and variances, as formulas that the loops compute in few passes.

On the CPU, Theano expands ``batch_normalization_train`` and its gradient when a graph is otherwise
finished. Its formulas read an array eleven times more than necessary: squares are powers, and means are
taken of products that are then written to memory for their shape. It does not expand them at all if a
result has another dtype than in the formula, such as for float32 images with ``floatX=float64``.

The mean and the variance of an array take one pass. A variance is the sum of ``(x - m)**2``, where m is
the mean, which needs a pass of its own. The sum is ``sum(x**2) - m * (2 * sum(x) - n * m)`` for any m
that is the same for all x of a sum; so two sums in one pass are enough. In double precision, the mean of
these differences is exact to about ``1e-16 * m**2``. A float32 m that is rounded by ``6e-8 * m`` changes
the mean of squared distances by ``4e-15 * m**2``, so for float32 the result is as exact as before. Other
sums are not replaced.
"""

from __future__ import annotations

from typing import Any, Iterable, Sequence

from theano import tensor
from theano.compile.ops import Shape, Shape_i
from theano.gof import Apply, Variable, local_optimizer
from theano.scalar import basic as scalars
from theano.tensor.elemwise import Elemwise, Sum
from theano.tensor.nnet.bn import AbstractBatchNormTrain, AbstractBatchNormTrainGrad

from synkhronos.engines.theano.kernels.cpp import at_each_node, with_traces


@local_optimizer([AbstractBatchNormTrain])
def synkhronos_batch_normalization(node: Apply) -> list[Variable] | None:
    """Return the results of batch normalization in training."""
    if type(node.op) is not AbstractBatchNormTrain or not _is_possible(node):
        return None
    x, scale, bias, epsilon, factor, *averages = node.inputs
    total = _Total(x, node.op.axes)
    mean = total.mean(x)
    variance = total.mean(tensor.sqr(x - mean))
    invstd = tensor.inv(tensor.sqrt(variance + epsilon.astype(x.dtype)))
    results = [(x - mean) * (scale * invstd) + bias, mean, invstd]
    unbiased = variance * total.count / (total.count - 1)
    for average, newest in zip(averages, (mean, unbiased)):
        results.append(average * (1 - factor) + newest * factor)
    return _like(results, node.outputs)


@local_optimizer([AbstractBatchNormTrainGrad])
def synkhronos_batch_normalization_grad(node: Apply) -> list[Variable] | None:
    """Return the gradients of batch normalization with respect to its input, scale and bias."""
    if type(node.op) is not AbstractBatchNormTrainGrad or not _is_possible(node):
        return None
    x, gradient, scale, mean, invstd, _ = node.inputs
    total = _Total(x, node.op.axes)
    of_bias, of_distance = total.sum(gradient), total.sum(gradient * (x - mean))
    slope = of_distance * tensor.sqr(invstd) / total.count
    # The distances add up to 0, unless the operation is given another mean.
    offset = (of_bias - total.sum(x - mean) * slope) / total.count
    of_input = gradient - (x - mean) * slope - offset
    return _like([of_input * (scale * invstd), of_distance * invstd, of_bias], node.outputs)


class _Total:
    """Sums over axes of an array, which keep the number of axes, and the number of the summed items."""

    def __init__(self, x: Variable, axes: Iterable[int]) -> None:
        self._axes, shape = tuple(axes), x.shape
        count = 1
        for axis in self._axes:
            count = count * shape[axis]
        self.count = tensor.cast(count, x.dtype)

    def sum(self, values: Variable) -> Variable:
        return values.sum(self._axes, keepdims=True)

    def mean(self, values: Variable) -> Variable:
        return self.sum(values) / self.count


def _is_possible(node: Apply) -> bool:
    return all(isinstance(variable.type, tensor.TensorType) for variable in node.inputs)


def _like(results: Sequence[Variable], outputs: Sequence[Variable]) -> list[Variable]:
    """Return results with the types and the traces of outputs."""
    cast = [result.astype(output.dtype) for result, output in zip(results, outputs)]
    like = [tensor.patternbroadcast(item, output.broadcastable) for item, output in zip(cast, outputs)]
    return with_traces(outputs, like)


# Moments


@local_optimizer([Sum])
def synkhronos_moments(node: Apply) -> list[Variable] | None:
    """Return the sum of squared distances from sums of numbers and of squares."""
    if type(node.op) is not Sum:
        return None
    (squares,) = node.inputs
    distances = squares.owner.inputs[0] if _is_elementwise(squares, scalars.Sqr) else None
    is_single = squares.dtype == node.outputs[0].dtype == "float32"
    is_exact = is_single and node.op._acc_dtype("float32") == "float64"
    if distances is None or not is_exact or not _is_elementwise(distances, scalars.Sub):
        return None
    x, mean = distances.owner.inputs
    axes = tuple(range(x.ndim)) if node.op.axis is None else tuple(sorted(node.op.axis))
    if not _is_summed(x, node.op) or x.dtype != mean.dtype or x.broadcastable != distances.broadcastable:
        return None
    if not all(mean.broadcastable[axis] for axis in axes):
        return None
    count: Any = 1
    for axis in axes:
        count = count * x.shape[axis]
    count = count.astype("float64")
    centre = mean.dimshuffle([axis for axis in range(x.ndim) if axis not in axes]).astype("float64")
    doubles = x.astype("float64")
    total, of_squares = doubles.sum(axes), tensor.sqr(doubles).sum(axes)
    result = tensor.maximum(of_squares - centre * (2 * total - count * centre), 0).astype("float32")
    return [tensor.patternbroadcast(result, node.outputs[0].broadcastable)]


def _is_elementwise(variable: Variable, kind: type[scalars.ScalarOp]) -> bool:
    op = getattr(variable.owner, "op", None)
    return isinstance(op, Elemwise) and isinstance(op.scalar_op, kind)


def _is_summed(x: Variable, op: Sum) -> bool:
    """Whether the same sum is also taken of an array itself."""
    return any(client != "output" and client.op == op for client, _ in x.clients)


@local_optimizer([Shape, Shape_i])
def synkhronos_shapes(node: Apply) -> list[Variable] | None:
    """Return the shape of an elementwise result from an input, so that the result need not be there."""
    if type(node.op) not in (Shape, Shape_i):
        return None
    (variable,) = node.inputs
    if not _is_elementwise(variable, scalars.ScalarOp):
        return None
    for item in variable.owner.inputs:
        if item.broadcastable == variable.broadcastable:
            return [node.op(item)]
    return None


OPTIMIZATIONS = [
    at_each_node(synkhronos_batch_normalization, 48.5),
    at_each_node(synkhronos_batch_normalization_grad, 48.5),
    at_each_node(synkhronos_moments, 48.91),
    at_each_node(synkhronos_shapes, 48.92),
]
