"""Compile a function and a training step by PyTensor's JAX mode on a device; print facts as JSON.

The argument is a device such as ``jax:cuda0``. The results are compared with those of NumPy.
"""

import json
import sys
import time

import numpy as np
import synkhronos as synk

device = sys.argv[1]
synk.fork(devices=[device])
import jax
import pytensor
import pytensor.tensor as pt
from synkhronos.extensions import train, updates

X = np.random.RandomState(1).normal(size=(64, 32)).astype("float32")
W = np.random.RandomState(2).normal(size=(32, 8)).astype("float32")
RATE = 0.1

x = pt.matrix("x", dtype="float32")
w = pytensor.shared(W, "w")
f = synk.function([x], (x.dot(w).sum(axis=0), "sum"))
step = train.make_train_function((x.dot(w) ** 2).mean(), [w], x, None, updates.sgd, RATE)
synk.distribute()
np.testing.assert_allclose(f(X), X.dot(W).sum(axis=0), rtol=1e-3, atol=1e-3)
expected, losses, seconds = W.astype("float64"), [], []
for _ in range(5):
    out = X.dot(expected)
    expected = expected - RATE * X.T.dot(2 * out / out.size)
    began = time.perf_counter()
    losses.append(float(step(X)))
    seconds.append(time.perf_counter() - began)
    np.testing.assert_allclose(losses[-1], (out**2).mean(), rtol=1e-2)
np.testing.assert_allclose(w.get_value(), expected, rtol=1e-2, atol=1e-3)
platform = jax.devices()[0].platform
assert (platform == "cpu") == (device == "jax:cpu"), platform
facts = {"platform": platform, "jax": jax.__version__, "pytensor": pytensor.__version__}
print(json.dumps({**facts, "losses": losses, "seconds": float(np.median(seconds[1:]))}))
