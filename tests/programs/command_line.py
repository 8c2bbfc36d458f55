"""Execute ``python -m synkhronos`` with the arguments of this program."""

import os
import sys

os.execv(sys.executable, [sys.executable, "-m", "synkhronos", *sys.argv[1:]])
