"""Reductions in graphs: the workers meet when they compute the function."""

from __future__ import annotations

import itertools
from typing import Any, Sequence

import numpy as np

from synkhronos._typing import Variable
from synkhronos.compat.platoon.channel.worker import Worker, find_worker
from synkhronos.engines.names import Apply, Op, tensor

#: Numbers the operations of this process, as workers that build the same graphs have the same numbers
_NUMBERS = itertools.count()


class AllReduce(Op):
    """Reduces the values of all workers to one. They need the same shapes, and build the same graphs."""

    __props__ = ("op", "number")

    def __init__(self, op: str, worker: Worker | None) -> None:
        self.op, self.number, self._worker = op, next(_NUMBERS), worker

    def make_node(self, x: Variable) -> Apply:
        variable = tensor.as_tensor_variable(x)
        return Apply(self, [variable], [variable.type()])

    def perform(
        self, node: Apply, inputs: Sequence[np.ndarray], outputs: Sequence[list[Any]], *_: Any
    ) -> None:
        worker = find_worker(self._worker)
        outputs[0][0] = worker.all_reduce_arrays([np.asarray(inputs[0])], self.op)[0]

    def infer_shape(self, *args: Any) -> Any:
        return args[-1]


def _reduced(op: str, src: Any, dest: Any, worker: Worker | None) -> Variable:
    result = AllReduce(op, worker)(src)
    if dest is not None and tensor.as_tensor_variable(dest).type != result.type:
        raise TypeError(
            f"all-reduce: dest: expected the type of the operand, {result.type}, got {dest.type}"
        )
    return result


def AllReduceSum(
    src: Any, dest: Any = None, inplace: bool = False, worker: Worker | None = None
) -> Variable:
    """Return the sum of the values of all workers.

    Parameters
    ----------
    src : tensor variable
        The value of this worker.
    dest : tensor variable, optional
        A variable of the same type, whose memory was used for the result; only its type is checked.
    inplace : bool
        Accepted; the result is a new array.
    worker : Worker, optional
        By default the worker that this process has made.
    """
    return _reduced("sum", src, dest, worker)


def AllReduceProd(
    src: Any, dest: Any = None, inplace: bool = False, worker: Worker | None = None
) -> Variable:
    """Return the product of the values of all workers; see `AllReduceSum`."""
    return _reduced("prod", src, dest, worker)


def AllReduceMax(
    src: Any, dest: Any = None, inplace: bool = False, worker: Worker | None = None
) -> Variable:
    """Return the maximum of the values of all workers; see `AllReduceSum`."""
    return _reduced("max", src, dest, worker)


def AllReduceMin(
    src: Any, dest: Any = None, inplace: bool = False, worker: Worker | None = None
) -> Variable:
    """Return the minimum of the values of all workers; see `AllReduceSum`."""
    return _reduced("min", src, dest, worker)
