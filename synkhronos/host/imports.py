"""Loading Theano, Lasagne and Keras with the repairs that this version of Python and NumPy needs.

They were written for older versions, and use names that have since been removed. `Finder` provides the
modules in ``repairs.MODULES``, under the names that they have in Theano, and loads the modules in
``repairs.REPAIRS`` with the parts of their source code replaced that no longer work. Nothing else
changes: neither their files, nor NumPy or Python as a script sees them.

Nothing here imports Theano. This file and ``repairs`` import nothing of this package either, because
``startup`` runs them in processes that do not import the package.
"""

import os
import sys
import warnings
import zlib
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional

_PACKAGE = Path(__file__).resolve().parent.parent
_STARTUP = _PACKAGE / "startup"
_PACKAGES = ("theano", "lasagne", "keras", "keras_preprocessing")


class _Needed(NamedTuple):
    """The rows that these versions of Python and NumPy need, and their files and repairs by module."""

    rows: List[Any]
    files: Dict[str, Path]
    repairs: Dict[str, List[Any]]


class Finder:
    """Finds the modules in ``repairs``, before Python looks for them."""

    _needed: Optional[_Needed] = None

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Optional[ModuleSpec]:
        """Return where to load a module from; None for all other modules. Python calls this."""
        if name.partition(".")[0] not in _PACKAGES:
            return None
        try:
            needed = cls.needed()
        except (ImportError, AttributeError):  # without NumPy none works; importing them reports that
            return None
        if name in needed.files:
            from importlib.util import spec_from_file_location  # takes a millisecond

            return spec_from_file_location(name, needed.files[name])
        if name in needed.repairs:
            spec = PathFinder.find_spec(name, path, target)
            if spec is not None and type(spec.loader) is SourceFileLoader:
                spec.loader = RepairingLoader(name, spec.loader.path, needed.repairs[name])
            return spec
        return None

    @classmethod
    def needed(cls) -> _Needed:
        """Return the repairs that are needed here. NumPy's version is looked up at the first call."""
        if cls._needed is None:
            needed = _Needed(_table().needed_here(), {}, {})
            for row in needed.rows:
                if hasattr(row, "file"):
                    needed.files[row.name] = _PACKAGE / row.file
                else:
                    for module in row.names():
                        needed.repairs.setdefault(module, []).append(row)
            cls._needed = needed
        return cls._needed


def _table() -> Any:
    """Return the module ``repairs``, which is loaded without the package."""
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("_synkhronos_repairs", Path(__file__).with_name("repairs.py"))
    module = module_from_spec(spec)  # type: ignore[arg-type]  # the file is there
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


class RepairingLoader(SourceFileLoader):
    """Loads a module with its repairs.

    Its bytecode is in a file of its own, whose name depends on the repairs, so that a Python without
    them does not find it.
    """

    def __init__(self, name: str, path: str, repairs: List[Any]) -> None:
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


def repaired(text: str, repairs: List[Any]) -> str:
    """Return source code with its repairs. A repair whose text is not there is left out."""
    for repair in repairs:
        text = text.replace(repair.old, repair.new)
    return text


def provide() -> None:
    """Let Python find the modules in ``repairs``. Calling it again changes nothing."""
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
