"""Prints the paths and customizations of this process, and of a child."""

import os
import subprocess
import sys

print(sys.path, os.environ.get("PYTHONPATH"), sys.flags)
mark = getattr(sys.modules.get("sitecustomize"), "mark", None)
print("sitecustomize" in sys.modules, mark, flush=True)
if len(sys.argv) == 1:
    subprocess.run([sys.executable, *sys.argv, "child"], check=True)
