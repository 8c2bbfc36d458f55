"""Collectives on the arrays of a GPU, without transfers of the arrays around them.

Theano's optimizer replaces operations whose inputs come from the device, or whose results go there, by
operations on the device. A collective is the same operation on host and device; the ranks' communicator
exchanges the arrays.
"""

from theano.gpuarray.basic_ops import as_gpuarray_variable
from theano.gpuarray.opt import op_lifter, register_opt

from synkhronos.engines.collectives import (
    AllGather,
    AllReduce,
    Broadcast,
    OwnRows,
    ToMaster,
)


@register_opt("fast_compile")
@op_lifter([AllReduce, AllGather, Broadcast, OwnRows, ToMaster])
def local_collective_on_device(op, context_name, inputs, outputs):
    """Return the outputs of a collective of an array on the device."""
    peers, array, *others = inputs
    if isinstance(op, ToMaster):
        others = [as_gpuarray_variable(one, context_name) for one in others]
    return op(peers, as_gpuarray_variable(array, context_name), *others, return_list=True)
