"""The names of the graph compiler: everything that is used from both Theano and PyTensor.

The engines and the extensions use them. PyTensor continues Theano, so most names differ only in their
module. Tuples hold the kinds of operations to which a rule applies; an empty tuple means that the
compiler has none.

``unfused(vector)`` is the vector itself, as an operation that is not fused with the operations that
compute the vector or use it. gcc does not vectorize a loop over more than a few vectors and scalars, so
a long fused expression can take several times as long as its parts.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import TYPE_CHECKING, Any, ContextManager, Sequence, Tuple

from synkhronos.host import compiler

if TYPE_CHECKING:
    import numpy as np

    from synkhronos._typing import Compiled

#: The modules of operations on sparse matrices are imported when they are used.
_SPARSE = {"SparseType", "SparseTensorType"}

#: The names of operations that move a value to another device; they are there only with pygpu.
TRANSFERS = ("GpuFromHost", "HostFromGpu", "GpuToGpu")

_Kinds = Tuple[Any, ...]

#: For annotations: objects of the compiler whose classes nothing else needs
FunctionGraph = Any
Mode = Any
VariableType = Any

if compiler.NAME == "pytensor":
    import pytensor as package
    import pytensor.tensor as tensor
    from pytensor import scalar
    from pytensor.compile.io import In, Out
    from pytensor.compile.mode import optdb
    from pytensor.compile.ops import ViewOp
    from pytensor.compile.sharedvalue import SharedVariable
    from pytensor.gradient import DisconnectedType, GradClip, grad_not_implemented
    from pytensor.graph.basic import Apply, Constant, Variable, clone_get_equiv
    from pytensor.graph.op import Op
    from pytensor.graph.replace import clone_replace as clone
    from pytensor.graph.rewriting.basic import (
        GraphRewriter,
        SequentialGraphRewriter,
        in2out,
        node_rewriter,
    )
    from pytensor.graph.traversal import ancestors, graph_inputs, io_toposort
    from pytensor.link.basic import Container
    from pytensor.link.c.type import Generic
    from pytensor.raise_op import CheckAndRaise
    from pytensor.scan.op import Scan
    from pytensor.tensor.basic import (
        Alloc,
        AllocEmpty,
        ARange,
        Eye,
        Join,
        MakeVector,
        ScalarFromTensor,
        TensorFromScalar,
    )
    from pytensor.tensor.blas import BatchedDot
    from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
    from pytensor.tensor.extra_ops import CpuContiguous, CumOp, Unique
    from pytensor.tensor.math import Argmax, Dot, Sum
    from pytensor.tensor.math import reciprocal as inv
    from pytensor.tensor.random.op import RandomVariable
    from pytensor.tensor.random.type import RandomType as GeneratorType
    from pytensor.tensor.shape import Reshape, Shape, Shape_i, SpecifyShape
    from pytensor.tensor.sort import ArgSortOp, SortOp
    from pytensor.tensor.special import LogSoftmax, Softmax
    from pytensor.tensor.subtensor import (
        AdvancedIncSubtensor,
        AdvancedSubtensor,
        IncSubtensor,
        Subtensor,
        get_constant_idx,
        get_idx_list,
    )
    from pytensor.tensor.type import TensorType, continuous_dtypes

    try:
        from pytensor.tensor.subtensor import AdvancedIncSubtensor1, AdvancedSubtensor1
    except ImportError:  # PyTensor 3.3
        AdvancedIncSubtensor1, AdvancedSubtensor1 = AdvancedIncSubtensor, AdvancedSubtensor

    try:
        from pytensor.conditional.op import IfElse
    except ImportError:  # PyTensor 3.0
        from pytensor.ifelse import IfElse
    try:
        from pytensor.compile.executor import Function
        from pytensor.compile.rebuild import construct_function_ins_and_outs as ins_and_outs
    except ImportError:  # PyTensor 2, which PyMC 5 needs
        from pytensor.compile.function.pfunc import construct_pfunc_ins_and_outs as ins_and_outs
        from pytensor.compile.function.types import Function

    HAS_MRG = False  # streams whose states are arrays
    AsTensorError = NotImplementedError  # besides TypeError and ValueError
    Reciprocal = scalar.Reciprocal
    _NONE: _Kinds = ()
    MEANS = POOLS = ANY_POOLS = CONVOLUTIONS = ANY_CONVOLUTIONS = OLD_CONVOLUTIONS = _NONE
    DIFFERENCES = FORWARD = TO_IMAGES = BY_ROW = LINEAR_BY_ROW = WITH_BIAS = _NONE
    COUNTING: _Kinds = (Scan, Eye)
    WITH_EXTENTS: _Kinds = (Alloc, SpecifyShape)
    SOFTMAXES: _Kinds = (Softmax, LogSoftmax)
    LARGEST: _Kinds = (Argmax,)
    RANDOM: _Kinds = (RandomVariable,)
    COPIES: _Kinds = (SpecifyShape, ViewOp, CheckAndRaise, TensorFromScalar, ScalarFromTensor)
    WRITES: _Kinds = (IncSubtensor, AdvancedIncSubtensor, AdvancedIncSubtensor1)
    LINEAR: _Kinds = (DimShuffle, Sum, SpecifyShape, ViewOp)

    def without_test_values() -> ContextManager[None]:
        """Return a context, as PyTensor has no test values."""
        return contextlib.nullcontext()

    class _Unfused(CpuContiguous):
        """The vector itself: results are contiguous, and only other arrays would be copied."""

    unfused = _Unfused()

    @node_rewriter([_Unfused])
    def _fusible(fgraph: FunctionGraph, node: Apply) -> list[Variable]:
        return node.inputs

    # Numba and JAX compile whole graphs, and vectorize any loop.
    optdb.register("synkhronos_fusible", in2out(_fusible), "numba", "jax", position=0)

    def of_any_rows(kind: VariableType) -> VariableType:
        """Return the type of a tensor of any extent on axis 0."""
        return kind.clone(shape=(None, *kind.shape[1:]))

    def with_pattern(variable: Variable, broadcastable: Sequence[bool]) -> Variable:
        """Return a tensor whose type says which axes are broadcast."""
        axes = [axis for axis, is_one in enumerate(broadcastable) if is_one]
        return tensor.specify_broadcastable(variable, *axes)

    def shared(value: np.ndarray, name: str | None, broadcastable: Sequence[bool]) -> SharedVariable:
        """Return a shared tensor whose type fixes the axes that are broadcast, and no other extent."""
        shape = tuple(1 if is_one else None for is_one in broadcastable)
        return package.shared(value, name=name, shape=shape)

    def shared_vector(value: np.ndarray, name: str | None) -> SharedVariable:
        """Return a shared vector whose type fixes its length, without which C code has slow loops.

        A length of one is not fixed, as the vector would be broadcast.
        """
        return package.shared(value, name=name, shape=(None if len(value) == 1 else len(value),))

    def fixed(variable: Variable, shape: Sequence[int]) -> Variable:
        """Return a variable whose type fixes its shape, but makes no further axis broadcastable."""
        ones = variable.type.broadcastable
        extents = [None if item == 1 and not is_one else item for item, is_one in zip(shape, ones)]
        return tensor.specify_shape(variable, extents)

    def gradients(loss: Variable, wrt: Sequence[Variable]) -> list[Variable | None]:
        """Return the gradients of a loss; None for a variable on which it does not depend."""
        return package.grad(loss, wrt, disconnected_inputs="ignore", return_disconnected="none")

    def constant_idx(node: Apply) -> list[Any]:
        """Return the index of a `Subtensor`, with numbers in place of constants."""
        return get_constant_idx(node.op.idx_list, node.inputs, True, True)

    def steps_of(loop: Scan) -> tuple[list[Variable], list[Variable]]:
        """Return the inputs and outputs of the steps of a `Scan`."""
        return loop.inner_inputs, loop.inner_outputs

    def is_read(compiled: Compiled, variable: Variable) -> bool:
        """Whether an input of an optimized graph is used in it."""
        return bool(compiled.maker.fgraph.clients[variable])

else:
    import theano as package
    import theano.tensor as tensor
    from theano import In, Out, clone, scalar
    from theano.compile.function_module import Function
    from theano.compile.ops import Rebroadcast, Shape, Shape_i, SpecifyShape, ViewOp
    from theano.compile.sharedvalue import SharedVariable
    from theano.gof import Apply, Constant, Op, Variable
    from theano.gof import Optimizer as GraphRewriter
    from theano.gof import SeqOptimizer as SequentialGraphRewriter
    from theano.gof.graph import ancestors, clone_get_equiv, io_toposort
    from theano.gof.graph import inputs as graph_inputs
    from theano.gof.link import Container
    from theano.gof.type import Generic
    from theano.gradient import DisconnectedType, GradClip, grad_not_implemented
    from theano.ifelse import IfElse
    from theano.sandbox.rng_mrg import mrg_uniform_base
    from theano.scan_module.scan_op import Scan
    from theano.tensor import (  # type: ignore[no-redef]  # PyTensor's are defined above
        AsTensorError,
        TensorType,
        continuous_dtypes,
    )
    from theano.tensor import patternbroadcast as with_pattern  # type: ignore[no-redef]
    from theano.tensor.basic import (
        Alloc,
        AllocEmpty,
        ARange,
        Argmax,
        Dot,
        Eye,
        Join,
        MaxAndArgmax,
        Mean,
        Reshape,
        ScalarFromTensor,
        TensorFromScalar,
        inv,
    )
    from theano.tensor.blas import BatchedDot
    from theano.tensor.elemwise import CAReduce, DimShuffle, Elemwise, Sum
    from theano.tensor.extra_ops import CpuContiguous, CumOp, DiffOp, Unique
    from theano.tensor.extra_ops import cpu_contiguous as unfused  # type: ignore[no-redef]
    from theano.tensor.nnet import abstract_conv, conv, nnet
    from theano.tensor.opt import Assert, MakeVector
    from theano.tensor.raw_random import RandomFunction
    from theano.tensor.raw_random import RandomStateType as GeneratorType
    from theano.tensor.signal.pool import Pool, PoolGrad
    from theano.tensor.sort import ArgSortOp, SortOp
    from theano.tensor.subtensor import (
        AdvancedIncSubtensor,
        AdvancedIncSubtensor1,
        AdvancedSubtensor,
        AdvancedSubtensor1,
        IncSubtensor,
        Subtensor,
        get_idx_list,
    )

    HAS_MRG = True
    Reciprocal = scalar.Inv
    MEANS, POOLS, CONVOLUTIONS = (Mean,), (Pool,), (abstract_conv.AbstractConv,)
    FORWARD, TO_IMAGES = (abstract_conv.AbstractConv,), (abstract_conv.AbstractConv_gradInputs,)
    ANY_POOLS, ANY_CONVOLUTIONS = (Pool, PoolGrad), (abstract_conv.BaseAbstractConv,)
    OLD_CONVOLUTIONS = (conv.ConvOp,)
    COUNTING, WITH_EXTENTS = (Scan, Eye), (Alloc,)
    WITH_BIAS = (nnet.SoftmaxWithBias,)
    BY_ROW = (nnet.Softmax, nnet.LogSoftmax, nnet.SoftmaxWithBias, nnet.CrossentropyCategorical1Hot)
    LINEAR_BY_ROW = (nnet.SoftmaxGrad, nnet.CrossentropyCategorical1HotGrad)
    SOFTMAXES = ()
    DIFFERENCES = (DiffOp,)
    LARGEST = (MaxAndArgmax, Argmax)
    RANDOM = (mrg_uniform_base, RandomFunction)
    COPIES = (
        Rebroadcast, SpecifyShape, ViewOp, Assert, CpuContiguous, TensorFromScalar, ScalarFromTensor,
    )  # fmt: skip
    WRITES = (IncSubtensor, AdvancedIncSubtensor, AdvancedIncSubtensor1)
    LINEAR = (DimShuffle, Sum, Rebroadcast, ViewOp)

    def without_test_values() -> ContextManager[None]:
        """Return a context in which operations compute no test values."""
        return package.change_flags(compute_test_value="off")

    def of_any_rows(kind: VariableType) -> VariableType:
        """Return the type of a tensor of any extent on axis 0."""
        return kind.clone(broadcastable=(False, *kind.broadcastable[1:]))

    def shared(value: np.ndarray, name: str | None, broadcastable: Sequence[bool]) -> SharedVariable:
        """Return a shared tensor whose type fixes the axes that are broadcast, and no other extent."""
        return package.shared(value, name=name, broadcastable=tuple(broadcastable))

    def shared_vector(value: np.ndarray, name: str | None) -> SharedVariable:
        """Return a shared vector that is not broadcast, even if it has one number."""
        return package.shared(value, name=name, broadcastable=(False,))

    def fixed(variable: Variable, shape: Sequence[int]) -> Variable:
        """Return the variable, as types have no shapes."""
        return variable

    def gradients(loss: Variable, wrt: Sequence[Variable]) -> list[Variable | None]:
        """Return the gradients of a loss; None for a variable on which it does not depend."""
        return package.grad(loss, wrt, disconnected_inputs="ignore", return_disconnected="None")

    def constant_idx(node: Apply) -> list[Any]:
        """Return the index of a `Subtensor`, with numbers in place of constants."""
        return node.op.get_constant_idx(node.inputs, allow_partial=True, only_process_constants=True)

    def steps_of(loop: Scan) -> tuple[list[Variable], list[Variable]]:
        """Return the inputs and outputs of the steps of a `Scan`."""
        return loop.inputs, loop.outputs

    def is_read(compiled: Compiled, variable: Variable) -> bool:
        """Whether an input of an optimized graph is used in it."""
        return bool(variable.clients)


def joined(node: Apply) -> tuple[int | None, list[Variable]]:
    """Return the axis of a `Join`, counted from the front, and its parts; None if it is computed."""
    axis, parts = getattr(node.op, "axis", None), list(node.inputs)
    if axis is None:  # Theano, and PyTensor 2
        axis = getattr(parts.pop(0), "data", None)
    return (None if axis is None else int(axis) % node.outputs[0].ndim), parts


def is_sparse(item: Variable | VariableType) -> bool:
    """Whether a variable, or a type of variables, is that of a sparse matrix."""
    return type(getattr(item, "type", item)).__name__ in _SPARSE


def is_sum_with_sparse(op: Op) -> bool:
    """Whether an operation adds a sparse and a dense matrix."""
    return type(op).__name__ == "AddSD"


def dense(variable: Variable) -> Variable:
    """Return a variable; a sparse matrix as a dense one."""
    if not is_sparse(variable):
        return variable
    return importlib.import_module(f"{package.__name__}.sparse").dense_from_sparse(variable)


def in_type_of(variable: Variable, value: Variable) -> Variable:
    """Return a dense value as a variable of the type of another variable, which may be sparse."""
    value = tensor.cast(value, variable.type.dtype)
    if is_sparse(variable):
        module = importlib.import_module(f"{package.__name__}.sparse")
        value = getattr(module, f"{variable.type.format}_from_dense")(value)
    return variable.type.filter_variable(value)
