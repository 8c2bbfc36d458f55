"""Run the checks of `gpu.graphs`. The arguments are the devices."""

import sys

from gpu.graphs import check

check(sys.argv[1:])
