"""Sessions with BSP and EASGD on two machines, of which the first is resumed from its checkpoint.

Prints a digest of the parameters after BSP, and the error that EASGD reaches.
"""

import hashlib
import sys

import synkhronos as synk
from compilers import default_mode
from session_models import Model

from synkhronos.extensions.session import Recorder, Session


def train(rule, checkpoint=None, **config):
    session = Session(
        Model, rule, None, Recorder(print_every=0), checkpoint, seed=1, config=config, progress=False
    )
    record = session.run()
    return record, [one.get_value() for one in session.model.params]


def main(path, *epochs):
    synk.fork(2, use_gpu=False, timeout=60)
    for each in epochs:
        _, params = train("BSP", path, n_epochs=int(each))
    digest = hashlib.sha256(b"".join(one.tobytes() for one in params)).hexdigest()
    record, _ = train("EASGD", n_epochs=4, batch_size=20, rate=0.1)
    print(digest, record.validations[-1]["error"])


if __name__ == "__main__":
    with default_mode("FAST_COMPILE"):
        main(*sys.argv[1:])
