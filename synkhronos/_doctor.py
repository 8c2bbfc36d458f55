"""What Synkhronos needs of a machine: one small function a check.

A check returns a `Result` and raises nothing. Theano, pygpu, NCCL and the GPUs are looked at
in subprocesses, so that a crash there is a finding too, and no CUDA context is made here.
"""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any, Dict, List, NamedTuple

from synkhronos import _environment
from synkhronos._machine import affinity, cores, cpu_quota, memory_room

OK, WARNING, PROBLEM = "ok", "warning", "problem"
TIME_LIMIT = 120  # seconds; the first compilation on a slow file system takes long
GIBIBYTE = 1024.0**3
REQUIREMENTS = {  # what is imported, and what pip is asked for
    "scipy": '"scipy<1.11"',
    "threadpoolctl": "threadpoolctl",
    "psutil": "psutil",
}

THEANO_PROBE = """
import json, time
import numpy, theano, theano.tensor as T

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

paths = {line.split()[-1] for line in open("/proc/self/maps") if "blas" in line}
print(json.dumps({
    "version": theano.__version__,
    "compiler": theano.config.cxx,
    "ldflags": theano.config.blas.ldflags,
    "theano": fastest(product),
    "numpy": fastest(numpy.dot),
    "libraries": sorted(path for path in paths if path.startswith("/")),
}))
"""

PYGPU_PROBE = """
import json
import pygpu
from pygpu import gpuarray

def count(kind):
    try:
        return sum(gpuarray.count_devices(kind, i) for i in range(gpuarray.count_platforms(kind)))
    except Exception:
        return 0

print(json.dumps({
    "version": pygpu.__version__, "cuda": count("cuda"), "opencl": count("opencl"),
}))
"""

NCCL_PROBE = """
import ctypes, json

version = ctypes.c_int()
ctypes.CDLL("libnccl.so").ncclGetVersion(ctypes.byref(version))
print(json.dumps({"version": version.value}))
"""


class Result(NamedTuple):
    """What a check found: its state, and how to mend it where it is not `OK`."""

    name: str
    state: str
    found: str
    remedy: str = ""

    def line(self) -> str:
        """Write the result as the doctor prints it."""
        text = f"{self.state:<8} {self.name:<14} {self.found}"
        return f"{text}\n{'':<24}-> {self.remedy}" if self.remedy else text


class ProbeError(Exception):
    """A probe's subprocess failed; the message is the last line that it wrote."""


def probe(code: str, **environ: str) -> Dict[str, Any]:
    """Run `code` in a fresh interpreter and read the JSON that it prints last."""
    command = [sys.executable, "-c", code]
    try:
        process = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT,
            env={**os.environ, **environ},
        )
    except subprocess.TimeoutExpired:
        raise ProbeError(f"no answer within {TIME_LIMIT} s") from None
    lines = process.stdout.strip().splitlines()
    if process.returncode or not lines:
        complaint = process.stderr.strip().splitlines() or [f"exit status {process.returncode}"]
        raise ProbeError(complaint[-1])
    return json.loads(lines[-1])


def check_python() -> Result:
    """Check the version of Python."""
    version = sys.version_info[:3]
    complaint = _environment.python_complaint(version)
    found = f"{'.'.join(map(str, version))} at {sys.executable}"
    if complaint:
        return Result("Python", PROBLEM, found, complaint)
    return Result("Python", OK, found)


def check_numpy() -> Result:
    """Check that NumPy is there, in a version that Theano compiles with, and Theano too."""
    complaint = _environment.package_complaint()
    numpy = sys.modules.get("numpy")
    found = getattr(numpy, "__version__", "not importable")
    if complaint:
        return Result("NumPy", PROBLEM, found, complaint)
    return Result("NumPy", OK, found)


def check_modules() -> Result:
    """Check that the other Python packages can be imported."""
    missing = []
    for name in REQUIREMENTS:
        try:
            importlib.import_module(name)
        except ImportError:
            missing.append(name)
    if missing:
        remedy = "python -m pip install " + " ".join(REQUIREMENTS[name] for name in missing)
        return Result("packages", PROBLEM, f"cannot import {', '.join(missing)}", remedy)
    return Result("packages", OK, ", ".join(REQUIREMENTS))


def check_compiler() -> Result:
    """Check the C++ compiler and Python's headers, which Theano compiles against."""
    compiler = shutil.which("g++")
    if compiler is None:
        remedy = "install it, on Debian with: apt-get install g++"
        return Result("compiler", PROBLEM, "no g++ in PATH", remedy)
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        remedy = "install them, on Debian with: apt-get install python3-dev"
        return Result("compiler", PROBLEM, f"no Python headers: {header} is missing", remedy)
    return Result("compiler", OK, f"{compiler}, {header}")


def check_theano() -> Result:
    """Check that Theano compiles, and that its matrix product is as fast as NumPy's."""
    if _environment.python_complaint(sys.version_info[:3]) or _environment.package_complaint():
        return Result("Theano", PROBLEM, "not tried", "mend what is wrong above first")
    environ = dict(os.environ)
    _environment.set_flags(environ)
    # A GPU named in the user's flags would be taken into use by the import; the last one wins.
    flags = environ.get("THEANO_FLAGS", "") + ",device=cpu"
    try:
        found = probe(THEANO_PROBE, THEANO_FLAGS=flags)
    except ProbeError as error:
        remedy = "empty Theano's cache of compiled code with: theano-cache purge"
        return Result("Theano", PROBLEM, str(error), remedy)
    return judge_theano(found)


def judge_theano(found: Dict[str, Any]) -> Result:
    """Make a result of what `THEANO_PROBE` found."""
    gigaflops = {name: 2 * 1024**3 / found[name] / 1e9 for name in ("theano", "numpy")}
    text = (
        f"{found['version']}, {blas_name(found['ldflags'])}; float32 product: "
        f"Theano {gigaflops['theano']:.0f}, NumPy {gigaflops['numpy']:.0f} GFLOP/s"
    )
    install = "install OpenBLAS, on Debian with: apt-get install libopenblas-dev"
    if found["version"] != "1.0.5":
        return Result("Theano", PROBLEM, text, "python -m pip install Theano==1.0.5")
    if not found["compiler"]:
        return Result("Theano", PROBLEM, f"{text}; it uses no C++ compiler", "unset the flag cxx")
    if not found["ldflags"]:
        return Result("Theano", WARNING, text, install)
    if found["theano"] > 2 * found["numpy"]:
        remedy = f"Theano's BLAS is slow ({', '.join(found['libraries'])}): {install}"
        return Result("Theano", WARNING, text, remedy)
    return Result("Theano", OK, text)


def blas_name(ldflags: str) -> str:
    """Shorten flags that name a library by its path to the library's name."""
    by_path = re.search(r"/([^/,]+\.so)\b", ldflags)
    return by_path.group(1) if by_path else ldflags or "no BLAS (blas.ldflags is empty)"


def check_cores() -> Result:
    """Tell how many cores there are, and how many this process may use."""
    quota = cpu_quota()
    limit = "none" if quota is None else f"{quota:g}"
    found = (
        f"{cores()} usable: {os.cpu_count()} in the machine, {affinity()} in the affinity "
        f"mask, control group's limit {limit}"
    )
    if cores() == 1:
        remedy = "fork() will make one process; name more with fork(n), or widen the limits"
        return Result("cores", WARNING, found, remedy)
    return Result("cores", OK, found)


def check_memory() -> Result:
    """Tell how much memory there is for data, which lies in anonymous shared mappings."""
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


def check_gpus(devices: Path = Path("/dev")) -> Result:
    """Check pygpu and count the GPUs that it can use; only where there are any."""
    present = sorted(path.name for path in devices.glob("nvidia[0-9]*"))
    try:
        found = probe(PYGPU_PROBE)
    except ProbeError as error:
        return judge_missing_pygpu(str(error), present)
    text = f"pygpu {found['version']}: {found['cuda']} CUDA, {found['opencl']} OpenCL devices"
    if present and not found["cuda"]:
        remedy = (
            "libgpuarray finds no CUDA: it loads libcuda.so, libnvrtc.so and libcublas.so by "
            "these names, so have them in LD_LIBRARY_PATH"
        )
        return Result("GPUs", WARNING, f"{text}, but {', '.join(present)} exist", remedy)
    return Result("GPUs", OK, text)


def judge_missing_pygpu(complaint: str, present: List[str]) -> Result:
    """Make a result where pygpu cannot be used: GPUs that stay idle are worth a warning."""
    if not present:
        return Result("GPUs", OK, f"none, and none is needed ({complaint})")
    remedy = (
        "install pygpu, on Debian 12 with: apt-get install python3-pygpu libgpuarray-dev, and "
        "use an environment made with /usr/bin/python3 -m venv --system-site-packages"
    )
    return Result("GPUs", WARNING, f"{', '.join(present)} cannot be used: {complaint}", remedy)


def check_nccl(devices: Path = Path("/dev")) -> Result:
    """Check that NCCL can be loaded; only where there are several GPUs to use it."""
    several = len(list(devices.glob("nvidia[0-9]*"))) > 1
    try:
        number = probe(NCCL_PROBE)["version"]
    except ProbeError as error:
        if not several:
            return Result("NCCL", OK, "none, and none is needed without several GPUs")
        remedy = (
            "libgpuarray loads libnccl.so by this name: install NCCL, and have the folder of a "
            "link of that name in LD_LIBRARY_PATH"
        )
        return Result("NCCL", WARNING, str(error), remedy)
    return Result("NCCL", OK, nccl_version(number))


def nccl_version(number: int) -> str:
    """Write NCCL's version number with points: 2.9 changed the way it is composed."""
    unit = 10_000 if number >= 10_000 else 1_000
    return f"{number // unit}.{number % unit // 100}.{number % 100}"



CHECKS = (
    check_python,
    check_numpy,
    check_modules,
    check_compiler,
    check_theano,
    check_cores,
    check_memory,
    check_gpus,
    check_nccl,
)
