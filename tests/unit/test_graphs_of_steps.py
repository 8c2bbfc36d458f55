"""Graphs as the planner of a training step reads them: equal, linear, dependent expressions."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import synkhronos  # noqa: F401
from compilers import Streams, compiler, softplus, tt
from synkhronos.engines.analysis.graphs import Dependence, Numbering, rebuilt
from synkhronos.extensions.steps.losses import split, terms
from synkhronos.extensions.steps.reduced_expressions import is_in_place

X = tt.dmatrix("x")
W = compiler.shared(np.arange(6.0).reshape(2, 3) / 7, "w")
B = compiler.shared(np.arange(3.0) - 1, "b")
DATA = np.random.RandomState(0).randn(4, 2)


def evaluate(*variables):
    function = compiler.function([X], list(variables), mode="FAST_COMPILE", on_unused_input="ignore")
    return function(DATA)


def dependence(*sources, independent=()):
    return Dependence(sources or (X,), {}, independent)


def loss_of(x):
    return tt.sqr(tt.tanh(tt.dot(x, W) + B)).mean()


def test_gradients_computed_twice_are_equal():
    numbering = Numbering()
    together = tt.grad(loss_of(X), [W, B])
    apart = [tt.grad(loss_of(X), one) for one in (W, B)]
    assert [numbering.of(one) for one in together] == [numbering.of(one) for one in apart]
    assert numbering.of(together[0]) != numbering.of(together[1])


@pytest.mark.parametrize(("one", "other"), [
    (X + 1, X + 2), (X + 1, 1 + X), (X.sum(axis=0), X.sum(axis=1)), (X[0], X[1]),
    (X, tt.dmatrix("x")), (tt.constant(1.0), tt.constant(1)), (tt.switch(X, X, W), tt.switch(X, W, X)),
])  # fmt: skip
def test_other_operations_operands_or_types_are_not_equal(one, other):
    numbering = Numbering()
    assert numbering.of(one) != numbering.of(other)


def test_random_numbers_are_equal_to_themselves_only():
    streams, numbering = Streams(1), Numbering()
    assert numbering.of(streams.uniform(size=(2,)) + 1) != numbering.of(streams.uniform(size=(2,)) + 1)
    drawn = streams.uniform(size=(2,))
    assert numbering.of(drawn + 1) == numbering.of(drawn + 1)


def test_graphs_deeper_than_the_stack():
    deep = X
    for _ in range(3000):
        deep = tt.tanh(deep)
    assert dependence().of(deep)
    numbering = Numbering()
    assert numbering.of(deep) != numbering.of(deep.owner.inputs[0])
    (copy,) = rebuilt([deep], {X: W.T}, {})
    assert not dependence().of(copy)


def test_which_sources_an_expression_depends_on():
    y, middle = tt.dvector("y"), X.sum()
    both = Dependence([X, y], {}, independent=[middle])
    assert both.sources_in(both.of(X + y)) == [X, y]
    assert both.sources_in(both.of(middle * y)) == [y]
    assert both.labels_in(both.of(X, y)) == "input 'x', input 'y'"
    given = Dependence([X], {y: X[0]})
    assert given.of(y + 1) and not given.of(B)


PIECES = {
    "rows": lambda: tt.tanh(tt.dot(X, W)),
    "mean": lambda: tt.dot(X, W).mean(axis=0).dimshuffle("x", 0),
    "penalty": lambda: tt.sqr(W).sum(axis=0, keepdims=True),
    "constant": lambda: tt.constant(2.0).dimshuffle("x", "x"),
    "vector": lambda: (B * 3).dimshuffle("x", 0),
}
expressions = st.recursive(
    st.sampled_from(sorted(PIECES)).map(lambda name: (name,)),
    lambda children: st.one_of(
        st.tuples(st.sampled_from(["add", "sub", "mul", "div"]), children, children),
        st.tuples(st.sampled_from(["neg", "cast", "fill", "shuffle", "sum", "square"]), children),
    ),
    max_leaves=6,
)


def build(expression):
    name, *parts = expression
    if name in PIECES:
        return PIECES[name]()
    parts = [build(part) for part in parts]
    return {
        "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
        "div": lambda a, b: a / (2 + tt.sqr(b)), "neg": lambda a: -a,
        "cast": lambda a: tt.cast(tt.cast(a, "float32"), "float64"),
        "fill": lambda a: tt.fill(X.sum().dimshuffle("x", "x"), a),
        "shuffle": lambda a: a.dimshuffle(1, 0).dimshuffle(0, 1).T,
        "sum": lambda a: a.sum(axis=0, keepdims=True), "square": lambda a: tt.sqr(a),
    }[name](*parts)  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(expressions)
def test_an_expression_is_the_sum_of_its_parts(expression):
    variable, local = build(expression), dependence()
    dependent, free = split(variable, local)
    assert free is None or not local.of(free)
    assert dependent is None or local.of(dependent)
    total = sum(part for part in (dependent, free) if part is not None)
    one, other = evaluate(variable, total)
    np.testing.assert_allclose(one, np.broadcast_to(other, one.shape), rtol=1e-4, atol=1e-4)
    if dependent is not None:
        assert dependent.type == variable.type
        assert evaluate(dependent)[0].shape == one.shape


@pytest.mark.parametrize(("loss", "free"), [
    (X.sum() + tt.sqr(W).sum(), tt.sqr(W).sum()),
    (2 * (X.sum() - 3 * B.sum()) / 4, -1.5 * B.sum()),
    (X.sum() * B.sum(), None),
    (tt.sqrt(tt.sqr(X).sum() + 1), None),
    (softplus(tt.dot(X, W)).sum() + (X * X + 1).sum() + B[0], B[0]),
])  # fmt: skip
def test_the_free_part_of_a_loss(loss, free):
    _, found = split(loss, dependence())
    if free is None:
        assert found is None
    else:
        np.testing.assert_allclose(*evaluate(found, free))


def test_a_sum_of_more_terms_than_the_stack_has_room_for():
    loss = X.sum()
    for _ in range(3000):
        loss = loss + B.sum()
    dependent, free = split(loss, dependence())
    assert dependence().of(dependent) and not dependence().of(free)
    assert len(list(terms(loss, dependence(X, B)))) == 3001


def test_whether_a_shared_graph_is_computed_in_the_memory_of_a_variable():
    power = X
    for _ in range(3000):
        power = power * power
    assert not is_in_place(W, power)
    assert is_in_place(W, power + W) and not is_in_place(W, W)
    assert is_in_place(B, tt.set_subtensor(B[:1], 1.0) + power[0, 0])
