"""Import the library and compile functions while the file system of Theano's cache is (nearly) full.

The argument is the cache folder, on a small file system. Each failure must be an error with an
explanation, and a later retry must succeed.
"""

import os
import sys
import time
from pathlib import Path

CACHE = sys.argv[1]
FILLER = Path(CACHE, "filler")


def fill(keep=0):
    """Fill the file system, leaving `keep` bytes free."""
    with open(FILLER, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
    os.truncate(FILLER, FILLER.stat().st_size - keep)


def refused(call, *words):
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        for word in (*words, "bytes free", CACHE, "theano-cache purge", "base_compiledir"):
            assert word in str(error), (word, str(error))
        assert time.monotonic() - began < 30 and len(str(error)) < 1000
        return error
    raise AssertionError("no error")


def import_it():
    import synkhronos  # noqa: F401


fill()
assert type(refused(import_it, "0 bytes free")) is ImportError
FILLER.unlink()

import synkhronos as synk
import numpy as np
import theano.tensor as tt
from theano.gof.cmodule import GCC_compiler

compile_str = GCC_compiler.compile_str


def compile_on_full_disk(*args, **kwargs):
    fill()
    return compile_str(*args, **kwargs)


synk.fork(2, use_gpu=False)
x = tt.dvector("x")
f = synk.function([x], (x.sum(), "sum"))
assert f(np.ones(4)) == 4
for keep in (0, 100 << 10, 1200 << 10):
    fill(keep)
    if keep > 1 << 20:  # as if another program filled the rest while the compiler runs
        GCC_compiler.compile_str = staticmethod(compile_on_full_disk)
    error = refused(lambda: synk.function([x], (tt.exp(x).sum(), "sum")))
    assert isinstance(error, synk.SynkhronosError), repr(error)
    assert f(np.ones(6)) == 6
GCC_compiler.compile_str = staticmethod(compile_str)
FILLER.unlink()
assert synk.function([x], (tt.exp(x).sum(), "sum"))(np.zeros(4)) == 4
assert f(np.ones(6)) == 6
