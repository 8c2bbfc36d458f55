"""Corrections of the GPU code of Theano and libgpuarray that common graphs need.

These are defects of Theano 1.0.5, besides those that the repairs of its source code correct:

Elementwise kernels use C that is not valid OpenCL: ``maximum`` and ``minimum`` call ``nan("")``, integer
division calls ``floorf``, and a cast to bool uses a float as a condition. No OpenCL compiler accepts
these.

New memory is not zeroed, and CLBlast's gemv adds 0 times the values that it overwrites, which may be
NaN.

Any cuDNN that compiles is used, even a version that is newer than Theano supports.

`CudaContext` describes a defect of libgpuarray 0.7.6.
"""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING, Any

import theano
from theano.compile import optdb
from theano.gpuarray import dnn
from theano.gpuarray.elemwise import GpuElemwise
from theano.gpuarray.nnet import GpuCrossentropySoftmaxArgmax1HotWithBias as GpuCrossentropy

if TYPE_CHECKING:
    from theano.gof import Apply, Op

_VERSION = 2  # part of the key of compiled modules, which stay on disk
_SPELLINGS = {  # C's, and OpenCL's
    'nan("")': "NAN",
    "floorf(": "floor(",
    "fmodf(": "fmod(",
    ") ? 1 : 0;": ") != 0 ? 1 : 0;",
}
_FIRST_UNKNOWN_CUDNN = 8000


def refuse_new_cudnn() -> None:
    """Disable a cuDNN with which Theano's convolutions do not compile, unless the user enabled it."""
    version = dnn.version(raises=False)
    if theano.config.dnn.enabled == "auto" and version >= _FIRST_UNKNOWN_CUDNN:
        major = version // (10_000 if version >= 90_000 else 1_000)
        dnn.dnn_present.avail = False
        dnn.dnn_present.msg = f"cuDNN {major} is too new for Theano, which supports 5 to 7"


def fix_kernels(kind: bytes) -> None:
    """Correct the kernels in this process, for a kind of device by its name in libgpuarray."""
    _change_version(GpuElemwise, kind)
    if kind == b"opencl":
        _spell_as_opencl(GpuElemwise)
        _change_version(GpuCrossentropy, kind)
        optdb.add_tags("local_gpua_alloc_empty_to_zeros", "fast_run", "fast_compile")


def _change_version(op: type[Op], kind: bytes) -> None:
    version_of = op.c_code_cache_version

    def c_code_cache_version(self: Any) -> tuple[Any, ...]:
        version = version_of(self)
        return version and (*version, kind, _VERSION)

    op.c_code_cache_version = c_code_cache_version


def _spell_as_opencl(op: type[Op]) -> None:
    generate = op._generate_op_string

    def generate_op_string(self: Any, node: Apply) -> tuple[str, str]:
        support, kernel = generate(self, node)
        for spelling, in_opencl in _SPELLINGS.items():
            support = support.replace(spelling, in_opencl)
            kernel = kernel.replace(spelling, in_opencl)
        return support, kernel

    op._generate_op_string = generate_op_string


class CudaContext:
    """Makes the context of a CUDA device current in each thread that uses it.

    libgpuarray makes its context current at the start of a call and restores the previous one at the
    end. Because calls are nested, it counts them. In 0.7.6 a call that finds a kernel in the cache does
    not decrement the count. From then on libgpuarray assumes that the context is current in every
    thread, but it is current in that thread only, and calls in other threads fail with "invalid device
    context". Functions are unpickled in a separate thread, so kernels are compiled in one thread and
    used in another.

    So this class makes the context permanently current in each thread.
    """

    def __init__(self, context: Any) -> None:
        self._driver = ctypes.CDLL("libcuda.so")  # libgpuarray has loaded it by this name
        self._handle = ctypes.c_void_p()
        self._threads = threading.local()
        with context:
            self._call("cuCtxGetCurrent", ctypes.byref(self._handle))

    def enter_thread(self) -> None:
        """Make the context current in this thread, unless it already is."""
        if not hasattr(self._threads, "entered"):
            self._call("cuCtxSetCurrent", self._handle)
            self._threads.entered = True

    def _call(self, name: str, argument: Any) -> None:
        status = getattr(self._driver, name)(argument)
        if status:
            raise RuntimeError(f"the CUDA driver's {name} failed with error {status}")
