"""Run the check of `gpu.networks`. The arguments are ``cudnn`` or ``no cudnn``, and the devices."""

import sys

from gpu.networks import check

check(sys.argv[2:], sys.argv[1] == "cudnn")
