"""Call a function with collectives in its graph on all GPUs, and compare it with the function alone."""

import numpy as np
import synkhronos as synk
import theano
import theano.tensor as tt

ITEMS = 5000  # more than what is sent along with an exchange

n = synk.fork()
x, w = tt.fmatrix("x"), theano.shared(np.linspace(0.5, 2, ITEMS).astype("float32"), "w")
y = x * w
total = synk.ops.all_reduce(y.sum(axis=0))
everyone = synk.ops.all_gather(y)
f = synk.function([x], [(total, None), (everyone, None), synk.ops.all_reduce(y.mean(), "avg")])
rows = np.random.RandomState(0).normal(size=(2 * n + 1, ITEMS)).astype("float32")
for chosen in (rows, rows[:1]):
    for result, expected in zip(f(chosen), f.as_theano(chosen)):
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)
synk.close()
