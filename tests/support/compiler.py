"""Settings that make compiling, which takes most of the time of the tests, as fast as possible.

`FLAGS` are Theano flags; they must be set before Theano is imported. All processes of all runs share a
compile cache, which is not the user's own. Code is compiled without debug information and with little
optimization, and linked by gold if it is installed. An explicit ``-march`` keeps each process from
running the compiler three times to expand ``native``. Call `precompile_headers` after Theano has been
imported.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

_KIND = "compiledir_%(short_platform)s-%(processor)s-%(python_version)s-%(python_bitwidth)s"
# Most of Theano's modules are compiled with -fno-math-errno, and the library's also with
# -fno-trapping-math. With both in all, they share the headers.
# In C++98, which is enough for Theano, the standard library's headers are half as long as in C++17.
_LEVEL = os.environ.get("TESTS_OPTIMIZATION", "1")  # what users have is 3
_CXXFLAGS = f"-g0 -O{_LEVEL} -std=gnu++98 -fno-math-errno -fno-trapping-math -march=native"
if shutil.which("ld.gold"):  # it needs half as long as the default linker
    _CXXFLAGS += " -fuse-ld=gold"
# PyTensor's own default is Numba, which compiles a function for many seconds.
PYTENSOR_FLAGS = f"compiledir_format={_KIND}-tests,linker=cvm,gcc__cxxflags=-g0 -O1 -march=native"
FLAGS = f"compiledir_format={_KIND}-tests,compile.wait=1,gcc.cxxflags={_CXXFLAGS}"

# Theano's modules include these. Reading them is more than half of the work of compiling a module.
HEADERS = (
    "Python.h", "iostream", "math.h", "numpy/arrayobject.h", "numpy/arrayscalars.h", "vector",
    "algorithm",
)  # fmt: skip
# g++ takes -fvisibility from precompiled headers, also for modules that are compiled without it, such as
# the loop of scan. Python 3.8, unlike later versions, does not export their start itself.
EXPORT = '#define PyMODINIT_FUNC extern "C" __attribute__((visibility("default"))) PyObject*\n'


def set_flags(flags):
    """Append to the compilers' flags in the environment, for this process and its children."""
    os.environ.setdefault("PYTENSOR_FLAGS", PYTENSOR_FLAGS)
    os.environ["THEANO_FLAGS"] = ",".join(filter(None, [os.environ.get("THEANO_FLAGS"), flags]))


def precompile_headers():
    """Precompile the headers that all modules of Theano include.

    The compiler checks whether the precompiled headers suit a module; otherwise it reads the headers.
    """
    if importlib.util.find_spec("theano") is None:  # but PyTensor
        return
    from theano import config
    from theano.gof.cmodule import GCC_compiler, std_include_dirs

    if not config.cxx or " " in config.base_compiledir:
        return
    includes = [f"-I{folder}" for folder in std_include_dirs()]
    command = [config.cxx, *GCC_compiler.compile_args(), "-fvisibility=hidden", *includes]
    text = EXPORT + _preamble() + "".join(f"#include <{name}>\n" for name in HEADERS)
    name = hashlib.sha256(" ".join([*command, text]).encode()).hexdigest()[:16]
    header = Path(config.base_compiledir, f"tests-headers-{name}", "headers.h")
    compiled = header.with_suffix(".h.gch")
    if not compiled.exists():
        header.parent.mkdir(parents=True, exist_ok=True)
        header.write_text(text)
        new = compiled.with_suffix(f".{os.getpid()}")
        subprocess.run([*command, "-x", "c++-header", header, "-o", new], check=True)
        new.replace(compiled)
    config.gcc.cxxflags += f" -include {header}"
    set_flags(f"gcc.cxxflags={config.gcc.cxxflags}")


def _preamble():
    """Return what all C code begins with, which has to come before NumPy's headers."""
    try:
        from theano.compat.numpy_1_24 import PREAMBLE
    except ImportError:  # this version of NumPy needs none
        return ""
    return PREAMBLE
