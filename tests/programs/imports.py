"""Import the modules that are the arguments; print Theano's flags for BLAS."""

import importlib
import sys

for name in sys.argv[1:]:
    importlib.import_module(name)
print(sys.modules["theano"].config.blas.ldflags)
