"""Settings with which the C++ compiler, which takes most of the time of the tests, takes less of it.

`FLAGS` are for Theano before it is imported: a cache of compiled code apart from the user's own, one per
process of pytest, as processes that compile at once wait for each other; and no debug information and
little optimization. `precompile_headers` is for Theano when it has been imported.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

_PART = "device" if "--device" in str(sys.argv) else "main"
_CACHE = f"tests-{os.environ.get('PYTEST_XDIST_WORKER', _PART)}"
_KIND = "compiledir_%(short_platform)s-%(processor)s-%(python_version)s-%(python_bitwidth)s"
# Most of Theano's modules are compiled with -fno-math-errno. As all are, they share the headers.
_CXXFLAGS = "-g0 -O1 -fno-math-errno"
FLAGS = f"compiledir_format={_KIND}-{_CACHE},compile.wait=1,gcc.cxxflags={_CXXFLAGS}"

# What Theano's modules include first. To read these is more than half of the work of compiling one.
HEADERS = "Python.h", "iostream", "math.h", "numpy/arrayobject.h", "numpy/arrayscalars.h", "vector"


def set_flags(flags):
    """Add flags to those of the environment, for this process and those that it starts."""
    os.environ["THEANO_FLAGS"] = ",".join(filter(None, [os.environ.get("THEANO_FLAGS"), flags]))


def precompile_headers():
    """Compile the headers that all modules of Theano include, and have these use the result.

    The compiler itself sees whether the result fits the module; if not, it reads the headers.
    """
    from theano import config
    from theano.gof.cmodule import GCC_compiler, std_include_dirs

    if not config.cxx or " " in config.base_compiledir:
        return
    includes = [f"-I{folder}" for folder in std_include_dirs()]
    command = [config.cxx, *GCC_compiler.compile_args(), "-fvisibility=hidden", *includes]
    name = hashlib.sha256(" ".join(command).encode()).hexdigest()[:16]
    header = Path(config.base_compiledir, f"tests-headers-{name}", "headers.h")
    compiled = header.with_suffix(".h.gch")
    if not compiled.exists():
        header.parent.mkdir(parents=True, exist_ok=True)
        header.write_text("".join(f"#include <{name}>\n" for name in HEADERS))
        new = compiled.with_suffix(f".{os.getpid()}")
        subprocess.run([*command, "-x", "c++-header", header, "-o", new], check=True)
        new.replace(compiled)
    config.gcc.cxxflags += f" -include {header}"
    set_flags(f"gcc.cxxflags={config.gcc.cxxflags}")
