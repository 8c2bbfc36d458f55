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
    """Finds the modules in `ALIASES`, and those inside them, unless Python finds the library itself.

    It comes before the other finders, as Python would find the modules inside by their paths, a second
    time.
    """

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Optional[ModuleSpec]:
        """Return how to load a module; None for all other modules. Python calls this."""
        first, dot, rest = name.partition(".")
        if first in ALIASES and (is_alias(first) if dot else not is_installed(name)):
            return _spec(name, f"{ALIASES[first]}{dot}{rest}")
        if name in SHORT_NAMES and dot and _is_ours(first):
            return ShortNameFinder.find_spec(name)
        return None


class ShortNameFinder:
    """Finds the modules in `SHORT_NAMES`, after the other finders have found none."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Optional[ModuleSpec]:
        """Return how to load a module; None for all other modules. Python calls this."""
        library = SHORT_NAMES.get(name, "")
        return _spec(name, f"{ALIASES[library]}.{name}") if library and is_alias(library) else None


class AliasLoader:
    """Gives a module that is loaded already, under another name."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module itself, so that there is one of it under both names."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module back its own description, which Python has replaced."""
        module.__spec__ = self._spec


def _spec(name: str, real: str) -> Optional[ModuleSpec]:
    """Return how to load a module of this package under another name; None if there is none."""
    try:
        module = importlib.import_module(real)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{real}.".startswith(f"{error.name}."):
            raise
        return None
    loader: Any = AliasLoader(module)  # with what Python calls; `importlib.abc` takes a millisecond
    return ModuleSpec(name, loader, is_package=hasattr(module, "__path__"))


def is_installed(name: str) -> bool:
    """Whether another finder finds a module at the top level."""
    own = AliasFinder.__name__, ShortNameFinder.__name__
    others = [item for item in sys.meta_path if getattr(item, "__name__", "") not in own]
    return any(other.find_spec(name, None) is not None for other in others)


def is_alias(name: str) -> bool:
    """Whether the module with the name of a library is of this package."""
    return getattr(sys.modules.get(name), "__name__", "") == ALIASES[name]


def _is_ours(name: str) -> bool:
    """Whether the module with a short name is of this package."""
    return getattr(sys.modules.get(name), "__name__", "").startswith(ALIASES[SHORT_NAMES[name]])


def provide() -> None:
    """Let Python find the modules. Calling it again changes nothing."""
    if all(getattr(item, "__name__", "") != AliasFinder.__name__ for item in sys.meta_path):
        sys.meta_path.insert(0, AliasFinder)
        sys.meta_path.append(ShortNameFinder)
