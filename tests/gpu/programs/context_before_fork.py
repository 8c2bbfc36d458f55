"""Try to create a world when the process already has a context on the device.

The arguments are the device, and who creates the context: ``script``, or ``flags`` (Theano's flags).
"""

import sys

import synkhronos as synk
from refusals import refused

device, maker = sys.argv[1:]
if maker == "script":
    import theano.gpuarray

    theano.gpuarray.use(device)
import theano.tensor as tt

message = refused(lambda: synk.fork(devices=[device] * 2), RuntimeError)
assert "THEANO_FLAGS=device=cpu,force_device=True" in message, message
assert synk.fork(devices=[device]) == 1
x = tt.fvector()
assert synk.function([x], ((x * 2).sum(), "sum"))([1.0, 1.0, 1.0]) == 6
synk.close()
