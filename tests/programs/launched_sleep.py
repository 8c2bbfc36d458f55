"""Sleeps in a call, which may be interrupted."""

import time

import numpy as np
import theano
import theano.tensor as tt

import synkhronos as synk


class Sleep(theano.Op):
    __props__ = ()

    def make_node(self, x):
        return theano.Apply(self, [x], [x.type()])

    def perform(self, node, inputs, outputs):
        if inputs[0].any():
            print("sleeping", flush=True)
            time.sleep(1.5)
        outputs[0][0] = inputs[0]


if __name__ == "__main__":
    synk.fork(2, use_gpu=False)
    x = tt.vector("x")
    f = synk.function([x], (Sleep()(x), "gather"), mode="FAST_COMPILE")
    synk.distribute()
    try:
        f(np.ones(4))
    except KeyboardInterrupt:
        print("interrupted", f(np.zeros(4)), flush=True)
        raise
