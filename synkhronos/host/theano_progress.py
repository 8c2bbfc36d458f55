"""Showing that Theano compiles, in scripts that ``python -m synkhronos run`` starts.

Functions of `synkhronos.function` show it themselves; this is for the script's own ``theano.function``.

Nothing here imports Theano. This file imports nothing of this package either, because ``startup`` runs
it in processes that do not import the package.
"""

import functools
import itertools
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any, Callable, Optional

#: Theano's module, and the function in it that every way of compiling calls
MODULE, FUNCTION = "theano.compile.function_module", "orig_function"
REMARK = "the first time this can take minutes; later the C code is taken from Theano's cache"


class Finder:
    """Finds Theano's module like Python, but has `FUNCTION` replaced when the module is loaded."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Optional[ModuleSpec]:
        """Return where to load the module from; None for all others. Python calls this."""
        if name != MODULE:
            return None
        sys.meta_path.remove(Finder)  # its work is done
        spec = PathFinder.find_spec(name, path)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def exec_module(self, module: Any) -> None:
        super().exec_module(module)
        setattr(module, FUNCTION, shown(getattr(module, FUNCTION)))


def shown(compile_function: Callable) -> Callable:
    """Return the same function, which shows that it runs if that takes long."""
    progress, numbers = _progress(), itertools.count(1)

    @functools.wraps(compile_function)
    def compile_and_show(inputs: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        name = kwargs.get("name")
        called = f" ({os.path.basename(name)})" if isinstance(name, str) else ""
        with progress.show(f"compiling theano.function {next(numbers)}{called}", REMARK):
            return compile_function(inputs, outputs, *args, **kwargs)

    return compile_and_show


def _progress() -> Any:
    import importlib.util  # takes a millisecond, so not at the start

    file = Path(__file__).with_name("progress.py")
    spec = importlib.util.spec_from_file_location("_synkhronos_progress", file)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module.Progress()


def provide() -> None:
    """Have the script's functions show that they are compiled, once Theano is imported."""
    sys.meta_path.insert(0, Finder)
