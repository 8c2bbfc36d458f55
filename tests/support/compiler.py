"""Settings that make compiling, which takes most of the time of the tests, as fast as possible.

`FLAGS` are Theano flags; they must be set before Theano is imported. All processes of all runs share a
compile cache, which is not the user's own. Code is compiled without debug information and with little
optimization, and linked by gold if it is installed. An explicit ``-march`` keeps each process from
running the compiler three times to expand ``native``.
"""

import os
import shutil

_KIND = "compiledir_%(short_platform)s-%(processor)s-%(python_version)s-%(python_bitwidth)s"
# Most of Theano's modules are compiled with -fno-math-errno, and the library's also with
# -fno-trapping-math. With both in all, they share precompiled headers.
# In C++98, which is enough for Theano, the standard library's headers are half as long as in C++17.
_LEVEL = os.environ.get("TESTS_OPTIMIZATION", "1")  # what users have is 3
_CXXFLAGS = f"-g0 -O{_LEVEL} -std=gnu++98 -fno-math-errno -fno-trapping-math -march=native"
if shutil.which("ld.gold"):  # it needs half as long as the default linker
    _CXXFLAGS += " -fuse-ld=gold"
# PyTensor's own default is Numba, which compiles a function for many seconds.
PYTENSOR_FLAGS = f"compiledir_format={_KIND}-tests,linker=cvm,gcc__cxxflags=-g0 -O1 -march=native"
FLAGS = f"compiledir_format={_KIND}-tests,compile.wait=1,gcc.cxxflags={_CXXFLAGS}"


def set_flags(flags):
    """Append to the compilers' flags in the environment, for this process and its children."""
    os.environ.setdefault("PYTENSOR_FLAGS", PYTENSOR_FLAGS)
    os.environ["THEANO_FLAGS"] = ",".join(filter(None, [os.environ.get("THEANO_FLAGS"), flags]))
