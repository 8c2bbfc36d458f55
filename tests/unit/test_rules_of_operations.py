"""Graphs that are drawn from the operations with rules, compared with numbers.

What the rules tell of a value must be true of its numbers: on all rows, on rows that occur twice, and on
two and three parts of the rows.
"""

import ast
import os
from pathlib import Path
from typing import Any, NamedTuple

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
#: In this mode every operation is run. Others leave out operations of whose results only shapes are
#: used, so that a function succeeds where a call of the operations would not.
PLAIN = compiler.compile.mode.Mode(linker="py", optimizer=None)
REFUSALS = ValueError, TypeError, IndexError, AssertionError, NotImplementedError


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
    half = a.shape[0] // 2 if a.ndim else 0
    cuts = [
        lambda: a[::-1], lambda: a[1:], lambda: a[0], lambda: a[-1], lambda: a[::2], lambda: a[:half],
        lambda: a[X.shape[0] :], lambda: a[:, 0], lambda: a[:, :2], lambda: a[:, ::-1],
    ]  # fmt: skip
    return cuts[draw.random.randint([0, 7, 10][a.ndim])]() if a.ndim else a


def along(of):
    """An operation along the rows or the columns of a matrix."""
    return lambda draw: of(matrix(draw()), draw.random.randint(2))


def pairs(draw):
    a = draw()
    a = a if a.ndim == 1 else matrix(a).sum(axis=1)
    return a.dimshuffle(0, "x") - a.dimshuffle("x", 0)


def ordered(draw):
    a = matrix(draw())
    return a[tt.argsort(a[:, 0])]


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
    "minimum": binary(tt.minimum),
    "clip": unary(lambda a: tt.clip(a, 0.2, 1)),
    "least": reduced(lambda a, axis: a.min(axis=axis)),
    "prod": reduced(lambda a, axis: a.prod(axis=axis)),
    "std": reduced(lambda a, axis: a.std(axis=axis)),
    "norm": reduced(lambda a, axis: a.norm(2, axis=axis)),
    "place": reduced(lambda a, axis: tt.cast(tt.argmax(a, axis=axis), "float64")),
    "any": reduced(lambda a, axis: tt.cast(tt.any(a > 1, axis=axis), "float64")),
    "tiled": along(lambda a, axis: tt.tile(a, (2, 1) if axis else (1, 2))),
    "repeated": along(lambda a, axis: tt.repeat(a, 2, axis=axis)),
    "rolled": along(lambda a, axis: tt.roll(a, 1, axis=axis)),
    "cumulated": along(lambda a, axis: tt.cumsum(a, axis=axis)),
    "in order": along(lambda a, axis: tt.sort(a, axis=axis)),
    "twice": along(lambda a, axis: tt.concatenate([a, 2 * a], axis=axis)),
    "ordered": ordered,
    "pairs": pairs,
    "distances": unary(lambda a: tt.dot(matrix(a), matrix(a).T)),
    "trace": unary(lambda a: tt.diagonal(tt.dot(matrix(a), matrix(a).T))),
    "one hot": unary(lambda a: tt.extra_ops.to_one_hot(LABELS, D) * a.sum()),
    "of class": unary(lambda a: a * tt.eq(LABELS, 1) if a.ndim == 1 else a),
    "counted": unary(lambda a: tt.cast(tt.extra_ops.bincount(LABELS, minlength=D), "float64")),
    "logarithm": reduced(lambda a, axis: tt.log(1 + tt.exp(tt.tanh(a)).sum(axis=axis))),
    "masked": unary(lambda a: (a * V).sum() / V.sum() if a.ndim == 1 else a),
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


def compiled(outputs):
    return compiler.function(INPUTS, outputs, mode=PLAIN, on_unused_input="ignore")


def drawn(seed):
    """Return a drawn expression that can be computed, and the names of its operations."""
    for attempt in range(100):
        draw = Draw(1000 * seed + attempt, depth=1 + seed % 6)
        try:
            with np.errstate(all="ignore"):
                variable = draw()
                function = compiled(variable)
                function(*data_of(np.random.RandomState(seed)))
        except REFUSALS:
            continue
        return variable, function, draw.used
    raise RuntimeError(f"no expression for the seed {seed}")


def rows_in(arrays, rows):
    return [array[rows] for array in arrays]


def close(value, other):
    return value.shape == other.shape and np.allclose(value, other, rtol=1e-7, atol=1e-9, equal_nan=True)


def evaluated(function, arrays):
    """Return a value; None if an operation refuses these rows."""
    with np.errstate(all="ignore"):
        try:
            return np.asarray(function(*arrays))
        except REFUSALS:
            return None


def rounded(arrays, seed):
    """Return the same rows, as if they had lost some of their last bits."""
    random = np.random.RandomState(seed)
    noise = [100 * np.finfo("float64").eps * random.standard_normal(array.shape) for array in arrays]
    return [
        array * (1 + part) if array.dtype.kind == "f" else array for array, part in zip(arrays, noise)
    ]


def computed(function, arrays):
    """Return a value; None if it cannot be computed, or if the last bits of the rows determine it.

    The latter is so for a quotient by a sum whose terms cancel, so that only their rounding is left. If
    the terms do not depend on the rows, such a quotient, or one by zero, is known by its size.
    """
    value = evaluated(function, arrays)
    if value is not None and (np.abs(value) > 1e12).any():
        return None
    others = [] if value is None else [evaluated(function, rounded(arrays, seed)) for seed in range(3)]
    is_determined = all(other is not None and close(value, other) for other in others)
    return value if is_determined else None


class Values(NamedTuple):
    """The values of all rows, of the rows twice, and of each of two and three parts of the rows."""

    whole: Any
    twice: Any
    parts: Any


def values_of(function, arrays):
    whole = computed(function, arrays)
    twice = computed(function, [np.concatenate([array] * 2) for array in arrays])
    places = [np.array_split(np.arange(N), k) for k in (2, 3)]
    parts = [[computed(function, rows_in(arrays, part)) for part in each] for each in places]
    return Values(whole, twice, [each for each in parts if all(part is not None for part in each)])


def check_rows(value, values):
    """Check the axis of rows and the degrees."""
    whole, twice, parts = values
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
        if value.degrees <= {0}:
            assert np.concatenate(each, axis=value.axis).shape == whole.shape


def check_mean(value, causes, values):
    """Check that the average, or the sum, of parts is right where no cause says otherwise."""
    if value is None or value.axis is not None or causes.possible or value.degrees not in ({0}, {1}):
        return
    for each in values.parts if values.whole is not None else ():
        assert close(values.whole, sum(each) / (1 if value.degrees == {1} else len(each)))


def check_extents(variable, function):
    """Check that axes in the class of another variable's axis have its extent."""
    axes = EqualAxes()
    axes.add([], [variable])
    for length in (N, N + 1):
        random = np.random.RandomState(3)
        arrays = [np.concatenate([array, array])[:length] for array in data_of(random)]
        value = evaluated(function, arrays)
        if value is None:
            continue
        for axis in range(variable.ndim):
            for known, array in zip([X, M, V], arrays):
                for other in range(known.ndim):
                    if axes.class_of((variable, axis)) == axes.class_of((known, other)):
                        assert value.shape[axis] == array.shape[other]


@pytest.mark.parametrize("seed", range(COUNT))
def test_what_the_rules_tell_of_a_drawn_graph_is_true(seed):
    variable, function, used = drawn(seed)
    arrays = data_of(np.random.RandomState(seed))
    values = values_of(function, arrays)
    try:
        [value] = RowGraph(dict(zip(INPUTS, AXES))).values_of([variable])
        [causes] = difference_causes(INPUTS, AXES, [variable])
        if value is not None:
            check_rows(value, values)
        check_mean(value, causes, values)
        [loose] = RowAxes(dict(zip(INPUTS, AXES))).values_of([variable])
        if loose is not None and loose.axis is not None:
            assert loose.axis < variable.ndim
        if value is not None:
            assert loose is not None and loose.axis == value.axis
        check_extents(variable, function)
        check_split(variable, values.whole, arrays)
        check_scale(variable, function, values.whole, arrays)
    except AssertionError as error:
        raise AssertionError(f"{used}: {compiler.pprint(variable)}: {value}, {causes}") from error


def check_split(variable, whole, arrays):
    """Check that an expression is the sum of the part that depends on the rows, and the rest."""
    local = Dependence(INPUTS, {})
    dependent, free = split(variable, local)
    if free is None or dependent is None:
        return
    assert not local.of(free)
    if whole is not None:
        total = compiled(dependent + free)(*arrays)
        assert np.allclose(whole, np.broadcast_to(total, whole.shape), equal_nan=True)


def check_scale(variable, function, whole, arrays):
    """Check the power of two that multiplies an expression if a parameter is doubled."""
    [value] = rows_of({W: Rows(None, frozenset([1.0]))}, [variable])
    if value is None or len(value.degrees) > 1 or whole is None:
        return
    before = W.get_value()
    W.set_value(2 * before)
    try:
        twice = computed(function, arrays)
    finally:
        W.set_value(before)
    assert twice is None or close(twice, 2.0 ** next(iter(value.degrees), 0) * whole)


PACKAGE = Path(losses.__file__).parents[2]
#: Besides the analysis of graphs, the modules that look at the types of operations. They rewrite graphs,
#: or compile and run them.
REWRITING = {
    "engines/collectives.py", "engines/graph_engine.py", "engines/pytensor/jax_engine.py",
    "engines/theano/engine.py", "engines/theano/gpu_engine.py", "engines/theano/kernels/cpp.py",
    "engines/theano/kernels/loops.py", "engines/theano/kernels/normalization.py",
    "extensions/pymc/graphs.py", "extensions/pymc/models.py", "extensions/pymc/potential.py",
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
