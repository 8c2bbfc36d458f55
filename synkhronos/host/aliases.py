"""Modules of older libraries by their own names: scripts written for them find those of ``compat``.

A library that is installed comes first. This file imports nothing of this package, because ``startup``
runs it in processes that do not import the package.
"""

import importlib
import sys
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Optional

#: The modules of this package by the names of the libraries that they stand for
ALIASES = {"platoon": "synkhronos.compat.platoon"}


class AliasFinder:
    """Finds the modules in `ALIASES`, and those inside them, unless Python finds the library itself.

    It comes before the other finders, as Python would find the modules inside by their paths, a second
    time.
    """

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Optional[ModuleSpec]:
        """Return how to load a module; None for all other modules. Python calls this."""
        first, dot, rest = name.partition(".")
        if first not in ALIASES or (is_installed(name) if not dot else not is_alias(first)):
            return None
        real = f"{ALIASES[first]}{dot}{rest}"
        try:
            module = importlib.import_module(real)
        except ModuleNotFoundError as error:
            if error.name != real:
                raise
            return None
        return ModuleSpec(name, AliasLoader(module), is_package=hasattr(module, "__path__"))


def is_installed(name: str) -> bool:
    """Whether another finder finds a module at the top level."""
    others = [one for one in sys.meta_path if getattr(one, "__name__", "") != AliasFinder.__name__]
    return any(one.find_spec(name, None) is not None for one in others)


def is_alias(name: str) -> bool:
    """Whether the module with this name is of this package."""
    return getattr(sys.modules.get(name), "__name__", "") == ALIASES[name]


class AliasLoader(Loader):
    """Gives a module that is loaded already, under another name."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module itself, so that there is one of it under both names."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module back its own description, which Python has replaced."""
        module.__spec__ = self._spec


def provide() -> None:
    """Let Python find the modules. Calling it again changes nothing."""
    if all(getattr(one, "__name__", "") != AliasFinder.__name__ for one in sys.meta_path):
        sys.meta_path.insert(0, AliasFinder)
