"""Train a network for some steps, and print the losses and digests of the weights.

The arguments are the number of processes and a mode: ``uninterrupted`` only trains, ``saving`` also
saves a checkpoint after some of the steps, and ``resumed`` runs only the steps after that checkpoint.
"""

import hashlib
import sys

import synkhronos as synk
import numpy as np
from compilers import RandomStreams, Streams, compiler, default_mode, tt
from synkhronos.extensions import train, updates

STEPS, SAVED = 12, 5


def network(rng):
    """Return inputs, parameters and loss, with random streams of both kinds."""
    x, y = tt.fmatrix("x"), tt.fvector("y")
    w1 = compiler.shared(rng.randn(20, 30).astype("float32") / 5, "w")
    w2 = compiler.shared(rng.randn(30).astype("float32") / 5, "w")
    kept = tt.cast(Streams(5).uniform(size=(x.shape[0], 30)) < 0.5, "float32")
    noise = tt.cast(RandomStreams(6).normal(size=(x.shape[0],)), "float32")
    hidden = tt.tanh(tt.dot(x, w1)) * kept
    loss = tt.sqr(tt.dot(hidden, w2) + np.float32(0.1) * noise - y).mean()
    return [x, y], [w1, w2], loss


def print_training(n, mode):
    synk.fork(n, use_gpu=False)
    (x, y), params, loss = network(np.random.RandomState(1))
    with default_mode("FAST_RUN" if n == 2 else "FAST_COMPILE"):  # compiled code, and NumPy code
        step = train.make_train_function(loss, params, x, y, updates.nesterov_momentum, 0.01)
        synk.distribute()
    shuffle = np.random.RandomState(2)
    rows = synk.data(shuffle.randn(53, 20).astype("float32"))
    targets = synk.data(shuffle.randn(53).astype("float32"))
    first, losses, order = 0, np.zeros(0), shuffle.permutation(53)
    if mode == "resumed":
        extra = synk.load("checkpoint.npz")
        first, shuffle, losses, order = (extra[name] for name in ("step", "shuffle", "losses", "order"))
    for number in range(first, STEPS):
        batch = order[:11]  # unequal shares on 2 and 3 ranks; 9 rows at the end of an epoch
        losses = np.append(losses, step(rows, targets, batch=batch))
        order = order[11:] if len(order) > 11 else shuffle.permutation(53)
        if mode == "saving" and number + 1 == SAVED:
            extra = {"step": number + 1, "shuffle": shuffle, "losses": losses, "order": order}
            synk.save("checkpoint.npz", extra)
    values = [shared.get_value() for shared in params]
    print(losses.tolist(), [hashlib.sha256(value.tobytes()).hexdigest() for value in values])


if __name__ == "__main__":
    print_training(int(sys.argv[1]), sys.argv[2])
