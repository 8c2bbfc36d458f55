"""Training steps in wire formats on two machines, resumed from a checkpoint if the file exists.

The gradients of some steps travel while the ranks compute. Prints a digest of all parameters.
"""

import hashlib
import os
import sys

from overlap_on_machines import X, Y, made, values

import synkhronos as synk
from synkhronos.extensions import updates

FORMATS = ("int8", synk.TopK(0.1), synk.PowerSGD(4))


def main(path):
    synk.fork(4, use_gpu=False, timeout=30)
    networks = [
        made(updates.momentum, 0.1, overlap=overlap, wire=wire)
        for wire in FORMATS
        for overlap in (False, True)
    ]
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


def take_steps(networks):
    """Take some steps with each network; return a digest of the parameters of each."""
    for _ in range(3):
        for step, _ in networks:
            step(X, Y)
    contents = [b"".join(one.tobytes() for one in values(params)) for _, params in networks]
    return [hashlib.blake2b(one, digest_size=8).hexdigest() for one in contents]


if __name__ == "__main__":
    main(sys.argv[1])
