"""Graphs that are drawn from the operations with rules, compared with numbers.

What the rules tell of a value must be true of its numbers: on all rows, on rows that occur twice, and on
two and three parts of the rows.
"""

import ast
import os
from pathlib import Path

import numpy as np
import pytest

from compilers import compiler, scan, softmax, tt
from synkhronos.engines.analysis.difference_causes import difference_causes
from synkhronos.engines.analysis.fixed_rows import EqualAxes
from synkhronos.engines.analysis.rows import RowAxes, RowGraph, Rows, rows_of
from synkhronos.extensions.steps import losses
from synkhronos.extensions.steps.losses import split
from synkhronos.engines.analysis.graphs import Dependence

N, D = 6, 3
X, M, V, LABELS = tt.dmatrix("x"), tt.dmatrix("m"), tt.dvector("v"), tt.ivector("labels")
INPUTS, AXES = [X, M, V, LABELS], [0, 0, 0, 0]
W, B = compiler.shared(np.linspace(-0.7, 1, D * D).reshape(D, D), "w"), compiler.shared(np.ones(D), "b")
#: How many graphs are drawn; a seed each.
COUNT = int(os.environ.get("SYNKHRONOS_DRAWN_GRAPHS", "60"))


def data_of(random):
    return [
        random.uniform(-1, 2, (N, D)),
        random.uniform(0.1, 2, (N, D)),
        random.uniform(0.5, 2, N),
        random.randint(0, D, N).astype("int32"),
    ]


def unary(of):
    return lambda draw: of(draw())


def binary(of):
    def build(draw):
        a, b = draw(), draw()
        if a.ndim and b.ndim and a.ndim != b.ndim:
            b = b.sum(axis=0) if b.ndim > a.ndim else b.dimshuffle(0, "x")
        return of(a, b)

    return build


def matrix(a):
    return a if a.ndim == 2 else a.dimshuffle(0, "x") if a.ndim else a.dimshuffle("x", "x")


def reduced(of):
    def build(draw):
        a = draw()
        axes = [None, 0, a.ndim - 1] if a.ndim else [None]
        return of(a, axes[draw.random.randint(len(axes))])

    return build


def indexed(draw):
    a = draw()
    cuts = [lambda: a[::-1], lambda: a[1:], lambda: a[0], lambda: a[:, 0], lambda: a[:, :2]]
    return cuts[draw.random.randint([0, 3, 5][a.ndim])]() if a.ndim else a


def looped(draw):
    """Steps along the columns, with a state of each row; or along the rows."""
    a = matrix(draw())
    if draw.random.randint(2):
        a = a.T
    states = scan(
        lambda column, state: tt.tanh(column) + 0.5 * state,
        sequences=[a],
        outputs_info=[tt.zeros_like(a[0])],
    )
    return [lambda: states, lambda: states[-1], lambda: states.T][draw.random.randint(3)]()


def mapped(draw):
    a = matrix(draw())
    return scan(lambda row: tt.sqr(row), sequences=[a])


def differentiated(draw):
    w = compiler.shared(np.linspace(0.3, 1, D), "of")
    a = matrix(draw()) * w
    loss = [a.mean, a.sum, tt.sqr(a).mean][draw.random.randint(3)]()
    return tt.grad(loss, w)


OPERATIONS = {
    "add": binary(lambda a, b: a + b),
    "sub": binary(lambda a, b: a - b),
    "mul": binary(lambda a, b: a * b),
    "div": binary(lambda a, b: a / (1 + tt.sqr(b))),
    "quotient": binary(lambda a, b: a / b),
    "maximum": binary(tt.maximum),
    "greater": binary(lambda a, b: tt.cast(a > b, "float64")),
    "switch": binary(lambda a, b: tt.switch(a > 0.5, a, b)),
    "neg": unary(lambda a: -a),
    "exp": unary(lambda a: tt.tanh(tt.exp(tt.tanh(a)))),
    "sqr": unary(tt.sqr),
    "abs": unary(abs),
    "sqrt": unary(lambda a: tt.sqrt(tt.sqr(a))),
    "pow": unary(lambda a: abs(a) ** 1.5),
    "sum": reduced(lambda a, axis: a.sum(axis=axis)),
    "mean": reduced(lambda a, axis: a.mean(axis=axis)),
    "max": reduced(lambda a, axis: a.max(axis=axis)),
    "var": reduced(lambda a, axis: a.var(axis=axis)),
    "centred": unary(lambda a: matrix(a) - matrix(a).mean(axis=0, keepdims=True)),
    "dot": unary(lambda a: tt.dot(a, W) if a.ndim == 2 else a),
    "transposed": unary(lambda a: a.T),
    "gram": binary(lambda a, b: tt.dot(matrix(a).T, matrix(b))),
    "softmax": unary(lambda a: softmax(a) if a.ndim == 2 else a),
    "count": unary(lambda a: a * tt.cast(X.shape[0], "float64")),
    "per row": unary(lambda a: a / tt.cast(X.shape[0], "float64")),
    "indexed": indexed,
    "looked up": unary(lambda a: W[LABELS]),
    "selected": unary(lambda a: a[tt.gt(V, 1).nonzero()] if a.ndim else a),
    "joined": unary(lambda a: tt.concatenate([matrix(a)] * 2, axis=1)),
    "stacked": unary(lambda a: tt.stack([a.sum(), a.mean()])),
    "cumsum": unary(lambda a: tt.cumsum(matrix(a), axis=1)),
    "diff": reduced(lambda a, axis: tt.extra_ops.diff(a, axis=axis or 0) if a.ndim else a),
    "sort": unary(lambda a: tt.sort(matrix(a), axis=1)),
    "set": unary(lambda a: tt.set_subtensor(matrix(a)[:, 0], 1)),
    "inc": unary(lambda a: tt.inc_subtensor(tt.zeros((D, D))[LABELS], tt.dot(X, W)) if a.ndim else a),
    "filled": unary(tt.ones_like),
    "reshaped": unary(lambda a: a.reshape((a.shape[0], -1)) if a.ndim else a),
    "flat": unary(lambda a: a.flatten()),
    "loop": looped,
    "map": mapped,
    "gradient": differentiated,
}


class Draw:
    """Draws an expression: an operation on drawn operands, or an input."""

    def __init__(self, seed, depth=6):
        self.random, self.depth, self.used = np.random.RandomState(seed), depth, []

    def __call__(self):
        if not self.depth or self.random.rand() < 0.15:
            leaves = [X, M, V, W, B, tt.constant(2.0), X * M, tt.cast(LABELS, "float64")]
            return leaves[self.random.randint(len(leaves))]
        name = sorted(OPERATIONS)[self.random.randint(len(OPERATIONS))]
        self.used.append(name)
        self.depth -= 1
        try:
            return OPERATIONS[name](self)
        finally:
            self.depth += 1


def drawn(seed):
    """Return a drawn expression that can be computed, and the names of its operations."""
    for attempt in range(100):
        draw = Draw(1000 * seed + attempt, depth=1 + seed % 6)
        try:
            with np.errstate(all="ignore"):
                variable = draw()
                function = compiler.function(
                    INPUTS, variable, mode="FAST_COMPILE", on_unused_input="ignore"
                )
                function(*data_of(np.random.RandomState(seed)))
        except (ValueError, TypeError, IndexError, AssertionError, NotImplementedError):
            continue
        return variable, function, draw.used
    raise RuntimeError(f"no expression for the seed {seed}")


def rows_in(arrays, rows):
    return [one[rows] for one in arrays]


def close(one, other):
    return one.shape == other.shape and np.allclose(one, other, rtol=1e-7, atol=1e-9, equal_nan=True)


def computed(function, arrays):
    with np.errstate(all="ignore"):
        try:
            return np.asarray(function(*arrays))
        except (ValueError, IndexError, AssertionError):  # other rows would not fit, either
            return None


def check_rows(value, function, arrays):
    """Check the axis of rows and the degrees."""
    whole, twice = (
        computed(function, arrays),
        computed(function, [np.concatenate([one] * 2) for one in arrays]),
    )
    parts = [
        [computed(function, rows_in(arrays, one)) for one in np.array_split(np.arange(N), k)]
        for k in (2, 3)
    ]
    if whole is None or twice is None:
        return
    if value.axis is None:
        if len(value.degrees) < 2:
            factor = 2.0 ** next(iter(value.degrees), 0)
            assert close(twice, factor * whole)
        return
    degree = next(iter(value.degrees), 0) if len(value.degrees) < 2 else None
    assert twice.shape[value.axis] == 2 * whole.shape[value.axis]
    if degree is not None:
        assert close(twice, 2.0**degree * np.concatenate([whole] * 2, axis=value.axis))
    for each in parts:
        if value.degrees <= {0} and None not in [one if one is None else 0 for one in each]:
            assert np.concatenate(each, axis=value.axis).shape == whole.shape


def check_mean(value, causes, function, arrays):
    """Check that the average, or the sum, of parts is right where no cause says otherwise."""
    if value is None or value.axis is not None or causes.possible or value.degrees not in ({0}, {1}):
        return
    whole = computed(function, arrays)
    for k in (2, 3):
        each = [computed(function, rows_in(arrays, one)) for one in np.array_split(np.arange(N), k)]
        if whole is not None and all(one is not None for one in each):
            assert close(whole, sum(each) / (1 if value.degrees == {1} else k))


def check_extents(variable):
    """Check that axes in the class of another variable's axis have its extent."""
    axes = EqualAxes()
    axes.add([], [variable])
    known = [X, M, V]
    compute = compiler.function(INPUTS, variable.shape, mode="FAST_COMPILE", on_unused_input="ignore")
    for length in (N, N + 1):
        random = np.random.RandomState(3)
        arrays = [np.concatenate([one, one])[:length] for one in data_of(random)]
        shape = computed(compute, arrays)
        if shape is None:
            continue
        for axis in range(variable.ndim):
            for one, array in zip(known, arrays):
                for other in range(one.ndim):
                    if axes.class_of((variable, axis)) == axes.class_of((one, other)):
                        assert shape[axis] == array.shape[other]


@pytest.mark.parametrize("seed", range(COUNT))
def test_what_the_rules_tell_of_a_drawn_graph_is_true(seed):
    variable, function, used = drawn(seed)
    arrays = data_of(np.random.RandomState(seed))
    try:
        [value] = RowGraph(dict(zip(INPUTS, AXES))).values_of([variable])
        [causes] = difference_causes(INPUTS, AXES, [variable])
        if value is not None:
            check_rows(value, function, arrays)
        check_mean(value, causes, function, arrays)
        [loose] = RowAxes(dict(zip(INPUTS, AXES))).values_of([variable])
        if loose is not None and loose.axis is not None:
            assert loose.axis < variable.ndim
        if value is not None:
            assert loose is not None and loose.axis == value.axis
        check_extents(variable)
        check_split(variable, arrays)
        check_scale(variable, function, arrays)
    except AssertionError as error:
        raise AssertionError(f"{used}: {compiler.pprint(variable)}: {value}, {causes}") from error


def check_split(variable, arrays):
    """Check that an expression is the sum of the part that depends on the rows, and the rest."""
    local = Dependence(INPUTS, {})
    dependent, free = split(variable, local)
    if free is None or dependent is None:
        return
    compute = compiler.function(
        INPUTS, [variable, dependent + free], mode="FAST_COMPILE", on_unused_input="ignore"
    )
    one, other = compute(*arrays)
    assert not local.of(free) and np.allclose(one, np.broadcast_to(other, one.shape), equal_nan=True)


def check_scale(variable, function, arrays):
    """Check the power of two that multiplies an expression if a parameter is doubled."""
    [value] = rows_of({W: Rows(None, frozenset([1.0]))}, [variable])
    if value is None or len(value.degrees) > 1:
        return
    once, before = computed(function, arrays), W.get_value()
    W.set_value(2 * before)
    try:
        twice = computed(function, arrays)
    finally:
        W.set_value(before)
    assert close(twice, 2.0 ** next(iter(value.degrees), 0) * once)


PACKAGE = Path(losses.__file__).parents[2]
#: Besides the analysis of graphs, the modules that look at the types of operations. They rewrite graphs,
#: or compile and run them.
REWRITING = {
    "engines/collectives.py", "engines/pytensor/jax_engine.py", "engines/theano/engine.py",
    "engines/theano/gpu_engine.py", "engines/theano/kernels/cpp.py", "engines/theano/kernels/fusion.py",
    "engines/theano/kernels/normalization.py", "engines/timing.py", "extensions/pymc/imputed.py",
    "extensions/pymc/leaves.py", "extensions/pymc/models.py", "extensions/pymc/operation.py",
    "extensions/pymc/terms.py", "extensions/steps/clipped_gradients.py", "extensions/steps/losses.py",
    "extensions/steps/reduced_expressions.py",
}  # fmt: skip


def looks_at_operations(path):
    """Whether a module asks for the type of an operation, as in `isinstance(node.op, Dot)`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) in ("isinstance", "type"):
            for part in ast.walk(node.args[0]):
                if getattr(part, "attr", None) in ("op", "scalar_op"):
                    return True
                if getattr(part, "value", None) == "scalar_op":
                    return True
    return False


def test_only_the_analysis_and_what_rewrites_graphs_look_at_operations():
    paths = [path for path in PACKAGE.rglob("*.py") if "analysis" not in path.parts]
    found = {path.relative_to(PACKAGE).as_posix() for path in paths if looks_at_operations(path)}
    assert found == REWRITING
