"""fork(check=True): every call compares the replicas."""

import os

import numpy as np
import pytest
import theano
import theano.tensor as tt
from oracle import assert_same
from theano.sandbox.rng_mrg import MRG_RandomStreams

import synkhronos as synk
from synkhronos.world.launch import CHECK

pytestmark = pytest.mark.usefixtures("in_python", "in_threads")
ROWS, TARGETS = np.arange(12.0).reshape(6, 2), np.array([1.0, 0, 1, 1, 0, 1])
x, y = tt.dmatrix("x"), tt.dvector("y")


@pytest.fixture(params=[2, 3])
def world(world_of, request):
    world_of(request.param, check=True)
    return request.param


def loss_of(w):
    return tt.sqr(tt.dot(x, w) - y).mean()


def weights(name="w"):
    return theano.shared(np.array([0.5, -0.5]), name)


def mismatch(call, *args):
    with pytest.raises(synk.MismatchError) as caught:
        call(*args)
    return caught.value


def test_updates_from_the_ranks_own_rows_are_refused_when_they_are_used(world):
    w = weights()
    loss = loss_of(w)
    train = synk.function([x, y], loss, updates=[(w, w - 0.01 * tt.grad(loss, w))], name="train")
    train(ROWS, TARGETS)
    error = mismatch(train, ROWS, TARGETS)
    assert error.names == ["w"]
    assert "<synkhronos.Function train>: before this call the replicas of w" in str(error)
    assert f"rank(s) {', '.join(map(str, range(1, world)))}" in str(error)
    synk.broadcast(w)
    train(ROWS, TARGETS)
    synk.all_reduce(w)
    train(ROWS, TARGETS)


def test_values_set_on_the_master_are_refused_before_and_after_a_call(world):
    w, other = weights(), weights("other")
    f = synk.function([x], tt.dot(x, w).mean(), name="f")
    synk.function([], other.sum())
    f(ROWS)
    other.set_value(np.zeros(2))
    error = mismatch(f, ROWS)
    assert error.names == ["other"] and "after this call" in str(error)
    synk.broadcast(other)
    w.set_value(np.zeros(2))
    assert "before this call the replicas of w" in str(mismatch(f, ROWS))
    synk.broadcast(w)
    assert f(ROWS) == 0


def test_rows_set_on_the_master_are_refused(world):
    rows = theano.shared(ROWS, "rows")
    f = synk.function([], rows.mean(), sliceable_shareds=[rows], name="f")
    f()
    synk.scatter(rows, ROWS)
    assert f() == ROWS.mean()
    rows.set_value(ROWS)
    error = mismatch(f)
    assert error.names == ["rows"] and "before this call the replicas of rows" in str(error)
    synk.scatter(rows, ROWS)
    assert f() == ROWS.mean()


@pytest.mark.parametrize("fused", [False, True])
def test_a_right_training_step_passes(world, fused):
    w, grad, total = weights(), theano.shared(np.zeros(2), "grad"), theano.shared(0.0, "total")
    loss = loss_of(w)
    updates = [(grad, tt.grad(loss, w)), (total, total + x.sum())]
    gradient = synk.function([x, y], loss, updates=updates)
    update = synk.function([], updates=[(w, w - 0.01 * grad)])
    for _ in range(3):
        if fused:
            with synk.fuse():
                gradient(ROWS, TARGETS)
                synk.all_reduce(grad, weights=gradient)
                update()
        else:
            gradient(ROWS, TARGETS)
            synk.all_reduce(grad, weights=gradient)
            update()
    assert synk.in_sync([w, grad])
    assert_same(synk.reduce(total, "sum", in_place=False), 3 * ROWS.sum())


def test_a_fused_step_without_the_reduction_is_refused(world):
    w, grad = weights(), theano.shared(np.zeros(2), "grad")
    loss = loss_of(w)
    gradient = synk.function([x, y], loss, updates=[(grad, tt.grad(loss, w))], name="gradient")
    update = synk.function([], updates=[(w, w - 0.01 * grad)], name="update")

    def step():
        with synk.fuse():
            gradient(ROWS, TARGETS)
            update()

    step()
    assert "gradient>: before this call the replicas of w" in str(mismatch(step))


def test_what_is_meant_to_differ_may(world):
    rows, w, streams = theano.shared(ROWS[:1], "rows"), weights(), MRG_RandomStreams(1)
    kept = theano.shared(0.0, "kept")
    f = synk.function([x], [(tt.dot(rows, w), "gather"), (x * streams.uniform(x.shape)).mean()],
                      updates=[(kept, streams.uniform(()))])  # fmt: skip
    synk.scatter(rows, ROWS)
    synk.set_value(1, w, np.ones(2))
    for _ in range(3):
        f(ROWS)
    synk.reduce(kept)
    f(ROWS)


def test_an_error_in_a_call_is_raised_as_without_checks(world):
    index, w = tt.ivector("index"), weights()
    f = synk.function([index], (w[index].sum(), "sum"))
    assert f(np.array([0, 1, 0], "int32")) == 0.5
    with pytest.raises(synk.WorkerError):
        f(np.array([0, 1, 9], "int32"))
    assert f(np.array([0, 1, 0], "int32")) == 0.5


@pytest.mark.parametrize(
    "value, check, audits",
    [("1", None, True), ("0", None, False), ("1", False, False), (None, True, True)],
)
def test_the_environment_decides_unless_fork_does(monkeypatch, value, check, audits):
    if value is None:
        monkeypatch.delenv(CHECK, raising=False)
    else:
        monkeypatch.setenv(CHECK, value)
    assert CHECK == "SYNKHRONOS_CHECK" and os.environ.get(CHECK) == value
    with synk.fork(2, use_gpu=False, check=check):
        assert synk.world.world.current_world().options.audits is audits


def test_one_process_has_nothing_to_check(world_of):
    world_of(1, check=True)
    w = weights()
    f = synk.function([x], tt.dot(x, w).mean(), updates=[(w, w * x.mean())])
    assert f.watch is None
    f(ROWS), f(ROWS)
