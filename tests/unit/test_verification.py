"""The first call of a function or step is compared with one rank, and a difference is a warning."""

import random

import numpy as np
import pytest
import theano
import theano.tensor as tt
from oracle import assert_same
from theano.sandbox.rng_mrg import MRG_RandomStreams
from theano.tensor.shared_randomstreams import RandomStreams

import synkhronos as synk
from synkhronos.engines.analysis.difference_causes import difference_causes
from synkhronos.extensions import updates
from synkhronos.extensions.train import make_train_function, parallel_function
from synkhronos.functions.call import CallFunction

pytestmark = pytest.mark.usefixtures("in_python", "in_threads")
ROWS, TARGETS = np.arange(12.0).reshape(6, 2), np.array([1.0, 0, 1, 1, 0, 0])
x, y = tt.dmatrix("x"), tt.dvector("y")


def weights():
    return theano.shared(np.array([0.5, -0.3]), "w")


def loss_of(w):
    return tt.sqr(tt.dot(x, w) - y).mean()


@pytest.mark.parametrize(
    "output, words",
    [
        (x.sum(), ["output 0 (Sum", "the sum of the ranks' values equals", "(output, 'sum')"]),
        (tt.exp(-x), ["has the shape (3, 2), not (6, 2)", "(output, 'gather')"]),
        (x.sum() + 1, ["contains a sum over the rows, and terms that"]),
        (x.max(), ["(output, 'max')"]),
        ((x[:, 0] * y).sum() / y.sum(), ["no op gives the serial value", "has a quotient of two sums"]),
        (tt.sqrt(tt.sqr(x).mean()), ["a nonlinear function of a value of all rows"]),
        (theano.scan(lambda row: row * 2, x)[0], ["(output, 'gather')"]),
    ],
    ids=["sum", "rows", "partly", "max", "quotient", "root", "by row"],
)
def test_an_output_that_differs_is_named_with_its_reason(two, noticed, output, words):
    f = synk.function([x, y], [x.mean() + y.mean(), output], name="f")
    f(ROWS, TARGETS)
    [text] = noticed()
    assert "<synkhronos.Function f>: on 2 rank(s) the call differs from one process" in text
    for word in words:
        assert word.replace("output 0", "output 1") in text
    assert "output 0" not in text
    f(ROWS, TARGETS)
    assert not noticed()


def test_what_has_been_said_is_not_compared_again(two, noticed):
    f = synk.function([x, y], (x[:, 0] * y).sum() / y.sum())  # other rows may differ
    commands = []
    run = f._world.run
    f._world.run = lambda command: commands.append(command) or run(command)
    f(ROWS, TARGETS)
    assert len(noticed()) == 1 and len(commands) > 1
    del commands[:]
    f(ROWS, TARGETS)
    assert len(commands) == 1


def test_several_outputs_are_one_warning(two, noticed):
    f = synk.function([x], [x.sum(), x.mean(), x.sum(axis=1), tt.sqr(x).sum(), (x.sum(), "sum")])
    f(ROWS)
    [text] = noticed()
    named = [line.split()[2] for line in text.splitlines()[1:]]
    assert named == ["0", "2", "3"]


def test_averages_and_what_is_not_split_are_right(two):
    w, whole, rows = weights(), tt.dvector("whole"), theano.shared(ROWS, "rows")
    loss = loss_of(w)
    outputs = [loss, tt.grad(loss, w), x.mean(axis=0), w.sum(), whole.sum()]
    synk.function([x, y], outputs, bcast_inputs=[whole])(ROWS, TARGETS, TARGETS)
    synk.function([], w.sum())()
    synk.function([], [rows.sum()])()


def test_one_process_is_not_verified(world_of):
    world_of(1)
    total, rows = synk.function([x], [x.sum(), x])(ROWS)
    assert_same(total, ROWS.sum())
    assert_same(rows, ROWS)


@pytest.mark.parametrize(
    "n_rows, most, expected", [(10, 4, [0, 2, 4, 6]), (9, 4, [0, 2, 4, 6]), (3, 4, [0, 1, 2])]
)
def test_a_call_on_few_rows_takes_them_at_equal_distances(n_rows, most, expected):
    call = CallFunction(0, (), range(n_rows), None, 1, None)
    few = call.on_few(most // 2, 2)
    assert list(few.rows) == expected and few.most == most // 2
    assert call.rows == range(n_rows) and call.most is None


def test_rounding_is_no_difference(two):
    """Also where a result is zero but for rounding."""
    rows = np.concatenate([ROWS / 3, -ROWS / 3])
    synk.function([x], [x.mean(), tt.sqr(x).mean() - tt.sqr(tt.abs_(x)).mean()])(rows)


def test_other_options_are_verified_too_and_other_numbers_of_ranks(world_of, noticed):
    world_of(3)
    f = synk.function([x], [x.mean(), x.sum()])
    f(ROWS, output_subset=[0])
    assert not noticed()
    f(ROWS)
    assert len(noticed()) == 1
    f(ROWS, num_slices=2)
    assert not noticed()  # it has been said of this output
    g = synk.function([x], theano.printing.Print("never", attrs=())(x.sum()) * 0 + x.sum())
    g(ROWS)
    noticed()
    synk.restart(2)
    g(ROWS)
    assert not noticed()


def test_the_mode_of_a_world(world_of, noticed, monkeypatch):
    world_of(2, verify="off")
    f = synk.function([x], x.sum())
    f(ROWS)
    assert f.verification is None and not noticed()
    world_of(2, verify="raise")
    w = weights()
    f = synk.function([x], x.sum(), updates=[(w, w + 1)])
    with pytest.raises(synk.MismatchError, match="give it as .output, 'sum'.") as caught:
        f(ROWS)
    assert len(caught.value.names) == 1 and (w.get_value() == [0.5, -0.3]).all()
    world_of(2, verify="always")
    f = synk.function([x], (x * x.reshape((2, -1))[::-1].reshape(x.shape)).mean())
    f(np.ones((4, 2)))
    assert not noticed()
    f(ROWS)
    assert len(noticed()) == 1
    monkeypatch.setenv("SYNKHRONOS_VERIFY", "off")
    world_of(2)
    assert synk.function([x], x.sum()).verification is None
    synk.close()
    monkeypatch.setenv("SYNKHRONOS_VERIFY", "on")
    with pytest.raises(ValueError, match="SYNKHRONOS_VERIFY: expected one of"):
        synk.fork(2, use_gpu=False)
    monkeypatch.delenv("SYNKHRONOS_VERIFY")


def test_nothing_remains_of_it(two):
    """Of updates, random streams, and the generators of the process."""
    w, count, streams = weights(), theano.shared(0, "count"), MRG_RandomStreams(1)
    noise = streams.uniform((2,))
    f = synk.function([x], [x.mean(), (noise, "gather")], updates=[(count, count + 1), (w, 2 * w)])
    g = synk.function([], (streams.uniform((2,)), "gather"))
    np.random.seed(3)
    random.seed(3)
    first = f(ROWS)[1]
    assert (np.random.rand(), random.random()) == (
        np.random.RandomState(3).rand(),
        random.Random(3).random(),
    )
    assert synk.gather(count).tolist() == [1, 1]
    np.testing.assert_array_equal(synk.gather(w), [[1, -0.6], [1, -0.6]])
    synk.close()
    synk.fork(2, use_gpu=False, verify="off")
    streams = MRG_RandomStreams(1)
    noise = streams.uniform((2,))
    f = synk.function([x], [x.mean(), (noise, "gather")])
    np.testing.assert_array_equal(f(ROWS)[1], first)
    del g


def test_replicas_that_differ_on_purpose_are_not_reported(two):
    w, own = weights(), theano.shared(np.zeros(2), "own")
    loss = loss_of(w)
    local = synk.function([x, y], loss, updates=[(w, w - 0.001 * tt.grad(loss, w))])
    local(ROWS, TARGETS)
    synk.function([x, y], loss)(ROWS, TARGETS)  # before the replicas are averaged
    synk.all_reduce(w)
    f = synk.function([x], (x * own).mean())
    synk.distribute()
    synk.set_value(1, own, np.ones(2))
    f(ROWS)
    synk.function([x], (x * MRG_RandomStreams(1).uniform(x.shape)).mean())(ROWS)


def test_functions_in_a_block_are_verified_where_they_are(two, noticed):
    scale = theano.shared(0.0, "scale")
    f = synk.function([x], (x * scale).sum(), name="f")
    g = synk.function([x], (x * scale).mean(), name="g")
    synk.distribute()
    scale.set_value(1.0)
    with synk.fuse():
        synk.broadcast(scale)
        g(ROWS)
        total = f(ROWS)
    [text] = noticed()
    assert "Function f" in text and "(output, 'sum')" in text
    assert_same(total.result(), ROWS.sum() / 2)


def by_scan(rows):
    return theano.scan(lambda row: row * 2, rows)[0]


def steps(loss, w, named=None, **options):
    """The same step by both functions."""
    new = w - 0.001 * tt.grad(loss, w)
    yield parallel_function([x, y], loss, updates=[(w, new)], **(named or {}), **options)
    yield make_train_function(loss, [w], x, y, updates.sgd, learning_rate=0.001, **options)


def test_a_right_step_is_right_also_by_check(two):
    w = weights()
    for step in steps(loss_of(w), w):
        step(ROWS, TARGETS)
        before = synk.gather(w)
        compared = step.check(ROWS, TARGETS)
        assert {"output 0", "shared variable w"} == set(compared.differences)
        step.check(ROWS, TARGETS, batch=[5, 0, 1], num_slices=2)
        assert_same(synk.gather(w), before)
        compared = step.functions[0].check(ROWS, TARGETS)
        assert max(compared.differences.values()) < 1e-12


@pytest.mark.parametrize(
    "loss, words",
    [
        (lambda e: e.sum(), "is a sum over the rows, perhaps divided by a fixed number"),
        (lambda e: e.sum() / 6, "is a sum over the rows, perhaps divided by a fixed number"),
        (lambda e: by_scan(e).sum(), "the serial value is the sum of the ranks' values"),
        (lambda e: tt.sqrt(e.mean()), "The graph has a nonlinear function of a value of all rows"),
        (lambda e: (e * y).sum() / (e.sum() + 1), "The graph has a quotient of two sums over the rows"),
        (lambda e: tt.tanh((e - e.mean()) / e.std() + 1).mean(), "The graph has statistics over"),
    ],
    ids=["sum", "constant", "scan", "root", "quotient", "statistics"],
)
def test_a_wrong_step_is_warned_of_once_and_refused_by_check(two, noticed, loss, words):
    w = weights()
    for step in steps(loss(tt.sqr(tt.dot(x, w) - y)), w):
        step(ROWS, TARGETS)
        texts = noticed()  # also of what is known when the step is built
        assert len(texts) == 1 and words in texts[0]
        step(ROWS, TARGETS)
        assert not noticed()
        with pytest.raises(synk.MismatchError, match="differs from the serial function") as refused:
            step.check(ROWS, TARGETS)
        assert "build it with" not in str(refused.value)  # a step is what it is


ONES = np.ones((4, 2))
e = tt.sqr(x - 3)
p, t = x, y.dimshuffle(0, "x")  # predictions and labels, 0 or 1
positives = tt.round(tt.clip(p * t, 0, 1)).sum()


@pytest.mark.parametrize(
    "output",
    [
        (e * t).sum() / t.sum(),
        (e * tt.neq(t, -1)).sum() / tt.maximum(tt.neq(t, -1).sum(), 1),
        (e[:, 0] * tt.constant([1.0, 5.0])[tt.cast(y, "int64")]).sum() / t.sum(),
        e[tt.neq(y, -1).nonzero()].mean(),
        e[tt.neq(y, -1)].mean(axis=0).sum(),
        abs(e.mean() - 0.1) + 0.1,
        tt.maximum(e.mean(axis=0), 0.1).sum(),
        2 * positives / (tt.round(p).sum() + tt.round(t).sum() + 1e-7),
        tt.sqrt(e.mean()),
        tt.log(e.mean()) + tt.exp(t.mean()),
        tt.mean(e / e.mean()),
        (theano.scan(lambda row: row * 2, x)[0] * t).sum() / t.sum(),
        (theano.scan(lambda row: row * 2, x)[0] / t.mean()).mean(),
        tt.sqr(e.norm(2)) / e.shape[0],
        e.max(),
        tt.sort(e[:, 0])[x.shape[0] // 2],
        tt.nnet.relu(e[:, 0] - e[:, 0].max() + 1).mean() + (e / e.max(axis=0)).mean(),
        (e[1:] * e[:-1]).mean(),
        e[: x.shape[0] // 2].mean(),
        (e * x[::-1]).mean(),
        (e * x[x.shape[0] - 1 - tt.arange(x.shape[0])]).mean(),
        tt.exp(-tt.sqr(x.dimshuffle(0, "x", 1) - x.dimshuffle("x", 0, 1)).sum(axis=2)).mean(),
        (tt.nnet.softmax(e.T) * y).sum(),
        tt.nlinalg.det(tt.dot(x.T, x) / x.shape[0] + tt.eye(2)),
        tt.extra_ops.diff(e, axis=0).mean(),
        (1 / (1 + tt.bincount(tt.cast(y, "int64")))).sum(),
    ],
)
def test_results_that_agree_on_the_first_rows_only_are_reported(two, noticed, output):
    f = synk.function([x, y], [e.mean() + y.mean(), output], on_unused_input="ignore")
    f(ONES, np.ones(4))
    [text] = noticed()
    assert "in output 1" in text and "The graph has" in text


@pytest.mark.parametrize(
    "output",
    [
        e.sum() / tt.ones_like(e).sum(),
        e.sum() / tt.maximum(tt.cast(x.shape[0], "float64"), 1),
        e[tt.neq(y, -1).nonzero()].sum() / x.shape[0],
        e[tt.neq(y, -1).nonzero()].sum() / e[tt.neq(y, -1).nonzero()].shape[1],
        tt.switch(tt.isnan(e.mean()), 0, e.mean()),
        theano.tensor.opt.Assert()(e.mean(), t.sum() > 0),
        tt.log(tt.exp(x - x.max()).sum(axis=1)).mean() + x.max() * 0,
        (e / e.sum(axis=1, keepdims=True)).mean(),
        (e + e.mean()).mean() - 2 * e.mean(),
        (theano.scan(lambda t: t, x.T)[0].sum(axis=0) / x.sum(axis=1)).mean(),
        e.sum() / tt.sqr(synk.ops.all_reduce(t.sum(), "sum")) * x.shape[0],
        tt.sqrt(synk.ops.all_reduce(e.mean(), "avg")),
        tt.nnet.softmax(e).mean(axis=0),
        (tt.dot(x, e.T) * tt.eye(x.shape[0])).sum() / x.shape[0],
        (e * x[tt.argsort(MRG_RandomStreams(1).uniform(y.shape))]).mean(),
        tt.concatenate([x, e])[: x.shape[0]].mean(axis=0),
        theano.scan(lambda row, target: row * target, [e, y])[0].mean(axis=0),
        (tt.arange(tt.cast(x.max(), "int64")).dimshuffle("x", 0) < e[:, :1]).sum(axis=1).mean(),
        tt.extra_ops.diff(e, axis=1).mean(),
        (e * y[0]).mean(),
        (e[::2] - e[1::2]).mean(),
        tt.grad(tt.sqr(tt.nnet.softmax(x)).mean(), x).sum(axis=0),
    ],
)
def test_no_certain_cause_is_in_a_graph_that_may_be_right(output):
    assert not difference_causes([x, y], [0, 0], [output])[0].certain


@pytest.mark.parametrize("of, says", [
    (lambda o: tt.sqr(o - o[0] - y).mean(), "a value that depends on several rows"),
    (lambda o: tt.sqr(o - o[-1] * y).mean(), "a value that depends on several rows"),
    (lambda o: theano.reduce(tt.maximum, o, np.float64(-9))[0] + 0 * y.sum(), "(output, 'max')"),
], ids=["first row", "last row", "reduce"])  # fmt: skip
def test_what_agrees_in_the_first_call_is_compared_again_where_rows_may_differ(two, noticed, of, says):
    w = weights()
    loss = of(tt.dot(x, w))
    f = synk.function([x, y], [x.mean() + y.mean(), loss])
    f(ONES, np.ones(4))
    assert not noticed()
    for function in (f, *steps(loss, w)):
        function(ONES, np.ones(4))
        function(ROWS, TARGETS)
        function(ROWS + 1, TARGETS)
        texts = noticed()
        assert 0 < len({*texts}) == len(texts) <= 2 and any(says in text for text in texts)


def test_a_row_that_equals_all_others_is_right(two):
    f = synk.function([x, y], (e * y[0]).mean())
    for number in range(8):
        f(ROWS, np.full(6, 1.0 + number))


def test_rows_at_equal_distances_are_right_if_shares_are_multiples_of_the_distance(two, noticed):
    f = synk.function([x], tt.sqr(x[::2] - x[1::2] + 1).mean())
    g = synk.function([x], e[1::3].mean())
    rows = np.random.RandomState(0).randn(24, 2)
    for n_rows, even, third in ((12, 0, 0), (24, 0, 0), (20, 0, 1)):
        f(rows[:n_rows])
        assert len(noticed()) == even
        g(rows[:n_rows])
        texts = noticed()
        assert len(texts) == third and all("rows at equal distances" in text for text in texts)


def test_a_step_that_agrees_on_the_first_rows_only_is_reported_once(two, noticed):
    w = theano.shared(np.ones(2), "w")
    loss = (tt.sqr(tt.dot(x, w)) * y).sum() / (y * tt.sqr(w[0])).sum()
    for step in steps(loss, w):
        step(ONES, np.ones(4))
        step(ROWS, TARGETS)
        [text] = noticed()
        assert "output 0" in text and "the gradient" in text and "a quotient of two sums" in text


@pytest.mark.parametrize("size", [1, 2])
def test_slices_that_differ_from_one_piece_are_reported(world_of, noticed, size):
    world_of(size)
    w = weights()
    loss = (tt.sqr(tt.dot(x, w)) * y).sum() / (y * tt.sqr(w[0])).sum()
    total = synk.ops.all_reduce(y.sum(), "sum", loss_op="sum")
    together = (tt.sqr(tt.dot(x, w)) * y).sum() / total
    sums = steps(together, w, {"loss": together}, loss_op="sum")
    for step, words in [
        *((step, "a quotient of two sums") for step in steps(loss, w)),
        *((step, "leave out num_slices") for step in sums),
        *((step, None) for step in steps(tt.sqr(tt.dot(x, w)).mean() + 0 * y.mean(), w)),
        *((step, None) for step in steps(*reversed(drawn("dropout", MRG_RandomStreams(1))))),
    ]:
        step(ROWS, TARGETS + 1, num_slices=2)
        texts = noticed()
        assert len(texts) == (words is not None)
        assert not texts or (words in texts[0] and "in 2 slices, the call differs" in texts[0])


def masked(uniform, e):
    """A mean over the elements that a dropout mask keeps: with other counts on other ranks."""
    keep = tt.cast(uniform > 0.55, "float64")
    return (e * keep).sum() / keep.sum()


def drawn(kind, streams):
    w = weights()
    hidden = (tt.dot(x, w) - y).dimshuffle(0, "x") * np.array([1.0, -2.0, 0.5])
    if kind == "samples":
        noise = streams.normal((1, x.shape[0], 2), dtype="float64")
        return w, tt.sqr(tt.dot(x + noise, w) - y).mean()
    if kind == "normal":
        return w, tt.sqr(hidden + streams.normal(hidden.shape)).mean()
    uniform = streams.uniform(hidden.shape)
    if kind == "dropout":
        return w, tt.sqr(hidden * tt.cast(uniform > 0.3, "float64") / 0.7).mean()
    if kind == "parameters":
        return w, tt.sqr(tt.dot(x, w + streams.uniform(w.shape)) - y).mean()
    return w, masked(uniform, tt.sqr(hidden))


@pytest.mark.parametrize("make_streams", [MRG_RandomStreams, RandomStreams])
@pytest.mark.parametrize("kind", ["dropout", "normal", "samples", "parameters", "masked"])
def test_steps_that_draw_are_compared_with_numbers_that_follow_from_the_rows(
    two, noticed, make_streams, kind
):
    w, loss = drawn(kind, make_streams(1))
    for step in steps(loss, w):
        step(ROWS, TARGETS)
        # Only the graph shows it.
        assert ["quotient of two sums" in one for one in noticed()] == [True] * (kind == "masked")
        if kind == "masked":
            with pytest.raises(synk.MismatchError, match="shared variable w"):
                step.check(ROWS, TARGETS, random=True)
            continue
        compared = step.check(ROWS, TARGETS, random=True)
        assert {"output 0", "shared variable w"} == set(compared.differences)
        assert not compared.not_compared
        assert "shared variable w" in step.check(ROWS, TARGETS).not_compared
