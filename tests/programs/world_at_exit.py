"""Create a world at exit, and print its workers' process ids.

The argument is ``before`` or ``after``: whether the function that does so is registered with `atexit`
before or after the library is imported.
"""

import atexit
import sys


def at_exit():
    world = open_world(3)
    world.check_usable()
    print(*world.workers(), flush=True)


when = sys.argv[1]
if when == "before":
    atexit.register(at_exit)

import synkhronos  # noqa: F401
from prelude import open_world

if when == "after":
    atexit.register(at_exit)
