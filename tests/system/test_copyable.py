"""Copies of functions and training steps: copy(), copy.deepcopy, pickle, as the compiler's are."""

import copy
import gc
import pickle

import numpy as np
import pytest
from compilers import RandomStreams, compiler, tt

import synkhronos as synk
from steps import Network, assert_same_results, batches, digits
from synkhronos.extensions import train, updates
from synkhronos.world.world import current_world

pytestmark = pytest.mark.usefixtures("in_python")
ROWS = np.random.RandomState(3).normal(size=(13, 3))


@pytest.fixture(params=[1, 3])
def world(request, world_of):
    world_of(request.param)


def from_pickle(item):
    return pickle.loads(pickle.dumps(item, -1))


each_way = pytest.mark.parametrize("duplicate", [copy.deepcopy, from_pickle])
#: Whether the workers have been started, and have the function, when it is copied.
each_time = pytest.mark.parametrize("is_late", [False, True])


def assert_equal_on_every_rank(shared, value):
    for replica in synk.gather(shared):
        np.testing.assert_allclose(replica, value, rtol=1e-12)


class Counting:
    """A function that updates one of its shared variables, with others of the same type."""

    def __init__(self, build=synk.function):
        x = tt.dmatrix("x")
        self.total, self.weight = compiler.shared(np.zeros(3), "total"), compiler.shared(np.ones(3), "w")
        self.other, self.another = compiler.shared(np.ones(3), "other"), compiler.shared(np.arange(3.0))
        self.shareds = [self.total, self.weight, self.other, self.another]
        mean = (x * self.weight).mean(axis=0)
        if build is not compiler.function and build is not train.parallel_function:
            new = synk.ops.all_reduce(mean, "avg")
        else:
            new = mean
        self.f = build([x], [mean, self.total], updates=[(self.total, self.total + new)], name="f")

    def values(self):
        return [shared.get_value() for shared in self.shareds]


COPIES = {
    "plain": lambda one: one.f.copy(),
    "copy.copy": lambda one: copy.copy(one.f),
    "swap what is read": lambda one: one.f.copy(swap={one.weight: one.another}),
    "swap what is updated": lambda one: one.f.copy(swap={one.total: one.other}),
    "exchange": lambda one: one.f.copy(swap={one.total: one.weight, one.weight: one.total}),
    "no updates": lambda one: one.f.copy(delete_updates=True),
    "no updates, and swap": lambda one: one.f.copy(True, {one.weight: one.other}, True, "named"),
}


@each_time
@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("build", [synk.function, train.parallel_function])
def test_a_copy_equals_the_compilers(two, build, way, is_late):
    ours, theirs = Counting(build), Counting(compiler.function)
    if is_late:
        synk.distribute()
        assert_same_results(ours.f(ROWS), theirs.f(ROWS))
    copies = [COPIES[way](one) for one in (ours, theirs)]
    assert copies[0].name == copies[1].name
    for _ in range(2):
        for our, their in ((ours.f, theirs.f), copies):
            assert_same_results(our(ROWS[:11]), their(ROWS[:11]))
    for shared, value in zip(ours.shareds, theirs.values()):
        np.testing.assert_allclose(shared.get_value(), value, rtol=1e-12)
        if shared in copies[0].get_shared():
            assert_equal_on_every_rank(shared, value)


def test_a_copy_keeps_operations_forms_defaults_and_slices(world):
    x, scale = tt.dvector("x"), tt.dscalar("scale")
    count = compiler.shared(np.int64(0), "count")
    f = synk.function(
        [synk.In(x, name="rows")], {"sum": (x.sum() * scale, "sum"), "rows": (x, "gather")},
        [synk.In(scale, value=2.0)], updates=[(count, x.size, "sum")],
    )  # fmt: skip
    other = compiler.shared(np.int64(100), "other")
    copied = f.copy(swap={count: other}, name="copied")
    assert repr(copied) == "<synkhronos.Function copied>"
    found = copied(rows=np.arange(6.0), num_slices=2)
    assert found["sum"] == 30 and found["rows"].tolist() == list(range(6))
    assert copied.output_modes == f.output_modes and copied.update_modes == ["sum"]
    assert sum(synk.gather(other)) == 6
    without = f.copy(delete_updates=True)
    assert without.update_modes == [] and without(np.arange(6.0))["sum"] == 30
    assert count.get_value() == 0


def test_a_copy_selects_rows_of_the_data_that_is_swapped_in(world):
    index, x = tt.lscalar("index"), tt.dmatrix("x")
    train_rows, test_rows = compiler.shared(ROWS), compiler.shared(ROWS[::-1].copy())
    givens = {x: train_rows[index * 5 : (index + 1) * 5]}
    f = synk.function([index], [x.mean(axis=0), (x, "gather")], givens=givens)
    g = f.copy(swap={train_rows: test_rows})
    for k in range(3):
        np.testing.assert_allclose(f(k)[1], ROWS[k * 5 : k * 5 + 5])
        np.testing.assert_allclose(g(k)[1], ROWS[::-1][k * 5 : k * 5 + 5])
        np.testing.assert_allclose(g(k)[0], ROWS[::-1][k * 5 : k * 5 + 5].mean(axis=0))


def test_a_copy_uses_the_rows_of_another_sliceable_variable(two):
    rows, others = compiler.shared(ROWS, "rows"), compiler.shared(ROWS, "others")
    f = synk.function([], (rows * 2, "gather"), sliceable_shareds=[rows])
    g = f.copy(swap={rows: others})
    synk.distribute()
    synk.scatter(rows, ROWS)
    synk.scatter(others, -ROWS)
    np.testing.assert_array_equal(f(), ROWS * 2)
    np.testing.assert_array_equal(g(), ROWS * -2)


def test_a_copy_without_updates_draws_the_same_numbers_again(two):
    streams = RandomStreams(4)
    f = synk.function([], (streams.uniform(size=(2,)), "gather"))
    g = f.copy(delete_updates=True)
    x = tt.dvector("x")
    step = train.parallel_function([x], (x + streams.uniform(size=x.shape), "gather"))
    quiet, rows = step.copy(delete_updates=True), np.zeros(4)
    assert quiet(rows).tolist() == quiet(rows).tolist() == step(rows).tolist() != step(rows).tolist()
    again = g()
    assert len(set(again)) == 4 and again.tolist() == g().tolist() == f().tolist() != f().tolist()


@pytest.mark.parametrize(
    "swap, error, words",
    [
        (lambda one: [1], TypeError, "expected a dict of shared variables"),
        (lambda one: {one.total: 3}, TypeError, "expected shared variables"),
        (lambda one: {one.other: one.total}, ValueError, "does not use .* other; it uses w, total"),
        (lambda one: {one.total: compiler.shared(np.float32(1))}, TypeError, "of the type of total"),
        (lambda one: {one.total: one.weight}, ValueError, "would be the same one"),
    ],
)
@pytest.mark.parametrize("build", [synk.function, train.parallel_function])
def test_what_cannot_be_swapped_is_refused(two, build, swap, error, words):
    one = Counting(build)
    with pytest.raises(error, match=words):
        one.f.copy(swap=swap(one))


def gradient_step(build):
    """Return a step with momentum of a small model, and its variables."""
    x, w, velocity = tt.dmatrix("x"), compiler.shared(np.ones(3), "w"), compiler.shared(np.zeros(3), "v")
    loss = tt.sqr(tt.dot(x, w) - 1).mean()
    new = velocity * 0.5 - 0.1 * tt.grad(loss, w)
    return build([x], loss, updates=[(velocity, new), (w, w + new)]), w, velocity


@each_way
def test_a_duplicate_of_a_step_can_be_copied(two, duplicate):
    step, w, _ = gradient_step(train.parallel_function)
    first = step(ROWS)
    again = duplicate(step)
    made = again.copy()  # of the same variables
    assert made(ROWS) == step(ROWS) < first
    assert again(ROWS) == step(ROWS)
    assert w not in again.get_shared() and w in step.get_shared()


def test_a_copy_is_freed_on_every_rank(two):
    one = Counting()
    synk.distribute()
    known = [*one.f.get_shared(), one.f]
    g = one.f.copy(swap={one.total: compiler.shared(np.zeros(3))})
    assert_same_results(g(ROWS), one.f(ROWS))
    number = g.replica.number
    del g
    gc.collect()
    one.f(ROWS)
    state = current_world().rank_state
    assert number not in state.functions and len(state.functions) == 1 and known


class Net:
    """A network with a training step and a function, in the order in which scripts make them."""

    def __init__(self, build_step, build, variables_first=True):
        network = Network()
        if variables_first:
            self.params = network.params
        self.x = network.x
        self.step = build_step(network)
        self.predict = build([network.x], network.probabilities)
        self.params = network.params
        self.loss = network.loss

    def values(self):
        return [param.get_value() for param in self.params]


def momentum(network):
    velocities = [network.shared(np.zeros(one.get_value().shape)) for one in network.params]
    gradients = compiler.grad(network.loss, network.params)
    news = [0.9 * v - 0.1 * g for v, g in zip(velocities, gradients)]
    pairs = [(param, param + new) for param, new in zip(network.params, news)]
    return [*pairs, *zip(velocities, news)]


def by_function(make):
    return lambda net: make([net.x, net.y], net.loss, updates=momentum(net))


def by_rule(make):
    return lambda net: make(net.loss, net.params, net.x, net.y, updates.adam)


STEPS = [
    (by_function(train.parallel_function), by_function(compiler.function)),
    (by_rule(train.make_train_function), by_rule(train.make_train_function_theano)),
]


def predict_gathered(inputs, output):
    return synk.function(inputs, (output, "gather"))


@each_way
@each_time
@pytest.mark.parametrize("variables_first", [True, False])
@pytest.mark.parametrize("of_ours, of_theirs", STEPS, ids=["function", "rule"])
def test_copies_of_a_network_equal_the_compilers(
    two, duplicate, is_late, variables_first, of_ours, of_theirs
):
    ours = Net(of_ours, predict_gathered, variables_first)
    theirs = Net(of_theirs, compiler.function, variables_first)
    x, y = digits()

    def take_steps(*pairs):
        for rows in batches(3):
            for our, their in pairs:
                assert_same_results(our.step(x[rows], y[rows]), their.step(x[rows], y[rows]))

    if is_late:
        take_steps((ours, theirs))
    copies = [duplicate(one) for one in (ours, theirs)]
    take_steps(copies)
    for our, their in (copies, (ours, theirs)):
        assert_same_results(our.predict(x), their.predict(x))
        assert_same_results(our.values(), their.values())
    take_steps((ours, theirs))
    again = [duplicate(one) for one in copies]
    take_steps(copies, again)
    for our, their in (copies, (ours, theirs), again):
        assert_same_results(our.predict(x), their.predict(x))
        for param, value in zip(our.params, their.values()):
            assert_equal_on_every_rank(param, value)


@each_time
def test_each_rank_copies_its_own_replica(two, is_late):
    streams = RandomStreams(5)
    rows, own = compiler.shared(ROWS, "rows"), compiler.shared(0.0, "own")
    f = synk.function([], [(rows + 0, "gather"), (own + 0, "gather")], sliceable_shareds=[rows])
    draw = synk.function([], (streams.uniform(size=(2,)), "gather"))
    if is_late:
        synk.distribute()
        synk.scatter(rows, ROWS)
        synk.set_value(1, own, 5.0)
        draw()
    g, draw_too = copy.deepcopy([f, draw])
    if not is_late:
        synk.distribute()
    assert_same_results(g(), f())
    assert draw_too().tolist() == draw().tolist()  # they have the same states
    assert draw_too().tolist() == draw().tolist()
    assert len({id(one) for one in [*f.get_shared(), *g.get_shared()]}) == 4
    if is_late:
        assert g()[1].tolist() == [0, 5]
        with pytest.raises(synk.MismatchError, match="own #2: rank 1, by up to 5"):
            synk.in_sync([one for one in g.get_shared() if one.ndim == 0])


def test_a_deep_copy_of_a_function_uses_the_data_that_are_bound_to_its_inputs(two):
    x = tt.dvector("x")
    f = synk.function([x], (x.sum(), "sum"))
    f.set_input_shmems(np.arange(5.0))
    g = copy.deepcopy(f)
    f.get_input_shmems()[0][0] = 10
    assert g() == f() == 20


def test_an_object_with_collectives_and_windows_is_copied(two):
    index, x = tt.lscalar("index"), tt.dmatrix("x")
    data, w = compiler.shared(ROWS, "data"), compiler.shared(np.ones(3), "w")
    centered = x - synk.ops.all_reduce(x.mean(axis=0), "avg")
    f = synk.function(
        [index], (tt.dot(centered, w), "gather"), givens={x: data[index * 4 : index * 4 + 4]}
    )
    g = copy.deepcopy(f)
    synk.distribute()
    h = copy.deepcopy(g)
    for k in range(3):
        rows = ROWS[4 * k : 4 * k + 4]
        for each in (f, g, h):
            np.testing.assert_allclose(each(k), (rows - rows.mean(axis=0)).sum(axis=1), atol=1e-12)


def test_a_deep_copy_needs_the_processes(two):
    one = Counting()
    with pytest.raises(RuntimeError, match="not inside a fuse.. block"):
        with synk.fuse():
            copy.deepcopy(one.f)
    text = pickle.dumps(one.f)
    synk.close()
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(synk.ClosedError, match="Function f>: the processes"):
            duplicate(one.f)
    with pytest.raises(synk.ClosedError):
        pickle.loads(text)


def test_a_pickle_becomes_a_function_of_the_processes_that_load_it(world_of):
    world_of(2)
    one = Counting()
    one.f(ROWS)
    text = pickle.dumps(one.f)
    expected = one.f(ROWS)
    world_of(3)
    loaded = pickle.loads(text)
    assert_same_results(loaded(ROWS), expected)
    for shared in loaded.get_shared():
        assert_equal_on_every_rank(shared, shared.get_value())


def test_a_pickle_without_the_rows_of_other_ranks_is_refused(two):
    rows = compiler.shared(ROWS, "rows")
    f = synk.function([], (rows.sum(), "sum"), sliceable_shareds=[rows], name="f")
    assert pickle.loads(pickle.dumps(f))() == pytest.approx(2 * ROWS.sum())
    synk.scatter(rows, ROWS)
    with pytest.raises(synk.SynkhronosError, match="f> cannot be pickled: .* its own value of rows"):
        pickle.dumps(f)
    assert copy.deepcopy(f)() == pytest.approx(ROWS.sum())


def test_functions_go_to_programs_by_their_numbers(two):
    x, w = tt.dvector("x"), compiler.shared(np.arange(1e5), "w")
    f = synk.function([x], x.mean() + w.sum(), name="f")
    synk.distribute()

    def program(rank):
        copies = [f, copy.deepcopy(f), from_pickle(f)]
        size = len(pickle.dumps(f))
        return [float(rank.call(one, [1.0 + rank.rank])) for one in copies], size

    for number, (sums, size) in enumerate(synk.spmd(program)):
        assert sums == [1 + number + w.get_value().sum()] * 3
        assert size < 1000


def test_what_is_left_of_a_program_cannot_be_called(two):
    x = tt.dvector("x")
    f = synk.function([x], x.mean(), name="f")
    synk.distribute()
    kept = synk.spmd(lambda rank: copy.deepcopy(f))
    calls = [*kept, kept[0].as_theano, kept[1].build_inputs, kept[0].set_input_shmems, kept[0].copy]
    for call in calls:
        with pytest.raises(TypeError, match="Function f>: this is a copy that was made for a program"):
            call(np.ones(2))
    assert f(np.ones(2)) == 1
