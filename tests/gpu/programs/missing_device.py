"""Try to create a world of two ranks, where the device of one does not exist.

The arguments are the device of the other rank, and the number of the rank with the missing device.
"""

import sys

import synkhronos as synk
from refusals import refused

device, wrong = sys.argv[1], int(sys.argv[2])
missing = "opencl7:0" if device.startswith("opencl") else "cuda99"
devices = [device, device]
devices[wrong] = missing
message = refused(lambda: synk.fork(devices=devices), Exception)
assert f"rank {wrong}" in message and missing in message, message
assert synk.fork(devices=[device]) == 1
synk.close()
