"""Import the library where no compiler is installed, and print the error that this raises."""

import importlib.util

find = importlib.util.find_spec
missing = ("theano", "pytensor")
importlib.util.find_spec = lambda name, *more: None if name in missing else find(name, *more)
try:
    import synkhronos  # noqa: F401
except ImportError as error:
    print(error)
