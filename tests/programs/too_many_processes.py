"""Try to start more workers than the user's limit on processes allows. Run it as non-root."""

import resource

import numpy as np
import psutil
import synkhronos as synk
import theano.tensor as tt
from prelude import error_of, open_world

world = open_world(4, start=False)
soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
mine = psutil.Process().num_threads()
resource.setrlimit(resource.RLIMIT_NPROC, (mine + 1, hard))
for _ in range(3):
    error = error_of(synk.distribute)
    assert isinstance(error, synk.SynkhronosError), repr(error)
    for word in ("only 1 of 3 workers", f"may have {mine + 1}", "ulimit -u", "pids-limit"):
        assert word in str(error), (word, str(error))
    assert psutil.Process().children() == []
resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))
world.check_usable()
# A function created late is pickled in a separate thread, which also counts towards the limit.
resource.setrlimit(resource.RLIMIT_NPROC, (1, hard))
x = tt.dvector("x")
late = synk.function([x], (x.sum() * 2, "sum"), mode="FAST_COMPILE")
error = error_of(synk.distribute)
assert isinstance(error, MemoryError) and "ulimit -u" in str(error), repr(error)
resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))
assert late(np.ones(4)) == 8
world.check_usable()
