"""Loops that compute elementwise results, and sums of such results, in one pass over memory.

`FastLoop` is the operation. `Fusion` joins Theano's operations into loops. Theano fuses an elementwise
operation with the operation that uses its result, if only one does, and never with a sum. Here a result
that several operations use is computed again by each, rather than written and read, where this saves
memory traffic; sums become part of the loop that computes their operand; and loops over the same arrays
become one loop. The gradient of batch normalization with a rectifier, for example, reads or writes an
array of the size of its input 6 times in place of 19.

The traffic is counted in arrays of the size of the loop; smaller ones, which are broadcast, count as
nothing. Only the types of variables are known, not their extents.

Loops also overwrite inputs that nothing else uses, as Theano's operations do.
"""

from __future__ import annotations

import zlib
from typing import Any, Iterable, Mapping, Sequence

import numpy as np
from theano import tensor
from theano.gof import Apply, Constant, FunctionGraph, InconsistencyError, Op, Optimizer, Variable
from theano.gof.destroyhandler import DestroyHandler
from theano.gof.toolbox import ReplaceValidate
from theano.gof.utils import MethodNotDefined
from theano.scalar import Composite, get_scalar_type, identity
from theano.scalar import basic as scalars
from theano.tensor.elemwise import Elemwise, Sum

from synkhronos.engines.theano.kernels import cpp
from synkhronos.engines.theano.kernels.cpp import Optimization, with_traces

_C_TYPES = {"float32": "npy_float32", "float64": "npy_float64", "bool": "npy_bool"}
_C_TYPES.update({f"{u}int{n}": f"npy_{u}int{n}" for u in ("", "u") for n in (8, 16, 32, 64)})

#: The dtypes of operands; sums have one of the first two.
DTYPES = tuple(_C_TYPES)
SUMS = DTYPES[:2]

#: A processor computes these about as fast as it reads numbers, so they may be computed again.
_CHEAP = (
    scalars.Abs, scalars.Add, scalars.Cast, scalars.Clip, scalars.Identity, scalars.Inv,
    scalars.LogicalComparison, scalars.Mul, scalars.Neg, scalars.Maximum, scalars.Minimum,
    scalars.Second, scalars.Sgn, scalars.Sqr, scalars.Sub, scalars.Switch, scalars.TrueDiv,
)  # fmt: skip
#: gcc does not vectorize Theano's loops of these.
_SLOW_IN_THEANO = (scalars.Sgn, scalars.LogicalComparison, scalars.Switch)

_FAIL = "synkhronos_fails;"

_MOST_STREAMS = 10  # arrays that one loop reads and writes
_MOST_SCALARS = 80  # operations in one loop


class FastLoop(cpp.Keyed, Op):
    """Elementwise functions of the inputs, and sums of such functions over axes.

    Parameters
    ----------
    scalar_op : theano.scalar.Composite
        Computes an element of each output before it is summed.
    axes : tuple
        For each output, the axes over which it is summed, as a tuple, or None if it is not a sum. Sums
        have the dtype of their operand, float32 or float64, and are accumulated in double precision.
    inplace : tuple of (int, int)
        Pairs of an elementwise output and the input whose memory it gets.
    """

    __props__ = ("scalar_op", "axes", "inplace")

    def __init__(
        self,
        scalar_op: Composite,
        axes: tuple[tuple[int, ...] | None, ...],
        inplace: tuple[tuple[int, int], ...] = (),
    ) -> None:
        self.scalar_op, self.axes, self.inplace = scalar_op, axes, inplace
        if inplace:
            self.destroy_map = {output: [replaced] for output, replaced in inplace}

    @property
    def synkhronos_key(self) -> tuple[Any, ...]:
        types = [kind.dtype for kind in (*self.scalar_op.inputs_type, *self.scalar_op.outputs_type)]
        code = _code_of(self.scalar_op, "name")
        return "synkhronos.FastLoop", code, *map(repr, (types, self.axes, self.inplace))

    def __str__(self) -> str:
        ops = dict.fromkeys(str(node.op) for node in self.scalar_op.fgraph.toposort())
        ops.pop("identity", None)
        kinds = ["Elemwise" if axis is None else f"Sum{list(axis)}" for axis in self.axes]
        where = "inplace " if self.inplace else ""
        return f"FastLoop{{{where}{', '.join(kinds)}: {', '.join(ops) or 'identity'}}}"

    def make_node(self, *inputs: Variable) -> Apply:
        arrays = [tensor.as_tensor_variable(variable) for variable in inputs]
        broadcastable = [all(flags) for flags in zip(*(array.broadcastable for array in arrays))]
        outputs = []
        for kind, axes in zip(self.scalar_op.outputs_type, self.axes):
            kept = [item for axis, item in enumerate(broadcastable) if axis not in (axes or ())]
            outputs.append(tensor.TensorType(kind.dtype, kept)())
        return Apply(self, arrays, outputs)

    def prepare_node(self, node: Apply, storage_map: Any, compute_map: Any, impl: str | None) -> None:
        self.scalar_op.prepare_node(_scalar_node(self.scalar_op), None, None, impl)

    def perform(self, node: Apply, inputs: list[np.ndarray], storages: list[list[Any]]) -> None:
        compute = np.frompyfunc(self.scalar_op.impl, len(inputs), len(storages))
        results = compute(*inputs)
        results = results if isinstance(results, tuple) else (results,)
        replaced = dict(self.inplace)
        for number, (result, axes) in enumerate(zip(results, self.axes)):
            result = np.asarray(result).astype(node.outputs[number].dtype)
            if axes is not None:
                result = result.sum(axes, dtype="float64").astype(result.dtype)
            if number in replaced:
                inputs[replaced[number]][...] = result
                result = inputs[replaced[number]]
            storages[number][0] = np.asarray(result)

    # The C++ code

    def c_code_cache_version_apply(self, node: Apply) -> tuple[Any, ...]:
        version = self.scalar_op.c_code_cache_version()
        code = self.c_support_code_apply(node, "name") + self.c_code(node, "name", [], [], {"fail": ""})
        return version and (version, cpp.version("loops"), zlib.crc32(code.encode()))

    def c_compile_args(self) -> list[str]:
        return cpp.COMPILE_ARGS

    def c_headers(self) -> list[str]:
        return self._of_scalars("c_headers")

    def c_libraries(self) -> list[str]:
        return self._of_scalars("c_libraries")

    def _of_scalars(self, method: str) -> list[str]:
        found: list[str] = []
        for node in self.scalar_op.fgraph.toposort():
            try:
                found += getattr(node.op, method)()
            except MethodNotDefined:
                pass
        return found

    def c_support_code(self) -> str:
        return cpp.read("loops") + self.scalar_op.c_support_code()

    def c_support_code_apply(self, node: Apply, name: str) -> str:
        support = self.scalar_op.c_support_code_apply(_scalar_node(self.scalar_op), f"{name}_scalar")
        return support + _body(node, name, _code_of(self.scalar_op, name))

    def c_code(
        self, node: Apply, name: str, inputs: list[str], outputs: list[str], sub: Mapping[str, str]
    ) -> str:
        call = cpp.call(f"synkhronos::Loop<Body_{name}>(outputs).run(inputs)", "{ ok = false; }")
        return f"""
        {{
            PyArrayObject *inputs[] = {{{", ".join(inputs)}}};
            PyArrayObject *outputs[] = {{{", ".join(outputs)}}};
            bool ok = true;
            {call}
            {" ".join(f"{output} = outputs[{i}];" for i, output in enumerate(outputs))}
            if (!ok) {sub["fail"]}
        }}
        """


def _scalar_node(scalar_op: Composite) -> Apply:
    return scalar_op.make_node(*(kind.make_variable() for kind in scalar_op.inputs_type))


def _code_of(scalar_op: Composite, name: str) -> str:
    """Return the code that computes ``o0``, ``o1``, ... from ``i0``, ``i1``, ..."""
    inputs = [f"i{number}" for number in range(scalar_op.nin)]
    outputs = [f"o{number}" for number in range(scalar_op.nout)]
    code = scalar_op.c_code(_scalar_node(scalar_op), f"{name}_scalar", inputs, outputs, {"fail": "{}"})
    # A composite joins equal outputs, and computes the last of them only.
    last = {output: number for number, output in enumerate(scalar_op.fgraph.outputs)}
    numbers = [last[output] for output in scalar_op.fgraph.outputs]
    return code + " ".join(f"o{i} = o{number};" for i, number in enumerate(numbers) if i != number)


def _body(node: Apply, name: str, code: str) -> str:
    """Return the class ``Body_...`` that ``loops.h`` expects, of which ``loop_body.h`` is a template."""
    axes, replaced, ndim = node.op.axes, dict(node.op.inplace), node.inputs[0].ndim
    sums = [item is not None for item in axes]
    usual = _usual_strides(node, sums)
    return "\n" + cpp.read("loop_body") % {
        "name": name,
        "ndim": ndim,
        "n_inputs": len(node.inputs),
        "n_outputs": len(node.outputs),
        "code": _loop_code(node, usual, code),
        "usual": _c_list(usual),
        "broadcast": _c_list(variable.broadcastable for variable in node.inputs),
        "summed": _c_list([axis in (item or ()) for axis in range(ndim)] for item in axes),
        "sums": _c_list(sums),
        "inplace": _c_list(replaced.get(output, -1) for output in range(len(sums))),
        "types": _c_list(f"NPY_{variable.dtype.upper()}" for variable in node.outputs),
        "sizes": _c_list(f"sizeof({_C_TYPES[item.dtype]})" for item in [*node.inputs, *node.outputs]),
    }


def _loop_code(node: Apply, usual: list[int], code: str) -> str:
    """Return the code that reads the inputs at a place, computes the outputs, and writes them."""
    reads, writes = [], []
    for number, variable in enumerate([*node.inputs, *node.outputs]):
        kind, output = _C_TYPES[variable.dtype], number - len(node.inputs)
        place = f"[i * (USUAL ? {usual[number]} : strides[{number}])]"
        if output < 0:
            reads.append(f"const {kind} i{number} = ((const {kind} *)operands[{number}]){place};")
        else:
            reads.append(f"{kind} o{output};")
            writes.append(f"(({kind} *)operands[{number}]){place} = o{output};")
    return " ".join([*reads, code, *writes])


def _usual_strides(node: Apply, sums: list[bool]) -> list[int]:
    """Return the stride of each operand along the innermost axis, unless its extent happens to be 1."""
    full = [all(flags) for flags in zip(*(variable.broadcastable for variable in node.inputs))]
    axes = [axis for axis, item in enumerate(full) if not item]
    last = axes[-1] if axes else None
    inputs = [int(last is not None and not variable.broadcastable[last]) for variable in node.inputs]
    return inputs + [1 if is_sum else int(last is not None) for is_sum in sums]


def _c_list(values: Iterable[Any]) -> str:
    """Return an initializer of an array in C."""
    words = []
    for value in values:
        if isinstance(value, str):
            words.append(value)
        else:
            words.append(_c_list(value) if isinstance(value, (list, tuple)) else str(int(value)))
    return f"{{{', '.join(words)}}}"


# Joining operations into loops


class Fusion(Optimizer):
    """Replaces elementwise operations and sums by `FastLoop`."""

    def add_requirements(self, fgraph: FunctionGraph) -> None:
        fgraph.attach_feature(ReplaceValidate())

    def apply(self, fgraph: FunctionGraph) -> None:
        order = fgraph.toposort()
        members = [item for item in map(_member, order) if item is not None]
        virtual = _find_virtual(members)
        loops = _join([member for member in members if member.result not in virtual], virtual)
        for loop in loops:
            if loop.is_worth_it(virtual):
                olds, news = loop.build(virtual)
                fgraph.replace_all_validate(list(zip(olds, news)), reason="synkhronos_loops")


class _Member:
    """An elementwise operation or a sum, as a part of a loop.

    Attributes
    ----------
    node : Apply
        Its node in the graph.
    result : variable
        The output of the node.
    axes : tuple of int, or None
        The axes over which it sums.
    pattern : tuple of bool
        Along which axes all arrays of the loop have one element.
    leaves : frozenset of variables
        The arrays that it reads and that have the size of the loop.
    costly : bool
        Whether it computes more than memory hides.
    n_scalars : int
        The number of operations on each element.
    """

    def __init__(self, node: Apply, axes: tuple[int, ...] | None) -> None:
        self.node, self.axes, (self.result,) = node, axes, node.outputs
        self.pattern = node.inputs[0].broadcastable if axes else self.result.broadcastable
        ops = [] if axes else _scalar_ops(node.op.scalar_op)
        self.costly = not all(isinstance(item, _CHEAP) for item in ops)
        self.is_slow_in_theano = any(isinstance(item, _SLOW_IN_THEANO) for item in ops)
        self.n_scalars = len(ops)
        self.leaves = frozenset(item for item in node.inputs if item.broadcastable == self.pattern)


def _member(node: Apply) -> _Member | None:
    """Return a `_Member`, or None if the node cannot be part of a loop."""
    op, (output, *others) = node.op, node.outputs
    dtypes = {getattr(variable, "dtype", None) for variable in [*node.inputs, output]}
    if others or not node.inputs or not dtypes <= set(DTYPES):
        return None
    if type(op) is Elemwise:
        possible = not op.inplace_pattern and _is_large(output) and _always_computes(op.scalar_op, node)
        return _Member(node, None) if possible else None
    if type(op) is not Sum or not _is_large(node.inputs[0]):
        return None
    (summed,) = node.inputs
    is_double = op._acc_dtype(summed.dtype) == "float64"
    if summed.dtype not in SUMS or output.dtype != summed.dtype or not is_double:
        return None
    axes = range(summed.ndim) if op.axis is None else sorted(op.axis)
    return _Member(node, tuple(axes)) if axes else None


def _is_large(variable: Variable) -> bool:
    """Whether an array may be large: not if all axes but one of several are broadcast."""
    return variable.ndim - sum(variable.broadcastable) >= max(1, min(variable.ndim, 2))


def _scalar_ops(op: scalars.ScalarOp) -> list[scalars.ScalarOp]:
    """Return the scalar operations of an elementwise operation: those inside, for a `Composite`."""
    if not isinstance(op, Composite):
        return [op]
    return [item for node in op.fgraph.apply_nodes for item in _scalar_ops(node.op)]


def _always_computes(op: scalars.ScalarOp, node: Apply) -> bool:
    """Whether a scalar operation has C code, for one result, that raises no errors.

    The code of an integer division raises an error for a division by zero.
    """
    arguments = [get_scalar_type(variable.dtype).make_variable() for variable in node.inputs]
    names = [f"i{number}" for number in range(len(arguments))]
    try:
        code = op.c_code(op.make_node(*arguments), "name", names, ["o0"], {"fail": _FAIL})
    except (MethodNotDefined, NotImplementedError):
        return False
    return _FAIL not in code and all(item.nout == 1 for item in _scalar_ops(op))


# Results that are computed again


def _find_virtual(members: list[_Member]) -> dict[Variable, _Member]:
    """Return, by result, the members that each of their users computes, and that have no loop."""
    of_node = {item.node: item for item in members}
    virtual: dict[Variable, _Member] = {}
    for member in members:
        if member.axes is not None:
            continue
        clients = {client for client, _ in member.result.clients}  # "output", if it is an output
        users = [of_node[item] for item in clients if item in of_node]
        if (
            not users
            or len(users) < len(clients)
            or any(item.pattern != member.pattern for item in users)
        ):
            continue
        if len(users) > 1 and member.costly:
            continue
        read = [item.leaves - {member.result} | member.leaves for item in users]
        before = len(member.leaves) + 1 + sum(len(item.leaves) for item in users)
        fits = all(
            len(leaves) < _MOST_STREAMS and item.n_scalars + member.n_scalars <= _MOST_SCALARS
            for item, leaves in zip(users, read)
        )
        if fits and sum(map(len, read)) <= before:
            virtual[member.result] = member
            for user, leaves in zip(users, read):
                user.leaves = leaves
                user.n_scalars += member.n_scalars
                user.costly |= member.costly
                user.is_slow_in_theano |= member.is_slow_in_theano
    return virtual


# The members of a loop


class _Loop:
    """Members that are computed in one pass."""

    def __init__(self, member: _Member) -> None:
        self.members, self.pattern = [member], member.pattern
        self.leaves, self.n_scalars = set(member.leaves), member.n_scalars
        self.written = set() if member.axes else {member.result}

    def gains(self, member: _Member) -> int:
        """Return how many passes over an array are saved if a member is added; 0 if it cannot be."""
        if member.pattern != self.pattern:
            return 0
        rest = member.leaves - self.written
        shared = len(member.leaves) - len(rest - self.leaves)
        if _computed(rest - self.leaves) and _computed(self.leaves - member.leaves):
            return 0  # these arrays would have to be kept for each other
        streams = len(rest | self.leaves) + len(self.written) + (member.axes is None)
        if streams > _MOST_STREAMS or self.n_scalars + member.n_scalars > _MOST_SCALARS:
            return 0
        return shared

    def add(self, member: _Member) -> None:
        self.members.append(member)
        self.leaves |= member.leaves - self.written
        self.n_scalars += member.n_scalars
        if member.axes is None:
            self.written.add(member.result)

    def is_worth_it(self, virtual: dict[Variable, _Member]) -> bool:
        """Whether it saves time; a single operation on equal arrays is as fast in Theano."""
        if len(self.members) > 1 or self.members[0].axes is not None:
            return True
        (member,) = self.members
        inputs = member.node.inputs
        smaller = [variable for variable in inputs if variable.broadcastable != self.pattern]
        is_mixed = not all(all(variable.broadcastable) for variable in smaller)
        return member.is_slow_in_theano or is_mixed or any(variable in virtual for variable in inputs)

    def build(self, virtual: dict[Variable, _Member]) -> tuple[list[Variable], list[Variable]]:
        """Return the results of the members, and new variables for them."""
        inputs: list[Variable] = []
        known: dict[Variable, Variable] = {}
        inside = {item.result: item for item in self.members if item.axes is None}

        def scalar_of(variable: Variable, root: _Member | None = None) -> Variable:
            if variable in known:
                return known[variable]
            member = root or virtual.get(variable) or inside.get(variable)
            if member is None:
                inputs.append(variable)
                known[variable] = get_scalar_type(variable.dtype).make_variable()
            else:
                arguments = [scalar_of(item) for item in member.node.inputs]
                known[variable] = _apply(member.node.op.scalar_op, arguments)
            return known[variable]

        results = []
        for member in self.members:
            root = member.node.inputs[0] if member.axes else member.result
            results.append(identity(scalar_of(root)))
        scalar_inputs = [known[item] for item in inputs]
        op = FastLoop(Composite(scalar_inputs, results), tuple(item.axes for item in self.members))
        olds = [item.result for item in self.members]
        return olds, with_traces(olds, op.make_node(*inputs).outputs)


def _computed(variables: Iterable[Variable]) -> list[Variable]:
    """Return the variables that are not inputs of the graph."""
    return [variable for variable in variables if variable.owner is not None]


def _apply(op: scalars.ScalarOp, arguments: Sequence[Variable]) -> Variable:
    """Return the result of a scalar operation; of a `Composite`, without the composite."""
    if not isinstance(op, Composite):
        return op(*arguments)
    known = dict(zip(op.fgraph.inputs, arguments))
    for node in op.fgraph.toposort():
        known[node.outputs[0]] = _apply(node.op, [known.get(item, item) for item in node.inputs])
    return known[op.fgraph.outputs[0]]


def _join(members: list[_Member], virtual: dict[Variable, _Member]) -> list[_Loop]:
    """Return the loops of members that are computed, in an order in which they can run."""
    loops: list[_Loop] = []
    of_node: dict[Apply, _Loop] = {}
    with_array: dict[Variable, set[int]] = {}
    for member in members:
        # In the order in which they were made, so that every process makes the same loops.
        near = sorted({place for leaf in member.leaves for place in with_array.get(leaf, ())})
        gains = [(loops[place].gains(member), loops[place]) for place in near]
        for gain, loop in sorted(gains, key=lambda one: -one[0]):
            if gain and not _depends(member, loop, of_node, virtual):
                loop.add(member)
                break
        else:
            loop = _Loop(member)
            loops.append(loop)
        of_node[member.node] = loop
        place = loops.index(loop)
        for array in member.leaves | loop.written:
            with_array.setdefault(array, set()).add(place)
    return loops


def _depends(
    member: _Member, loop: _Loop, of_node: dict[Apply, _Loop], virtual: dict[Variable, _Member]
) -> bool:
    """Whether a member needs a loop's results for more than an element of its own."""
    waiting, seen = _needed(member, virtual), set()
    waiting = [
        item for item in waiting if not (item in loop.written and item.broadcastable == loop.pattern)
    ]
    while waiting:
        node = waiting.pop().owner
        if node is None or node in seen:
            continue
        seen.add(node)
        its_loop = of_node.get(node)
        if its_loop is loop:
            return True
        waiting += node.inputs
        if its_loop is not None:
            for other in its_loop.members:
                if other.node not in seen:
                    seen.add(other.node)
                    waiting += other.node.inputs
    return False


def _needed(member: _Member, virtual: dict[Variable, _Member]) -> list[Variable]:
    """Return all variables that a member reads, except the variables that it computes itself."""
    waiting, found, seen = list(member.node.inputs), [], set()
    while waiting:
        variable = waiting.pop()
        if variable in seen:
            continue
        seen.add(variable)
        if variable in virtual:
            waiting += virtual[variable].node.inputs
        else:
            found.append(variable)
    return found


# Loops inplace


class Inplace(Optimizer):
    """Gives the results of loops the memory of inputs, where the graph permits it."""

    def add_requirements(self, fgraph: FunctionGraph) -> None:
        fgraph.attach_feature(ReplaceValidate())
        fgraph.attach_feature(DestroyHandler())

    def apply(self, fgraph: FunctionGraph) -> None:
        for node in fgraph.toposort():
            if type(node.op) is not FastLoop:
                continue
            for output, axes in enumerate(node.op.axes):
                if axes is None:
                    node = _overwriting(fgraph, node, output) or node


def _overwriting(fgraph: FunctionGraph, node: Apply, output: int) -> Apply | None:
    """Replace a node by a node that overwrites an input, and return that; None if it cannot be done."""
    op, kind = node.op, node.outputs[output].type
    used = {replaced for _, replaced in op.inplace}
    possible = [
        number
        for number, variable in enumerate(node.inputs)
        if variable.type == kind and number not in used and not isinstance(variable, Constant)
    ]
    for number in sorted(possible, key=lambda one: len(node.inputs[one].clients)):
        new = FastLoop(op.scalar_op, op.axes, (*op.inplace, (output, number))).make_node(*node.inputs)
        pairs = list(zip(node.outputs, with_traces(node.outputs, new.outputs)))
        try:
            fgraph.replace_all_validate(pairs, reason="synkhronos_inplace")
            return new
        except InconsistencyError:
            pass
    return None


OPTIMIZATIONS = [
    Optimization("synkhronos_loops", 49.2, Fusion()),
    Optimization("synkhronos_inplace", 75.5, Inplace()),
]
