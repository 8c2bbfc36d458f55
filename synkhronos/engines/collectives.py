"""Collectives as operations of Theano and of PyTensor.

The other ranks are a value of the graph: the *peers*, an object that a call passes as the last argument;
``base`` has its interface. Each collective takes the peers and an array, and returns the peers and an
array. In a script's graphs they come from the shared variable `ALONE`, whose value is None. So in a
plain function of the compiler, and in every serial call of a parallel function, which passes None,
collectives return their input.

Gradients: let rank r compute the loss l_r on n_r rows. The ranks' losses are combined to their average,
weighted by n_r ("avg"), or to their sum ("sum"), and so are the ranks' gradients. Therefore the gradient
on rank s has to be the sum of the gradients of l_r, each times n_r / n_s ("avg") or 1 ("sum"). For a
linear collective this is the adjoint in the inner product with the weights n_r, or with equal weights.

All ranks run the collectives of a graph in one order. Independent collectives could run in any order.
Therefore, after all other optimizations, each collective gets the peers from the collective before it,
and a number. This chain is part of the graph, so every linker follows it, and so does every rank that
receives the graph as a pickle.

A vector can be filled and reduced bucket by bucket. Nothing waits in the graph: after filling a bucket,
it runs an operation that notifies the other ranks that it is ready, and returns the vector itself. It is
in the chain of the collectives, so all ranks announce the buckets in the same order.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any, Callable, NoReturn, Sequence

import numpy as np

from synkhronos.arithmetic.partition import Buckets, divide
from synkhronos.engines import names
from synkhronos.engines.names import (
    Apply,
    DisconnectedType,
    FunctionGraph,
    Generic,
    GraphRewriter,
    IfElse,
    Mode,
    Op,
    Shape_i,
    SharedVariable,
    Variable,
    VariableType,
    continuous_dtypes,
    grad_not_implemented,
    of_any_rows,
    package,
    with_pattern,
)
from synkhronos.engines.names import tensor as tt

if TYPE_CHECKING:
    from synkhronos._typing import Array, Compiled
    from synkhronos.engines.base import Peers

NOT_IN_SCAN = (
    "a collective is inside scan or OpFromGraph, which ranks may repeat a different number of times; "
    "use collectives outside, on the inputs or on the results"
)

#: For each linear reduction and loss operation, the reduction of the gradient.
_ADJOINT = {
    ("sum", "avg"): "weighted_sum",
    ("weighted_sum", "avg"): "sum",
    ("avg", "avg"): "avg",
    ("sum", "sum"): "sum",
    ("avg", "sum"): "share_of_sum",
    ("share_of_sum", "sum"): "avg",
}


class PeersType(Generic):
    """The type of the other ranks, as a value of a graph."""

    @property
    def dtype(self) -> NoReturn:
        # Compilers ask for it when they differentiate a scan.
        raise AttributeError(f"this value has no dtype; {NOT_IN_SCAN}")


def is_peers(variable: Variable) -> bool:
    """Whether this is an input for the peers."""
    return isinstance(variable.type, PeersType)


class _Alone(SharedVariable):
    """Stands for no other ranks. It is a singleton: copies and pickles of it are the same object."""

    def __reduce__(self) -> tuple[Callable[[], _Alone], tuple[()]]:
        return _get_alone, ()


ALONE = _Alone(name="alone", type=PeersType(), value=None, strict=False)


def _get_alone() -> _Alone:
    return ALONE


class Collective(Op):
    """An operation on an array of every rank: ``(peers, array, ...)`` to ``(peers, array)``.

    Parameters
    ----------
    loss_op : {"avg", "sum"} or None
        How the losses of the ranks, whose gradients are taken, are combined. None if the gradient does
        not depend on it.
    number : int or None
        The position among the collectives of a function.
    """

    __props__: tuple[str, ...] = ("loss_op", "number")

    is_same_everywhere = False  # whether the result is the same on every rank
    is_of_master = False  # whether the result is the value of the master

    def __init__(self, loss_op: str | None, number: int | None = None) -> None:
        self.loss_op, self.number = loss_op, number

    def numbered(self, number: int) -> Collective:
        """Return the operation with a number, which is the last of its properties."""
        return type(self)(*self._props()[:-1], number)  # type: ignore[call-arg]  # of a subclass

    def of(self, *inputs: Variable, peers: Variable = ALONE) -> Variable:
        """Return the result for some inputs."""
        return self(peers, *inputs)[1]

    @property
    def _sum(self) -> str:
        """The reduction by which gradients are added up."""
        return "weighted_sum" if self.loss_op == "avg" else "sum"

    def make_node(self, peers: Variable, array: Variable, *others: Variable) -> Apply:
        return Apply(self, [peers, array, *others], [peers.type(), self._type(array.type)()])

    def _type(self, kind: VariableType) -> VariableType:
        return kind

    def do_constant_folding(self, *context: Any) -> bool:
        return False

    def connection_pattern(self, node: Apply) -> list[list[bool]]:
        return [[False, index == 1] for index in range(len(node.inputs))]

    def perform(self, node: Apply, inputs: list[Any], outputs: list[list[Any]]) -> None:
        peers, array, *others = inputs
        outputs[0][0] = peers
        outputs[1][0] = array.copy() if peers is None else self._run(peers, array, *others)

    def infer_shape(self, *context: Any) -> list[Any]:
        *_, node, shapes = context  # PyTensor gives the graph as well
        return [None, self._shape(node, shapes)]

    def _shape(self, node: Apply, shapes: list[Any]) -> Any:
        return shapes[1]

    def grad(self, inputs: list[Variable], gradients: list[Variable]) -> list[Variable]:
        """Return the gradients of the inputs; only the array has a gradient."""
        array = inputs[1]
        if array.dtype in continuous_dtypes:
            gradient = self._gradient(inputs, gradients[1])
        else:
            gradient = array.zeros_like(dtype=package.config.floatX)
        rest = [DisconnectedType()() for _ in inputs[2:]]
        return [DisconnectedType()(), gradient, *rest]

    def R_op(self, inputs: list[Variable], tangents: list[Variable | None]) -> list[Variable | None]:
        if tangents[1] is None:
            return [None, None]
        return [None, self._derivative(inputs, tangents[1])]

    def _derivative(self, inputs: list[Variable], tangent: Variable) -> Variable:
        return self.of(tangent, *inputs[2:], peers=inputs[0])

    # PyTensor's names and arguments

    def pullback(
        self, inputs: list[Variable], outputs: list[Variable], gradients: list[Variable]
    ) -> list[Variable]:
        """See `grad`."""
        return self.grad(inputs, gradients)

    def pushforward(
        self, inputs: list[Variable], outputs: list[Variable], tangents: list[Variable]
    ) -> list[Variable]:
        """See `R_op`."""
        absent = [isinstance(tangent.type, DisconnectedType) for tangent in tangents]
        found = self.R_op(inputs, [None if gone else tangent for tangent, gone in zip(tangents, absent)])
        return [DisconnectedType()() if item is None else item for item in found]


class AllReduce(Collective):
    """The reduction of the arrays of all ranks.

    Parameters
    ----------
    op : str
        A name of `synkhronos.arithmetic.operations.OPERATIONS`, or another operation of
        `Peers.all_reduce`.
    """

    __props__ = ("op", "loss_op", "number")
    loss_op: str

    def __init__(self, op: str, loss_op: str, number: int | None = None) -> None:
        super().__init__(loss_op, number)
        self.op = op
        self.is_same_everywhere = op not in ("weighted_sum", "share_of_sum")

    def _run(self, peers: Peers, array: Array) -> Array:
        return peers.all_reduce(array, self.op, self.number)

    def _gradient(self, inputs: list[Variable], gradient: Variable) -> Variable:
        peers, array = inputs
        if (self.op, self.loss_op) in _ADJOINT:
            adjoint = AllReduce(_ADJOINT[self.op, self.loss_op], self.loss_op)
            return adjoint.of(gradient, peers=peers)
        if self.op == "prod":
            return grad_not_implemented(
                self, 1, array, "all_reduce: 'prod' has no gradient; use exp of the sum of log(x)"
            )
        # As for the compiler's maximum: if several ranks have the extreme value, all get the gradient.
        is_extreme = tt.eq(array, self.of(array, peers=peers))
        return is_extreme * AllReduce(self._sum, self.loss_op).of(gradient, peers=peers)

    def _derivative(self, inputs: list[Variable], tangent: Variable) -> Variable:
        if (self.op, self.loss_op) not in _ADJOINT:
            raise NotImplementedError(f"all_reduce: {self.op!r} has no R operation")
        return super()._derivative(inputs, tangent)


class AllGather(Collective):
    """The arrays of all ranks, concatenated along axis 0."""

    is_same_everywhere = True

    def _type(self, kind: VariableType) -> VariableType:
        return of_any_rows(kind)

    def _run(self, peers: Peers, array: Array) -> Array:
        return peers.all_gather(array, self.number)

    def _shape(self, node: Apply, shapes: list[Any]) -> tuple[Any, ...]:
        return (Shape_i(0)(node.outputs[1]), *shapes[1][1:])

    def _gradient(self, inputs: list[Variable], gradient: Variable) -> Variable:
        peers, array = inputs
        own = OwnRows(self.loss_op).of(gradient, array.shape[0], peers=peers)
        return with_pattern(own, array.broadcastable)


class OwnRows(Collective):
    """The rows of this rank in the sum of the ranks' arrays: the adjoint of `AllGather`."""

    def _run(self, peers: Peers, array: Array, n_rows: Array) -> Array:
        return peers.own_rows(array, self._sum, int(n_rows), self.number)

    def _type(self, kind: VariableType) -> VariableType:
        return of_any_rows(kind)

    def _shape(self, node: Apply, shapes: list[Any]) -> tuple[Any, ...]:
        return (node.inputs[2], *shapes[1][1:])

    def _gradient(self, inputs: list[Variable], gradient: Variable) -> Variable:
        return AllGather(self.loss_op).of(gradient, peers=inputs[0])


class Broadcast(Collective):
    """The array of the master."""

    is_same_everywhere = is_of_master = True

    def _run(self, peers: Peers, array: Array) -> Array:
        return peers.broadcast(array, self.number)

    def _shape(self, node: Apply, shapes: list[Any]) -> tuple[Any, ...]:
        return tuple(Shape_i(axis)(node.outputs[1]) for axis in range(node.outputs[1].ndim))

    def _gradient(self, inputs: list[Variable], gradient: Variable) -> Variable:
        peers, array = inputs
        return ToMaster(self.loss_op).of(gradient, array, peers=peers)


class ToMaster(Collective):
    """On the master, the sum of the ranks' arrays; elsewhere zeros in the shape of a second array.

    It is the adjoint of `Broadcast`.
    """

    def _run(self, peers: Peers, array: Array, like: Array) -> Array:
        total = peers.all_reduce(array, self._sum, self.number)
        return total if peers.is_master else peers.zeros_like(like)

    def _shape(self, node: Apply, shapes: list[Any]) -> Any:
        return shapes[2]

    def _gradient(self, inputs: list[Variable], gradient: Variable) -> Variable:
        return Broadcast(self.loss_op).of(gradient, peers=inputs[0])


_numbers = itertools.count()


class BucketReady(Collective):
    """A bucket is ready: ``(peers, vector)`` to ``(peers, vector)``, the same vector.

    Parameters
    ----------
    buckets : Buckets
        How the vector is divided.
    bucket : int
        The number of the bucket.
    """

    __props__ = ("buckets", "bucket", "number")
    view_map = {1: [1]}

    def __init__(self, buckets: Buckets, bucket: int, number: int | None = None) -> None:
        super().__init__(None, number)
        self.buckets, self.bucket = buckets, bucket

    def __str__(self) -> str:
        return f"Ready{{bucket {self.bucket} of {len(self.buckets.shapes)}}}"

    def perform(self, node: Apply, inputs: list[Any], outputs: list[list[Any]]) -> None:
        peers, vector = inputs
        if peers is not None:
            peers.start(vector, self.buckets, self.bucket)
        outputs[0][0], outputs[1][0] = peers, vector

    def _gradient(self, inputs: list[Variable], gradient: Variable) -> Variable:
        return gradient

    def _derivative(self, inputs: list[Variable], tangent: Variable) -> Variable:
        return tangent


def fill_in_buckets(
    vector: SharedVariable,
    expressions: Sequence[Variable],
    shapes: Sequence[tuple[int, ...]],
    op: str,
    wire: Any,
    is_overlapped: bool,
) -> Variable:
    """Return a vector with the values of expressions, written in place; see ``synkhronos.ops``.

    If not `is_overlapped`, other ranks are not notified of the buckets.
    """
    groups = divide(shapes, np.dtype(vector.dtype).itemsize)
    buckets = Buckets(
        number=next(_numbers),
        op=op,
        wire=wire,
        dtype=vector.dtype,
        shapes=tuple(tuple(shapes[group.start : group.stop]) for group in groups),
    )
    new, stop = vector, buckets.size
    for bucket, group in enumerate(groups):
        for index in reversed(group):
            start = stop - math.prod(shapes[index])
            new = tt.set_subtensor(new[start:stop], expressions[index].flatten())
            stop = start
        if is_overlapped:
            new = BucketReady(buckets, bucket).of(new)
    vector.tag.buckets = buckets if is_overlapped else None
    return new


def schedule_buckets_early(fgraph: FunctionGraph) -> list[Apply]:
    """Return the operations of a graph in an order in which each bucket is ready as soon as possible.

    It is a schedule for a linker of the compiler. With the compiler's own schedule, the gradients of
    several layers may be computed before the first of them is put into the vector.
    """
    order = fgraph.toposort()
    places = {node: place for place, node in enumerate(order)}
    before, found = fgraph.orderings(), []
    for last in [node for node in order if isinstance(node.op, BucketReady)]:
        needed, waiting = set(), [last]
        while waiting:
            node = waiting.pop()
            if node in places and node not in needed:
                needed.add(node)
                waiting += [variable.owner for variable in node.inputs if variable.owner is not None]
                waiting += before.get(node, ())
        found += sorted(needed, key=places.__getitem__)
        for node in needed:
            del places[node]
    return found + [node for node in order if node in places]


class _Ordering(GraphRewriter):
    """Orders the collectives of a graph: each takes the peers from the collective before it."""

    def add_requirements(self, fgraph: FunctionGraph) -> None:
        pass

    def apply(self, fgraph: FunctionGraph) -> None:
        peers, number = None, 0
        for node in fgraph.toposort():
            if isinstance(node.op, Collective):
                first = node.inputs[0] if peers is None else peers
                ordered = node.op.numbered(number)(first, *node.inputs[1:])  # computes test values, too
                fgraph.replace_all(list(zip(node.outputs, ordered)), reason="ordering")
                peers, number = ordered[0], number + 1


def ordering_mode(mode: Mode) -> Mode:
    """Return a mode that orders the collectives of a graph after all its own optimizations."""
    mode = names.package.compile.mode.get_mode(mode)
    last = _Ordering()
    optimizer = mode.provided_optimizer
    if isinstance(optimizer, GraphRewriter):
        ordered = mode.clone(optimizer=names.SequentialGraphRewriter(optimizer, last))
    else:
        ordered = mode.register((last, 1e6))
    if hasattr(ordered.linker, "schedule"):
        ordered.linker.schedule = schedule_buckets_early  # the mode and its linker are new
    return ordered


def check_order(compiled: Compiled) -> None:
    """Raise if the collectives of a compiled function are not in one chain, or some may be left out."""
    nodes = compiled.maker.fgraph.toposort()
    for node in nodes:
        is_user = any(map(is_peers, node.inputs))
        if is_user and not isinstance(node.op, Collective):
            raise TypeError(f"function: {node.op}: {NOT_IN_SCAN}")
    collectives = [node for node in nodes if isinstance(node.op, Collective)]
    for number, node in enumerate(collectives):
        before = collectives[number - 1].outputs[0] if number else None
        if node.op.number != number or (number and node.inputs[0] is not before):
            raise RuntimeError(f"function: {node} has no place in the order of the collectives")
    if any(isinstance(node.op, IfElse) for node in nodes):
        _check_not_lazy(compiled.maker.fgraph, collectives)


def _check_not_lazy(fgraph: FunctionGraph, collectives: list[Apply]) -> None:
    """Raise if a collective is computed for one branch of an ``ifelse`` only."""
    needed, waiting = set(), list(fgraph.outputs)
    while waiting:
        node = waiting.pop().owner
        if node is not None and node not in needed:
            needed.add(node)
            inputs = node.inputs[:1] if isinstance(node.op, IfElse) else node.inputs
            waiting.extend(variable for variable in inputs if not is_peers(variable))
    for node in collectives:
        if node not in needed:
            raise ValueError(
                f"function: {node} is computed for one branch of an ifelse only, which other ranks may "
                f"not take; use {names.tensor.__name__}.switch, which computes both, or let an output "
                f"use it"
            )


def takes_peers(compiled: Compiled) -> bool:
    """Whether a compiled function takes the peers as an argument."""
    return any(is_peers(spec.variable) and spec.variable is not ALONE for spec in compiled.maker.inputs)
