"""Makes a world when it ends, in a function registered before or after the library is imported.

Its argument says which of the two. Prints the workers' process ids.
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
