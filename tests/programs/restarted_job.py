"""A script that ``launch --restart`` starts again: it resumes from its last checkpoint, as users do.

The arguments are a folder, and the number of steps, or "on" to train until there is a file ``enough``.
After each start, a file ``began-N`` has the step, and the hosts and process ids by rank; N is the number
of restarts. The file ``step`` and the last line that is printed have the number of steps.
"""

import json
import os
import socket
import sys
from pathlib import Path

import numpy as np
import synkhronos as synk
from compilers import compiler, tt
from synkhronos.extensions import train, updates

BATCH, BATCHES, WIDTH = 8, 5, 12
# With whole numbers, a power of two as rate, and shares of 1, 2 or 4 rows, no sum is rounded.
ROWS = np.random.RandomState(3).randint(-9, 10, (BATCH * BATCHES, WIDTH)).astype("float64")
RATE = 0.125


def make_steps():
    """Return a training step of a network, one without rounding errors, and their parameters."""
    x = tt.dmatrix("x")
    w = compiler.shared(np.linspace(-1, 1, WIDTH * 7).reshape(WIDTH, 7), "w")
    exact = compiler.shared(np.zeros(WIDTH), "exact")
    losses = tt.sqr(tt.tanh(x.dot(w) / 9) - 0.5).mean(), x.dot(exact).mean()
    steps = [
        train.make_train_function(loss, [param], x, None, updates.momentum, rate, momentum=momentum)
        for loss, param, rate, momentum in ((losses[0], w, 0.01, 0.9), (losses[1], exact, RATE, 1.0))
    ]
    return steps, w, exact


def exact_after(count):
    """Return the parameters of the step without rounding errors after a number of steps."""
    means = ROWS.reshape(BATCHES, BATCH, WIDTH).mean(axis=1)
    exact, velocity = np.zeros(WIDTH), np.zeros(WIDTH)
    for step in range(count):
        velocity = velocity - RATE * means[step % BATCHES]
        exact = exact + velocity
    return exact


def main(folder, count):
    path, enough = folder / "run.npz", folder / "enough"
    size = synk.fork(use_gpu=False)
    steps, w, exact = make_steps()
    x = tt.dmatrix("x")
    own_rows = synk.function([x], (x.sum(axis=1), "gather"))
    synk.distribute()
    data = synk.data(ROWS)
    position = synk.load(path) if path.exists() else {"step": 0}
    said = position["step"], list(synk.spmd(where))
    file = folder / f"began-{os.environ.get('SYNKHRONOS_RESTARTS', 0)}"
    file.with_suffix(".new").write_text(json.dumps(said))
    file.with_suffix(".new").rename(file)
    assert own_rows(data).tolist() == ROWS.sum(axis=1).tolist() and synk.size() == size
    shares = [len(one) for one in np.array_split(np.arange(BATCH), size)]
    while position["step"] < count and not enough.exists():
        first = position["step"] % BATCHES * BATCH
        for step in steps:
            step(data, batch=slice(first, first + BATCH))
        position["step"] += 1
        synk.save(path, position)
        (folder / "step").write_text(str(position["step"]))
        assert exact.get_value().tolist() == exact_after(position["step"]).tolist(), position
    for one in (w, exact):
        copies = synk.gather(one, nd_up=1)
        assert (copies == copies[0]).all(), copies
    np.savez(folder / "end.npz", w=w.get_value(), exact=exact.get_value())
    synk.close()
    print(f"ended after {position['step']} steps with shares {shares}", flush=True)


def where(rank):
    return socket.gethostname(), os.getpid()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float("inf") if sys.argv[2] == "on" else int(sys.argv[2]))
