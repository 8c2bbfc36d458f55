"""The checks of ``python -m synkhronos doctor`` where PyTensor is the graph compiler."""

import os
from typing import Any, Dict, Optional

from synkhronos.host import blas_kernels, pytensor_environment
from synkhronos.host.probe import OK, PROBLEM, WARNING, ProbeError, Result, probe

PROBE = """
import json, time
import numpy, pytensor, pytensor.tensor as pt

try:
    from threadpoolctl import threadpool_info
except ImportError:  # another check reports it
    threadpool_info = list

a = numpy.random.RandomState(0).rand(1024, 1024).astype("float32")
x, y = pt.fmatrices("x", "y")
product = pytensor.function([x, y], pt.dot(x, y), mode="CVM")

def fastest(function):
    function(a, a)
    times = []
    for _ in range(7):
        start = time.perf_counter()
        function(a, a)
        times.append(time.perf_counter() - start)
    return min(times)

print(json.dumps({
    "version": pytensor.__version__,
    "compiler": pytensor.config.cxx,
    "ldflags": pytensor.config.blas__ldflags,
    "pytensor": fastest(product),
    "numpy": fastest(numpy.dot),
    "libraries": [one for one in threadpool_info() if one["user_api"] == "blas"],
}))
"""


def check_numpy() -> Result:
    """Check that NumPy is installed, in a version that works with PyTensor."""
    try:
        import numpy
    except ImportError as error:
        return Result("NumPy", PROBLEM, str(error), 'python -m pip install "numpy>=2"')
    complaint = pytensor_environment.numpy_complaint(numpy.__version__)
    if complaint:
        return Result("NumPy", PROBLEM, numpy.__version__, complaint)
    return Result("NumPy", OK, numpy.__version__)


def check_pytensor() -> Result:
    """Check that PyTensor compiles C code, and that its BLAS is as fast as NumPy's and the processor."""
    complaint = pytensor_environment.package_complaint()
    if complaint:
        return Result("PyTensor", PROBLEM, "not usable", complaint)
    environ = dict(os.environ)
    pytensor_environment.set_flags(environ)
    try:
        found = probe(PROBE, PYTENSOR_FLAGS=environ.get("PYTENSOR_FLAGS", ""))
    except ProbeError as error:
        remedy = "empty PyTensor's cache of compiled code with: pytensor-cache purge"
        return Result("PyTensor", PROBLEM, str(error), remedy)
    coretype = os.environ.get(blas_kernels.VARIABLE)
    return judge_pytensor(found, coretype, blas_kernels.instructions_of_processor())


def judge_pytensor(
    found: Dict[str, Any], coretype: Optional[str] = None, instructions: Optional[str] = None
) -> Result:
    """Convert the output of `PROBE` to a result.

    Parameters
    ----------
    found : dict
        The output.
    coretype : str, optional
        The value of ``OPENBLAS_CORETYPE`` in the environment.
    instructions : str, optional
        The newest instructions of the processor, as in `blas_kernels`.
    """
    name = found["ldflags"] or "no BLAS"
    text, remedy = blas_kernels.judge(found, "PyTensor", name, coretype, instructions)
    if not found["compiler"]:
        no_compiler = "install g++, or build functions with mode='NUMBA'"
        return Result("PyTensor", WARNING, f"{text}; it uses no C++ compiler", no_compiler)
    return Result("PyTensor", WARNING if remedy else OK, text, remedy)
