"""Import the library after an import of Theano that has failed, as in another cell of a notebook."""

import sys


class Failing:
    """A finder with which the import of Theano fails halfway, as with newer NumPy."""

    def find_spec(self, name, path=None, target=None):
        if name == "theano.gof":
            raise AttributeError("module 'numpy' has no attribute 'distutils'")


sys.meta_path.insert(0, Failing())
try:
    import theano  # noqa: F401
except AttributeError as error:
    print(error)
del sys.meta_path[0]

import synkhronos as synk  # noqa: E402
import theano.tensor as T  # noqa: E402

synk.fork(1)
x = T.dscalar("x")
print(synk.function([], x * 2, bcast_inputs=[x], mode="FAST_COMPILE")(21))
synk.close()
