"""Make a world and use it, between two requests for files by which a trace shows when."""

import os

import synkhronos as synk
import numpy as np
import theano
import theano.tensor as tt

x, s = tt.dmatrix("x"), theano.shared(np.ones(3))
theano.function([x], [x.sum(), s.sum()])  # compiled here, so that it is not compiled below
os.path.exists("/begin")
synk.fork(3, use_gpu=False)
f = synk.function([x], x.sum())
synk.distribute()
data = synk.data(np.ones((300, 300)))
f(data)
f(np.ones((200, 300)))
synk.function([], s.sum())()
synk.all_reduce(s)
os.path.exists("/end")
synk.close()
