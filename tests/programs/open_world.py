"""Open a world, use it and close it."""

import synkhronos as synk
from prelude import open_world

open_world(3).check_usable()
synk.close()
