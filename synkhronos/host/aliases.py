"""Modules of older libraries by their own names: scripts written for them find those of ``compat``.

A library that is installed comes first, and so does any module of the script. This file imports nothing
of this package, because ``startup`` runs it in processes that do not import the package.
"""

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Optional

#: The modules of this package by the names of the libraries that they stand for
ALIASES = {"platoon": "synkhronos.compat.platoon", "theanompi": "synkhronos.compat.theanompi"}
#: Modules that scripts of a library also import without its name, out of a folder of their own. They are
#: found after the library was imported.
SHORT_NAMES = {
    "models": "theanompi",
    "models.layers2": "theanompi",
    "models.data": "theanompi",
    "models.data.utils": "theanompi",
}


class AliasFinder:
    """Finds the modules in `ALIASES`, and those inside them, where Python has found none."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Optional[ModuleSpec]:
        """Return how to load a module; None for all other modules. Python calls this."""
        first, dot, rest = name.partition(".")
        if name in SHORT_NAMES and _is_alias(sys.modules.get(SHORT_NAMES[name])):
            first, dot, rest = SHORT_NAMES[name], ".", name
        if first not in ALIASES:
            return None
        real = f"{ALIASES[first]}{dot}{rest}"
        try:
            module = importlib.import_module(real)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{real}.".startswith(f"{error.name}."):
                raise
            return None
        loader: Any = AliasLoader(module)  # with what Python calls; `importlib.abc` takes a millisecond
        return ModuleSpec(name, loader, is_package=hasattr(module, "__path__"))


class AliasLoader:
    """Gives a module that is loaded already, under another name.

    A package is given by another one with the same names but no path, in which Python would find the
    modules of the package, and load them a second time.
    """

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module itself, so that there is one of it under both names."""
        if spec.submodule_search_locations is None:
            return self._module
        package = ModuleType(spec.name, self._module.__doc__)
        names = {"__all__": getattr(self._module, "__all__", []), "__path__": []}
        names["__getattr__"] = self._get
        package.__dict__.update(names)
        return package

    def _get(self, name: str) -> Any:
        """Return a name of the package here, for the other one."""
        return getattr(self._module, name)

    def exec_module(self, module: ModuleType) -> None:
        """Give the module back its own description, which Python has replaced."""
        if module is self._module:
            module.__spec__ = self._spec


def _is_alias(module: Optional[ModuleType]) -> bool:
    """Whether a module is a package of this file."""
    return type(getattr(getattr(module, "__spec__", None), "loader", None)).__name__ == "AliasLoader"


def provide() -> None:
    """Let Python find the modules. Calling it again changes nothing."""
    if all(getattr(one, "__name__", "") != AliasFinder.__name__ for one in sys.meta_path):
        sys.meta_path.append(AliasFinder)
