"""An operation that computes elementwise results, and sums of such results, in one pass over memory."""

from __future__ import annotations

import zlib
from typing import Any, Iterable, Mapping

import numpy as np
from theano import tensor
from theano.gof import Apply, Op, Variable
from theano.gof.utils import MethodNotDefined
from theano.scalar import Composite

from synkhronos.engines.theano.kernels import cpp

_C_TYPES = {"float32": "npy_float32", "float64": "npy_float64", "bool": "npy_bool"}
_C_TYPES.update({f"{u}int{n}": f"npy_{u}int{n}" for u in ("", "u") for n in (8, 16, 32, 64)})

#: The dtypes of operands; sums have one of the first two.
DTYPES = tuple(_C_TYPES)
SUMS = DTYPES[:2]


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
        self._signature: tuple[Any, ...] | None = None
        if inplace:
            self.destroy_map = {output: [replaced] for output, replaced in inplace}

    __eq__, __hash__ = cpp.Keyed.__eq__, cpp.Keyed.__hash__  # Theano would define them by the properties

    def signature(self) -> tuple[Any, ...]:
        if self._signature is None:
            types = [kind.dtype for kind in (*self.scalar_op.inputs_type, *self.scalar_op.outputs_type)]
            code = _code_of(self.scalar_op, "name")
            self._signature = ("synkhronos.FastLoop", code, *map(repr, (types, self.axes, self.inplace)))
        return self._signature

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
