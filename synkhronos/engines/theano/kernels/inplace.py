"""Loops that overwrite inputs that nothing else uses, as Theano's operations do."""

from __future__ import annotations

from theano.gof import Apply, Constant, FunctionGraph, InconsistencyError, Optimizer
from theano.gof.destroyhandler import DestroyHandler
from theano.gof.toolbox import ReplaceValidate

from synkhronos.engines.theano.kernels.loops import FastLoop
from synkhronos.engines.theano.kernels.optimizations import Optimization, with_traces


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


OPTIMIZATIONS = [Optimization("synkhronos_inplace", 75.5, Inplace())]
