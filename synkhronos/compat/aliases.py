"""Finding the packages of this folder by the names of the libraries that they stand for.

``import theanompi.lib.opt`` imports ``synkhronos.compat.theanompi.lib.opt``, and both names are the same
module. An installed library of that name has precedence, and so has any module that a script could
import without this.

This file imports nothing of the package before a name is asked for, because ``startup`` runs it in
processes that may not import the package.
"""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Optional

_FOLDER = Path(__file__).resolve().parent
_PACKAGE = "synkhronos.compat"

#: The libraries with a folder or a file here.
LIBRARIES = ("platoon", "theanompi")

#: Modules of Theano-MPI that its examples also import without the name of the library, out of a folder
#: of the script. They are found only after the library itself was imported.
_SHORT = {"models": "theanompi", "models.data": "theanompi"}
_SHORT.update(dict.fromkeys(("models.layers2", "models.data.utils"), "theanompi"))


class Finder(MetaPathFinder):
    """Finds the modules of libraries here, after Python has found none.

    Parameters
    ----------
    *libraries : str
        The names of the libraries.
    """

    def __init__(self, *libraries: str) -> None:
        self._libraries = libraries

    def __eq__(self, other: object) -> bool:
        # `startup` loads this file apart from the package, so there may be two of this class.
        return repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        return f"Finder{self._libraries!r}"

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Optional[ModuleSpec]:
        """Return where to load a module from; None for all other modules. Python calls this."""
        full = name
        if name in _SHORT and _is_here(sys.modules.get(_SHORT[name])):
            full = f"{_SHORT[name]}.{name}"
        parts = full.split(".")
        if parts[0] not in self._libraries:
            return None
        place = _FOLDER.joinpath(*parts)
        is_package = (place / "__init__.py").exists()
        if not is_package and not place.with_suffix(".py").exists():
            return None
        return ModuleSpec(name, _Alias(f"{_PACKAGE}.{full}"), is_package=is_package)


class _Alias(Loader):
    """Gives a module of this folder a second name.

    A package becomes a module of its own, without a path, from which Python would load the modules in it
    a second time. It takes its names from the package here.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self._name)
        self._spec = module.__spec__
        if spec.submodule_search_locations is None:
            return module
        package = ModuleType(spec.name, module.__doc__)
        package.__dict__.update(
            __getattr__=lambda name: getattr(module, name),
            __all__=getattr(module, "__all__", []),
            __file__=module.__file__,
        )
        return package

    def exec_module(self, module: ModuleType) -> None:
        if not hasattr(module, "__path__"):
            module.__spec__ = self._spec  # Python has replaced it by that of the alias


def _is_here(module: Optional[ModuleType]) -> bool:
    """Whether a module is an alias of a package in this folder."""
    file = getattr(module, "__file__", None)
    return file is not None and _FOLDER in Path(file).parents


def install(*libraries: str) -> None:
    """Let Python find libraries here where they are not installed. Calling it again changes nothing.

    Parameters
    ----------
    *libraries : str
        Of `LIBRARIES`; all by default.
    """
    finder = Finder(*(libraries or LIBRARIES))
    if finder not in sys.meta_path:
        sys.meta_path.append(finder)
