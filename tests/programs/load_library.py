"""Load a library by name; print the file that the dynamic loader chose."""

import ctypes
import sys

(name,) = sys.argv[1:]
ctypes.CDLL(name)
with open("/proc/self/maps") as maps:
    print([line.split()[-1] for line in maps if line.strip().endswith(name)][0])
