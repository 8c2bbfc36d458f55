"""A job with which to try a cluster: it fits a linear model, with the rows split over all ranks.

python -m synkhronos launch --hosts node-1,node-2 train.py --epochs 10
"""

import argparse
import socket

import synkhronos as synk
from synkhronos.extensions import train, updates

import numpy as np
import theano
import theano.tensor as T

ROWS, FEATURES, BATCH = 20_000, 20, 1000


def host(rank):
    """Each rank calls this, by `synk.spmd`."""
    return socket.gethostname()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    epochs = parser.parse_args().epochs
    n = synk.fork()
    hosts = synk.spmd(host)
    counts = ", ".join(f"{name}: {hosts.count(name)}" for name in sorted(set(hosts)))
    print(f"{n} ranks ({counts})", flush=True)

    x, y = T.matrix("x"), T.vector("y")
    weights = theano.shared(np.zeros(FEATURES, theano.config.floatX), "weights")
    loss = T.sqr(T.dot(x, weights) - y).mean()
    step = train.make_train_function(loss, [weights], x, y, updates.sgd, 0.05)

    random = np.random.RandomState(1)
    rows = random.normal(size=(ROWS, FEATURES)).astype(theano.config.floatX)
    noise = 0.1 * random.normal(size=ROWS)
    targets = (rows.dot(np.linspace(-1, 1, FEATURES)) + noise).astype(theano.config.floatX)
    data = synk.data(rows, constant=True), synk.data(targets, constant=True)
    for epoch in range(epochs):
        order = random.permutation(ROWS).reshape(-1, BATCH)
        mean = np.mean([step(*data, batch=batch) for batch in order])
        print(f"epoch {epoch + 1}: loss {mean:.4f}", flush=True)
    synk.close()


if __name__ == "__main__":
    main()
