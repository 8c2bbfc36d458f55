"""Import the library, or run its ``setup.py``, as another version of Python would.

It has no ``distutils``, ``imp`` and setuptools, as Python 3.12 and newer, and no NumPy is installed.
"""

import runpy
import sys
from pathlib import Path

MISSING = ("distutils", "imp", "setuptools", "numpy", "theano")


class Missing:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(name)


version, what = sys.argv[1:]
root = Path(__file__).resolve().parent.parent.parent
for name in list(sys.modules):
    if name.partition(".")[0] in MISSING:
        del sys.modules[name]
sys.meta_path.insert(0, Missing)
sys.version_info = (*map(int, version.split(".")), "final", 0)
sys.path.insert(0, str(root))
if what == "import":
    import synkhronos  # noqa: F401
else:
    runpy.run_path(str(root / "setup.py"), run_name="__main__")
