"""The checks of ``python -m synkhronos doctor``: one function per check.

A check returns a `Result` and does not raise. Theano, pygpu, NCCL and the GPUs are tried in
subprocesses, so that a crash is a result as well, and no CUDA context is created in this process.
"""

import importlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from synkhronos.host import (
    blas_kernels,
    compile_cache,
    compiler,
    doctor_pytensor,
    environment,
    heap,
    imports,
    preparation,
)
from synkhronos.host.doctor_gpus import check_cuda, check_gpus, check_nccl
from synkhronos.host.machine import affinity, cores, cpu_quota, memory_room
from synkhronos.host.ownership import outsider
from synkhronos.host.probe import (
    OK,
    PROBLEM,
    TIME_LIMIT,
    WARNING,
    ProbeError,
    Result,
    probe,
)

GIBIBYTE = 1024.0**3
REQUIREMENTS = ("scipy", "cloudpickle", "threadpoolctl", "psutil")

REPAIRS = f"import runpy\nrunpy.run_path({imports.__file__!r})['provide']()\n"
THEANO_PROBE = """
import json, time
import numpy, theano, theano.tensor as T, threadpoolctl

a = numpy.random.RandomState(0).rand(1024, 1024).astype("float32")
x, y = T.fmatrices("x", "y")
product = theano.function([x, y], T.dot(x, y))

def fastest(function):
    function(a, a)
    times = []
    for _ in range(7):
        start = time.perf_counter()
        function(a, a)
        times.append(time.perf_counter() - start)
    return min(times)

print(json.dumps({
    "version": theano.__version__,
    "compiler": theano.config.cxx,
    "ldflags": theano.config.blas.ldflags,
    "theano": fastest(product),
    "numpy": fastest(numpy.dot),
    "libraries": [one for one in threadpoolctl.threadpool_info() if one["user_api"] == "blas"],
}))
"""


def check_python() -> Result:
    """Check the version of Python."""
    version = sys.version_info[:3]
    complaint = preparation.python_complaint()
    found = f"{'.'.join(map(str, version))} at {sys.executable}"
    if complaint:
        return Result("Python", PROBLEM, found, complaint)
    return Result("Python", OK, found)


def check_numpy() -> Result:
    """Check that NumPy is installed, in a version that works with Theano."""
    complaint = environment.installed_numpy_complaint()
    numpy = sys.modules.get("numpy")
    found = getattr(numpy, "__version__", "not importable")
    if complaint:
        return Result("NumPy", PROBLEM, found, _with_this_python(complaint))
    return Result("NumPy", OK, found)


def check_modules() -> Result:
    """Check that the other Python packages can be imported."""
    missing = []
    for name in REQUIREMENTS:
        try:
            importlib.import_module(name)
        except Exception:  # SciPy raises others if this NumPy is not for it
            missing.append(name)
    if missing:
        remedy = "python -m pip install " + " ".join(missing)
        found = f"cannot import {', '.join(missing)}"
        return Result("packages", PROBLEM, found, _with_this_python(remedy))
    return Result("packages", OK, ", ".join(REQUIREMENTS))


def _with_this_python(remedy):
    """Return the remedy if this version of Python can be used; otherwise no package would help."""
    is_wrong = preparation.python_complaint()
    return "use another version of Python first, as described above" if is_wrong else remedy


def check_compiler() -> Result:
    """Check that there is a C++ compiler, and that it finds Python's headers, which are both needed."""
    name = environment.user_setting("cxx", os.environ) or "g++"
    program = shutil.which(name)
    if program is None:
        remedy = "install it, on Debian with: apt-get install g++"
        return Result("compiler", PROBLEM, f"no {name} in PATH", remedy)
    folders = sorted({sysconfig.get_paths()[one] for one in ("include", "platinclude")})
    complaint = compile_complaint(program, folders)
    if complaint is None:
        return Result("compiler", OK, f"{program}, with Python's headers in {folders[0]}")
    if "Python.h" in complaint or "pyconfig.h" in complaint:
        remedy = (
            f"install them, on Debian with: apt-get install python3-dev (or python3."
            f"{sys.version_info[1]}-dev, if python3 is another version)"
        )
        return Result("compiler", PROBLEM, f"no Python headers in {', '.join(folders)}", remedy)
    remedy = "reinstall it, on Debian with: apt-get install --reinstall g++ libc6-dev"
    return Result("compiler", PROBLEM, f"{program} does not compile: {complaint}", remedy)


def compile_complaint(compiler: str, folders: Sequence[str]) -> Optional[str]:
    """Compile a module of one line; return the first error of the compiler, or None."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "module.cpp")
        source.write_text("#include <Python.h>\n")
        output = Path(folder, "module.so")
        command = [compiler, "-shared", "-fPIC", *(f"-I{one}" for one in folders), source, "-o", output]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
    if not done.returncode:
        return None
    lines = done.stderr.splitlines() or [f"exit status {done.returncode}"]
    return next((line for line in lines if "error:" in line), lines[0])


def check_cache() -> Result:
    """Check that Theano can use its cache, and that no other user can put code into it."""
    folder = compile_cache.folder(os.environ)
    fault = compile_cache.fault(folder)
    if fault is not None:
        return Result("Theano's cache", PROBLEM, *fault)
    complaint = outsider(folder)
    if complaint is None:
        return Result("Theano's cache", OK, f"{folder}, which no other user can change")
    remedy = (
        "a user who can change it can run code as you: set THEANO_FLAGS=base_compiledir=FOLDER to a new "
        "folder of your own; or chmod -R go-w"
    )
    return Result("Theano's cache", WARNING, complaint, remedy)


def check_theano() -> Result:
    """Check that Theano compiles, and that its BLAS is as fast as NumPy's and the processor."""
    complaint = environment.installed_theano_complaint()
    if complaint:
        found = "not installed, or another package in its place"
        return Result("Theano", PROBLEM, found, _with_this_python(complaint))
    needed = (check_python, check_numpy, check_modules, check_compiler, check_cache)
    missing = [result.name for result in (check() for check in needed) if result.state == PROBLEM]
    if missing:
        remedy = f"fix the problems above first: {', '.join(missing)}"
        return Result("Theano", PROBLEM, "installed, but not tried", remedy)
    environ = dict(os.environ)
    environment.set_flags(environ)
    # Importing Theano would use a GPU that is named in the user's flags. The last flag wins.
    flags = environ.get("THEANO_FLAGS", "") + ",device=cpu"
    try:
        found = probe(REPAIRS + THEANO_PROBE, THEANO_FLAGS=flags)
    except ProbeError as error:
        remedy = "empty Theano's cache of compiled code with: theano-cache purge"
        return Result("Theano", PROBLEM, str(error), remedy)
    coretype = os.environ.get(blas_kernels.VARIABLE)
    return judge_theano(found, coretype, blas_kernels.instructions_of_processor())


def judge_theano(
    found: Dict[str, Any], coretype: Optional[str] = None, instructions: Optional[str] = None
) -> Result:
    """Convert the output of `THEANO_PROBE` to a result.

    Parameters
    ----------
    found : dict
        The output.
    coretype : str, optional
        The value of ``OPENBLAS_CORETYPE`` in the environment.
    instructions : str, optional
        The newest instructions of the processor, as in `blas_kernels`.
    """
    name = blas_name(found["ldflags"])
    text, remedy = blas_kernels.judge(found, "Theano", name, coretype, instructions)
    if found["version"] != "1.0.5":
        return Result("Theano", PROBLEM, text, "python -m synkhronos install")
    if not found["compiler"]:
        return Result("Theano", PROBLEM, f"{text}; it does not use a C++ compiler", "unset the flag cxx")
    return Result("Theano", WARNING if remedy else OK, text, remedy)


def blas_name(ldflags: str) -> str:
    """Return a short name of the BLAS in these flags."""
    by_path = re.search(r"/([^/,]+\.so)\b", ldflags)
    return by_path.group(1) if by_path else ldflags or "no BLAS (blas.ldflags is empty)"


def check_repairs() -> Result:
    """List what is replaced in Theano, Lasagne and Keras for this version of Python and NumPy."""
    if environment.installed_numpy_complaint():
        return Result("repairs", OK, "depend on the version of NumPy")
    reasons: Dict[str, List[str]] = {}
    for one in imports.Finder.needed().rows:
        reasons.setdefault(one.why, []).extend(one.names())
    lines = [f"{why}: {', '.join(sorted(set(names)))}" for why, names in reasons.items()]
    return Result(
        "repairs", OK, "\n".join(["of Theano, Lasagne and Keras, when they are imported", *lines])
    )


def check_cores() -> Result:
    """Report the number of cores, and the number that this process may use."""
    quota = cpu_quota()
    limit = "none" if quota is None else f"{quota:g}"
    found = (
        f"{cores()} usable: {os.cpu_count()} in the machine, {affinity()} in the affinity "
        f"mask, control group's limit {limit}"
    )
    if cores() == 1:
        remedy = "fork() will use one process; request more with fork(n), or raise the limits"
        return Result("cores", WARNING, found, remedy)
    return Result("cores", OK, found)


def check_memory() -> Result:
    """Report the memory available for data, which is in anonymous shared mappings."""
    try:
        import psutil
    except ImportError:
        return Result("memory", WARNING, "unknown without psutil", "python -m pip install psutil")
    machine = psutil.virtual_memory().available
    room = memory_room()
    available = machine if room is None else min(machine, room)
    limit = "none" if room is None else f"leaves {room / GIBIBYTE:.1f} GiB"
    found = f"{available / GIBIBYTE:.1f} GiB available for data; control group's limit {limit}"
    if available < GIBIBYTE:
        return Result("memory", WARNING, found, "free memory, or raise the limit")
    return Result("memory", OK, found)


def check_malloc() -> Result:
    """Report whether malloc keeps freed memory, and whether the kernel uses huge pages."""
    kernel = ", ".join(
        f"{what} {heap.huge_pages(name)}"
        for what, name in (("heap", "enabled"), ("shared memory", "shmem_enabled"))
    )
    reason = heap.why_not_kept()
    text = "keeps freed memory" if reason is None else f"returns freed memory, as {reason}"
    text = f"{text}; huge pages by the kernel's settings: {kernel}"
    if reason is None and heap.huge_pages("enabled") == "madvise":
        text = f"{text}; scripts started by python -m synkhronos run use them"
    return Result("malloc", OK, text)


OF_THEANO = (check_numpy, check_modules, check_repairs, check_compiler, check_cache, check_theano)
OF_PYTENSOR = (
    doctor_pytensor.check_numpy,
    check_modules,
    check_compiler,
    doctor_pytensor.check_pytensor,
)

CHECKS = (
    check_python,
    *(OF_PYTENSOR if compiler.NAME == "pytensor" else OF_THEANO),
    check_cores,
    check_memory,
    check_malloc,
    check_cuda,
    check_gpus,
    check_nccl,
)
