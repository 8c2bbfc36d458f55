"""Function.check: the call and the serial function on the same rows and the same state."""

import numpy as np
import pytest
import theano
import theano.tensor as tt
from oracle import assert_same
from theano.sandbox.rng_mrg import MRG_RandomStreams
from theano.tensor.shared_randomstreams import RandomStreams

import synkhronos as synk
from synkhronos.functions.comparing.serial_comparison import how_output_differs
from synkhronos.functions.comparing.trial_runs import ByRank
from synkhronos.world.world import current_world

pytestmark = pytest.mark.usefixtures("in_python", "in_threads")
ROWS, TARGETS = np.arange(14.0).reshape(7, 2), np.array([1.0, 1, 1, 1, 0, 1, 0])
x, y = tt.dmatrix("x"), tt.dvector("y")
SIZES = [(1, 0), (2, 1), (3, 0)]


def weights(dtype="float64"):
    return theano.shared(np.array([0.5, -0.5], dtype), "w")


def loss_of(w):
    return tt.sqr(tt.dot(x, w) - y).mean()


def mismatch(f, *args, **kwargs):
    with pytest.raises(synk.MismatchError) as caught:
        f.check(*args, **kwargs)
    return caught.value


def test_a_gradient_of_indexing_that_stops_growing_in_the_serial_function_is_told(two):
    w, group = theano.shared(np.ones(1, "float16"), "w"), tt.lvector("group")
    gradient = synk.function([group], (tt.grad(w[group].astype("float32").sum(), w), "sum"))
    text = str(mismatch(gradient, np.zeros(3000, "int64")))
    assert "float16 is too narrow" in text and "Usual reasons" not in text


@pytest.mark.parametrize("size, master_rank", SIZES)
def test_a_right_function_is_compared_and_changes_nothing(world_of, size, master_rank):
    world_of(size, master_rank=master_rank)
    w, count = weights(), theano.shared(0, "count")
    loss = loss_of(w)
    outputs = [loss, tt.grad(loss, w), (tt.dot(x, w), "gather"), (x.sum(axis=0), "sum"),
               (x.max(), "max"), (x.shape[0], None), (x.shape[0], "gather")]  # fmt: skip
    f = synk.function([x, y], outputs, updates=[(count, count + 1, "max")])
    compared = f.check(ROWS, TARGETS)
    names = [f"output {index}" for index in range(5)]
    assert list(compared.differences) == [*names, "shared variable count"]
    assert max(compared.differences.values()) < 1e-12
    assert "master's own" in compared.not_compared["output 5"]
    assert "one number per rank" in compared.not_compared["output 6"]
    for options in ({"batch": 5}, {"batch": [6, 0, 0]}, {"num_slices": 2}, {"output_subset": [2, 0]}):
        compared = f.check(ROWS, TARGETS, **options)
        assert max(compared.differences.values()) < 1e-12
    assert set(compared.differences) == {"output 2", "output 0", "shared variable count"}
    short = synk.data(TARGETS[:3], minibatch=True)
    f.check(ROWS, y=short, batch=slice(2, 5))
    assert synk.gather(count).tolist() == [0] * size
    assert f(ROWS, TARGETS)[5] == len(np.array_split(ROWS, size)[master_rank])


@pytest.mark.parametrize(
    "output, words",
    [
        (x.sum(), ["the sum of the ranks' values equals", "(output, 'sum')", "by up to 33 (0.5 of"]),
        ((x.sum(), "avg"), ["its op is 'avg'", "(output, 'sum')"]),
        (tt.exp(-x), ["has the shape (3, 2), not (6, 2)", "(output, 'gather')"]),
        ((x.max(), "avg"), ["(output, 'max')"]),
        ((x.mean(), "sum"), ["(output, 'avg')"]),
        ((tt.exp(-x), "sum"), ["its op is 'sum'", "(output, 'gather')"]),
        ((x[:, 0] * y).sum() / y.sum(), ["no op gives the serial value", "what a mask selects"]),
    ],
)
@pytest.mark.filterwarnings("ignore::synkhronos.SynkhronosWarning")
def test_an_output_that_is_reduced_wrongly_is_named_with_its_reason(two, output, words):
    f = synk.function([x, y], [y.mean(), output], name="f")
    error = mismatch(f, ROWS[:6], TARGETS[:6])
    assert error.names == ["output 1"]
    for word in ["<synkhronos.Function f>: on 2 rank(s) the call differs", *words]:
        assert word in str(error)
    f.check(ROWS[:6], TARGETS[:6], output_subset=[0])


def test_an_update_from_the_ranks_own_rows_is_named_with_its_reason(two):
    w, total, grad = weights(), theano.shared(np.zeros(2), "total"), theano.shared(np.zeros(2), "grad")
    loss = loss_of(w)
    gradient = tt.grad(loss, w)
    updates = [(w, tt.tanh(w - 0.01 * gradient)), (total, x.sum(axis=0)), (grad, gradient)]
    f = synk.function([x, y], loss, updates=updates)
    error = mismatch(f, ROWS, TARGETS)
    assert error.names == [f"shared variable {name}" for name in ("w", "total", "grad")]
    of_w, of_total, of_grad = str(error).splitlines()[1:]
    assert "neither their average nor their sum" in of_w and "make_train_function" in of_w
    assert "on rank(s) 0, 1" in of_w
    assert "their sum equals the serial value: call synk.all_reduce(variable, 'sum')" in of_total
    assert "their avg equals the serial value" in of_grad and "weights=function" in of_grad


def test_replicas_that_differed_before_are_the_reason(two):
    w = weights()
    f = synk.function([x, y], loss_of(w), updates=[(w, 2 * w)])
    synk.distribute()
    synk.set_value(1, w, [3.0, 4.0])
    error = mismatch(f, ROWS, TARGETS)
    assert error.names == ["output 0", "shared variable w"]
    lines = str(error).splitlines()[1:]
    assert all("the replicas of w differed before the call" in line for line in lines)
    assert "on rank(s) 1;" in lines[1]
    synk.broadcast(w)
    f.check(ROWS, TARGETS)


@pytest.mark.parametrize("make_streams", [MRG_RandomStreams, RandomStreams])
@pytest.mark.parametrize("size", [1, 2])
def test_what_depends_on_random_numbers_is_reported_and_the_streams_are_put_back(
    world_of, make_streams, size
):
    world_of(size)
    numbers, noise = make_streams(1).uniform(x.shape), theano.shared(0.0, "noise")
    outputs = [(numbers, "gather"), x.mean(), (x * numbers).mean()]
    f = synk.function([x], outputs, updates=[(noise, numbers.mean())])
    first, again = f(ROWS)[0], f(ROWS)[0]
    synk.restart()
    synk.distribute()
    before = synk.gather(noise)
    compared = f.check(ROWS)
    assert_same(synk.gather(noise), before)
    drawn = f(ROWS)[0]
    g = synk.function([x], (numbers, "gather"))
    assert not np.array_equal(first, again) and not np.array_equal(drawn, g(ROWS))
    if size == 1:
        assert len(compared.differences) >= 4 and not compared.not_compared
        return
    assert list(compared.differences) == ["output 1"]
    assert list(compared.not_compared) == ["output 0", "output 2", "shared variable noise"]
    assert all("random numbers" in reason for reason in compared.not_compared.values())


@pytest.mark.parametrize("make_streams", [MRG_RandomStreams, RandomStreams])
def test_random_streams_continue_on_every_rank_as_if_nothing_had_been_checked(two, make_streams):
    streams = make_streams(1)
    f = synk.function([x], (streams.uniform(x.shape), "gather"))
    f(ROWS)
    synk.reseed(streams, 3)
    expected = [f(ROWS) for _ in range(2)]
    synk.reseed(streams, 3)
    got = [f(ROWS)]
    f.check(ROWS)
    got.append(f(ROWS))
    np.testing.assert_array_equal(got, expected)


def test_rows_of_sliceable_variables_are_those_of_all_ranks(two):
    rows = theano.shared(np.zeros((1, 2)), "rows")
    w = weights()
    f = synk.function([], [tt.dot(rows, w).mean(), (rows, "gather")], sliceable_shareds=[rows])
    synk.scatter(rows, ROWS)
    for options in ({}, {"batch_s": [2, 0]}, {"batch_s": [slice(0, 3), [1]]}, {"num_slices": 2}):
        compared = f.check(**options)
        assert list(compared.differences) == ["output 0", "output 1"] and not compared.not_compared
    wrong = synk.function([], (rows.sum(), "avg"), sliceable_shareds=[rows])
    assert "(output, 'sum')" in str(mismatch(wrong))


def test_results_of_scattered_variables_that_are_not_sliced_are_not_compared(two):
    rows, w = theano.shared(np.zeros((1, 2)), "rows"), weights()
    f = synk.function([], [(rows.max(), "max"), w.sum()])
    synk.scatter(rows, ROWS)
    compared = f.check()
    assert list(compared.differences) == ["output 1"]
    assert compared.not_compared == {"output 0": "it depends on rows, which differs by rank"}


def test_values_and_counts_of_rows_are_put_back_on_every_rank_also_after_an_error(two):
    w, flat, index = weights(), theano.shared(np.zeros(2), "flat"), tt.ivector("index")
    late = theano.shared(0.0, "late")
    updates = [(w, 2 * w), (flat, w[index[:1]].sum() * w), (late, late + 1)]
    f = synk.function([index], (tt.dot(w[index], w[index]), "avg"), updates=updates)
    f(np.array([0, 1, 1], "int32"))
    synk.set_value(1, flat, [5.0, 6.0])
    synk.broadcast(w)
    storage = current_world().rank_state.engine.storage(w)
    before = synk.gather([w, flat, late])
    mismatch(f, np.array([0, 1], "int32"))
    for wrong in ([0, 1, 7], [7, 0, 1]):  # on the worker; on the master
        with pytest.raises(IndexError):  # the serial function raises first
            f.check(np.array(wrong, "int32"))
    assert current_world().rank_state.engine.storage(w) is storage
    for got, expected in zip(synk.gather([w, flat, late]), before):
        assert_same(got, expected)
    synk.set_value(1, flat, [1.0, 1.0])
    synk.all_reduce(flat, weights=f)  # two rows and one, as in the last call
    assert_same(synk.get_value(1, flat), (2 * before[1][0] + 1) / 3)


def test_a_comparison_is_no_call_whose_rows_could_be_weights(two):
    w, values = weights(), tt.dvector("values")
    f = synk.function([values], values.mean(), updates=[(w, w)])
    f.check(np.ones(3))
    with pytest.raises(ValueError):
        synk.all_reduce(w, weights=f)


def test_an_error_of_a_worker_alone_puts_everything_back(two):
    rows, w = theano.shared(np.zeros((1, 2)), "rows"), weights()
    bounded = theano.tensor.opt.Assert("too large")(rows, tt.lt(rows.shape[0], 4))
    f = synk.function([], bounded.sum(), updates=[(w, w + 1)])
    synk.scatter(rows, ROWS[:6])
    synk.set_value(1, rows, ROWS)
    before = synk.gather(w)
    with pytest.raises(synk.WorkerError, match="too large"):
        f.check()
    assert_same(synk.gather(w), before)


def test_single_precision_has_wider_tolerances_which_can_be_given(two):
    w = weights("float32")
    loss = tt.sqr(tt.dot(tt.cast(x, "float32"), w)).mean()
    f = synk.function([x], [loss, tt.cast(loss, "float64"), tt.grad(loss, w)])
    rows = np.random.RandomState(0).rand(999, 2)
    compared = f.check(rows)
    assert len(compared.differences) == 3
    if max(compared.differences.values()):
        mismatch(f, rows, rtol=0, atol=0)
    g = synk.function([x], (x.sum(), "avg"))
    assert g.check(ROWS, rtol=0.6).differences["output 0"] > 40
    assert g.check(ROWS, atol=50).differences["output 0"] > 40
    mismatch(g, ROWS, rtol=0.4)
    mismatch(g, ROWS, rtol=0, atol=40)


def test_values_that_are_not_numbers_are_equal_where_both_are(two):
    f = synk.function([x], [tt.log(x.mean() - 100), (tt.log(x - 5), "gather")])
    with np.errstate(all="ignore"):
        assert set(f.check(ROWS).differences.values()) == {0.0}


def test_values_that_cannot_be_combined_are_named_with_their_shapes():
    found = ByRank([np.ones(2), np.ones(3)], [1, 1], [0, 1])
    assert how_output_differs(None, np.ones(2), found) == (
        "cannot be combined, as the ranks' values have the shapes (2,), (3,)"
    )
    assert how_output_differs(np.ones(2), np.ones(3), found) == "has the shape (2,), not (3,)"


def test_wrong_arguments_are_refused_before_anything_runs(two):
    w = weights()
    f = synk.function([x], x.mean(), updates=[(w, w + 1)])
    for error, options in [
        (TypeError, {"rtol": "1"}), (TypeError, {"atol": True}), (ValueError, {"rtol": -1}),
        (ValueError, {"atol": float("nan")}), (IndexError, {"batch": [9]}), (TypeError, {"z": ROWS}),
        (ValueError, {"batch_s": [0]}), (TypeError, {"num_slices": 1.5}),
        (IndexError, {"output_subset": [1]}),
    ]:  # fmt: skip
        with pytest.raises(error):
            f.check(ROWS, **options)
    assert not current_world().registry.replicated
    with synk.fuse(), pytest.raises(RuntimeError, match=r"check\(\): not inside a fuse"):
        f.check(ROWS)
    synk.close()
    with pytest.raises(synk.ClosedError):
        f.check(ROWS)
