"""Import the library with a NumPy that is too new; print the error, and whether Theano was imported."""

import sys

import numpy

numpy.__version__ = "1.26.4"
try:
    import synkhronos  # noqa: F401
except ImportError as error:
    print(error)
    print("theano" in sys.modules)
