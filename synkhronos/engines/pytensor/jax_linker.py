"""PyTensor's graphs as functions of JAX: results have the dtypes of variables, and shapes are known.

JAX needs the shapes of all arrays when it traces a function. PyTensor's conversion computes many of them
by operations of JAX, whose results are known only when the function runs, as in the gradient of
``scan``. An operation whose inputs are all known is computed at once here. Some of PyTensor's
conversions return another dtype than that of the variable: draws of Bernoulli are bool, for example, and
the sum of two of them would be, too. Sums are computed in the dtype in which they accumulate.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Callable

import numpy as np
from pytensor.graph.fg import AbstractFunctionGraph
from pytensor.link.jax.linker import JAXLinker
from pytensor.link.utils import fgraph_to_python
from pytensor.raise_op import CheckAndRaise
from pytensor.tensor.elemwise import CAReduce
from pytensor.tensor.random.basic import CategoricalRV

if TYPE_CHECKING:
    from synkhronos.engines.names import Apply, FunctionGraph, Variable


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
