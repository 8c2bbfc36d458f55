"""The versions and the BLAS that the graph compilers need; the user's settings of them.

Theano asks NumPy which BLAS it was built with, in a way that NumPy 1.22 and newer no longer support, so
a plain ``import theano`` fails. ``imports`` lets Theano take `find_ldflags` instead, unless the user has
set ``blas.ldflags``, and replaces the other parts of Theano that do not work with this version of Python
or NumPy; ``installation`` installs it.

Nothing here runs the compiler or imports anything but NumPy, which Theano imports as well. Theano loads
this file without the package.
"""

import configparser
import importlib.util
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any, Iterable, List, Mapping, Optional, Sequence, Tuple

PYTHON_VERSIONS = ((3, 8), (3, 15))  # with Theano; other compilers have no upper bound
WAYS_TO_PYTHON = (
    "Ways to get Python 3.13: an environment made by 'uv venv --python 3.13', the container image "
    "'python:3.13', or Debian 13, whose python3 is 3.13."
)
#: For each compiler: the versions of NumPy, in words, too, and how to install them and the compiler
NUMPY = {
    "theano": ((1, 23), (3, 0), "NumPy 1.23 or newer but before 3.0"),
    "pytensor": ((2, 0), (1000,), "NumPy 2"),
}
REMEDIES = {
    "theano": "To fix this: python -m synkhronos install",
    "pytensor": 'To fix this: python -m pip install "pytensor>=2.38.3,<4" "numpy>=2"',
}
# Older versions lack the guard against https://github.com/numba/numba/issues/10486: sibling processes,
# as the ranks are, give the same name to different functions that they compile at once, and crash later.
PYTENSOR_VERSIONS = ((2, 38, 3), (4, 0))
MPI_VARIABLES = ("MPI4PY_RC_INITIALIZE", "MPI4PY_RC_FINALIZE")

# The BLAS functions that C code of Theano and PyTensor calls. In the OpenBLAS of newer wheels of SciPy,
# their names begin with scipy_.
CALLED = (
    *(f"{kind}{name}_" for kind in "sd" for name in ("dot", "gemv", "ger", "gemm")),
    "openblas_get_num_threads",
    "openblas_set_num_threads",
)

# Characters with a special meaning when Theano splits flags, in its shell-like quoting, or in
# the linker's comma-separated options.
UNSAFE_IN_FLAGS = frozenset(" \t\n,\"'\\#")


def apply() -> None:
    """Set up this process for Theano, unless it is imported. Settings of the user are not changed."""
    if "theano" not in sys.modules:
        _forget_failed_import()
        # Theano imports mpi4py if it is installed, which would initialize MPI.
        for name in MPI_VARIABLES:
            os.environ.setdefault(name, "0")


def _forget_failed_import() -> None:
    """Remove what a failed ``import theano`` has left: with it, another import fails in other words."""
    for name in [name for name in sys.modules if name.startswith("theano.")]:
        del sys.modules[name]


def package_complaint(compiler: str = "theano") -> Optional[str]:
    """Return an error message if the installed NumPy or compiler cannot be used, else None."""
    of_compiler = installed_theano_complaint if compiler == "theano" else installed_pytensor_complaint
    return installed_numpy_complaint(compiler) or of_compiler()


def installed_numpy_complaint(compiler: str = "theano") -> Optional[str]:
    """Return an error message if there is no NumPy, or it cannot be used, else None."""
    of_file = complaint_of_file("numpy")
    if of_file:
        return of_file
    try:
        import numpy
    except ImportError as error:
        return f"Synkhronos needs NumPy, and importing it failed: {error}. {REMEDIES[compiler]}"
    return numpy_complaint(numpy.__version__, compiler)


def installed_theano_complaint() -> Optional[str]:
    """Return an error message if there is no Theano, or another package in its place, else None."""
    of_file = complaint_of_file("theano")
    if of_file:
        return of_file
    theano = importlib.util.find_spec("theano")
    if theano is None:
        return f"Synkhronos needs Theano 1.0.5, and no Theano is installed. {REMEDIES['theano']}"
    return theano_complaint([Path(folder) for folder in theano.submodule_search_locations or []])


def complaint_of_file(package: str) -> Optional[str]:
    """Return an error message if a file, such as one beside the script, hides a package, else None."""
    found = importlib.util.find_spec(package)
    if found is None or found.submodule_search_locations is not None:
        return None
    return f"{found.origin} is imported in place of the package {package}, as it has its name: rename it"


def python_complaint(version: Sequence[int], compiler: str = "pytensor") -> Optional[str]:
    """Return an error message if a compiler cannot be used with this version of Python, else None."""
    oldest, too_new = PYTHON_VERSIONS
    got = f"and got Python {'.'.join(map(str, version))}. {WAYS_TO_PYTHON}"
    if tuple(version[:2]) < oldest:
        return f"Synkhronos needs Python 3.8 or newer, {got}"
    if compiler != "theano" or tuple(version[:2]) < too_new:
        return None
    return (
        f"With Theano, Synkhronos needs Python 3.8 to 3.14, since Theano 1.0.5 has not been tried on a "
        f"newer one, {got}"
    )


def theano_complaint(folders: Iterable[Path]) -> Optional[str]:
    """Return an error message if the package in these folders is not Theano, else None.

    Theano-PyMC, which old versions of PyMC3 install, is a package of the same name. It is recognized by
    the folder in which pip describes it. Nothing is imported.
    """
    for folder in folders:
        for described in sorted(folder.parent.glob("[Tt]heano_[Pp][Yy][Mm][Cc]-*-info")):
            version = described.name.split("-")[1].replace(".dist", "")
            return (
                f"Synkhronos needs Theano 1.0.5, and got Theano-PyMC {version}, which is installed in "
                f"its place: {folder}. Remove both with: python -m pip uninstall Theano-PyMC Theano. "
                f"{REMEDIES['theano']}"
            )
        if not (folder / "gof").is_dir():
            return (
                f"Synkhronos needs Theano 1.0.5, and got another package of this name, {folder}: remove "
                f"it. {REMEDIES['theano']}"
            )
    return None


def installed_pytensor_complaint() -> Optional[str]:
    """Return an error message if there is no PyTensor, or another version of it, else None."""
    from importlib import metadata

    of_file = complaint_of_file("pytensor")
    if of_file:
        return of_file
    if importlib.util.find_spec("pytensor") is None:
        return (
            f"Synkhronos was told by SYNKHRONOS_COMPILER to use PyTensor, and no PyTensor is installed. "
            f"{REMEDIES['pytensor']}"
        )
    try:
        return pytensor_complaint(metadata.version("pytensor"))
    except metadata.PackageNotFoundError:  # a copy of its source
        return None


def pytensor_complaint(version: str) -> Optional[str]:
    """Return an error message if this version of PyTensor cannot be used, else None."""
    oldest, too_new = PYTENSOR_VERSIONS
    if oldest <= _numbers(version) < too_new:
        return None
    return (
        f"Synkhronos needs PyTensor 2.38.3 or newer, before 4, and got PyTensor {version}. "
        f"{REMEDIES['pytensor']}"
    )


def numpy_complaint(version: str, compiler: str = "theano") -> Optional[str]:
    """Return an error message if this version of NumPy cannot be used, else None."""
    oldest, too_new, wanted = NUMPY[compiler]
    if oldest <= _numbers(version) < too_new:
        return None
    title = {"theano": "Theano", "pytensor": "PyTensor"}[compiler]
    return f"With {title}, Synkhronos needs {wanted}, and got NumPy {version}. {REMEDIES[compiler]}"


def _numbers(version: str) -> Tuple[int, ...]:
    found: Any = re.match(r"\d+(\.\d+){0,2}", version)  # each version begins with a number
    return tuple(int(number) for number in found[0].split("."))


def user_setting(name: str, environ: Mapping[str, str], compiler: str = "theano") -> Optional[str]:
    """Return a setting of the user, as the compiler reads it, or None."""
    value = flags_of(environ.get(f"{compiler.upper()}_FLAGS", "")).get(name)
    if value is not None:
        return value
    section, _, option = name.rpartition(".")
    settings = read_settings(environ.get(f"{compiler.upper()}RC", f"~/.{compiler}rc"))
    return settings.get(section or "global", option, fallback=None)


def hidden_folder(package: str) -> Optional[Path]:
    """Return the folder of a package that Python itself has but this virtual environment does not see.

    It is None if there is none, or if this is not a virtual environment.
    """
    base = Path(sys.base_prefix, "lib")
    if sys.prefix == sys.base_prefix or importlib.util.find_spec(package) is not None:
        return None
    found = (
        base / version / kind
        for version in ("python3", f"python3.{sys.version_info[1]}")
        for kind in ("dist-packages", "site-packages")
    )
    return next((item for item in found if (item / package / "__init__.py").exists()), None)


def read_settings(paths: str) -> configparser.RawConfigParser:
    """Return the settings in a compiler's files, whose paths are separated by colons.

    If one of them cannot be parsed, there are none: the compiler reads it, too, and reports the error.
    """
    settings = configparser.RawConfigParser()
    try:
        settings.read([os.path.expanduser(path) for path in paths.split(os.pathsep)])
    except configparser.Error:
        settings.clear()
    return settings


def flags_of(text: str) -> Mapping[str, str]:
    """Split a value of ``THEANO_FLAGS`` into names and values, by Theano's rules."""
    splitter = shlex.shlex(text, posix=True)
    splitter.whitespace = ","
    splitter.whitespace_split = True
    pairs = (flag.strip().split("=", 1) for flag in splitter)
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def find_ldflags() -> str:
    """Return the linker's flags for a BLAS: the system's OpenBLAS, else the copy in SciPy's wheel.

    They are empty if there is neither. Theano then uses NumPy's functions.
    """
    system, others = library_folders()
    if find_library(system, "libopenblas.so"):
        return "-lopenblas"
    by_path = find_library(others, "libopenblas.so")
    return ldflags_by_path(by_path or scipy_openblas())


def ldflags_by_path(library: Optional[Path]) -> str:
    """Return the flags to link a library by its path, and to load it from there."""
    # Theano does not accept a bare path, and warns about -L if it cannot guess the name. So both are
    # passed as one linker option. Without --no-as-needed, some linkers drop a library that is named
    # before the code that needs it.
    if library is None or UNSAFE_IN_FLAGS & set(str(library)):
        return ""
    flags = f"-Wl,--no-as-needed,{library},-rpath,{library.parent}"
    if library.name.startswith("libscipy_"):
        flags = " ".join([*(f"-D{name}=scipy_{name}" for name in CALLED), flags])
    return flags


def scipy_openblas() -> Optional[Path]:
    """Return the OpenBLAS in SciPy's wheel, if there is one."""
    folders = scipy_folders()
    return find_library(folders, "libopenblas*.so") or find_library(folders, "libscipy_openblas-*.so")


def library_folders() -> Tuple[List[Path], List[Path]]:
    """List the folders that linkers search by default, and others that may contain a BLAS."""
    architecture = getattr(sys.implementation, "_multiarch", "")
    names = ["/usr/local/lib", "/lib64", "/usr/lib64", "/lib", "/usr/lib"]
    if architecture:
        names = [f"/lib/{architecture}", f"/usr/lib/{architecture}", *names]
    others = [*os.environ.get("LIBRARY_PATH", "").split(os.pathsep), f"{sys.prefix}/lib"]
    return [Path(name) for name in names], [Path(name) for name in others if name]


def scipy_folders() -> List[Path]:
    """List the folders of the OpenBLAS that is part of SciPy's wheel."""
    scipy = importlib.util.find_spec("scipy")
    locations = scipy.submodule_search_locations if scipy else None
    return [Path(location).parent / "scipy.libs" for location in locations or []]


def find_library(folders: Iterable[Path], pattern: str) -> Optional[Path]:
    """Find the first file whose name matches `pattern`, in the order of `folders`."""
    for folder in folders:
        for library in sorted(folder.glob(pattern)):
            return library
    return None


def fresh_python(code: str) -> List[str]:
    """Return the command that runs `code` in a fresh interpreter.

    It imports nothing from the current directory, which ``python -c`` searches first, because another
    user may have put a module there.
    """
    return [sys.executable, "-c", f"import sys; sys.path = [path for path in sys.path if path]\n{code}"]
