"""Theano on the arrays of a GPU, through pygpu.

Shared variables and outputs stay on the device. NumPy arrays, such as the inputs, and numbers are
handled as on the CPU. The device may be a CUDA or an OpenCL device.

Defects of Theano 1.0.5 are corrected, besides those that the repairs of its source code correct:

Elementwise kernels use C that is not valid OpenCL: ``maximum`` and ``minimum`` call ``nan("")``, integer
division calls ``floorf``, and a cast to bool uses a float as a condition. No OpenCL compiler accepts
these.

New memory is not zeroed, and CLBlast's gemv adds 0 times the values that it overwrites, which may be
NaN.

Any cuDNN that compiles is used, even a version that is newer than Theano supports.

`CudaContext` describes a defect of libgpuarray 0.7.6.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import sys
import threading
from typing import TYPE_CHECKING, Any, Sequence

import numpy as np
import pygpu
import theano
import theano.gpuarray
from pygpu.elemwise import GpuElemwise, arg
from pygpu.gpuarray import GpuArray, GpuContext
from theano.compile import optdb
from theano.gpuarray import dnn, elemwise, nnet
from theano.gpuarray.basic_ops import GpuFromHost, HostFromGpu, as_gpuarray_variable, host_from_gpu
from theano.gpuarray.opt import op_lifter, register_opt
from theano.gpuarray.type import GpuArrayType, get_context, gpu_supported, list_contexts

from synkhronos.arithmetic.operations import DeviceArithmetic
from synkhronos.arithmetic.partition import as_slice
from synkhronos.engines.base import Definition, TensorType
from synkhronos.engines.collectives import AllGather, AllReduce, Broadcast, OwnRows, ToMaster
from synkhronos.engines.theano.engine import TheanoEngine

if TYPE_CHECKING:
    from synkhronos._typing import Array, Compiled, Rows
    from synkhronos.engines.names import Apply, Op, SharedVariable, Variable

_EXPRESSIONS = {  # like NumPy's, the last two return NaN if either operand is NaN
    np.add: "a = a + b",
    np.multiply: "a = a * b",
    np.divide: "a = a / b",
    np.minimum: "a = (b < a || b != b) ? b : a",
    np.maximum: "a = (b > a || b != b) ? b : a",
}
_VERSION = 2  # part of the key of compiled modules, which stay on disk
_SPELLINGS = {  # C's, and OpenCL's
    'nan("")': "NAN",
    "floorf(": "floor(",
    "fmodf(": "fmod(",
    ") ? 1 : 0;": ") != 0 ? 1 : 0;",
}
_FIRST_UNKNOWN_CUDNN = 8000


class TheanoGpuEngine(TheanoEngine):
    """Theano 1.0.5 with its GpuArray back end, on one device."""

    survives_fork = False  # a CUDA context does not, nor do OpenCL's threads
    reducers = {GpuContext: lambda context: (get_context, (None,))}  # each rank has its own
    _cuda_context = None

    def before_fork(self, forks_all: bool = True) -> None:
        if list_contexts():
            raise RuntimeError(
                "fork: Theano already uses a GPU in this process, so no process can be forked from "
                "it. Start Python with THEANO_FLAGS=device=cpu,force_device=True, call no "
                "theano.gpuarray.use(), and let synk.fork() bind each rank to its device. After "
                "synk.close() the process keeps its device: call fork() again in a new process, or "
                "with n_parallel=1"
            )
        super().before_fork(forks_all)

    def setup(self, device: str, announce: bool = True) -> None:
        bound = list(theano.gpuarray.init_dev.devmap)
        if bound and bound != [device]:
            raise ValueError(f"device: this process is already bound to {bound}, got {device!r}")
        if not bound:
            if device.startswith("cuda"):
                refuse_new_cudnn()
            with contextlib.redirect_stderr(sys.stderr if announce else io.StringIO()):
                theano.gpuarray.use(device)
            fix_kernels(get_context(None).kind)
        self.context = get_context(None)
        self.arithmetic = GpuArithmetic(self.context)
        self._cuda_context = CudaContext(self.context) if self.context.kind == b"cuda" else None
        self.enter_thread()

    def enter_thread(self) -> None:
        if self._cuda_context is not None:
            self._cuda_context.enter_thread()

    # Graphs

    def type_of(self, variable: Variable) -> TensorType:
        kind = getattr(variable, "type", None)
        if isinstance(kind, GpuArrayType):
            return TensorType(np.dtype(kind.dtype), kind.ndim, self.extents_of(kind))
        return super().type_of(variable)

    def build(self, definition: Definition, **kwargs: Any) -> Compiled:
        self.enter_thread()
        for variable in definition.inputs:
            if isinstance(variable.type, GpuArrayType):
                raise TypeError(
                    f"inputs: expected tensor variables, whose values are NumPy arrays, got {variable} "
                    f"of {variable.type}"
                )
        outputs = [_place(*pair) for pair in zip(definition.outputs, definition.on_host)]
        return super().build(definition._replace(outputs=outputs), **kwargs)

    def call(
        self, compiled: Compiled, arguments: Sequence[Array], subset: Sequence[int] | None = None
    ) -> list[Array]:
        self.enter_thread()
        return super().call(compiled, arguments, subset)

    # Arrays

    def overwrite(self, array: Array, value: Array) -> Array:
        if not isinstance(array, GpuArray):
            return super().overwrite(array, value)
        if isinstance(value, GpuArray) and array.shape == value.shape:
            array[...] = value
        elif isinstance(value, GpuArray):
            return value.copy()
        elif array.shape == value.shape and array.flags["C_CONTIGUOUS"]:
            array.write(np.ascontiguousarray(value))
        else:
            return self.to_device(value)
        return array

    def take(self, array: Array, rows: Rows, out: np.ndarray | None = None) -> Array:
        if not isinstance(array, GpuArray):
            return super().take(array, rows, out)
        if isinstance(rows, range):
            return array[as_slice(rows)]
        return _contiguous(array).take1(self.to_device(rows))

    def to_host(self, array: Array) -> Any:  # as None may be given
        return None if array is None else np.asarray(array)

    def to_device(self, value: np.ndarray) -> Array:
        return pygpu.array(value, context=self.context)

    def read(self, array: Array, out: np.ndarray) -> None:
        if isinstance(array, GpuArray):
            _contiguous(array).read(out)
        else:
            super().read(array, out)

    # Random streams

    def jump(self, shared: SharedVariable, index: int) -> None:
        storage = self.storage(shared)
        if isinstance(storage, GpuArray):
            self.store(shared, self.to_host(storage))
        super().jump(shared, index)
        if isinstance(storage, GpuArray):
            self.store(shared, self.to_device(self.storage(shared)))

    def origin(self, variable: Variable) -> Variable:
        while variable.owner is not None and isinstance(variable.owner.op, (GpuFromHost, HostFromGpu)):
            variable = variable.owner.inputs[0]
        return variable


class GpuArithmetic(DeviceArithmetic):
    """Arithmetic on the arrays of one device, and on NumPy arrays."""

    def __init__(self, context: GpuContext) -> None:
        super().__init__(GpuArray)
        self._context = context
        self._kernels: dict[tuple[np.ufunc, Any, bool], GpuElemwise] = {}

    def compute(self, function: np.ufunc, array: Any, other: Any) -> Any:
        """Change `array` by a kernel on its items and the items of `other`, an array or one number."""
        scalar = not isinstance(other, GpuArray)
        key = function, array.dtype, scalar
        if key not in self._kernels:
            arguments = [
                arg("a", array.dtype, read=True, write=True),
                arg("b", array.dtype, read=not scalar, scalar=scalar),
            ]
            expression = _EXPRESSIONS[function]
            self._kernels[key] = GpuElemwise(self._context, expression, arguments, convert_f16=True)
        self._kernels[key](array, other)
        return array

    def join(self, arrays: Sequence[Any], axis: int) -> Any:
        return pygpu.concatenate(arrays, axis=axis, context=self._context)


def _place(output: Variable, on_host: bool) -> Variable:
    """Return an output as a variable on the device, or on the host if that is required."""
    # A number is sent to the master anyway, and Theano keeps shared numbers on the host, too.
    if on_host or not output.ndim:
        return host_from_gpu(output) if isinstance(output.type, GpuArrayType) else output
    return output.transfer(None) if gpu_supported(output) else output


def _contiguous(array: GpuArray) -> GpuArray:
    return array if array.flags["C_CONTIGUOUS"] else array.copy("C")


@register_opt("fast_compile")
@op_lifter([AllReduce, AllGather, Broadcast, OwnRows, ToMaster])
def local_collective_on_device(
    op: Op, context_name: str | None, inputs: list[Variable], outputs: list[Variable]
) -> list[Variable]:
    """Return the outputs of a collective of an array on the device, without transfers around it.

    Theano's optimizer replaces operations whose inputs come from the device, or whose results go there,
    by operations on the device. A collective is the same operation on host and device; the ranks'
    communicator exchanges the arrays.
    """
    peers, array, *others = inputs
    if isinstance(op, ToMaster):
        others = [as_gpuarray_variable(other, context_name) for other in others]
    return op(peers, as_gpuarray_variable(array, context_name), *others, return_list=True)


# Corrections


def refuse_new_cudnn() -> None:
    """Disable a cuDNN with which Theano's convolutions do not compile, unless the user enabled it."""
    version = dnn.version(raises=False)
    if theano.config.dnn.enabled == "auto" and version >= _FIRST_UNKNOWN_CUDNN:
        major = version // (10_000 if version >= 90_000 else 1_000)
        dnn.dnn_present.avail = False
        dnn.dnn_present.msg = f"cuDNN {major} is too new for Theano, which supports 5 to 7"


def fix_kernels(kind: bytes) -> None:
    """Correct the kernels in this process, for a kind of device by its name in libgpuarray."""
    _change_version(elemwise.GpuElemwise, kind)
    if kind == b"opencl":
        _spell_as_opencl(elemwise.GpuElemwise)
        _change_version(nnet.GpuCrossentropySoftmaxArgmax1HotWithBias, kind)
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
