"""Create and use a world. Accesses to two files mark the beginning and the end in a trace."""

import os

import synkhronos as synk
import numpy as np
import theano
import theano.tensor as tt

x, s = tt.dmatrix("x"), theano.shared(np.ones(3))


def use_a_world(end="/"):
    synk.fork(3, use_gpu=False)
    f = synk.function([x], (x.sum(), "sum"))
    synk.distribute()
    data = synk.data(np.ones((300, 300)))
    f(data)
    f(np.ones((200, 300)))
    synk.function([], s.sum())()
    synk.all_reduce(s)
    os.path.exists(end)
    synk.close()


use_a_world()  # compile now, so that nothing is compiled below
os.path.exists("/begin")
use_a_world("/end")
