"""Import the modules given as arguments; print Theano's linker flags for BLAS."""

import importlib
import sys

for name in sys.argv[1:]:
    importlib.import_module(name)
print(sys.modules["theano"].config.blas.ldflags)
