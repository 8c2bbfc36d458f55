"""Run most computations of the library in several worlds; print their digests by world as JSON.

The arguments are worlds, each as ``SIZE:MASTER_RANK``, and optionally ``--late``, which delays each
rank at the barriers by a different time.
"""

import argparse
import hashlib
import json
import random
import time

import synkhronos as synk
import numpy as np
import theano
import theano.tensor as tt
from synkhronos.extensions import train, updates
from synkhronos.transports.local import LocalTransport
from theano.sandbox.rng_mrg import MRG_RandomStreams
from theano.tensor.shared_randomstreams import RandomStreams

ROWS, COLUMNS, HIDDEN, TARGETS = 203, 30, 40, 4
RULES = (
    (MRG_RandomStreams, updates.adam, "FAST_COMPILE"),
    (MRG_RandomStreams, updates.sgd_nonflat, "FAST_RUN"),
    (RandomStreams, updates.nesterov_momentum, "FAST_RUN"),
    (RandomStreams, updates.sgd_nonflat, "FAST_COMPILE"),
)
OPS = ("sum", "avg", "prod", "min", "max")


class Digests:
    """A digest of each computation, so that a difference can be traced to where it begins."""

    def __init__(self):
        self._by_name = {}

    def note(self, name, *arrays):
        for array in arrays:
            contents = np.ascontiguousarray(array)
            told = f"{contents.dtype} {contents.shape}".encode() + contents.tobytes()
            self._by_name.setdefault(name, hashlib.sha256()).update(told)

    def as_text(self):
        return {name: digest.hexdigest() for name, digest in self._by_name.items()}


def use_mode(name):
    theano.compile.mode.instantiated_default_mode = theano.compile.get_mode(name)


def network(streams, rng):
    x, y = tt.fmatrices("x", "y")
    shapes = [(COLUMNS, HIDDEN), (HIDDEN,), (HIDDEN, TARGETS), (TARGETS,)]
    params = w1, b1, w2, b2 = [
        theano.shared((rng.randn(*shape) / 5).astype("float32"), f"p{position}")
        for position, shape in enumerate(shapes)
    ]
    kept = x * streams.binomial(x.shape, p=0.8, dtype="float32") / np.float32(0.8)
    hidden = tt.tanh(tt.dot(kept, w1) + b1)
    hidden = hidden * streams.uniform(hidden.shape, dtype="float32")
    loss = tt.sqr(tt.tanh(tt.dot(hidden, w2) + b2) - y).mean()
    return x, y, params, loss


def note_training(digests, rng, x_data, y_data):
    for make, rule, mode in RULES:
        use_mode(mode)
        x, y, params, loss = network(make(234), rng)
        step = train.make_train_function(loss, params, x, y, rule, learning_rate=0.02)
        name = f"{make.__name__} {rule.__name__}"
        order = np.random.RandomState(2).permutation(ROWS)
        for start, stop in ((0, 64), (64, 101), (101, 102), (102, 104), (104, ROWS)):
            loss = step(x_data, y_data, batch=order[start:stop], num_slices=1 + start % 2)
            digests.note(name, loss)
        digests.note(name, *synk.gather(params))


def note_collectives(digests, rng, size):
    use_mode("FAST_RUN")
    values = theano.shared(rng.randn(50021).astype("float32"), "values")
    s = synk.function([], (values.sum(), "avg"), updates=[(values, values * tt.cos(values))])
    draw = RandomStreams(5).normal((50021,), dtype="float32")
    fill = synk.function([], updates=[(values, draw)])
    for op in OPS:
        fill()
        digests.note(f"reduce {op}", synk.reduce(values, op, in_place=False))
        with synk.fuse():
            total = s()
            synk.all_reduce(values, op, weights=None if op != "avg" else list(range(1, size + 1)))
        digests.note(f"all_reduce {op}", total.result(), synk.gather(values))
    fill()
    synk.all_gather(values)
    digests.note("all_gather", synk.gather(values))


def note_outputs(digests, x_data):
    x = tt.fmatrix("x")
    expressions = [x.sum(), x.mean(), x.prod(), x.min(), x.max()]
    f = synk.function([x], list(zip(expressions, OPS)), mode="FAST_COMPILE")
    for keywords in ({}, {"num_slices": 3, "batch": 101}, {"batch": 1}):
        for op, value in zip(OPS, f(x_data, **keywords)):
            digests.note(f"outputs {op}", value)


def digests_of(size, master_rank):
    digests, rng = Digests(), np.random.RandomState(1)
    synk.fork(size, use_gpu=False, master_rank=master_rank)
    x_data = synk.data(rng.randn(ROWS, COLUMNS).astype("float32"))
    y_data = synk.data(rng.randn(ROWS, TARGETS).astype("float32"))
    note_training(digests, rng, x_data, y_data)
    note_collectives(digests, rng, size)
    note_outputs(digests, x_data)
    synk.close()
    return digests.as_text()


def be_late_at_barriers():
    barrier = LocalTransport.barrier
    seconds = random.SystemRandom()  # forked ranks would share the state of a seeded generator

    def barrier_late(transport):
        time.sleep(seconds.uniform(0, 0.003))
        barrier(transport)

    LocalTransport.barrier = barrier_late


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("worlds", nargs="+")
    parser.add_argument("--late", action="store_true")
    options = parser.parse_args()
    if options.late:
        be_late_at_barriers()
    print(json.dumps({world: digests_of(*map(int, world.split(":"))) for world in options.worlds}))
