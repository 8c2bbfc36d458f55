"""Four ranks that train, and save after each step, until a leader is killed; a new run resumes.

The arguments are a folder for the checkpoint, and where the run waits to be killed, "step" or "save", or
"end" if it is not. Then the file ``now`` is in the folder. At the end, another run without interruption
must give the same checkpoint, byte for byte.
"""

import itertools
import sys
import time
from pathlib import Path

import numpy as np
import synkhronos as synk
import theano
import theano.tensor as tt
from synkhronos.extensions import train, updates
from theano.tensor.shared_randomstreams import RandomStreams

STEPS, FATAL = 12, 7
LONG = 10.0  # seconds for the death


def run(path, wait_to_be_killed=None):
    """Train from the last checkpoint, if there is one, to the end."""
    synk.fork(4, use_gpu=False)
    x, w = tt.dmatrix("x"), theano.shared(np.linspace(-1, 1, 3000).reshape(60, 50), "w")
    noise = RandomStreams(5).normal((60, 50))
    step = train.make_train_function(
        tt.sqr(tt.tanh(x.dot(w + 0.1 * noise)) - 0.5).mean(), [w], x, None, updates.adam, 0.01
    )
    rows = np.random.RandomState(3).rand(STEPS, 8, 60)
    synk.distribute()
    position = synk.load(path) if path.exists() else {"step": 0}
    print("begins with", position["step"], flush=True)
    while position["step"] < STEPS:
        step(rows[position["step"]])
        position["step"] += 1
        if position["step"] == FATAL and wait_to_be_killed is not None:
            wait_to_be_killed(lambda: step(rows[0]), lambda: synk.save(path, position), path.parent)
        synk.save(path, position)
    synk.close()


def in_steps(step, save, folder):
    (folder / "now").touch()
    until = time.monotonic() + LONG
    while time.monotonic() < until:
        step()
    raise SystemExit("nobody has killed a leader")


def in_save(step, save, folder):
    """Wait while half of the checkpoint has been written."""
    write_array, count = np.lib.format.write_array, itertools.count()

    def write_slowly(*arguments, **options):
        write_array(*arguments, **options)
        if next(count) == 1:
            (folder / "now").touch()
            time.sleep(LONG)

    np.lib.format.write_array = write_slowly
    save()
    step()
    raise SystemExit("nobody has killed a leader")


def main(folder, moment):
    path = folder / "run.npz"
    run(path, {"step": in_steps, "save": in_save, "end": None}[moment])
    run(folder / "uninterrupted.npz")
    assert path.read_bytes() == (folder / "uninterrupted.npz").read_bytes()
    print("the same")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
