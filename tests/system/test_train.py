"""Tests of the fused training step against the serial step on the whole minibatch."""

import weakref

import numpy as np
import pytest
import scipy.sparse

import synkhronos as synk
from compilers import UnusedInputError, compiler, cross_entropy, softmax, sparse, sparse_grad, tt
from synkhronos.extensions import train, updates
from synkhronos.functions.comparing.watch import PATIENCE
from synkhronos.world.schedule import _Block

ROWS = 53


@pytest.fixture(scope="module")
def digits():
    rng = np.random.RandomState(0)
    return rng.randn(ROWS, 6).astype("float32"), rng.randint(0, 3, ROWS).astype("int32")


def make_network(x, y):
    rng = np.random.RandomState(1)
    w = compiler.shared(rng.randn(6, 3).astype("float32"), "w")
    b = compiler.shared(np.zeros(3, "float32"), "b")
    loss = cross_entropy(softmax(x.dot(w) + b), y).mean()
    return loss, [w, b]


def make_both(rule, **kwargs):
    x, y = tt.fmatrix("x"), tt.ivector("y")
    loss, params = make_network(x, y)
    parallel = train.make_train_function(loss, params, x, y, rule, **kwargs)
    loss, serial_params = make_network(x, y)
    serial = train.make_train_function_theano(loss, serial_params, x, y, rule, **kwargs)
    return parallel, serial, list(zip(params, serial_params))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_steps_equal_the_serial_steps_for_any_batch(world_of, digits, ranks):
    world_of(ranks)
    parallel, serial, params = make_both(updates.nesterov_momentum, learning_rate=0.1)
    x, y = map(synk.data, digits)
    rng = np.random.RandomState(2)
    batches = [None, 1, 2, slice(5, 40, 3), slice(None, None, -1), [3, 3, -1]]
    batches += [rng.permutation(ROWS)[:n] for n in (1, 4, 10, 53)]
    for step, batch in enumerate(batches):
        loss = parallel(x, y, batch=batch, num_slices=1 + step % 3)
        np.testing.assert_allclose(loss, serial(*digits, batch=batch), rtol=1e-5)
        assert loss.dtype == "float32" and loss.shape == ()
    for ours, theirs in params:
        for replica in synk.gather(ours):
            np.testing.assert_allclose(replica, theirs.get_value(), rtol=1e-4, atol=1e-6)


def test_a_step_does_not_keep_what_it_returned(two, digits):
    parallel, _, _ = make_both(updates.sgd, learning_rate=0.1)
    for _ in range(2):
        returned = weakref.ref(parallel(*digits))
        assert returned() is None


@pytest.fixture
def recorded(monkeypatch):
    """The numbers of calls in each fused block so far."""
    blocks, run = [], _Block._run
    monkeypatch.setattr(
        _Block, "_run", lambda self, commands: (blocks.append(len(commands)), run(self, commands))
    )
    return blocks


def test_a_repeated_step_sees_what_the_script_changes_between_the_steps(world_of, digits, recorded):
    world_of(3)
    parallel, serial, params = make_both(updates.nesterov_momentum, learning_rate=0.01)
    x, y = map(synk.data, digits)
    pair = [digits[0].copy(), digits[1].copy()]
    start = iter(range(10**6))

    def both(times=3, batch=10):
        for _ in range(times):
            rows = slice(first := next(start) % 40, first + batch)
            np.testing.assert_allclose(parallel(x, y, rows), serial(*pair, rows), rtol=1e-4)

    def count_recorded(times=3):
        del recorded[:]
        both(times)
        return len(recorded)

    both(PATIENCE + 2)  # until replicas are not compared any more
    assert count_recorded() == 0
    x[3:20] = pair[0][3:20] = 0.5  # in place
    assert count_recorded() == 0
    params[0][0].set_value(params[0][0].get_value() / 2)
    params[0][1].set_value(params[0][1].get_value() / 2)
    synk.broadcast(params[0][0])
    assert count_recorded() == 0  # what was set has been sent to all ranks
    pair = [np.concatenate([one, one]) for one in pair]
    x.set_value(pair[0])
    y.set_value(pair[1])
    assert 1 <= count_recorded() <= 2
    z = tt.fvector("z")
    other = synk.function([z], [(z.sum(), "sum")])
    assert count_recorded() == 1  # it has to be replicated
    assert other(np.ones(5, "float32")) == [5]
    with pytest.raises(synk.FuseError), synk.fuse():
        parallel(x, y, 10)
    with pytest.raises(TypeError, match="batch"):
        parallel(x, y, "ten")
    both(batch=1)  # fewer rows than ranks
    assert count_recorded() <= 1
    synk.restart()
    both(PATIENCE)
    assert count_recorded() == 0
    for ours, theirs in params:
        for replica in synk.gather(ours):
            np.testing.assert_allclose(replica, theirs.get_value(), rtol=1e-3, atol=1e-5)
    synk.close()
    with pytest.raises(synk.ClosedError):
        parallel(x, y, slice(0, 10))


def test_a_repeated_step_that_fails_is_taken_by_none(world_of, digits, recorded):
    world_of(3)
    parallel, serial, params = make_both(updates.momentum, learning_rate=0.01)
    x, y = map(synk.data, digits)
    for _ in range(PATIENCE + 2):
        np.testing.assert_allclose(parallel(x, y), serial(*digits), rtol=1e-4)
    del recorded[:]
    for bad_row in (0, ROWS - 1):
        y[bad_row] = 3
        with pytest.raises((ValueError, IndexError, AssertionError, synk.WorkerError)):
            parallel(x, y)
        y[bad_row] = digits[1][bad_row]
        np.testing.assert_allclose(parallel(x, y), serial(*digits), rtol=1e-4)
    assert not recorded
    for ours, theirs in params:
        for replica in synk.gather(ours):
            np.testing.assert_allclose(replica, theirs.get_value(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("batch", [np.int64(7), (1, 2, 3), range(4, 9), np.arange(ROWS) > 40])
def test_the_serial_step_takes_the_batches_that_the_parallel_step_takes(two, digits, batch):
    parallel, serial, _ = make_both(updates.sgd, learning_rate=0.1)
    for _ in range(2):
        np.testing.assert_allclose(parallel(*digits, batch), serial(*digits, batch), rtol=1e-5)


def test_the_serial_step_is_not_compared_with_itself(two, digits):
    _, serial, _ = make_both(updates.sgd, learning_rate=0.1)
    with pytest.raises(TypeError, match="got the serial step"):
        serial.check(*digits)


@pytest.mark.usefixtures("in_python")
def test_a_list_is_the_data_of_one_input(two):
    """A list of labels is one array; only a list of inputs has a list of arrays."""
    x, z, y = tt.dvector("x"), tt.dvector("z"), tt.ivector("y")
    w = compiler.shared(1.0, "w")

    def make(x, y):
        return train.make_train_function((w * (x * y)).mean(), [w], x, y, updates.sgd, 0)

    step = make(x, y)
    assert step([1.0, 2.0, 3.0], [0, 1, 0]) == pytest.approx(2 / 3)
    assert step((1.0, 2.0, 3.0), y=(0, 1, 0)) == pytest.approx(2 / 3)
    assert step(x_data=[1.0, 2.0, 3.0], y_data=np.array([0, 1, 0], "int32"), batch=2) == 1
    loss = (w * x * y + z).mean()
    steps = [
        train.make_train_function(loss, [w], [x, z], y, updates.sgd, 0),
        train.make_train_function_theano(loss, [w], [x, z], y, updates.sgd, 0),
    ]
    for step in steps:
        assert step([[1.0, 2.0], [3.0, 3.0]], [1, 0]) == 3.5
        assert step(x_data=([1.0, 2.0], [3.0, 3.0]), y_data=[1, 0]) == 3.5
        assert step(y=[1, 0], z=[3.0, 3.0], x=[1.0, 2.0]) == 3.5
        message = "expected a list of 2 arrays for the inputs x, z, got "
        with pytest.raises(TypeError, match=message + "ndarray"):
            step(np.ones((2, 2)), [1, 0])
        with pytest.raises(TypeError, match=message + "3"):
            step([[1.0]] * 3, [1])
        with pytest.raises(TypeError, match="data for the input x is given twice"):
            step([[1.0], [1.0]], [1], x=[1.0])
    with pytest.raises(TypeError, match="expected 1 dimensions, got 2"):
        make(x, y)([[1.0]], [1])
    one_in_a_list = train.make_train_function(loss, [w], [x, z], [y], updates.sgd, 0)
    assert one_in_a_list([[1.0], [2.0]], [[1]]) == 3
    assert one_in_a_list([[1.0], [2.0]], np.array([1], "int32")) == 3


@pytest.mark.usefixtures("in_python")
def test_there_may_be_no_y(two):
    x, rate, w = tt.dvector("x"), tt.dscalar("rate"), compiler.shared(0.0, "w")
    loss = tt.sqr(x - w).mean()
    step = train.make_train_function(loss, [w], x, None, updates.sgd, rate, bcast_inputs=[rate])
    assert step([1.0, 3.0, 5.0], 0.5) == pytest.approx(35 / 3)
    np.testing.assert_allclose(synk.gather(w), [3, 3])
    assert step([3.0, 9.0], 0.0, 1) == 0  # then batch,
    assert step([3.0, 9.0], 0.0, 2, 2) == 18  # and num_slices, by position
    assert step(x=[3.0, 9.0], rate=0.0, batch=[1]) == 36
    for args, keywords in ((([3.0], 0.0, 1, 1, 1), {}), (([3.0], 0.0, 1), {"batch": 1})):
        with pytest.raises(TypeError, match="expected data for 2 arguments, then at most batch and"):
            step(*args, **keywords)


@pytest.mark.usefixtures("in_python")
def test_the_options_of_theano_can_be_given(two):
    x, unused, w = tt.fvector("x"), tt.fvector("unused"), compiler.shared(np.float32(0), "w")
    loss = tt.sqr(x - w).mean()
    arguments = (loss, [w], [x, unused], None, updates.sgd, 0.5)
    with pytest.raises(UnusedInputError):
        train.make_train_function(*arguments)
    data = [np.array([1.0, 3.0]), np.array([0.0, 0.0])]  # float64
    options = {"on_unused_input": "ignore", "name": "mine"}
    with pytest.raises(TypeError, match="allow_input_downcast=True"):
        train.make_train_function(*arguments, function_options=options)(data)
    options["allow_input_downcast"] = True
    for make in (train.make_train_function, train.make_train_function_theano):
        step = make(*arguments, function_options=options)
        assert step(data) == 5
        w.set_value(np.float32(0))
    assert options == {"on_unused_input": "ignore", "name": "mine", "allow_input_downcast": True}


@pytest.mark.usefixtures("in_python")
def test_givens_replace_inputs(two):
    x, raw, w = tt.dvector("x"), tt.ivector("raw"), compiler.shared(0.0, "w")
    for make in (train.make_train_function, train.make_train_function_theano):
        step = make(tt.sqr(x - w).mean(), [w], raw, None, updates.sgd, 0.5, givens={x: raw / 2.0})
        assert step([2, 6]) == 5
        assert w.get_value() == 2
        w.set_value(0.0)


def by_gradients(gradients, params):
    return [(one, one - 0.1 * gradient) for one, gradient in zip(params, gradients)]


def by_loss(loss, params):
    return [(one, one - 0.1 * sparse.dense_from_sparse(tt.grad(loss, one))) for one in params]


@pytest.mark.usefixtures("in_python")
@pytest.mark.skipif(sparse_grad is None, reason="PyTensor 3.3 has no sparse gradients")
@pytest.mark.parametrize("rule", [updates.sgd, updates.adam, updates.sgd_nonflat, by_gradients, by_loss])
def test_the_gradient_of_a_table_may_be_sparse(world_of, rule):
    world_of(3)
    random, found = np.random.RandomState(1), []
    indices, targets = random.randint(0, 6, 11).astype("int32"), random.randn(11)
    for make in (train.make_train_function_theano, train.make_train_function):
        index, target = tt.ivector("index"), tt.dvector("target")
        table = compiler.shared(np.arange(12.0).reshape(6, 2) / 7, "table")
        loss = tt.sqr(sparse_grad(table[index]).sum(axis=1) - target).mean()
        rate = {} if rule in (by_gradients, by_loss) else {"learning_rate": 0.1}
        step = make(loss, [table], index, target, rule, **rate)
        found.append([step(indices, targets), step(indices, targets, batch=[1, 7]), table.get_value()])
    for got, expected in zip(found[1], found[0]):
        np.testing.assert_allclose(got, expected)


@pytest.mark.usefixtures("in_python")
def test_an_input_of_the_loss_may_be_sparse(world_of):
    world_of(3)
    matrix, targets = scipy.sparse.random(7, 5, 0.5, "csr", random_state=1), np.arange(7.0)
    found = []
    for make in (train.make_train_function_theano, train.make_train_function):
        x, y, w = sparse.csr_matrix("x"), tt.dvector("y"), compiler.shared(np.ones((5, 2)), "w")
        loss = tt.sqr(sparse.structured_dot(x, w).sum(axis=1) - y).mean()
        step = make(loss, [w], x, y, by_gradients)
        found.append([step(matrix, targets), step(matrix[2:5], targets[2:5]), w.get_value()])
    for got, expected in zip(found[1], found[0]):
        np.testing.assert_allclose(got, expected)
