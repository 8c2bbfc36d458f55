"""Loading Theano, Lasagne and Keras with the repairs that this version of Python and NumPy needs.

They were written for older versions, and use names that have since been removed. `Finder` provides the
modules of ``engines/theano/repairs`` under the names that they have in Theano, and loads other modules
with the parts of their source code replaced that no longer work, as the table there says. Nothing else
changes: neither their files, nor NumPy or Python as a script sees them.

Scripts written for Platoon and Theano-MPI find the modules of ``compat`` under the names of those. A
library that is installed comes first, and so does any module of the script.

Nothing here imports Theano. This file imports nothing of this package either, because ``startup`` runs
it in processes that do not import the package.
"""

import importlib
import os
import sys
import warnings
import zlib
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional

_PACKAGE = Path(__file__).resolve().parent.parent
_STARTUP = _PACKAGE / "startup"
_TABLE = _PACKAGE / "engines" / "theano" / "repairs" / "table.txt"
_PACKAGES = ("theano", "lasagne", "keras", "keras_preprocessing")

#: The libraries for which modules of ``compat`` stand
LIBRARIES = ("platoon", "theanompi")
#: Modules of Theano-MPI that scripts also import without its name, out of a folder of their own. They
#: are found after the library was imported.
SHORT_NAMES = ("models", "models.layers2", "models.data", "models.data.utils")
_COMPAT = "synkhronos.compat"


class Repair(NamedTuple):
    """A text that is replaced in the source code of modules, or the file that one is loaded from."""

    modules: str  # with spaces in between; each of them contains the text
    why: str
    old: str = ""
    new: str = ""
    file: str = ""
    since: str = "always"  # or the version of Python or NumPy from which on it is needed


def read_table(path: Path = _TABLE) -> List[Repair]:
    """Return the rows of the table of repairs."""
    found, modules, why, since, old = [], "", "", "", ""
    for line in path.read_text(encoding="utf-8").splitlines():
        mark, text = line[:2], line[2:].replace("\\n", "\n")
        if mark == "- ":
            old = text
        elif mark == "+ ":
            found.append(Repair(modules, why, old, text, since=since))
        elif mark == "= ":
            found.append(Repair(modules, why, file=text, since=since))
        elif mark[:1] == "[":
            since, why = line[1:].split("] ")
        elif mark[:1] not in ("", "#"):
            modules = line
    return found


def needed_repairs() -> List[Repair]:
    """Return the repairs that these versions of Python and NumPy need. It imports NumPy."""
    import numpy

    here = {"python": sys.version_info[:2], "numpy": _numbers(numpy.__version__)}
    return [
        repair
        for repair in read_table()
        if repair.since == "always" or here[repair.since.split()[0]] >= _numbers(repair.since.split()[1])
    ]


def _numbers(version: str) -> Any:
    return tuple(int(part) for part in version.split(".")[:2])


class Finder:
    """Finds the modules in the table of repairs, before Python looks for them."""

    _needed: Optional[Dict[str, List[Repair]]] = None  # by module

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Optional[ModuleSpec]:
        """Return where to load a module from; None for all other modules. Python calls this."""
        if name.partition(".")[0] not in _PACKAGES:
            return None
        try:
            repairs = cls.needed().get(name, [])
        except (ImportError, AttributeError):  # without NumPy none works; importing them reports that
            return None
        if repairs and repairs[0].file:
            from importlib.util import spec_from_file_location  # takes a millisecond

            return spec_from_file_location(name, _PACKAGE / repairs[0].file)
        spec = PathFinder.find_spec(name, path, target) if repairs else None
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = RepairingLoader(name, spec.loader.path, repairs)
        return spec

    @classmethod
    def needed(cls) -> Dict[str, List[Repair]]:
        """Return the needed repairs of each module. NumPy's version is looked up at the first call."""
        if cls._needed is None:
            found: Dict[str, List[Repair]] = {}
            for repair in needed_repairs():
                for module in repair.modules.split():
                    found.setdefault(module, []).append(repair)
            cls._needed = found
        return cls._needed


class RepairingLoader(SourceFileLoader):
    """Loads a module with its repairs.

    Its bytecode is in a file of its own, whose name depends on the repairs, so that a Python without
    them does not find it.
    """

    def __init__(self, name: str, path: str, repairs: List[Repair]) -> None:
        super().__init__(name, path)
        self._repair: Callable[[str], str] = lambda text: repaired(text, repairs)
        self._digest = f"{zlib.crc32(repr([tuple(repair) for repair in repairs]).encode()):08x}"

    def get_data(self, path: str) -> bytes:
        """Return the source code with its repairs, or the bytecode."""
        if path == self.path:
            return self._repair(super().get_data(path).decode()).encode()
        return super().get_data(self._own(path))

    def set_data(self, path: str, data: Any, **options: Any) -> None:
        """Write the bytecode."""
        super().set_data(self._own(path), data, **options)

    # For this loader it is no static method.
    def source_to_code(  # type: ignore[override]
        self, data: Any, path: Any, **options: Any
    ) -> Any:
        """Compile the source code. Python's warnings about it do not concern users."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return super().source_to_code(data, path, **options)

    def _own(self, path: str) -> str:
        stem, extension = os.path.splitext(path)
        return f"{stem}.repaired-{self._digest}{extension}"


def repaired(text: str, repairs: List[Repair]) -> str:
    """Return source code with its repairs. A repair whose text is not there is left out."""
    for repair in repairs:
        text = text.replace(repair.old, repair.new)
    return text


def provide() -> None:
    """Let Python find the modules in the table. Calling it again changes nothing."""
    if not any(hasattr(finder, "needed") for finder in sys.meta_path):  # also that of the start
        sys.meta_path.insert(0, Finder)


def variables(environ: Mapping[str, str] = os.environ) -> Dict[str, str]:
    """Return the environment variables that make a new Python provide the modules from its start.

    They are empty if Python was told to ignore its environment, as with the option ``-I``.
    """
    if sys.flags.ignore_environment or sys.flags.no_site or os.pathsep in str(_STARTUP):
        return {}
    present = environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(_STARTUP), present]))}


# Modules of other libraries


class AliasFinder:
    """Finds the modules inside those that have another name.

    It comes before the other finders, as Python would find them by their paths, a second time.
    """

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Optional[ModuleSpec]:
        """Return how to load a module; None for all other modules. Python calls this."""
        first, dot, rest = name.partition(".")
        return _spec(name, f"{sys.modules[first].__name__}.{rest}") if dot and _is_ours(first) else None


class FallbackFinder:
    """Finds the modules that have another name, after the other finders have found none."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Optional[ModuleSpec]:
        """Return how to load a module; None for all other modules. Python calls this."""
        if name in LIBRARIES:
            return _spec(name, f"{_COMPAT}.{name}")
        if name in SHORT_NAMES and _is_ours("theanompi"):
            return _spec(name, f"{_COMPAT}.theanompi.{name}")
        return None


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


def _is_ours(name: str) -> bool:
    """Whether the module with a name is one of ``compat``."""
    return getattr(sys.modules.get(name), "__name__", "").startswith(f"{_COMPAT}.")


def provide_aliases() -> None:
    """Let Python find the modules of `LIBRARIES`. Calling it again changes nothing."""
    if all(getattr(item, "__name__", "") != AliasFinder.__name__ for item in sys.meta_path):
        sys.meta_path.insert(0, AliasFinder)
        sys.meta_path.append(FallbackFinder)
