"""Run the checks of `gpu.conform`. The arguments are the kind of communicator and the devices."""

import sys

from gpu.conform import conform

conform(sys.argv[1], sys.argv[2:])
