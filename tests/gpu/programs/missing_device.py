"""Try to make a world of two ranks, of which one has a device that is not there.

The arguments: the other's device, and the rank.
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
