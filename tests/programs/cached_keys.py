"""Compiles a function with the library's operations; prints how many modules were not in the cache."""

import synkhronos as synk
import theano
import theano.tensor as tt
from theano.gof.cc import get_module_cache

import numpy as np

synk.fork(1, use_gpu=False)
before = set(get_module_cache().module_hash_to_key_data)
x, w = tt.ftensor4(), tt.ftensor4()
y = tt.nnet.relu(tt.signal.pool.pool_2d(tt.nnet.conv2d(x, w), (2, 2), ignore_border=True))
f = theano.function([x, w], [y, *theano.grad(y.sum(), [x, w])])
f(np.ones((2, 3, 8, 8), "f"), np.ones((4, 3, 3, 3), "f"))
print(len(set(get_module_cache().module_hash_to_key_data) - before))
synk.close()
