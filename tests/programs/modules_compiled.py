"""Fail if a worker compiles anything when it takes over a function created after the fork."""

from pathlib import Path

import synkhronos as synk
import numpy as np
import theano
import theano.tensor as tt


def modules():
    return sorted(Path(theano.config.compiledir).glob("*/key.pkl"))


synk.fork(4, use_gpu=False)
synk.distribute()
x = tt.fmatrix()
w = theano.shared(np.ones((3, 4), "float32"))
f = synk.function([x], (x.dot(w).sum(), "sum"))  # contains Dot22, whose ``__props__`` is empty
compiled = modules()
synk.distribute()
assert modules() == compiled and compiled, set(modules()) ^ set(compiled)
assert f(np.ones((8, 3), "float32")) == 8 * 3 * 4
