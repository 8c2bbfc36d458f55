"""Modules of Theano that this package provides.

They are loaded only when something imports them, by the names that they have in Theano:

``theano.tensor.signal.downsample``
    Theano 1.0 no longer has it, but Lasagne 0.1 imports it.
``theano.scan_module.scan_perform_ext``
    On Python 3.11 Theano's own does not compile.

Nothing here imports Theano. This file imports nothing of this package either, because ``startup`` runs
it in processes that do not import the package.
"""

import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, Dict, Mapping, Optional

_PACKAGE = Path(__file__).resolve().parent.parent
_STARTUP = _PACKAGE / "startup"
_ENGINES = _PACKAGE / "engines"

#: The file that is loaded for each name
FILES = {"theano.tensor.signal.downsample": _ENGINES / "theano_downsample.py"}
if sys.version_info >= (3, 11):
    FILES["theano.scan_module.scan_perform_ext"] = _ENGINES / "theano_scan.py"


class Finder:
    """Finds the modules in `FILES`, before Python looks for them in Theano's folder."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Optional[ModuleSpec]:
        """Return where to load a module from; None for all other modules. Python calls this."""
        if name not in FILES:
            return None
        from importlib.util import spec_from_file_location  # takes a millisecond, so not at the start

        return spec_from_file_location(name, FILES[name])


def provide() -> None:
    """Let Python find the modules in `FILES`. Calling it again changes nothing."""
    if Finder not in sys.meta_path:
        sys.meta_path.insert(0, Finder)


def variables(environ: Mapping[str, str] = os.environ) -> Dict[str, str]:
    """Return the environment variables that make a new Python provide the modules from its start.

    They are empty if Python was told to ignore its environment, as with the option ``-I``.
    """
    if sys.flags.ignore_environment or sys.flags.no_site or os.pathsep in str(_STARTUP):
        return {}
    present = environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(_STARTUP), present]))}
