"""Tests of the shapes of collectives in graphs, inferred without a collective if possible."""

import numpy as np
import pytest
from compilers import compiler, tt

import synkhronos as synk
from synkhronos.engines.collectives import Collective

ops = synk.ops
ROWS = np.random.RandomState(0).normal(size=(7, 3))


@pytest.fixture(scope="module", autouse=True)
def two(open_world):
    open_world(2, master_rank=1)


def gradient(make, order=1):
    """Return a function that makes the gradient of what a collective does with rows."""

    def made(x):
        found = x
        for turn in range(order):
            loss = tt.sqr(make(x) if turn == 0 else found).sum()
            found = tt.grad(loss, x)
        return found

    return made


REDUCTIONS = {op: lambda x, op=op: ops.all_reduce(tt.exp(x).sum(0), op)
              for op in ("sum", "avg", "prod", "min", "max")}  # fmt: skip
KNOWN = {
    **{f"all_reduce {op}": make for op, make in REDUCTIONS.items()},
    "all_reduce of a number": lambda x: ops.all_reduce(x.sum()),
    "of another": lambda x: x * ops.all_reduce(tt.exp(x).mean(0), "avg"),
    **{f"gradient of all_reduce {op}": gradient(make)
       for op, make in REDUCTIONS.items() if op != "prod"},
    "gradient of all_gather": gradient(ops.all_gather),
    "gradient of a gathered column": gradient(lambda x: ops.all_gather(x[:, :1])),
    "gradient of broadcast": gradient(ops.broadcast),
    "second gradient of all_reduce": gradient(REDUCTIONS["avg"], 2),
    "second gradient of all_gather": gradient(lambda x: ops.all_gather(tt.exp(x)), 2),
    "second gradient of broadcast": gradient(lambda x: ops.broadcast(tt.exp(x)), 2),
    "a row of all_gather": lambda x: tt.zeros_like(ops.all_gather(x)[0]),
}  # fmt: skip
UNKNOWN = {
    "all_gather": ops.all_gather,
    "all_gather of a number": lambda x: ops.all_gather(x.sum()),
    "broadcast": ops.broadcast,
    "broadcast of one row": lambda x: ops.broadcast(x[0]),
}


def shapes_of(variables, x, mode):
    """Return the shapes of variables on each rank, and the collectives that are run for them."""
    outputs = [(one.shape.dimshuffle("x", 0), "gather") for one in variables]
    f = synk.function([x], outputs, mode=mode)
    nodes = [node for node in f.maker.fgraph.toposort() if isinstance(node.op, Collective)]
    return [shape.tolist() for shape in f(ROWS)], nodes


@pytest.mark.parametrize(
    "makers, needed", [(KNOWN, 0), (UNKNOWN, len(UNKNOWN))], ids=["known", "not known"]
)
def test_inferred_shapes_are_those_of_the_values(makers, needed):
    """Without optimizations, the values are computed for their shapes."""
    x = tt.dmatrix("x")
    variables = [make(x) for make in makers.values()]
    computed, nodes = shapes_of(variables, x, compiler.Mode("vm", None))
    assert len(nodes) >= len(makers)
    inferred, nodes = shapes_of(variables, x, compiler.Mode("vm", "fast_run"))
    assert dict(zip(makers, inferred)) == dict(zip(makers, computed))
    assert len(nodes) == needed, nodes
