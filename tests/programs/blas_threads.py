"""Print the number of BLAS threads on each rank, in a world of two ranks on eight cores."""

import json

import synkhronos as synk
from synkhronos.world import threads
from synkhronos.world.world import Command, current_world
import numpy as np
import theano.tensor as tt
from threadpoolctl import threadpool_info


class Threads(Command):
    def run(self, state):
        found = [one for one in threadpool_info() if one["user_api"] == "blas"]
        return sorted((one["filepath"], one["num_threads"]) for one in found)


threads.cores = lambda: 8
synk.fork(2, use_gpu=False)
x = tt.dmatrix("x")
f = synk.function([x], (tt.dot(x, x.T).sum(), "sum"))  # makes Theano load its BLAS after fork()
f(np.ones((4, 4)))
master, worker = current_world().run(Threads())
assert master == worker, (master, worker)
print(json.dumps([number for _, number in master]))
synk.close()
