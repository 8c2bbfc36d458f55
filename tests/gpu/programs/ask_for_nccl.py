"""Run computations and reductions; print "NCCL" or "no NCCL". The arguments are the devices.

If ``--as-cuda`` precedes them, OpenCL devices are treated as CUDA devices. The ranks then try to join
by NCCL, which fails.
"""

import sys

import numpy as np
import synkhronos as synk

devices = sys.argv[1:]
if devices[0] == "--as-cuda":
    del devices[0]
    from synkhronos.world import devices as kinds

    kinds.kind_of = lambda device: "cuda"
n = synk.fork(devices=devices)
import theano
import theano.tensor as tt

nccl = type(synk.world.world.current_world().rank_state.comm).__name__ == "NcclCommunicator"
x = tt.fmatrix("x")
w = theano.shared(np.ones((3, 2), "float32"))
f = synk.function([x], [(tt.dot(x, w).sum(axis=0), "sum"), (x, "gather")], updates=[(w, w * 2)])
for length in (2 * n + 1, 1):
    before = w.get_value()[0, 0]
    total, gathered = f(np.ones((length, 3), "float32"), num_slices=2)
    assert gathered.shape == (length, 3)
    assert np.allclose(total, 3 * length * before), total
for rank in range(n):
    synk.set_value(rank, w, np.full((3, 2), rank + 1, "float32"))
for use_nccl in (True, False):
    reduced = synk.reduce(w, "sum", in_place=False, nccl=use_nccl)
    assert (reduced == n * (n + 1) / 2).all(), reduced
synk.all_reduce(w, "avg", weights=range(n))
assert np.allclose(w.get_value(), sum(r * (r + 1) for r in range(n)) / sum(range(n)))
print("NCCL" if nccl else "no NCCL")
