"""Create a world on a device, and exit without closing it. The argument is the device."""

import sys

import numpy as np
import synkhronos as synk

synk.fork(devices=sys.argv[1:] * 2)
import theano

s = theano.shared(np.arange(4, dtype="float32"))
f = synk.function([], (s, "gather"))
assert len(f()) == 8
