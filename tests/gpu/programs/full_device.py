"""Call a collective when rank 1 does not have enough memory left on its GPU of 64 MB.

The argument is the name of the collective.
"""

import sys
import time

import numpy as np
import synkhronos as synk

n = synk.fork()
import theano

full = theano.shared(np.zeros(1, "float32"))
many = [theano.shared(np.ones(1 << 17, "float32")) for _ in range(16)]
f = synk.function([], updates=[(one, one + 1) for one in [full, *many]])
synk.distribute()
synk.set_value(1, full, np.ones(12 << 20, "float32"))  # 48 MB
call = {
    "all_reduce": lambda: synk.all_reduce(many, "sum"),
    "broadcast": lambda: synk.broadcast(many),
    "all_gather": lambda: synk.all_gather(many),
}[sys.argv[1]]
begin = time.monotonic()
try:
    call()
except synk.WorkerError as error:
    assert error.rank == 1 and "cuMemAlloc" in str(error), error
else:
    raise AssertionError("no error")
assert time.monotonic() - begin < 20
synk.set_value(1, full, np.zeros(1, "float32"))
synk.all_reduce(many, "sum")
assert (many[0].get_value() == n).all()
