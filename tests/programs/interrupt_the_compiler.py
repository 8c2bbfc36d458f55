"""Get interrupted twice while the compiler runs; then compile in this and in another process."""

import subprocess
import sys
import threading
import time

import psutil
import theano
import theano.tensor as tt
import numpy as np
from prelude import interrupt
from striking import interrupted

import synkhronos as synk

OTHER = """
import synkhronos, theano, theano.tensor as tt; x = tt.dscalar()
print(theano.function([x], tt.cos(x) + 1)(0.0))
"""


def build():
    return synk.function([x], (tt.tanh(x * 3).sum() + w.sum(), "sum"))


def interrupt_the_compiler():
    end = time.monotonic() + 30
    while time.monotonic() < end:
        for child in psutil.Process().children(recursive=True):
            if "cc1plus" in child.name():
                return interrupt()
        time.sleep(0.005)


synk.fork(2, use_gpu=False)
x = tt.dvector("x")
w = theano.shared(np.arange(3.0), name="w")
for _ in range(2):
    threading.Thread(target=interrupt_the_compiler).start()
    interrupted(build)
assert build()(np.zeros(4)) == 6
done = subprocess.run([sys.executable, "-c", OTHER], stdout=subprocess.PIPE, timeout=50)
assert done.stdout == b"2.0\n"
synk.close()
