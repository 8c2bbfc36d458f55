"""Import the modules given as arguments, set flags of Theano, import it, and print flags."""

import importlib
import os
import sys

for name in sys.argv[1:]:
    importlib.import_module(name)
os.environ["THEANO_FLAGS"] = "device=cpu,floatX=float32"
import theano

print(theano.config.floatX, theano.config.blas.ldflags)
