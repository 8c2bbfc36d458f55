"""The checks of ``python -m synkhronos doctor``: all in a table, and those of software and machine.

Theano, PyTensor, pygpu, NCCL and the GPUs are tried in subprocesses, so that a crash is a result as
well, and no CUDA context is created in this process.
"""

import functools
import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from synkhronos.host import (
    compile_cache,
    compiler,
    environment,
    heap,
    imports,
    preparation,
)
from synkhronos.host.doctor import blas_kernels, gpus
from synkhronos.host.doctor.check import PROBLEM, TIME_LIMIT, Check, Fault, Finding, probe
from synkhronos.host.machine import OtherPrograms, affinity, cores, cpu_quota, memory_room

GIBIBYTE = 1024.0**3
REQUIREMENTS = ("scipy", "cloudpickle", "threadpoolctl", "psutil")

REPAIRS = f"import runpy\nrunpy.run_path({imports.__file__!r})['provide']()\n"
#: Multiplies matrices with the graph compiler NAME in the mode MODE, which `examine` functions set
PRODUCT_PROBE = """
import importlib, json, time
import numpy

compiler = importlib.import_module(NAME)
tensor = importlib.import_module(f"{NAME}.tensor")
try:
    from threadpoolctl import threadpool_info
except ImportError:  # another check reports it
    threadpool_info = list

a = numpy.random.RandomState(0).rand(1024, 1024).astype("float32")
x, y = tensor.fmatrices("x", "y")
product = compiler.function([x, y], tensor.dot(x, y), mode=MODE)
config = compiler.config

def fastest(function):
    function(a, a)
    times = []
    for _ in range(7):
        start = time.perf_counter()
        function(a, a)
        times.append(time.perf_counter() - start)
    return min(times)

print(json.dumps({
    "version": compiler.__version__,
    "compiler": config.cxx,
    "ldflags": config.blas.ldflags if NAME == "theano" else config.blas__ldflags,
    NAME: fastest(product),
    "numpy": fastest(numpy.dot),
    "libraries": [library for library in threadpool_info() if library["user_api"] == "blas"],
}))
"""


def examine_python() -> Finding:
    """Check the version of Python."""
    found = f"{'.'.join(map(str, sys.version_info[:3]))} at {sys.executable}"
    complaint = preparation.python_complaint()
    if complaint:
        raise Fault(found, complaint)
    return found, ""


def examine_numpy(name: str = "theano") -> Finding:
    """Check that NumPy is installed, in a version that works with the compiler."""
    complaint = environment.installed_numpy_complaint(name)
    found = getattr(sys.modules.get("numpy"), "__version__", "not importable")
    if complaint:
        raise Fault(found, _with_this_python(complaint))
    return found, ""


def examine_packages() -> Finding:
    """Check that the other Python packages can be imported."""
    missing = []
    for name in REQUIREMENTS:
        try:
            importlib.import_module(name)
        except Exception:  # SciPy raises others if this NumPy is not for it
            missing.append(name)
    if missing:
        remedy = "python -m pip install " + " ".join(missing)
        raise Fault(f"cannot import {', '.join(missing)}", _with_this_python(remedy))
    return ", ".join(REQUIREMENTS), ""


def _with_this_python(remedy: str) -> str:
    """Return the remedy if this version of Python can be used; otherwise no package would help."""
    is_wrong = preparation.python_complaint()
    return "use another version of Python first, as described above" if is_wrong else remedy


def examine_repairs() -> Finding:
    """List the replaced parts of Theano, Lasagne and Keras, for this version of Python and NumPy."""
    if environment.installed_numpy_complaint():
        return "depend on the version of NumPy", ""
    reasons: Dict[str, List[str]] = {}
    for repair in imports.needed_repairs():
        reasons.setdefault(repair.why, []).extend(repair.modules.split())
    lines = [f"{why}: {', '.join(sorted(set(names)))}" for why, names in reasons.items()]
    first = (
        f"{len(lines)} of Theano, Lasagne and Keras; import theano needs them: start scripts by run, or "
        f"import synkhronos first"
    )
    return "\n".join([first, *lines]), ""


def examine_compiler() -> Finding:
    """Check that there is a C++ compiler, and that it finds Python's headers, which are both needed."""
    name = environment.user_setting("cxx", os.environ) or "g++"
    program = shutil.which(name)
    if program is None:
        raise Fault(f"no {name} in PATH", "install it, on Debian with: apt-get install g++")
    folders = sorted({sysconfig.get_paths()[item] for item in ("include", "platinclude")})
    complaint = compile_complaint(program, folders)
    if complaint is None:
        return f"{program}, with Python's headers in {folders[0]}", ""
    if "Python.h" in complaint or "pyconfig.h" in complaint:
        remedy = (
            f"install them, on Debian with: apt-get install python3-dev (or python3."
            f"{sys.version_info[1]}-dev, if python3 is another version)"
        )
        raise Fault(f"no Python headers in {', '.join(folders)}", remedy)
    remedy = "reinstall it, on Debian with: apt-get install --reinstall g++ libc6-dev"
    raise Fault(f"{program} does not compile: {complaint}", remedy)


def compile_complaint(compiler: str, folders: Sequence[str]) -> Optional[str]:
    """Compile a module of one line; return the first error of the compiler, or None."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "module.cpp")
        source.write_text("#include <Python.h>\n")
        output = Path(folder, "module.so")
        includes = [f"-I{item}" for item in folders]
        command = [compiler, "-shared", "-fPIC", *includes, str(source), "-o", str(output)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
    if not done.returncode:
        return None
    lines = done.stderr.splitlines() or [f"exit status {done.returncode}"]
    return next((line for line in lines if "error:" in line), lines[0])


def examine_cache(name: str = "theano") -> Finding:
    """Check that a compiler can use its cache, and that no other user can put code into it."""
    folder = compile_cache.folder(os.environ, name)
    fault = compile_cache.fault(folder, name)
    if fault is not None:
        raise Fault(*fault)
    complaint = None if folder is None else compile_cache.outsider(folder)
    if complaint is None:
        return f"{folder}, which no other user can change", ""
    return complaint, (
        f"a user who can change it can run code as you: set {name.upper()}_FLAGS=base_compiledir=FOLDER "
        f"to a new folder of your own; or chmod -R go-w"
    )


def examine_theano() -> Finding:
    """Check that Theano compiles, and that its BLAS is as fast as NumPy's and the processor."""
    complaint = environment.installed_theano_complaint()
    if complaint:
        found = "not installed, or another package in its place"
        raise Fault(found, _with_this_python(complaint))
    _check_needed(OF_THEANO[:-1])
    # Importing Theano would use a GPU that is named in the user's flags. The last flag wins.
    flags = os.environ.get("THEANO_FLAGS", "") + ",device=cpu"
    code = f"NAME, MODE = 'theano', None\n{REPAIRS}{PRODUCT_PROBE}"
    return judge_product(probe(code, THEANO_FLAGS=flags), "Theano", *_of_processor())


def examine_pytensor() -> Finding:
    """Check that PyTensor compiles C code, and that its BLAS is as fast as NumPy's and the processor."""
    complaint = environment.package_complaint("pytensor")
    if complaint:
        raise Fault("not usable", complaint)
    _check_needed(OF_PYTENSOR[:-1])
    environ = dict(os.environ)
    preparation.set_flags(environ, "pytensor")
    code = f"NAME, MODE = 'pytensor', 'CVM'\n{PRODUCT_PROBE}"
    found = probe(code, PYTENSOR_FLAGS=environ.get("PYTENSOR_FLAGS", ""))
    return judge_product(found, "PyTensor", *_of_processor())


def _check_needed(needed: Sequence[Check]) -> None:
    """Raise a `Fault` if checks fail without which there is nothing to try."""
    missing = [item.name for item in needed if item.run().state == PROBLEM]
    if missing:
        remedy = f"fix the problems above first: {', '.join(missing)}"
        raise Fault("installed, but not tried", remedy)


def _of_processor() -> Tuple[Optional[str], Optional[str]]:
    return os.environ.get(blas_kernels.VARIABLE), blas_kernels.instructions_of_processor()


def judge_product(
    found: Dict[str, Any],
    title: str,
    coretype: Optional[str] = None,
    instructions: Optional[str] = None,
) -> Finding:
    """Judge from the output of `PRODUCT_PROBE` how fast a compiler multiplies matrices.

    Parameters
    ----------
    found : dict
        The output: the compiler's ``version`` and ``ldflags``, the ``libraries`` that are loaded, and
        the seconds of a product of 1024 rows, by `title` in small letters and by ``numpy``.
    title : str
        The name of the compiler.
    coretype : str, optional
        The value of ``OPENBLAS_CORETYPE`` in the environment.
    instructions : str, optional
        The newest instructions of the processor, as in `blas_kernels`.
    """
    seconds, numpy_seconds = found[title.lower()], found["numpy"]
    speeds = [2 * 1024**3 / item / 1e9 for item in (seconds, numpy_seconds)]
    flags, libraries = found["ldflags"], found["libraries"]
    library = blas_kernels.linked(flags, libraries)
    described = f" ({blas_kernels.describe(library)})" if library else ""
    text = (
        f"{found['version']}, {blas_kernels.blas_name(flags)}{described}; float32 product: "
        f"{title} {speeds[0]:.0f}, NumPy {speeds[1]:.0f} GFLOP/s"
    )
    is_slow = seconds > 2 * numpy_seconds
    remedy = blas_kernels.remedy(flags, libraries, is_slow, coretype, instructions)
    if title == "Theano" and found["version"] != "1.0.5":
        raise Fault(text, "python -m synkhronos install")
    if found["compiler"]:
        return text, remedy
    text = f"{text}; it does not use a C++ compiler"
    if title == "Theano":
        raise Fault(text, "unset the flag cxx")
    return text, "install g++, or build functions with mode='NUMBA'"


def examine_cores() -> Finding:
    """Report the number of cores, and the number that this process may use."""
    quota = cpu_quota()
    limit = "none" if quota is None else f"{quota:g}"
    masked = f"{affinity()} in the affinity mask"
    found = f"{cores()} usable of {os.cpu_count()}: {masked}, control group's limit {limit}"
    if cores() > 1:
        return found, ""
    is_masked = affinity() == 1 < (os.cpu_count() or 1)
    way = "start without taskset, or with more cores in its mask" if is_masked else "raise the limit"
    return found, f"fork() will use one process; {way}, or request more with fork(n)"


def examine_load(seconds: float = 0.5) -> Finding:
    """Report the number of cores that other programs use."""
    others = OtherPrograms()
    time.sleep(seconds)
    used, available = others.cores(), affinity()
    found = f"other programs use {used:.1f} of {available} cores"
    left = min(cores(), int(available - used + 0.5))  # half a core is not missed
    if 0 < left < cores():
        return found, f"while they run, fork({left}) may be faster, as ranks wait for each other"
    return found, ""


def examine_memory() -> Finding:
    """Report the memory available for data, which is in anonymous shared mappings."""
    import psutil

    machine = psutil.virtual_memory().available
    room = memory_room()
    available = machine if room is None else min(machine, room)
    limit = "none" if room is None else f"leaves {room / GIBIBYTE:.1f} GiB"
    found = f"{available / GIBIBYTE:.1f} GiB available for data; control group's limit {limit}"
    if available < GIBIBYTE:
        return found, "free memory, or raise the limit"
    return found, ""


def examine_malloc() -> Finding:
    """Report whether malloc keeps freed memory, and whether the kernel uses huge pages."""
    kernel = ", ".join(
        f"{what} {heap.huge_pages(name)}"
        for what, name in (("heap", "enabled"), ("shared memory", "shmem_enabled"))
    )
    reason = heap.why_not_kept()
    text = "keeps freed memory" if reason is None else f"returns freed memory, as {reason}"
    return f"{text}; huge pages: {kernel}", ""


_PURGE = "empty its cache of compiled code with: {}-cache purge"

#: The checks of a compiler, of which the last needs all others
OF_THEANO = (
    Check("Python", examine_python, is_required=True),
    Check("NumPy", examine_numpy, is_required=True),
    Check("packages", examine_packages, is_required=True),
    Check("repairs", examine_repairs, is_required=True),
    Check("compiler", examine_compiler, is_required=True),
    Check("Theano's cache", examine_cache, is_required=True),
    Check("Theano", examine_theano, is_required=True, remedy=_PURGE.format("theano")),
)
OF_PYTENSOR = (
    Check("Python", examine_python, is_required=True),
    Check("NumPy", functools.partial(examine_numpy, "pytensor"), is_required=True),
    Check("packages", examine_packages, is_required=True),
    Check("compiler", examine_compiler, is_required=True),
    Check("compile cache", functools.partial(examine_cache, "pytensor"), is_required=True),
    Check("PyTensor", examine_pytensor, is_required=True, remedy=_PURGE.format("pytensor")),
)
#: The checks, in the order in which they are carried out
CHECKS = (
    *(OF_PYTENSOR if compiler.NAME == "pytensor" else OF_THEANO),
    Check("cores", examine_cores, is_required=False),
    Check("other load", examine_load, is_required=False),
    Check("memory", examine_memory, is_required=False),
    Check("malloc", examine_malloc, is_required=False),
    Check("CUDA", gpus.examine_cuda, is_required=False),
    Check("GPUs", gpus.examine_gpus, is_required=False),
    Check("NCCL", gpus.examine_nccl, is_required=False),
)
