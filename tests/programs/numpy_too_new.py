"""Import the library with an unsupported, newer NumPy version.

Print the error, and whether Theano was imported.
"""

import sys

import numpy

numpy.__version__ = "3.0.0"
try:
    import synkhronos  # noqa: F401
except ImportError as error:
    print(error)
    print("theano" in sys.modules)
