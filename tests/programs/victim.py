"""Open a world to be attacked; print its process ids and the address of its data as JSON.

For each line of standard input, print the sum of the data.
"""

import json
import os
import sys

import numpy as np
import psutil
import synkhronos as synk
import theano.tensor as tt

synk.fork(2, use_gpu=False)
x = tt.dmatrix("x")
f = synk.function([x], (x.sum(), "sum"), mode="FAST_COMPILE")
secret = synk.data(np.full((64, 64), 123456.789))
synk.distribute()
f(secret)
pids = [os.getpid(), *(child.pid for child in psutil.Process().children())]
print(json.dumps({"pids": pids, "address": secret.data.ctypes.data}), flush=True)
for _ in sys.stdin:
    print(float(f(secret)), flush=True)
synk.close()
