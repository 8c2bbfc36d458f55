"""Run the checks of `gpu.conform`. The arguments: the kind of communicator, the devices."""

import sys

from gpu.conform import conform

conform(sys.argv[1], sys.argv[2:])
