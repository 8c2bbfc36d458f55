"""Fail unless pygpu accepts exactly the dtypes that the communicator passes to NCCL."""

import numpy as np
import pygpu
from pygpu.collectives import GpuComm, GpuCommCliqueId
from synkhronos.comms import nccl

DTYPES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64"

context = pygpu.init("cuda0")
name = bytes(GpuCommCliqueId(context).comm_id)
names = [name, bytes(GpuCommCliqueId(context).comm_id)]
assert len(set(names)) == 2 and {len(one) for one in names} == {128}
comm = GpuComm(GpuCommCliqueId(context, bytearray(name)), 1, 0)
assert (comm.rank, comm.count) == (0, 1)
taken = []
for dtype in DTYPES.split():
    array = pygpu.array(np.ones(3, dtype), context=context)
    try:
        comm.all_reduce(array, "sum", array)
    except pygpu.gpuarray.GpuArrayException as error:
        assert b"data type" in error.args[0], error
    else:
        taken.append(np.dtype(dtype))
        assert (np.asarray(array) == 1).all()
assert set(taken) == set(nccl._DTYPES)
