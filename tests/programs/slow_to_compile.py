"""Compiles a function of Theano with an optimization that waits until something is shown."""

import io
import sys
import time

import theano
import theano.tensor as tt


class Slow(theano.gof.Optimizer):
    def optimize(self, graph):
        limit = time.monotonic() + 20
        while not sys.stderr.getvalue() and time.monotonic() < limit:
            time.sleep(0.05)


sys.stderr = io.StringIO()
x = tt.dvector("x")
f = theano.function([x], x.sum(), mode=theano.Mode("py", Slow()), name="slow")
print(f([1, 2]), sys.stderr.getvalue())
