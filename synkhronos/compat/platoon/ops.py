"""Reductions in graphs: the workers meet when they compute the function."""

from __future__ import annotations

import functools
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


def all_reduce(
    op: str, src: Any, dest: Any = None, inplace: bool = False, worker: Worker | None = None
) -> Variable:
    """Return the reduction of the values of all workers.

    Parameters
    ----------
    op : {"sum", "prod", "max", "min"}
        The operation, which `AllReduceSum` and the others have.
    src : tensor variable
        The value of this worker.
    dest : tensor variable, optional
        A variable of the same type, whose memory was used for the result; only its type is checked.
    inplace : bool
        Accepted; the result is a new array.
    worker : Worker, optional
        By default the worker that this process has made.
    """
    result = AllReduce(op, worker)(src)
    if dest is not None and tensor.as_tensor_variable(dest).type != result.type:
        raise TypeError(
            f"all-reduce: dest: expected the type of the operand, {result.type}, got {dest.type}"
        )
    return result


AllReduceSum = functools.partial(all_reduce, "sum")
AllReduceProd = functools.partial(all_reduce, "prod")
AllReduceMax = functools.partial(all_reduce, "max")
AllReduceMin = functools.partial(all_reduce, "min")
