"""Preparing this process for its graph compiler, by the rules of that compiler."""

import contextlib
import functools
import gc
import os
import sys
import warnings
from typing import Iterator, List, MutableMapping, Optional

from synkhronos.host import compile_cache, compiler, environment, imports

_LDFLAGS = "blas__ldflags"


def apply() -> None:
    """Set up this process for the compiler, before it is imported."""
    if compiler.NAME not in sys.modules and type(os.environ) is os._Environ:
        os.environ.__class__ = _Environ
    if compiler.NAME == "theano":
        environment.apply()
        imports.provide()
        return
    ldflags = set_flags(os.environ)
    # A script may have imported PyMC first. To read the value would search for a BLAS, and warn.
    config = getattr(sys.modules.get("pytensor"), "config", None)
    parameter = vars(type(config)).get(_LDFLAGS)
    if ldflags and parameter is not None and not getattr(parameter, "val", ""):
        setattr(config, _LDFLAGS, ldflags)


class _Environ(os._Environ):
    """The type of ``os.environ`` where importing the library imports the compiler.

    The compiler then reads its flags. A warning names flags that the script sets later.
    """

    def __setitem__(self, name: str, value: str) -> None:
        former = self.get(name, "")
        super().__setitem__(name, value)
        if name == f"{compiler.TITLE.upper()}_FLAGS":
            late = _without_effect(former, value)
            if late:
                warnings.warn(
                    f"{name} has no effect for {', '.join(late)}: {compiler.TITLE} has read its flags, "
                    f"as importing synkhronos imports it; set them before import synkhronos",
                    stacklevel=2,
                )


def _without_effect(former: str, value: str) -> List[str]:
    """Return the flags that were added to others, and that the compiler does not have."""
    config = getattr(sys.modules.get(compiler.NAME), "config", None)
    if config is None:  # it is not imported yet
        return []
    late, known = [], environment.flags_of(former).items()
    for flag, wanted in environment.flags_of(value).items():
        try:
            has = str(functools.reduce(getattr, flag.split("."), config)) == wanted
        except AttributeError:  # no flag of this compiler, or of a part that is not imported
            has = False
        if not has and (flag, wanted) not in known:
            late.append(f"{flag}={wanted}")
    return late


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
    found = complaint(of_cache="theano" not in sys.modules)
    if found:
        raise ImportError(found)


def complaint(of_cache: bool = True) -> Optional[str]:
    """Return an error message if a script could not use the compiler, or Theano its cache, else None."""
    found = python_complaint() or environment.package_complaint(compiler.NAME)
    if found or compiler.NAME == "pytensor" or not of_cache:
        return found
    return compile_cache.complaint(compile_cache.folder(os.environ))


def python_complaint() -> Optional[str]:
    """Return an error message if the compiler cannot be used with this version of Python, else None."""
    return environment.python_complaint(sys.version_info[:3], compiler.NAME)


def set_flags(environ: MutableMapping[str, str], name: str = compiler.NAME) -> str:
    """Add the compiler's flags to the environment of a script; return the flags for the linker.

    PyTensor that pip has installed often finds no BLAS, says so in a long warning, and computes products
    slowly. So a BLAS is named in ``PYTENSOR_FLAGS``, unless the user has.
    """
    names = ("blas.ldflags", _LDFLAGS)
    is_set = any(environment.user_setting(item, environ, name) is not None for item in names)
    ldflags = "" if name == "theano" or is_set else environment.find_ldflags()
    if ldflags:
        flags = environ.get("PYTENSOR_FLAGS", "")
        environ["PYTENSOR_FLAGS"] = f'{_LDFLAGS}="{ldflags}"' + (flags and f",{flags}")
    return ldflags
