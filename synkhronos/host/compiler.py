"""The graph compiler of this process: Theano or PyTensor.

It is the compiler that the script has already imported, otherwise the installed compiler, Theano before
PyTensor. The environment variable ``SYNKHRONOS_COMPILER`` has priority over both. The choice is made
when the library is imported, and nothing here imports a compiler.
"""

import importlib.util
import os
import sys
from typing import Callable, Container, Mapping

NAMES = ("theano", "pytensor")
TITLES = {"theano": "Theano", "pytensor": "PyTensor"}

#: An environment variable
VARIABLE = "SYNKHRONOS_COMPILER"


def choose(
    environ: Mapping[str, str], imported: Container[str], is_installed: Callable[[str], bool]
) -> str:
    """Return the name of the compiler to use.

    Parameters
    ----------
    environ : mapping
        The environment variables.
    imported : container of str
        The names of the modules that are imported.
    is_installed : callable
        Whether there is a package of a name.

    Raises
    ------
    ImportError
        If the environment variable does not name a compiler.
    """
    wanted = environ.get(VARIABLE)
    if wanted:
        if wanted not in NAMES:
            raise ImportError(
                f"{VARIABLE}: expected one of {', '.join(NAMES)}, got {wanted!r}; set one of them, or "
                f"unset the variable, and the compiler that is installed is used"
            )
        return wanted
    for is_there in (imported.__contains__, is_installed):
        for name in NAMES:
            if is_there(name):
                return name
    return NAMES[0]  # its absence is reported


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:  # some finders raise an error instead
        return False


#: The compiler of this process, by the name of its package
NAME = choose(os.environ, sys.modules, _is_installed)
TITLE = TITLES[NAME]
