"""Lose a worker of a world on a device, and continue with a world of one rank.

The argument is the device.
"""

import os
import signal
import sys

import numpy as np
import synkhronos as synk
from refusals import children, refused

(device,) = sys.argv[1:]
assert synk.fork(devices=[device] * 2) == 2
import theano
import theano.tensor as tt

s = theano.shared(np.arange(4, dtype="float32"))
x = tt.fvector()
f = synk.function([x], [(x.sum() + s.sum(), "sum"), (x * 2, "gather")], updates=[(s, s + 1)])
for length in (7, 1):
    total, doubled = f([1.0] * length)
    assert doubled.tolist() == [2] * length
try:
    f([1.0, 2.0], batch_s=[0])
except ValueError:
    pass
os.kill(children()[0].pid, signal.SIGKILL)
try:
    f([1.0] * 7)
except synk.WorldBrokenError as error:
    assert "rank 1" in str(error) and "SIGKILL" in str(error), error
else:
    raise AssertionError("no error")
synk.close()
assert not children()
assert s.get_value()[0] == 3  # the master has completed its share of the last call
message = refused(lambda: synk.fork(devices=[device] * 2), RuntimeError)
assert "call fork() again in a new process" in message, message
assert synk.fork(devices=[device]) == 1
g = synk.function([x], (x * s.sum(), "gather"))
total = s.get_value().sum()
assert g([1.0, 2.0]).tolist() == [total, 2 * total]
