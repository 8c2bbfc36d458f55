"""PyTensor on JAX arrays, which are immutable: compilation by XLA, calls, and keys.

The state of a random generator is a key of JAX. JAX is imported by `PyTensorJaxEngine.setup`, because it
starts threads, which are missing in processes that are forked later.

JAX needs the shapes of all arrays when it traces a function. PyTensor's conversion computes many of them
by operations of JAX, whose results are known only when the function runs, as in the gradient of
``scan``. An operation whose inputs are all known is computed at once here. Some of PyTensor's
conversions return another dtype than that of the variable: draws of Bernoulli are bool, for example, and
the sum of two of them would be, too. Sums are computed in the dtype in which they accumulate.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any, Callable, Iterator, Sequence

import numpy as np
from pytensor.compile.mode import Mode, get_mode
from pytensor.graph.fg import AbstractFunctionGraph
from pytensor.link.jax.linker import JAXLinker
from pytensor.link.utils import fgraph_to_python
from pytensor.raise_op import CheckAndRaise
from pytensor.tensor.elemwise import CAReduce
from pytensor.tensor.random.basic import CategoricalRV

from synkhronos.arithmetic.operations import DeviceArithmetic
from synkhronos.arithmetic.partition import as_slice
from synkhronos.engines.graph_engine import is_referred_to
from synkhronos.engines.pytensor.engine import PyTensorEngine, is_generator

if TYPE_CHECKING:
    from synkhronos._typing import Array, Compiled, Rows
    from synkhronos.engines.base import Givens, RowAxes, TensorType, Variables, Windows
    from synkhronos.engines.names import Apply, FunctionGraph, SharedVariable, Variable

_KEY = "jax_state"  # the field from which JAX draws, in the state that PyTensor makes of a generator


class PyTensorJaxEngine(PyTensorEngine):
    """PyTensor by JAX, on the CPU or on one GPU."""

    survives_fork = False
    in_use = "JAX"

    def before_fork(self, forks_all: bool = True) -> None:
        if _has_started():
            raise RuntimeError(
                "fork: JAX is in use in this process already, and its threads do not survive a fork: "
                "call synk.fork() before anything uses JAX. After synk.close() the process keeps them: "
                "call fork() again in a new process, or with one device"
            )
        super().before_fork(forks_all)

    def setup(self, device: str, announce: bool = True) -> None:
        kind = device.rstrip("0123456789")
        if kind not in ("jax:cpu", "jax:cuda"):
            raise ValueError(f"device: expected 'jax:cpu' or a GPU such as 'jax:cuda0', got {device!r}")
        if not _has_started() and kind == "jax:cuda":
            _show_only(int(device[len(kind) :]))
        self._start(kind[len("jax:") :])

    def _start(self, platform: str) -> None:
        import jax

        if not _has_started():
            jax.config.update("jax_platforms", platform)
        with _number_of_threads(os.environ.get("OMP_NUM_THREADS")):
            register()
            found = jax.devices()[0]
        jax.config.update("jax_enable_x64", True)  # PyTensor sets it according to floatX
        if found.platform not in {"cpu": ("cpu",), "cuda": ("cuda", "gpu")}[platform]:
            raise ValueError(
                f"device: JAX computes on {found} in this process already, got 'jax:{platform}'; use it "
                f"in a new process"
            )
        self._jax = jax
        self.arithmetic = JaxArithmetic(jax)

    # Graphs

    def input_type_of(self, variable: Variable) -> TensorType:
        kind = super().input_type_of(variable)
        if kind.format != "dense":
            raise TypeError(f"inputs: JAX takes dense tensors, got {variable} of {variable.type}")
        return kind

    def mode(self, given: Mode) -> Mode:
        mode = get_mode("JAX" if given is None else given)
        if not isinstance(mode.linker, JAXLinker):
            raise ValueError(
                f"function: mode: on JAX's devices, expected 'JAX', or none, got {given!r}; for other "
                f"modes, fork without these devices"
            )
        # JAX fuses operations itself; PyTensor's fusion would mix shapes with values.
        return Mode(linker=JaxLinker(), optimizer=mode.excluding("fusion").provided_optimizer)

    def mode_for_collectives(self, mode: Mode) -> Mode:
        raise ValueError(
            "function: collectives in graphs (synkhronos.ops) call the other ranks from Python, which "
            "functions of JAX cannot; use synk.all_reduce between two functions"
        )

    def cut_windows(self, givens: Givens, index: Variables, divided: RowAxes) -> Windows:
        windows = super().cut_windows(givens, index, divided)
        if windows.bounds:
            raise ValueError(
                "function: givens: slices whose bounds are inputs have no fixed number of rows, which "
                "JAX needs; give the rows as inputs, and select them by batch"
            )
        return windows

    def to_parts(self, compiled: Compiled) -> Any:
        for shared in self.shareds(compiled):
            self._give_back(shared)
        return super().to_parts(compiled)

    def duplicate(self, shared: SharedVariable) -> SharedVariable:
        self._give_back(shared)
        return super().duplicate(shared)

    def _give_back(self, shared: SharedVariable) -> None:
        """Move a value from the device, where PyTensor cannot copy it."""
        storage = self.storage(shared)
        if isinstance(storage, self._jax.Array):
            self.store(shared, np.array(storage))

    def check_stream(self, shared: SharedVariable) -> None:
        self._state(shared)

    # Calls

    def call(
        self, compiled: Compiled, arguments: Sequence[Array], subset: Sequence[int] | None = None
    ) -> list[Array]:
        shareds = self.shareds(compiled)
        for shared in shareds:
            self._take_over(shared)
        outputs = compiled(*arguments)
        chosen = outputs if subset is None else [outputs[index] for index in subset]
        # Calls return before they have computed, and may still read the memory of arguments.
        self._jax.block_until_ready([outputs, [self.storage(shared) for shared in shareds]])
        return [np.array(array) for array in chosen]

    def _take_over(self, shared: SharedVariable) -> None:
        """Move a value that the script has set to the device, unless it may still write to the array."""
        kind = type(self.storage(shared))
        if issubclass(kind, np.ndarray) and not is_referred_to(shared.container.storage):
            self.store(shared, self.to_device(self.storage(shared)))
        elif issubclass(kind, np.random.Generator):
            self._state(shared)

    # Arrays

    def overwrite(self, array: Any, value: Array) -> Array:
        if isinstance(array, np.ndarray):
            return super().overwrite(array, self.to_host(value))
        return value if isinstance(value, self._jax.Array) else self.to_device(value)

    def take(self, array: Any, rows: Rows, out: np.ndarray | None = None) -> Array:
        if isinstance(array, np.ndarray):
            return super().take(array, rows, out)
        return array[as_slice(rows) if isinstance(rows, range) else rows]

    def to_host(self, array: Any) -> np.ndarray:
        return array if isinstance(array, np.ndarray) else np.array(array)

    def to_device(self, value: np.ndarray) -> Array:
        return self._jax.numpy.array(value)  # a copy

    # Random streams

    def export(self, shared: SharedVariable) -> np.ndarray:
        if is_generator(shared):
            return np.array(self._state(shared)[_KEY])
        return super().export(shared)

    def restore(self, shared: SharedVariable, array: np.ndarray) -> None:
        if is_generator(shared):
            self._set_key(shared, self.to_device(array))
        else:
            super().restore(shared, array)

    def check_state(self, array: np.ndarray) -> None:
        if array.shape != (2,) or array.dtype != np.uint32:
            raise ValueError("expected a key of JAX, got other numbers")

    def seed(self, streams: Any, seed: int | None) -> list[SharedVariable]:
        seeded = super().seed(streams, seed)
        for shared in seeded:
            self._state(shared)
        return seeded

    def reseeded(self, shared: SharedVariable, seed: Any) -> np.random.Generator:
        return np.random.default_rng(seed)

    def jump(self, shared: SharedVariable, index: int) -> None:
        if index:
            key = self._state(shared)[_KEY]
            self._set_key(shared, self._jax.random.fold_in(key, index))

    def _set_key(self, shared: SharedVariable, key: Any) -> None:
        self.store(shared, {**self._state(shared), _KEY: key})

    def _state(self, shared: SharedVariable) -> Any:
        """Return the state of a stream as PyTensor passes it to JAX; generators are converted."""
        storage = self.storage(shared)
        if isinstance(storage, np.random.Generator):
            storage = self._converted(storage)
            self.store(shared, storage)
        return storage

    def _converted(self, generator: np.random.Generator) -> Any:
        check_convertible(generator)
        from pytensor.link.jax.dispatch import jax_typify

        return self._jax.tree_util.tree_map(self._jax.numpy.asarray, jax_typify(generator))


class JaxArithmetic(DeviceArithmetic):
    """Arithmetic on JAX's arrays, and on NumPy arrays."""

    def __init__(self, jax: Any) -> None:
        super().__init__(jax.Array)
        self._numpy = jax.numpy

    def compute(self, function: np.ufunc, array: Any, other: Any) -> Any:
        other = other if isinstance(other, self._kind) else array.dtype.type(other)
        return getattr(self._numpy, function.__name__)(array, other)

    def join(self, arrays: Sequence[Any], axis: int) -> Any:
        return self._numpy.concatenate([self._numpy.atleast_1d(array) for array in arrays], axis)


def _has_started() -> bool:
    """Whether JAX has started its threads in this process. Importing it starts none."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bridge.backends_are_initialized()


@contextlib.contextmanager
def _number_of_threads(number: str | None) -> Iterator[None]:
    """Let JAX start this number of compute threads, which it reads from an environment variable."""
    if number is None or "NPROC" in os.environ:
        yield
        return
    os.environ["NPROC"] = number
    try:
        yield
    finally:
        del os.environ["NPROC"]


def _show_only(number: int) -> None:
    """Let JAX see one GPU only, given its number among the GPUs that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = None if visible is None else visible.split(",")
    if names is not None and number >= len(names):
        raise ValueError(f"device: CUDA_VISIBLE_DEVICES={visible} has no GPU number {number}")
    os.environ["CUDA_VISIBLE_DEVICES"] = str(number) if names is None else names[number]


# The linker


class JaxLinker(JAXLinker):
    """PyTensor's linker, but shapes are values, and shared generators themselves are the inputs."""

    def fgraph_convert(
        self, fgraph: FunctionGraph, input_storage: Any, storage_map: Any, **kwargs: Any
    ) -> Callable[..., Any]:
        from pytensor.link.jax.dispatch.shape import JAXShapeTuple

        def is_extent(variable: Variable) -> bool:
            nodes = [node for node, _ in fgraph.clients[variable]]
            return bool(nodes) and all(isinstance(node.op, JAXShapeTuple) for node in nodes)

        for item in fgraph.inputs:
            if isinstance(storage_map[item][0], np.random.Generator):
                check_convertible(storage_map[item][0])
        self.scalar_shape_inputs = tuple(
            place for place, item in enumerate(fgraph.inputs) if is_extent(item)
        )
        return _convert_graph(fgraph, input_storage=input_storage, storage_map=storage_map, **kwargs)

    def create_thunk_inputs(self, storage_map: Any) -> list[Any]:
        return [storage_map[variable] for variable in self.fgraph.inputs]


def check_convertible(generator: np.random.Generator) -> None:
    """Raise ``TypeError`` if PyTensor cannot convert a generator to a key of JAX."""
    bits = generator.bit_generator
    if not isinstance(bits, np.random.PCG64):
        raise TypeError(
            f"expected a generator of PCG64, as of numpy.random.default_rng(), which PyTensor converts "
            f"to a key of JAX, got one of {type(bits).__name__}"
        )


def register() -> None:
    """Let PyTensor convert graphs inside operations, as of `scan`, and categorical draws as here."""
    import jax
    from pytensor.link.jax.dispatch import jax_funcify
    from pytensor.link.jax.dispatch.random import jax_sample_fn

    def draw(key: Any, size: Any, dtype: Any, p: Any) -> Any:
        return jax.random.categorical(key, jax.numpy.log(p), shape=size)  # PyTensor takes the odds

    jax_funcify.register(AbstractFunctionGraph, _convert_graph)
    jax_sample_fn.register(CategoricalRV, lambda op, node: draw)


def _convert_graph(
    graph: AbstractFunctionGraph, node: Apply | None = None, **kwargs: Any
) -> Callable[..., Any]:
    """Return the function of a graph."""
    from pytensor.link.jax.dispatch import jax_typify

    # The name is PyTensor's.
    options = {"type_conversion_fn": jax_typify, "fgraph_name": "jax_funcified_fgraph", **kwargs}
    return fgraph_to_python(graph, _convert, **options)


def _convert(op: Any, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the function of an operation; its results are values if its inputs are, and no tracers."""
    import jax
    from pytensor.link.jax.dispatch import jax_funcify

    function = _checked(op) if isinstance(op, CheckAndRaise) else jax_funcify(op, node=node, **kwargs)
    # PyTensor converts the finished sum.
    accumulated = op.acc_dtype if isinstance(op, CAReduce) else None

    def compute(*inputs: Any) -> Any:
        if accumulated is not None:
            inputs = (inputs[0].astype(accumulated),)
        results = trace_or_compute(*inputs)
        if len(node.outputs) == 1:
            return _in_dtype_of(node.outputs[0], results)
        return [_in_dtype_of(*pair) for pair in zip(node.outputs, results)]

    def trace_or_compute(*inputs: Any) -> Any:
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree_util.tree_leaves(inputs)):
            return function(*inputs)
        with jax.ensure_compile_time_eval():
            return jax.tree_util.tree_map(_as_extent, function(*inputs))

    return compute


def _in_dtype_of(variable: Variable, value: Any) -> Any:
    """Return an array in the dtype of a variable."""
    dtype = getattr(variable.type, "dtype", None)
    has_other = dtype is not None and getattr(value, "dtype", dtype) != dtype
    return value.astype(dtype) if has_other else value


def _checked(op: CheckAndRaise) -> Callable[..., Any]:
    """Return the function of an assertion: JAX can check it if the condition is known."""
    import jax

    def check(value: Any, *conditions: Any) -> Any:
        if any(isinstance(condition, jax.core.Tracer) for condition in conditions):
            warnings.warn(f"JAX leaves out the check of values {op.msg!r}", stacklevel=2)
        elif not all(conditions):
            raise op.exc_type(op.msg)
        return value

    return check


def _as_extent(value: Any) -> Any:
    """Return a number of JAX as one of NumPy, which may be an extent or the bound of a slice."""
    is_number = getattr(value, "ndim", None) == 0 and value.dtype.kind in "iub"
    return np.asarray(value)[()] if is_number else value
