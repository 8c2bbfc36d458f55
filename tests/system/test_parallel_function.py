"""`parallel_function` against the ``theano.function`` that it replaces."""

import inspect
from collections import OrderedDict

import numpy as np
import pytest
import scipy.sparse
from steps import COLUMNS, Network, assert_same_results, assert_same_values, batches, digits

import synkhronos as synk
from compilers import (
    NAME, Apply, Op, RandomStreams, Streams, UnusedInputError, clone, compiler, run_examples, scan,
    sigmoid, softplus, sparse, sparse_grad, tt,
)  # fmt: skip
from synkhronos.extensions import train
from synkhronos.functions.comparing.watch import PATIENCE

pytestmark = pytest.mark.usefixtures("two", "in_python")


class Scattered:
    """A function of the compiler alone, called as that on all ranks."""

    def __init__(self, inputs, outputs=None, loss=None, params=None, gradients=None, **kwargs):
        updates = kwargs.pop("updates", None) or []
        pairs = updates.items() if hasattr(updates, "items") else updates
        kwargs.pop("loss_op", None), kwargs.pop("bcast_inputs", None)
        updates = [tuple(update[:2]) for update in pairs]
        self._keys = sorted(outputs) if isinstance(outputs, dict) else None  # PyTensor takes no dict
        if self._keys is not None:
            outputs = [outputs[key] for key in self._keys]
        self._function = compiler.function(inputs, outputs, updates=updates, **kwargs)

    def __call__(self, *args, batch=None, num_slices=1, **named):
        outputs = self._function(*args, **named)
        return outputs if self._keys is None else dict(zip(self._keys, outputs))


def compare(make_step, arguments=None, network_of=Network, **tolerances):
    """Compare steps of what `make_step` returns: a function, and the variables to compare as well."""
    arguments = arguments or (lambda x, y: (x, y))
    networks = [network_of(), network_of()]
    made = [make_step(net, make) for net, make in zip(networks, (train.parallel_function, Scattered))]
    (ours, own), (theirs, other) = [one if isinstance(one, tuple) else (one, []) for one in made]
    x, y = digits(networks[0].params[0].dtype)
    for step, rows in enumerate(batches()):
        given = arguments(x[rows], y[rows])
        result = ours(*given, num_slices=1 + step % 2)
        assert_same_results(result, theirs(*given), **tolerances)
        assert_same_values(networks[0].params + own, networks[1].params + other, **tolerances)
    return networks


def compared(make_step):
    """A test that compares the steps of what a function returns."""

    def test():
        compare(make_step)

    return test


def momentum(gradients, params, rate, make=list):
    updates = []
    for param, gradient in zip(params, gradients):
        velocity = compiler.shared(param.get_value() * 0)
        new = 0.9 * velocity - rate * gradient
        updates += [(velocity, new), (param, param + new)]
    return make(updates)


@pytest.mark.parametrize("make_updates", [list, dict, OrderedDict])
def test_the_gradients_of_an_output_are_found(make_updates):
    def make_step(network, make):
        gradients = tt.grad(network.loss, network.params)
        updates = momentum(gradients, network.params, 0.1, make_updates)
        return make([network.x, network.y], network.loss, updates=updates)

    compare(make_step)


@compared
def test_gradients_may_be_given(network, make):
    gradients = tt.grad(network.loss, network.params)
    gradients = [gradient * (1 + tt.sqr(one)) for one, gradient in zip(network.params, gradients)]
    updates = momentum(gradients, network.params, 0.1)
    given = {"gradients": gradients, "params": network.params}
    return make([network.x, network.y], network.accuracy, updates=updates, **given)


@compared
def test_what_is_computed_from_gradients_has_its_serial_value(network, make):
    """Gradients are clipped after they were averaged; outputs may be computed from them."""
    gradients = tt.grad(network.loss, network.params)
    norm = tt.sqrt(sum(tt.sqr(one).sum() for one in gradients))
    clipped = [one * tt.minimum(1, 0.2 / norm) for one in gradients]
    updates = momentum(clipped, network.params, 0.1)
    outputs = {"loss": network.loss, "norm": norm, "perplexity": tt.exp(network.loss)}
    return make([network.x, network.y], outputs, updates=updates)


@compared
def test_updates_may_use_the_loss(network, make):
    rate, least = network.shared(0.2, "rate"), network.shared(9.0, "least")
    gradients = tt.grad(network.loss, network.params)
    updates = momentum(gradients, network.params, rate * network.loss)
    updates += [(rate, tt.switch(network.loss < least, rate * 1.05, rate * 0.5))]
    updates += [(least, tt.minimum(least, network.loss))]
    return make([network.x, network.y], network.loss, updates=updates), [rate, least]


def test_scalars_and_broadcast_inputs_keep_their_places():
    def make_step(network, make):
        rate, mask = tt.dscalar("rate"), tt.dvector("mask")
        loss = clone(network.loss, {network.x: network.x * mask})
        updates = momentum(tt.grad(loss, network.params), network.params, rate)
        inputs = [rate, network.x, mask, network.y]
        return make(inputs, loss, updates=updates, bcast_inputs=[mask])

    mask = np.array([1.0, 0, 1, 1, 0.5])
    compare(make_step, lambda x, y: (0.1, x, mask, y))


@compared
def test_inputs_by_name_and_lists_as_data(network, make):
    rate, inputs = tt.dscalar("rate"), [network.x, network.y]
    updates = momentum(tt.grad(network.loss, network.params), network.params, rate)
    if make is Scattered:
        step = make([*inputs, rate], network.loss, updates=updates)
    else:
        step = make(inputs, network.loss, bcast_inputs=[rate], updates=updates)
    return lambda x, y, **options: step(x.tolist(), rate=0.1, y=y.tolist(), **options)


def test_givens_and_options_of_theano():
    def make_step(network, make):
        scaled, unused = tt.fmatrix("scaled"), tt.dvector("unused")
        updates = momentum(tt.grad(network.loss, network.params), network.params, 0.1)
        return make(
            [scaled, network.y, unused], network.loss, updates=updates,
            givens={network.x: tt.cast(scaled, "float64") / 2},
            allow_input_downcast=True, on_unused_input="ignore", name="train", mode="FAST_COMPILE",
        )  # fmt: skip

    compare(make_step, lambda x, y: (x, y.astype("int64"), x[:, 0]))
    network = Network()
    step = make_step(network, train.parallel_function)
    assert [function.name for function in step.functions] == ["train: gradient", "train: update"]
    unused = tt.dvector("unused")
    with pytest.raises(UnusedInputError):
        train.parallel_function([network.x, unused], network.x.sum())


@compared
def test_moving_averages_are_averaged_over_the_rows(network, make):
    """As of batch normalization: the average of the ranks' means is the mean over all rows."""
    mean = network.shared(np.zeros(4), "mean")
    last = network.shared(0.0, "last")
    updates = momentum(tt.grad(network.loss, network.params), network.params, 0.1)
    updates += [(mean, 0.9 * mean + 0.1 * network.hidden.mean(axis=0))]
    updates += [(last, tt.sqr(network.x).mean())]
    deviation = tt.sqr(network.hidden - mean).mean(axis=0)  # from the average before the step
    variance = network.shared(np.ones(4), "variance")
    updates += [(variance, 0.9 * variance + 0.1 * deviation)]
    step = make([network.x, network.y], network.loss, updates=updates)
    return step, [mean, last, variance]


def test_updates_of_all_rows_by_collectives_are_right():
    """As a queue of embeddings: each rank makes the same update."""
    x, w, start = tt.dmatrix("x"), compiler.shared(np.ones(3), "w"), np.zeros((5, 3))
    queue, expected = compiler.shared(start, "queue"), start
    step = train.parallel_function(
        [x],
        loss := tt.sqr((x * w).mean(axis=1) - tt.dot(x, queue.T).mean(axis=1)).mean(),
        updates=[
            (w, w - 0.1 * tt.grad(loss, w)),
            (queue, tt.concatenate([synk.ops.all_gather(x), queue])[:5]),
        ],
    )
    for rows in np.random.RandomState(0).normal(size=(2, 4, 3)):
        step(rows)
        expected = np.concatenate([rows, expected])[:5]
        np.testing.assert_array_equal(synk.gather(queue), [expected] * 2)
    with pytest.raises(ValueError, match="queue of rows, .* synk.ops.all_gather.rows.*bcast_inputs"):
        train.parallel_function([x], updates=[(queue, tt.concatenate([x, queue])[:5])])


@pytest.mark.filterwarnings("ignore:.*default_update:DeprecationWarning")
def test_default_updates_are_averaged_as_well():
    """As of Lasagne's layer: the update of a variable that shares its value with another one."""

    def make_step(network, make):
        mean = network.shared(np.zeros(4), "mean")
        running = mean.clone()  # has the value of `mean`
        running.default_update = 0.9 * running + 0.1 * network.hidden.mean(axis=0)
        calls = compiler.shared(0, "calls")
        calls.default_update = calls + 1
        loss = network.loss + 0 * running.sum() + 0 * calls
        updates = momentum(tt.grad(loss, network.params), network.params, 0.1)
        step = make([network.x, network.y], loss, updates=updates)
        if make is train.parallel_function:
            reads.append(synk.function([], [(mean.dimshuffle("x", 0), "gather"), mean]))
        else:
            reads.append(compiler.function([], mean))
        return step, [running, calls]

    reads = []
    compare(make_step)
    by_rank, mean = reads[0]()
    np.testing.assert_allclose(by_rank, [reads[1]()] * 2)
    assert mean.any()


@pytest.mark.filterwarnings("ignore:.*default_update:DeprecationWarning")
def test_two_layers_of_batch_normalization_are_warned_of_as_one_is():
    """As Lasagne 0.2 has them: a layer's output depends on its running mean, by zero times it."""
    x, w = tt.dmatrix("x"), compiler.shared(np.ones(3), "w")
    hidden = x * w
    for name in ("first", "second"):
        mean = compiler.shared(np.zeros(3), name)
        running = mean.clone()
        running.default_update = 0.5 * running + 0.5 * hidden.mean(axis=0)
        hidden = tt.tanh((hidden - hidden.mean(axis=0) - 0 * running) / hidden.std(axis=0))
    loss = (hidden * x).mean()
    step = train.parallel_function([x], loss, updates=[(w, w - 0.1 * tt.grad(loss, w))])
    with pytest.warns(synk.SynkhronosWarning, match="synkhronos.extensions.batch_norm"):
        step(np.random.RandomState(0).normal(size=(6, 3)))


@pytest.mark.filterwarnings("ignore:.*default_update:DeprecationWarning")
def test_default_updates_can_be_left_out():
    x, count = tt.dvector("x"), compiler.shared(0.0, "count")
    count.default_update = count + x.mean()
    for excluded, expected in ((True, 0), ([count], 0), (False, 2)):
        step = train.parallel_function([x], x.mean() + count, no_default_updates=excluded)
        step([1.0, 3.0])
        np.testing.assert_array_equal(synk.gather(count), [expected, expected])


@compared
def test_counts_are_added_and_extremes_are_kept(network, make):
    count = compiler.shared(np.int64(3), "count")
    total = network.shared(np.arange(5.0), "total")
    largest = network.shared(np.full(5, -9.0), "largest")
    least = compiler.shared(np.int32(9), "least")
    updates = momentum(tt.grad(network.loss, network.params), network.params, 0.1)
    updates += [
        (count, count + network.x.shape[0], "sum"),
        (total, total + network.x.sum(axis=0), "sum"),
        (largest, tt.maximum(largest, network.x.max(axis=0)), "max"),
        (least, tt.minimum(least, network.y.min()), "min"),
    ]
    step = make([network.x, network.y], network.loss, updates=updates)
    return step, [count, total, largest, least]


def test_a_rank_may_keep_its_own_value():
    x, seen = tt.dvector("x"), compiler.shared(np.zeros(2), "seen")
    step = train.parallel_function([x], updates=[(seen, x[:2], None)])
    step(np.arange(4.0))
    np.testing.assert_array_equal(synk.gather(seen), [[0, 1], [2, 3]])


@compared
def test_any_expression_can_be_reduced(network, make):
    count = train.reduced(network.x.shape[0], "sum")
    scale = train.reduced(abs(network.x).max(axis=0), "max", shape=(COLUMNS,))
    gradients = tt.grad(network.losses.sum(), network.params)
    updates = momentum([one / count for one in gradients], network.params, 0.1)
    known = network.shared(np.zeros(COLUMNS), "known")
    updates += [(known, known + scale)]
    step = make(
        [network.x, network.y], [count, 2 * scale], updates=updates, loss=network.losses.sum(),
        loss_op="sum",
    )  # fmt: skip
    return step, [known]


@compared
def test_several_losses_in_one_function(network, make):
    others = Network(seed=9)
    loss = tt.sqr(clone(others.hidden, {others.x: network.x})).mean()
    updates = momentum(tt.grad(network.loss, network.params), network.params, 0.1)
    updates += momentum(tt.grad(loss, others.params[:2]), others.params[:2], 0.1)
    losses = [network.loss, loss]
    step = make([network.x, network.y], network.loss, updates=updates, loss=losses)
    return step, others.params[:2]


class Embeddings:
    """A table of which each row of the data uses some rows, with a sparse gradient."""

    def __init__(self, is_mean=True, penalty=0):
        self.index, self.target = tt.ivector("index"), tt.dvector("target")
        self.table = compiler.shared(np.arange(12.0).reshape(6, 2) / 7, "table")
        rows = sparse_grad(self.table[self.index])
        losses = tt.sqr(rows.sum(axis=1) - self.target)
        self.loss = losses.mean() if is_mean else losses.sum()
        if penalty:
            self.loss += penalty * tt.sqr(self.table).sum()
        self.gradient = tt.grad(self.loss, self.table)

    def step(self, make, new, **kwargs):
        updates = [(self.table, new)]
        return self, make([self.index, self.target], self.loss, updates=updates, **kwargs)


def dense(make):
    net = Embeddings()
    return net.step(make, net.table - 0.1 * sparse.dense_from_sparse(net.gradient))


def added_as_sparse(make):
    net = Embeddings()
    return net.step(make, sparse.add(net.table, net.gradient))


def of_a_loss_with_a_penalty(make):
    net = Embeddings(penalty=0.3)
    return net.step(make, net.table - 0.1 * net.gradient)


def of_a_sum_with_a_penalty(make):
    net = Embeddings(is_mean=False, penalty=0.3)
    return net.step(make, net.table - 0.02 * net.gradient, loss=net.loss, loss_op="sum")


def marked(make):
    net = Embeddings()
    [gradient] = train.gradients(net.loss, [net.table])
    return net.step(make, net.table - 0.1 * gradient)


def marked_as_given(make):
    net = Embeddings()
    [gradient] = train.gradients([net.gradient], [net.table])
    return net.step(make, net.table - 0.1 * gradient)


def given(make):
    net = Embeddings()
    new = net.table - 0.1 * sparse.dense_from_sparse(net.gradient)
    return net.step(make, new, gradients=[net.gradient], params=[net.table])


@pytest.mark.parametrize("make_step", [dense, added_as_sparse, of_a_loss_with_a_penalty,
                                       of_a_sum_with_a_penalty, marked, marked_as_given,
                                       given])  # fmt: skip
@pytest.mark.skipif(sparse_grad is None, reason="PyTensor 3.3 has no sparse gradients")
def test_a_sparse_gradient_is_reduced_as_a_dense_one(make_step):
    random = np.random.RandomState(1)
    indices, targets = random.randint(0, 6, 11).astype("int32"), random.randn(11)
    found = []
    for make in (Scattered, train.parallel_function):
        net, step = make_step(make)
        values = [step(indices[rows], targets[rows]) for rows in (slice(0, 11), slice(3, 8), slice(1))]
        found.append([*values, net.table.get_value()])
    assert synk.in_sync(net.table)
    for got, expected in zip(found[1], found[0]):
        np.testing.assert_allclose(got, expected)


def test_an_index_into_givens_divides_the_rows_that_it_selects():
    """As in Theano's tutorials; the last minibatch has one row, and one update uses the index."""
    networks, steps = [Network(), Network()], []
    x, y = digits()
    index, size = tt.lscalar("index"), 5
    rows = slice(index * size, (index + 1) * size)
    for network, make in zip(networks, (train.parallel_function, compiler.function)):
        latest = compiler.shared(np.int64(-1), "latest")
        loss = network.loss + network.penalty
        updates = momentum(tt.grad(loss, network.params), network.params, 0.1 / (1 + index))
        givens = {network.x: compiler.shared(x[:11])[rows]}
        givens[network.y] = tt.cast(compiler.shared(y[:11] * 1.0)[rows], network.y.dtype)
        outputs = [loss, network.accuracy, index + 1]
        steps.append(make([index], outputs, updates=[*updates, (latest, index)], givens=givens))
        network.params.append(latest)
    for step in range(6):
        assert_same_results(steps[0](step % 3), steps[1](step % 3))
        assert_same_values(networks[0].params, networks[1].params)
    n_rows = train.parallel_function([index], (network.x.shape[0], None), givens=givens)
    assert [n_rows(0), n_rows(2)] == [3, 1]


def test_an_index_in_bcast_inputs_selects_of_each_rank_its_own_rows():
    x, index, stored = tt.dvector("x"), tt.lscalar("index"), compiler.shared(np.zeros(1), "stored")
    with pytest.raises(ValueError, match="no input is divided among the ranks"):
        train.parallel_function([], x.mean(), bcast_inputs=[index], givens={x: stored[index:]})
    function = train.parallel_function(
        [], x.mean(), bcast_inputs=[index], givens={x: stored[index:]}, sliceable_shareds=[stored]
    )
    synk.scatter(stored, np.arange(4.0))
    assert function(1) == 2


@compared
def test_a_sum_with_a_penalty(network, make):
    loss = network.losses.sum() + network.penalty
    updates = momentum(tt.grad(loss, network.params), network.params, 0.01)
    outputs = [loss, loss / 7, network.accuracy]
    return make([network.x, network.y], outputs, updates=updates, loss=loss, loss_op="sum")


@compared
def test_a_parameter_that_is_only_in_a_penalty(network, make):
    extra = network.shared(np.arange(3.0), "extra")
    network.params.append(extra)
    loss = network.loss + tt.sqr(extra).sum()
    updates = momentum(tt.grad(loss, network.params), network.params, 0.1)
    return make([network.x, network.y], loss, updates=updates)


@pytest.mark.skipif(NAME == "pytensor", reason="loops there have no updates of streams")
@pytest.mark.parametrize("are_named", [True, False])
def test_gradients_with_constants_and_the_updates_of_a_loop(are_named):
    """As in contrastive divergence; here with noise that is the same on every rank and in the end.

    Updates that are means over the rows can be averaged, too, if the gradients are not named.
    """
    network, serial = Network(), Network()

    def make_step(net, make):
        streams = RandomStreams(3)
        w, b = net.params[:2]

        def sample(state):
            hidden = sigmoid(tt.dot(state, w) + b) > 0.5 + 0 * streams.uniform(size=(1,))[0]
            return tt.tanh(tt.dot(hidden, w.T))

        states, of_streams = compiler.scan(sample, outputs_info=net.x, n_steps=2)
        assert of_streams
        end = states[-1]
        loss = softplus(tt.dot(net.x, w) + b).mean() - softplus(tt.dot(end, w) + b).mean()
        slopes = tt.grad(loss, net.params[:2], consider_constant=[end])
        updates = momentum(slopes, net.params[:2], 0.1) + list(of_streams.items())
        if make is compiler.function or not are_named:
            return make([net.x], loss, updates=updates)
        return make([net.x], loss, updates=updates, gradients=slopes, params=net.params[:2])

    ours, theirs = make_step(network, train.parallel_function), make_step(serial, compiler.function)
    for rows in batches(6):
        assert_same_results(ours(digits()[0][rows]), theirs(digits()[0][rows]))
    assert_same_values(network.params[:2], serial.params[:2])


@compared
def test_a_loop(network, make):
    """The gradient of a recurrent network is found as well."""
    recurrent = network.shared(np.eye(4) / 2, "recurrent")
    states = scan(
        lambda state, inputs, weights: tt.tanh(tt.dot(state, weights) + inputs),
        outputs_info=tt.zeros_like(network.hidden), non_sequences=[network.hidden, recurrent],
        n_steps=3,
    )  # fmt: skip
    loss = tt.sqr(states[-1] - tt.extra_ops.to_one_hot(network.y, 4)).mean()
    del network.params[2:]
    params = [recurrent, *network.params]
    step = make([network.x, network.y], loss, updates=momentum(tt.grad(loss, params), params, 0.1))
    return step, [recurrent]


@pytest.mark.skipif(NAME == "pytensor", reason="states of its streams cannot be broadcast")
@compared
def test_random_numbers_in_the_updates_are_the_same_on_every_rank(network, make):
    """Noise that is added to the parameters, as in Langevin dynamics."""
    noise = Streams(11)
    last = network.shared(np.zeros(3), "last")
    updates = [
        (one, one - 0.1 * slope + 0.01 * noise.normal(size=one.get_value().shape))
        for one, slope in zip(network.params, tt.grad(network.loss, network.params))
    ]
    updates += [(last, noise.uniform(size=(3,)))]
    return make([network.x, network.y], network.loss, updates=updates), [last]


def test_a_chain_of_states_that_each_rank_keeps():
    """As in persistent contrastive divergence: each rank has chains of its own."""
    network, streams = Network(), Streams(12)
    chain = network.shared(np.zeros((6, COLUMNS)), "chain")
    new = tt.tanh(chain + streams.normal(size=(6, COLUMNS)))
    loss = tt.sqr(network.hidden).mean() - tt.dot(new, network.params[0]).mean()
    del network.params[2:]
    updates = momentum(tt.grad(loss, network.params), network.params, 0.1)
    step = train.parallel_function([network.x], loss, updates=[*updates, (chain, new, None)])
    for rows in batches(5):
        step(digits()[0][rows])
    first, second = synk.gather(chain)
    assert (first != second).any()
    for param in network.params:
        first, second = synk.gather(param)
        np.testing.assert_array_equal(first, second)
    message = "new value of chain depends on random numbers.*\\(shared, new, None\\)"
    with pytest.raises(ValueError, match=message):
        train.parallel_function([network.x], loss, updates=[*updates, (chain, new)])


def test_wrapped_inputs_and_outputs():
    network = Network()
    x_by_columns, rate = tt.dmatrix("columns"), tt.dscalar("rate")
    loss = clone(network.loss, {network.x: x_by_columns.T})
    updates = momentum(tt.grad(loss, network.params), network.params, rate)
    step = train.parallel_function(
        [synk.In(x_by_columns, axis=1), compiler.In(network.y), synk.In(rate, value=0.1)],
        [compiler.Out(loss), synk.Out(network.y, "gather")],
        updates=updates,
    )
    serial = Network()
    updates = momentum(tt.grad(serial.loss, serial.params), serial.params, 0.1)
    other = compiler.function([serial.x, serial.y], serial.loss, updates=updates)
    x, y = digits()
    for rows in batches(6):
        loss, labels = step(x[rows].T, y[rows])
        assert_same_results(loss, other(x[rows], y[rows]))
        np.testing.assert_array_equal(labels, y[rows])
    assert_same_values(network.params, serial.params)


def test_sliceable_shared_variables_hold_rows():
    network, serial = Network(), Network()
    x, y = digits()
    shareds = [compiler.shared(x, "x_rows"), compiler.shared(y, "y_rows")]
    updates = momentum(tt.grad(network.loss, network.params), network.params, 0.1)
    step = train.parallel_function(
        [], network.loss, updates=updates, sliceable_shareds=shareds,
        givens=dict(zip([network.x, network.y], shareds)),
    )  # fmt: skip
    synk.scatter(shareds, [x, y])
    updates = momentum(tt.grad(serial.loss, serial.params), serial.params, 0.1)
    other = compiler.function([serial.x, serial.y], serial.loss, updates=updates)
    for _ in range(PATIENCE + 3):  # until the replicas are not compared any more
        assert_same_results(step(), other(x, y))
    half = (len(x) + 1) // 2
    rows = np.r_[0:5, half : half + 5]
    assert_same_results(step(batch_s=slice(5)), other(x[rows], y[rows]))
    assert_same_values(network.params, serial.params)


def test_a_function_without_updates_is_a_function():
    network = Network()
    evaluate = train.parallel_function([network.x, network.y], [network.loss, network.accuracy])
    serial = compiler.function([network.x, network.y], [network.loss, network.accuracy])
    assert_same_results(evaluate(*digits()), serial(*digits()))
    rows = [3, 1, -1]
    x, y = digits()
    assert_same_results(evaluate(synk.data(x), synk.data(y), batch=rows), serial(x[rows], y[rows]))


def test_outputs_that_do_not_depend_on_the_rows_may_have_any_dtype():
    x, count = tt.dvector("x"), compiler.shared(5, "count")
    step = train.parallel_function([x], [x.mean(), count], updates=[(count, count + 1)])
    assert_same_results(step([1.0, 2.0]), [np.array(1.5), np.array(5)])
    assert synk.gather(count).tolist() == [6, 6]


def zeros_of(params):
    return [compiler.shared(one.get_value() * 0) for one in params]


def decayed(averages, values, rate=0.95):
    return [(one, rate * one + (1 - rate) * value) for one, value in zip(averages, values)]


def pair_of_rmsprop(gradients, params, rate):
    stored, means, squares, moves = (zeros_of(params) for _ in range(4))
    new_moves = [
        0.9 * move - 1e-3 * gradient / tt.sqrt(square - mean**2 + 1e-4)
        for move, gradient, mean, square in zip(moves, stored, means, squares)
    ]
    first = list(zip(stored, gradients))
    first += decayed(means, gradients) + decayed(squares, [tt.sqr(one) for one in gradients])
    second = list(zip(moves, new_moves))
    second += [(one, one + new) for one, new in zip(params, new_moves)]
    return first, second, stored + means + squares + moves


@compared
def test_one_function_stores_gradients_and_another_one_applies_them(network, make):
    """The parameters are not in the updates of the first function."""
    rate = tt.dscalar("rate")
    gradients = tt.grad(network.loss, network.params)
    first, second, between = pair_of_rmsprop(gradients, network.params, rate)
    store = make([network.x, network.y], network.loss, updates=first)
    apply = make([rate], [], updates=second, on_unused_input="ignore")

    def step(x, y, num_slices=1):
        value = store(x, y, num_slices=num_slices)
        assert apply(0.01) == []
        return value

    return step, between


@pytest.mark.parametrize("given", ["loss", "gradients", "nothing"])
def test_stored_gradients_of_some_of_the_parameters(given):
    """The loss is no output, or it is one of several; the other parameters have no gradients."""

    def make_step(network, make):
        params = network.params[1:3]
        gradients = tt.grad(network.loss, params)
        squares = zeros_of(params)
        known = {
            "loss": {"loss": network.loss},
            "gradients": {"gradients": gradients, "params": params},
            "nothing": {"outputs": [network.accuracy, network.loss]},
        }
        updates = decayed(squares, [one**2 for one in gradients])
        return make([network.x, network.y], updates=updates, **known[given]), squares

    compare(make_step)


def test_a_variable_without_a_gradient_does_not_hide_the_gradients_of_others():
    """The loss depends on one variable through an operation that refuses to be differentiated."""

    class NotDifferentiable(Op):
        __props__ = ()

        def make_node(self, x):
            return Apply(self, [x], [x.type()])

        def perform(self, node, inputs, outputs):
            outputs[0][0] = inputs[0] * 2

        def grad(self, inputs, gradients):
            raise NotImplementedError("no gradient")

        def pullback(self, inputs, outputs, gradients):
            raise NotImplementedError("no gradient")

    def make_step(network, make):
        scale = network.shared(0.5, "scale")
        loss = network.loss * NotDifferentiable()(scale)
        gradients = tt.grad(loss, network.params)
        squares = zeros_of(network.params)
        return make([network.x, network.y], loss, updates=decayed(squares, [
            one**2 for one in gradients])), squares  # fmt: skip

    compare(make_step)


def test_a_subset_of_the_outputs_the_maker_and_the_profile():
    for outputs, wanted, subset in (
        (lambda net: [net.loss, net.accuracy], [1], list),
        (lambda net: net.loss, [0], list),
        (lambda net: {"loss": net.loss, "right": net.accuracy}, ["right"], dict),
    ):
        network, rows = Network(), digits("float64")
        updates = momentum(tt.grad(network.loss, network.params), network.params, 0.1)
        inputs, before = [network.x, network.y], network.params[0].get_value()
        step = train.parallel_function(inputs, outputs(network), updates=updates, profile=True)
        with pytest.raises(IndexError, match="output_subset: expected"):
            step(*rows, output_subset=["none" if subset is dict else 2])
        np.testing.assert_array_equal(network.params[0].get_value(), before)
        chosen = step(*rows, output_subset=wanted)
        assert type(chosen) is subset and len(chosen) == 1
        assert not np.array_equal(network.params[0].get_value(), before)
        assert step.maker.fgraph is step.functions[0].maker.fgraph
        assert step.profile.fct_callcount >= 1


N = compiler.shared(0, "n")
F = compiler.shared(0.0, "f")
ROWS_KEPT = compiler.shared(np.zeros((3, COLUMNS)), "rows")
SPARSE = compiler.shared(scipy.sparse.csr_matrix(np.zeros((3, COLUMNS))), "sparse")


def slope(net):
    return tt.grad(net.loss, net.params[0])


def another_slope(net):
    return tt.grad(tt.sqrt(tt.sqr(net.hidden).mean()), net.params[0])


def stepped(net, slope):
    return [(net.params[0], net.params[0] - 0.1 * slope)]


def adagrad(slope, param):
    total = compiler.shared(param.get_value() * 0, "total")
    new = total + slope**2
    return [(total, new), (param, param - slope / tt.sqrt(new + 1e-3))]


REFUSED = {
    "an integer": (
        lambda net: [(N, N + net.x.shape[0])],
        TypeError, "new value of n, int64, depends on input 'x'.*'sum'\\) adds up the changes",
    ),
    "a count": (
        lambda net: [(F, F + tt.cast(net.x.shape[0], "float64"))],
        ValueError, "new value of f depends on input 'x' and is a sum over the rows",
    ),
    "a sum": (
        lambda net: [(F, F + tt.tanh(tt.dot(net.x, net.params[0])).sum() / 100)],
        ValueError, "new value of f depends on input 'x' and is a sum over the rows",
    ),
    "rows": (
        lambda net: [(ROWS_KEPT, 2 * net.x)],
        ValueError, "new value of rows depends on input 'x' and has an item for each row",
    ),
    "an extreme": (
        lambda net: [(F, tt.maximum(F, net.x.mean()))],
        ValueError, "new value of f depends on input 'x', but no gradient of the loss was found",
    ),
    "another gradient": (
        lambda net: stepped(net, another_slope(net)),
        ValueError, "new value of w1 depends on input 'x', but no gradient.*train.gradients",
    ),
    "the state of another rule": (
        lambda net: adagrad(another_slope(net), net.params[0]),
        ValueError, "no gradient of the loss was found in it",
    ),
    "two gradients": (
        lambda net: stepped(net, slope(net) + another_slope(net)),
        ValueError, "new value of w1 uses a gradient or the loss, and besides depends on input 'x'",
    ),
    "the number of rows": (
        lambda net: stepped(net, slope(net) / net.x.shape[0]),
        ValueError, "Mark any other expression with train.reduced\\(\\)",
    ),
    "RandomStreams": (
        lambda net: stepped(net, slope(net) + RandomStreams(1).normal(size=net.params[0].shape)),
        TypeError, "has to draw alike. (RandomStreams cannot|Give .shared, new, None)",
    ),
    "no tensor": (
        lambda net: [(SPARSE, sparse.csr_from_dense(net.x))],
        TypeError, "new value of .*parse.*only tensors can be combined",
    ),
    "a sum of bool": (
        lambda net: [(compiler.shared(np.array(False), "b"), tt.any(net.x > 0), "sum")],
        TypeError, "changes of b cannot be added, as it is bool; use 'max'",
    ),
    "an unknown operation": (
        lambda net: [(F, net.x.mean(), "gather")],
        ValueError, "updates\\[0\\]: op of f: expected one of avg, sum, min, max, got 'gather'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_an_update_that_cannot_be_averaged_is_refused(name):
    updates, error, message = REFUSED[name]
    network = Network()
    with pytest.raises(error, match=message):
        train.parallel_function([network.x, network.y], network.loss, updates=updates(network))


def test_an_output_that_cannot_be_averaged_is_refused():
    network = Network()
    one = slope(network)
    mixed = tt.sqr(one).sum() * network.hidden.mean()
    inputs, updates = [network.x, network.y], stepped(network, one)
    with pytest.raises(ValueError, match="outputs\\[1\\]: it uses a gradient, and besides depends on"):
        train.parallel_function(inputs, [network.loss, mixed], updates=updates)
    train.parallel_function(inputs, [network.loss, (mixed, "avg")], updates=updates)
    train.parallel_function(inputs, [network.loss, network.loss * network.hidden.mean()])


def test_a_step_without_rows_is_refused():
    index, w = tt.lscalar("index"), compiler.shared(1.0, "w")
    with pytest.raises(ValueError, match="no input is divided among the ranks"):
        train.parallel_function([index], w * index, updates=[(w, w + index)])
    y, stored = tt.dscalar("y"), compiler.shared(np.arange(3.0))
    with pytest.raises(ValueError, match="no input is divided among the ranks"):
        train.parallel_function([index], y, givens={y: stored[index]})
    with pytest.raises(ValueError, match="no input is divided among the ranks"):
        train.parallel_function([], w)


def test_wrong_arguments_are_refused():
    network = Network()
    inputs, loss, updates = [network.x, network.y], network.loss, stepped(network, slope(network))
    for arguments, keywords, error, message in (
        ((network.x, loss), {}, TypeError, "inputs: expected a list of variables"),
        (([3], loss), {}, TypeError, "inputs: expected variables, got 3"),
        ((inputs, [3]), {}, TypeError, "outputs\\[0\\]: expected a variable or"),
        ((inputs, (loss, "avg", 1)), {}, ValueError, "give several outputs as a list"),
        ((inputs, loss), {"updates": 3}, TypeError, "updates: expected a dict, or a list"),
        ((inputs, loss), {"givens": [3]}, TypeError, "givens\\[0\\]: expected \\(variable, value\\)"),
        ((inputs, loss), {"givens": network.x}, TypeError, "givens: expected a dict"),
        ((inputs, loss), {"loss": network.losses}, ValueError, "loss: expected a scalar"),
        ((inputs, loss), {"loss": 3.0}, TypeError, "loss: expected a scalar expression"),
        ((inputs, loss), {"params": network.params[0]}, TypeError, "put a single parameter in a list"),
        ((inputs, loss), {"gradients": [slope(network)]}, ValueError, "as many params"),
        ((inputs, loss), {"gradients": [1], "params": [network.params[0]]}, TypeError, "gradients\\["),
        ((inputs, None), {"loss_op": "sum"}, ValueError, "name it with loss="),
        ((inputs, loss), {"updates": updates * 2}, ValueError, "w1 is updated more than once"),
        ((inputs, loss), {"bcast_inputs": network.x}, TypeError, "bcast_inputs: expected a list"),
    ):
        with pytest.raises(error, match=message):
            train.parallel_function(*arguments, **keywords)
    for arguments, error, message in (
        ((3,), TypeError, "numbers are the same on every rank"),
        ((network.x.sum(), "mean"), ValueError, "expected one of avg, sum, min, max"),
        ((network.x.sum(), None), TypeError, "expected one of avg, sum, min, max"),
        ((network.x.shape[0],), TypeError, "int64 cannot be averaged"),
        ((network.x.sum(axis=0),), ValueError, "expected the extents of 1 dimensions"),
    ):
        with pytest.raises(error, match=message):
            train.reduced(*arguments)


def test_wrong_data_are_refused():
    network = Network()
    unnamed = tt.dvector()
    step = train.parallel_function([unnamed, network.x], (network.x * unnamed[0]).mean())
    rows, x = np.ones(4), np.ones((4, COLUMNS))
    for args, named, message in (
        ((rows, x, x), {}, "expected at most 2 arguments by position, got 3"),
        ((rows,), {"z": x}, "no input is named 'z'; inputs: None, x"),
        ((rows, x), {"x": x}, "data for the input x is given twice"),
        ((rows,), {}, "no value for input 'x'"),
        ((rows, x[0]), {}, "expected 2 dimensions"),
    ):
        with pytest.raises(TypeError, match=message):
            step(*args, **named)
    assert step(rows, x=x) == 1


@pytest.mark.parametrize("name", ["parallel_function", "make_train_function",
                                  "make_train_function_theano", "gradients", "reduced"])  # fmt: skip
def test_examples_print_what_they_show(name):
    synk.close()
    function = getattr(train, name)
    assert run_examples(inspect.getdoc(function), name)
