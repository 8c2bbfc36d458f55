"""Import the library without the packages that are given, and print the error that this raises."""

import importlib.util
import sys

find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name in sys.argv else find(name, *more)
try:
    import synkhronos  # noqa: F401
except ImportError as error:
    print(f"{type(error).__name__}: {error}")
