"""Training steps in wire formats on two machines, resumed from a checkpoint if the file exists.

The gradients of some steps travel while the ranks compute. Prints a digest of all parameters.
"""

import hashlib
import os
import sys

import synkhronos as synk
import numpy as np
from compilers import compiler, tt
from synkhronos.extensions import train, updates

WIDTH = 300
X = np.random.RandomState(0).randn(13, WIDTH).astype("float32")
FORMATS = ("int8", synk.TopK(0.1), synk.PowerSGD(4))


def main(path):
    synk.fork(4, use_gpu=False, timeout=30)
    networks = [made(wire, overlap) for wire in FORMATS for overlap in (False, True)]
    digests = []
    if not os.path.exists(path):
        take_steps(networks)
        synk.save(path)
        digests.append(take_steps(networks))
    for _ in range(2):
        synk.load(path)
        digests.append(take_steps(networks))
    synk.close()
    assert all(one == digests[0] for one in digests), digests
    print(*digests[0])


def made(wire, overlap):
    """Return a training step, and its parameters."""
    rng = np.random.RandomState(1)
    x, params = tt.fmatrix("x"), []
    out = x
    for _ in range(3):
        params.append(compiler.shared((rng.randn(WIDTH, WIDTH) / 20).astype("float32")))
        out = tt.tanh(out.dot(params[-1]))
    loss = tt.sqr(out - x).mean()
    step = train.make_train_function(
        loss, params, x, None, updates.momentum, 0.1, wire=wire, overlap=overlap
    )
    return step, params


def take_steps(networks):
    """Take some steps with each network; return a digest of the parameters of each."""
    for _ in range(3):
        for step, _ in networks:
            step(X)
    contents = [b"".join(one.get_value().tobytes() for one in params) for _, params in networks]
    return [hashlib.blake2b(one, digest_size=8).hexdigest() for one in contents]


if __name__ == "__main__":
    main(sys.argv[1])
