"""Making PyTensor ready: its version, NumPy's, and the BLAS that its C code is linked with.

PyTensor that pip has installed often finds no BLAS, says so in a long warning, and computes products
slowly. So `apply` names one in ``PYTENSOR_FLAGS``, unless the user has, and in PyTensor's settings if it
is imported already, as by PyMC. Nothing here imports PyTensor.
"""

import os
import re
import sys
from importlib import metadata, util
from typing import Any, MutableMapping, Optional, Tuple

from synkhronos.host import environment

NUMPY_VERSION = (2, 0)
# Older versions lack the guard against https://github.com/numba/numba/issues/10486: sibling processes,
# as the ranks are, give the same name to different functions that they compile at once, and crash later.
VERSIONS = ((2, 38, 3), (4, 0))
LDFLAGS = "blas__ldflags"
_REMEDY = 'To fix this: python -m pip install "pytensor>=2.38.3,<4"'


def apply() -> None:
    """Set up this process for PyTensor, also if it is imported. Settings of the user are not changed."""
    ldflags = missing_ldflags(os.environ)
    if ldflags:
        _add(os.environ, ldflags)
        _configure(sys.modules.get("pytensor"), ldflags)


def set_flags(environ: MutableMapping[str, str]) -> None:
    """Add ``blas__ldflags`` to ``PYTENSOR_FLAGS`` in `environ`, unless the user has set it."""
    ldflags = missing_ldflags(environ)
    if ldflags:
        _add(environ, ldflags)


def missing_ldflags(environ: MutableMapping[str, str]) -> str:
    """Return what to set as ``blas__ldflags``; nothing if the user has set it, or no BLAS is found."""
    settings = environment.read_settings(environ.get("PYTENSORRC", "~/.pytensorrc"))
    is_set = settings.has_option("blas", "ldflags") or settings.has_option("global", LDFLAGS)
    if is_set or LDFLAGS in environment.flags_of(environ.get("PYTENSOR_FLAGS", "")):
        return ""
    return environment.find_ldflags()


def _add(environ: MutableMapping[str, str], ldflags: str) -> None:
    flags = environ.get("PYTENSOR_FLAGS", "")
    environ["PYTENSOR_FLAGS"] = f'{LDFLAGS}="{ldflags}"' + (flags and f",{flags}")


def _configure(pytensor: Any, ldflags: str) -> None:
    """Set ``blas__ldflags`` in a PyTensor that is imported, unless it has found a BLAS itself."""
    config = getattr(pytensor, "config", None)  # a script may have imported PyMC first
    parameter = vars(type(config)).get(LDFLAGS)  # to read its value would search, and warn
    if parameter is not None and not getattr(parameter, "val", ""):
        setattr(config, LDFLAGS, ldflags)


def check() -> None:
    """Raise `ImportError` if PyTensor cannot work here. The message says why, and how to fix it."""
    complaint = environment.python_complaint(sys.version_info[:3]) or package_complaint()
    if complaint:
        raise ImportError(complaint)


def package_complaint() -> Optional[str]:
    """Return an error message if the installed NumPy or PyTensor cannot be used, else None."""
    for package in ("numpy", "pytensor"):
        of_file = environment.complaint_of_file(package)
        if of_file:
            return of_file
    try:
        import numpy
    except ImportError as error:
        return f"Synkhronos needs NumPy, and importing it failed: {error}. {_REMEDY}"
    return numpy_complaint(numpy.__version__) or installed_pytensor_complaint()


def numpy_complaint(version: str) -> Optional[str]:
    """Return an error message if this version of NumPy cannot be used, else None."""
    if _numbers(version) >= NUMPY_VERSION:
        return None
    return f'With PyTensor, Synkhronos needs NumPy 2, and got NumPy {version}. {_REMEDY} "numpy>=2"'


def installed_pytensor_complaint() -> Optional[str]:
    """Return an error message if there is no PyTensor, or another version of it, else None."""
    if util.find_spec("pytensor") is None:
        return (
            f"Synkhronos was told by SYNKHRONOS_COMPILER to use PyTensor, and no PyTensor is installed. "
            f"{_REMEDY}"
        )
    try:
        version = metadata.version("pytensor")
    except metadata.PackageNotFoundError:  # a copy of its source
        return None
    return version_complaint(version)


def version_complaint(version: str) -> Optional[str]:
    """Return an error message if this version of PyTensor cannot be used, else None."""
    oldest, too_new = VERSIONS
    if oldest <= _numbers(version) < too_new:
        return None
    return f"Synkhronos needs PyTensor 2.38.3 or newer, before 4, and got PyTensor {version}. {_REMEDY}"


def _numbers(version: str) -> Tuple[int, ...]:
    found: Any = re.match(r"\d+(\.\d+){0,2}", version)  # each version begins with a number
    return tuple(int(number) for number in found[0].split("."))
