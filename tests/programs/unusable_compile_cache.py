"""Import the library and compile functions while Theano cannot use its cache.

The arguments are the cache folder, on a file system of its own, and the option with which that is
mounted, ``ro`` or ``noexec``. Each failure must be an error with an explanation, and a later retry must
succeed.
"""

import subprocess
import sys

CACHE, OPTION = sys.argv[1:]
WORDS = {"ro": "cannot be written to", "noexec": "noexec"}[OPTION]


def mount(options):
    subprocess.run(["mount", "-o", f"remount,{options}", CACHE], check=True)


def refused(call, kind):
    mount(OPTION)
    try:
        call()
    except Exception as error:
        assert type(error).__name__ == kind, repr(error)
        for word in (WORDS, CACHE, "set another folder with THEANO_FLAGS=base_compiledir=FOLDER"):
            assert word in str(error), (word, str(error))
        assert "\n" not in str(error) and error.__cause__ is None
    else:
        raise AssertionError("no error")
    finally:
        mount("rw,exec")


def import_it():
    import synkhronos  # noqa: F401


refused(import_it, "ImportError")

import numpy as np
import theano.tensor as tt

import synkhronos as synk

synk.fork(2, use_gpu=False)
x = tt.dvector("x")
f = synk.function([x], (x.sum(), "sum"))
assert f(np.ones(4)) == 4
refused(lambda: synk.function([x], (tt.exp(x).sum(), "sum")), "SynkhronosError")
assert f(np.ones(6)) == 6
assert synk.function([x], (tt.exp(x).sum(), "sum"))(np.zeros(4)) == 4
