"""Run a script, and kill it after it has saved a checkpoint for the fifth time.

The arguments are the script's path and its arguments.
"""

import os
import runpy
import signal
import sys
from pathlib import Path

import synkhronos as synk

save, saved = synk.save, []


def save_or_die(path, extra=None):
    save(path, extra)
    saved.append(path)
    if len(saved) == 5:
        os.kill(os.getpid(), signal.SIGKILL)  # this process is the master


synk.save = save_or_die
del sys.argv[0]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
