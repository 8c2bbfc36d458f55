"""Programs, centers and training rules on this run's devices, against NumPy."""

import copy

import numpy as np
import pytest
import theano
import theano.tensor as tt
from test_controller import Counter

import synkhronos as synk
from synkhronos.extensions import rules, updates

pygpu = pytest.importorskip("pygpu")

RATE, STEPS = 0.1, 8
START = np.array([[0.3, -0.2], [0.1, 0.7]], "float32")
FEATURES = np.random.RandomState(0).normal(size=(120, 2, 2)).astype("float32")
TARGETS = (FEATURES * [[2, -1], [1, 0.5]]).sum(axis=(1, 2)).astype("float32")


class Model:
    def __init__(self):
        self.w = theano.shared(START, "w")
        self.count = theano.shared(np.zeros(3, "int64"), "count")
        x, y = tt.ftensor3("x"), tt.fvector("y")
        loss = tt.sqr((x * self.w).sum(axis=(1, 2)) - y).mean()
        self.step = rules.make_step(loss, [self.w], [x, y], updates.sgd, learning_rate=RATE)
        self.add = synk.function(
            [x], [(x.sum(axis=0), "sum"), (x.sum(axis=(1, 2)), "gather")],
            updates=[(self.w, self.w + x.sum(axis=0), "sum"), (self.count, self.count + 1, "max")],
        )  # fmt: skip


@pytest.fixture(scope="module")
def built(world):
    model = Model()
    synk.distribute()
    return model


@pytest.fixture
def model(built):
    synk.broadcast([built.w, built.count], [START, np.zeros(3, "int64")])
    return built


def is_on_device(shared):
    return isinstance(shared.container.storage[0], pygpu.gpuarray.GpuArray)


def rows_of(rank, number):
    return np.random.RandomState(100 * rank + number).choice(len(FEATURES), 5 + rank, False)


def by_turns(rank, work):
    for turn in range(rank.size):
        if rank.rank == turn:
            work()
        rank.barrier()


def calls_and_collectives(rank, model):
    w, seen = model.w, []
    total, sums = rank.call(model.add, FEATURES, batch=rows_of(rank.rank, 0))
    seen += [total, sums, w.get_value(), model.count.get_value()]
    rank.all_reduce(w, "sum")
    seen.append(w.get_value())
    seen.append(rank.gather(w))
    rank.broadcast(w)
    rank.scatter(w, START[:, :1].repeat(rank.size, axis=0) if rank.is_master else None)
    seen.append(w.get_value())
    following = (rank.rank + 1) % rank.size
    assert rank.send(following, w.get_value() + rank.rank)
    source, message = rank.receive(wait=True)
    seen += [source, message, rank.ask("me", message)[2], rank.device]
    return seen, is_on_device(w)


def test_calls_collectives_and_messages_in_a_program(model, devices):
    size = synk.size()
    results = synk.spmd(calls_and_collectives, model, controller=Counter())
    own = [START + FEATURES[rows_of(rank, 0)].sum(axis=0) for rank in range(size)]
    scattered = START[:, :1].repeat(size, axis=0)
    for rank, (seen, on_device) in enumerate(results):
        total, sums, w, count, reduced, gathered, part, source, message, answer, device = seen
        rows, before = FEATURES[rows_of(rank, 0)], (rank - 1) % size
        np.testing.assert_allclose(total, rows.sum(axis=0), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(sums, rows.sum(axis=(1, 2)), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(w, own[rank], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(reduced, sum(own), rtol=1e-4, atol=1e-5)
        assert count.tolist() == [1, 1, 1] and on_device and device == devices[rank]
        assert (part == scattered[2 * rank : 2 * rank + 2]).all()
        assert source == before and (message == scattered[2 * before : 2 * before + 2] + before).all()
        assert (answer == message).all()
        assert (gathered is None) == (rank != synk.world.world.current_world().master_rank)
        if gathered is not None:
            assert gathered.tobytes() == np.stack([one[0][4] for one in results]).tobytes()


def exchange(rank, model):
    w, count, seen = model.w, model.count, []
    both, elastic = rank.center([w, count]), rank.center(w, "elastic")

    def change(much):
        w.set_value(w.get_value() + np.float32(much))
        count.set_value(count.get_value() + rank.rank + 1)

    def push():
        change(rank.rank + 1)
        both.push(2)

    def meet():
        change(10 * rank.rank)
        elastic.elastic(0.25)
        seen.append(w.get_value())

    rank.barrier()
    by_turns(rank, push)
    both.pull()
    seen += [w.get_value(), count.get_value()]
    by_turns(rank, meet)
    by_turns(rank, lambda: both.assign([START, [1, 2, 3]]) if rank.is_master else None)
    return [*seen, elastic.value(), *both.value()], is_on_device(w)


def test_exchanges_with_centers(model):
    size = synk.size()
    results = synk.spmd(exchange, model)
    sums, center = START + sum(2 * (rank + 1) for rank in range(size)), START
    for rank, (seen, _) in enumerate(results):
        moved = sums + 10 * rank
        difference = (moved - center) / 4
        center = center + difference
        np.testing.assert_allclose(seen[0], sums, rtol=1e-6)
        assert seen[1].tolist() == [sum(2 * (one + 1) for one in range(size))] * 3
        np.testing.assert_allclose(seen[2], moved - difference, rtol=1e-5)
    for seen, on_device in results:
        np.testing.assert_allclose(seen[3], center, rtol=1e-5)
        assert (seen[4] == START).all() and seen[5].tolist() == [1, 2, 3] and on_device


def follow(rank, rule, model):
    """Take steps in turns; return this rank's parameters after each, and at the end."""
    rule, params, seen = copy.copy(rule), [model.w], []
    rule.prepare(model.step)
    rule.start(rank, params)
    rank.barrier()
    for number in range(1, STEPS + 1):
        rule.take_step(rank, model.step, [FEATURES, TARGETS], rows_of(rank.rank, number))
        if rule.is_synchronous:
            rule.after_step(rank, params, number)
        else:
            by_turns(rank, lambda number=number: rule.after_step(rank, params, number))
        seen.append(model.w.get_value())
    rule.finish(rank, params)
    return np.array(seen), model.w.get_value(), is_on_device(model.w)


def gradient(w, rows):
    errors = (FEATURES[rows] * w).sum(axis=(1, 2)) - TARGETS[rows]
    return 2 * np.einsum("n,nij->ij", errors, FEATURES[rows]) / len(rows)


def test_bsp_equals_gradient_descent_on_the_rows_of_all_ranks(model):
    results = synk.spmd(follow, rules.BSP(), model)
    w = START.astype("float64")
    for number in range(1, STEPS + 1):
        rows = np.concatenate([rows_of(rank, number) for rank in range(synk.size())])
        w = w - RATE * gradient(w, rows)
    for _, end, on_device in results:
        np.testing.assert_allclose(end, w, rtol=1e-4, atol=1e-5)
        assert end.tobytes() == results[0][1].tobytes() and on_device


def test_train_validates_with_the_center_and_ends_with_it(model):
    """The loop as a whole: minibatches, validation by one rank, the record, the final values."""
    data = [synk.data(FEATURES), synk.data(TARGETS)]
    record = rules.train(
        model.step, [model.w], data, rules.EASGD(0.4, 2), batch_size=10, epochs=6, seed=1,
        validate=(model.step.compute, data), progress=False,
    )  # fmt: skip
    steps = 6 * synk.Rank.n_minibatches(len(FEATURES), synk.size(), 10)
    assert [len(losses) for losses in record.losses] == [steps] * synk.size()
    losses = [one["loss"] for one in record.validations]
    assert len(losses) == 6 and losses[-1] < 0.01 * losses[0] < losses[0]
    np.testing.assert_allclose(model.w.get_value(), [[2, -1], [1, 0.5]], atol=0.1)
