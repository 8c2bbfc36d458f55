"""Fail if calls and collectives increase the memory in use on a device."""

import numpy as np
import synkhronos as synk
from synkhronos.world.rank_state import Command


class Free(Command):
    def run(self, state):
        return state.engine.context.free_gmem


synk.fork()
import theano
import theano.tensor as tt

x = tt.fmatrix("x")
w = theano.shared(np.ones((200, 300), "float32"))
v = [theano.shared(np.ones((200, 300), "float32")) for _ in range(5)]
outputs = [(x.dot(w), "gather"), (x.dot(w).sum(axis=0), "avg"), (w * 2, "max")]
f = synk.function([x], outputs, updates=[(one, one + 1, "avg") for one in [w, *v]])
synk.distribute()
free = []
for turn in range(30):
    rows = 10 + turn % 7
    f(np.ones((rows, 200), "float32"), num_slices=2)
    synk.all_reduce([w, *v], "avg", weights=[1, turn])
    synk.broadcast([w, *v])
    synk.scatter(v[0], np.ones((rows, 300), "float32"))
    synk.all_gather(v[0])
    free.append(synk.world.world.current_world().run(Free()))
assert free[14] == free[-1], free
