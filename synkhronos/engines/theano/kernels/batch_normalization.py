"""Theano's batch normalization in training, as operations that the loops compute in few passes.

On the CPU, Theano expands ``batch_normalization_train`` and its gradient when a graph is otherwise
finished. Its formulas read an array eleven times more than necessary: squares are powers, and means are
taken of products that are then written to memory for their shape. It does not expand them at all if a
result has another dtype than in the formula, such as for float32 images with ``floatX=float64``.
"""

from __future__ import annotations

from typing import Iterable, Sequence

from theano import tensor
from theano.gof import Apply, Variable, local_optimizer
from theano.tensor.nnet.bn import AbstractBatchNormTrain, AbstractBatchNormTrainGrad

from synkhronos.engines.theano.kernels.optimizations import at_each_node, with_traces


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


OPTIMIZATIONS = [
    at_each_node(synkhronos_batch_normalization, 48.5),
    at_each_node(synkhronos_batch_normalization_grad, 48.5),
]
