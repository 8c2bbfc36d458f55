"""Four ranks that compute until something dies. The arguments are a moment and a folder.

The file ``ranks`` in the folder then has the process ids and hosts by rank. If the world breaks, the
script says so and opens another one.
"""

import json
import os
import socket
import sys
import time
from pathlib import Path

import synkhronos as synk
import numpy as np
import theano
import theano.tensor as tt
from synkhronos.extensions import train, updates
from prelude import DOZE, LONG, Act, open_world

from synkhronos._errors import WorldBrokenError


def meet_for_ever(rank):
    while True:
        rank.barrier()
        time.sleep(0.01)


def exchange_for_ever(rank, weights):
    center = rank.center(weights)
    while True:
        center.elastic(0.5)
        rank.send((rank.rank + 1) % rank.size, weights.get_value())
        rank.receive()


def exchange_again(rank, weights):
    """Go on after the first error, as a program that catches errors does."""
    try:
        exchange_for_ever(rank, weights)
    except Exception:
        exchange_for_ever(rank, weights)


EXCHANGES = {"center": exchange_for_ever, "again": exchange_again}


def step_for_ever():
    """Take steps whose gradients are reduced by the progress processes."""
    x, weights = tt.dmatrix("x"), [theano.shared(np.ones((300, 300)) / 300) for _ in range(3)]
    out = x
    for one in weights:
        out = tt.tanh(out.dot(one))
    step = train.make_train_function(
        tt.sqr(out).mean(), weights, x, None, updates.sgd, 0.1, overlap=True
    )
    while True:
        step(np.ones((40, 300)))


def function_that_reduces():
    """Return a function in whose graph the ranks wait for each other, once it has been called."""
    x = tt.dvector("x")
    f = synk.function([x], synk.ops.all_reduce(Act()(x).sum()))
    f([0.0] * 4)
    return f


def compute_until_asked(rank):
    while not rank.should_stop:
        time.sleep(0.05)
    return True


def main(moment, folder):
    world = open_world(4)
    f = function_that_reduces() if moment == "graph" else None
    facts = synk.spmd(lambda rank: (os.getpid(), socket.gethostname()))
    (folder / "new").write_text(json.dumps(facts))
    (folder / "new").rename(folder / "ranks")
    try:
        if moment == "raise":
            return raise_on_each(world)
        if moment == "call":
            world.act(LONG, LONG, LONG, LONG)
        elif moment == "wait":
            world.act(0, LONG, 0, LONG)  # leaders cannot be interrupted
        elif moment == "far":
            world.act(0, 0, LONG, 0)
        elif moment == "idle":
            time.sleep(60)
        elif moment == "doze":
            while True:
                world.act(DOZE, DOZE, DOZE, DOZE)
        elif moment in EXCHANGES:
            weights = theano.shared(np.zeros(300_000), "weights")
            synk.function([], weights.sum())
            synk.distribute()
            synk.spmd(EXCHANGES[moment], weights)
        elif moment == "overlap":
            step_for_ever()
        elif moment == "graph":
            f([0.0, LONG, 0.0, LONG])  # the leaders wait inside
        elif moment == "meet":
            synk.spmd(meet_for_ever)
        else:
            print(f"stopped {list(synk.spmd(compute_until_asked))}", flush=True)
    except WorldBrokenError as error:
        print(f"broken: {error}", flush=True)
        synk.close()
        open_world(4).check_usable()
        print("recovered", flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        raise


def raise_on_each(world):
    """Raise an exception on one rank after the other, and go on."""
    for rank in range(1, 4):
        try:
            world.act(*(np.arange(4) == rank).astype(int))
        except synk.WorkerError as error:
            assert error.rank == rank and "WorkerTrouble: it went wrong in here" in error.traceback
            world.check_usable()
            print(f"rank {rank} raised", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
