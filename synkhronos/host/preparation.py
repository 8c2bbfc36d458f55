"""Preparing this process for its graph compiler, by the rules of that compiler."""

import contextlib
import gc
import os
import sys
from typing import Iterator, MutableMapping, Optional

from synkhronos.host import compile_cache, compiler, environment, imports, pytensor_environment


def apply() -> None:
    """Set up this process for the compiler, before it is imported."""
    if compiler.NAME == "pytensor":
        pytensor_environment.apply()
    else:
        environment.apply()
        imports.provide()


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Postpone garbage collection. Imports make little garbage, and many objects to scan for it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():
            # All objects go to the oldest generation, as if a collection had found them alive.
            gc.freeze()
            gc.unfreeze()
        if was_enabled:
            gc.enable()


def check() -> None:
    """Raise `ImportError` if the compiler cannot work here. The message says why, and gives a remedy."""
    if compiler.NAME == "pytensor":
        pytensor_environment.check()
    else:
        environment.check()
        compile_cache.check()
        compile_cache.explain_lock()


def complaint() -> Optional[str]:
    """Return an error message if a script could not use the compiler, else None."""
    of_python = python_complaint()
    if compiler.NAME == "pytensor":
        return of_python or pytensor_environment.package_complaint()
    return (
        of_python
        or environment.package_complaint()
        or compile_cache.complaint(compile_cache.folder(os.environ))
    )


def python_complaint() -> Optional[str]:
    """Return an error message if the compiler cannot be used with this version of Python, else None."""
    if compiler.NAME == "pytensor":
        return environment.python_complaint(sys.version_info[:3])
    return environment.theano_python_complaint(sys.version_info[:3])


def set_flags(environ: MutableMapping[str, str]) -> None:
    """Add the compiler's flags to the environment of a script."""
    if compiler.NAME == "pytensor":
        pytensor_environment.set_flags(environ)
    else:
        environment.set_flags(environ)
