"""Graphs in which a script gives the number of rows as a constant, on ranks that have a part of them."""

import numpy as np
import pytest

import synkhronos as synk
from compilers import NAME, Streams, compiler, default_mode, scan, shared, softmax, tt
from synkhronos.extensions import train

pytestmark = pytest.mark.usefixtures("in_threads")
ROWS = 12
RNG = np.random.RandomState(3)
IMAGES = RNG.randn(ROWS, 36)
LABELS = RNG.randint(0, 3, ROWS).astype("int32")
theano_only = pytest.mark.skipif(NAME == "pytensor", reason="about operations of Theano")


@pytest.fixture(autouse=True)
def with_convolutions_in_python():
    mode = "FAST_COMPILE"
    if NAME == "theano":  # the others need C code
        mode = compiler.compile.get_mode(mode).excluding("conv_gemm")
    with default_mode(mode):
        yield


@pytest.fixture(params=[2, 3])
def ranks(request, world_of):
    world_of(request.param)


class Net:
    """The inputs and parameters of a network."""

    def __init__(self):
        rng = np.random.RandomState(4)
        self.x, self.y = tt.dmatrix("x"), tt.ivector("y")
        self.params = [
            compiler.shared(rng.randn(*shape) / 3, name)
            for name, shape in (("f", (2, 1, 3, 3)), ("w", (36, 5)), ("u", (5, 5)), ("v", (5, 3)))
        ]
        self.filters, self.w, self.u, self.v = self.params

    def loss_of(self, hidden):
        """Return a loss of five hidden units."""
        rows = softmax(tt.dot(hidden, self.v))
        return -tt.log(rows)[tt.arange(self.y.shape[0]), self.y].mean()

    def convolved(self, number):
        images = self.x.reshape((self.x.shape[0], 1, 6, 6))
        shape = (number, 1, 6, 6)
        return tt.nnet.conv2d(images, self.filters, input_shape=shape, filter_shape=(2, 1, 3, 3))


def lenet(net):
    images = net.x.reshape((ROWS, 1, 6, 6))
    maps = tt.nnet.conv2d(images, net.filters, input_shape=(ROWS, 1, 6, 6), filter_shape=(2, 1, 3, 3))
    pooled = tt.signal.pool.pool_2d(tt.tanh(maps), (2, 2), ignore_border=True)
    return net.loss_of(tt.tanh(tt.dot(pooled.flatten(2), net.w[:8])))


def regrouped_elements(net):
    """The number of columns shows that the rows are kept."""
    cubes = net.x.reshape((ROWS, 4, 9))
    return tt.sqr(tt.tanh(cubes).sum(axis=2)).sum(axis=1).mean()


def regrouped_twice(net):
    cubes = tt.tanh(net.x.reshape((ROWS, 4, 9)))
    return net.loss_of(tt.dot(tt.tanh(cubes.reshape((ROWS, -1))), net.w))


def regrouped_beside_rows(net):
    """The labels show that the rows are kept."""
    flat = tt.tanh(net.x[:, :, None]).reshape((ROWS, -1))
    return tt.sqr(flat - net.y[:, None]).mean()


def zeros(net):
    return net.loss_of(tt.tanh(tt.dot(net.x, net.w) + tt.zeros((ROWS, 5))))


def first_state(net):
    states = scan(
        lambda inner, state, u: tt.tanh(inner + tt.dot(state, u)),
        sequences=[tt.dot(net.x, net.w).dimshuffle("x", 0, 1) * tt.ones((3, 1, 1))],
        outputs_info=[tt.alloc(np.float64(0), ROWS, 5)], non_sequences=[net.u],
    )  # fmt: skip
    return net.loss_of(states[-1])


def counted(net):
    rows = softmax(tt.dot(tt.tanh(tt.dot(net.x, net.w)), net.v))
    return -tt.log(rows)[tt.arange(ROWS), net.y].mean()


def masked(net):
    """A mask of fixed size, which has no effect here."""
    mask = Streams(3).uniform(size=(ROWS, 5)) >= 0
    return net.loss_of(tt.tanh(tt.dot(net.x, net.w)) * mask)


#: Losses of a convolution with a given number of images
CONVOLVED = {
    "LeNet": lenet,
    "mean of squares": lambda net: tt.sqr(net.convolved(ROWS)).mean(),
    "global mean": lambda net: tt.sqr(net.convolved(ROWS).mean(axis=(2, 3))).sum(axis=1).mean(),
    "global largest": lambda net: tt.tanh(tt.max(net.convolved(ROWS), (2, 3))).sum(axis=1).mean(),
    "flattened": lambda net: tt.sqr(net.convolved(ROWS).flatten(2)).sum(axis=1).mean(),
    "over the shape": lambda net: tt.tanh(net.convolved(ROWS)).sum() / net.convolved(ROWS).shape[0],
    "regrouped": lambda net: tt.sqr(net.convolved(ROWS).reshape((ROWS, -1))).sum(axis=1).mean(),
}
#: Losses in which the operations show which numbers are those of the rows.
LOSSES = {
    **(CONVOLVED if NAME == "theano" else {}),
    "regrouped elements": regrouped_elements, "regrouped twice": regrouped_twice,
    "regrouped beside rows": regrouped_beside_rows, "zeros": zeros, "first state": first_state,
    "counted": counted, "masked": masked,
}  # fmt: skip
#: With PyTensor, the numbers are in the types of what follows, so that calls fail.
IN_TYPES = {"regrouped twice", "zeros", "first state", "masked"}


def descent(loss, params):
    return [
        (one, one - 0.3 * slope)
        for one, slope in zip(params, compiler.grad(loss, params, disconnected_inputs="ignore"))
    ]


def build(name, make):
    net = Net()
    loss, options = LOSSES[name](net), {"on_unused_input": "ignore"}
    return net, make([net.x, net.y], loss, updates=descent(loss, net.params), **options)


def assert_same_params(ours, theirs):
    for one, other in zip(ours.params, theirs.params):
        for replica in synk.gather(one):
            np.testing.assert_allclose(replica, other.get_value(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_steps_equal_the_serial_ones(ranks, name):
    ours, step = build(name, train.parallel_function)
    theirs, serial = build(name, compiler.function)
    if name in IN_TYPES and NAME == "pytensor":
        with pytest.raises(Exception, match=f"of the {ROWS} rows of the call; the graph fixes"):
            step(IMAGES, LABELS)
        return
    for num_slices in (1, 3, 1):
        value = step(IMAGES, LABELS, num_slices=num_slices)
        np.testing.assert_allclose(value, serial(IMAGES, LABELS), rtol=1e-9)
        assert_same_params(ours, theirs)


@theano_only
def test_rows_that_an_index_selects(ranks):
    """As in Theano's tutorials: the size of a minibatch is in the givens and in the graph."""
    nets, steps, index = [Net(), Net()], [], tt.lscalar("index")
    data = np.concatenate([IMAGES, -IMAGES]), np.concatenate([LABELS, LABELS])
    for net, make in zip(nets, (train.parallel_function, compiler.function)):
        loss = lenet(net)
        rows = slice(index * ROWS, (index + 1) * ROWS)
        givens = {one: compiler.shared(data)[rows] for one, data in zip([net.x, net.y], data)}
        steps.append(make([index], loss, updates=descent(loss, net.params), givens=givens))
    for position in (1, 0, 1):
        np.testing.assert_allclose(steps[0](position), steps[1](position), rtol=1e-9)
        assert_same_params(*nets)


def test_default_updates_of_what_is_replaced(two):
    """The stream continues by what was drawn, and an average is that of the rows."""
    x, streams = tt.dmatrix("x"), Streams(5)
    noise = streams.uniform(size=(ROWS, 36))
    drawn = synk.function([x], (x * 0 + noise, "gather"))
    first, second = drawn(IMAGES), drawn(IMAGES)
    assert first.shape == second.shape == (ROWS, 36)
    assert len({*first.ravel(), *second.ravel()}) == 2 * ROWS * 36


def test_other_extents_of_the_same_number_are_kept(ranks):
    """Of parameters, of columns, and of groups."""
    x, w = tt.dmatrix("x"), shared(RNG.randn(ROWS, ROWS), "w")
    square = w + tt.zeros((ROWS, ROWS)) + tt.alloc(1.0, ROWS, ROWS).T
    outputs = [
        tt.dot(x[:, :ROWS], square).mean(), (x.reshape((-1, ROWS)), "gather"),
        x.reshape((x.shape[0], ROWS, 3)).mean(axis=0), (w + tt.arange(ROWS), None),
        (w.reshape((ROWS, -1, 2)), None), tt.dot(x, tt.zeros((36, ROWS))).mean(),
    ]  # fmt: skip
    plain = [one[0] if isinstance(one, tuple) else one for one in outputs]
    function, serial = synk.function([x], outputs), compiler.function([x], plain)
    for rows in (IMAGES, IMAGES[:7]):
        for ours, theirs in zip(function(rows), serial(rows)):
            np.testing.assert_allclose(ours, theirs, rtol=1e-9)


@pytest.mark.filterwarnings("ignore:.*differs from one process")
def test_a_regrouping_of_rows_that_nothing_explains_is_an_error_for_this_number(ranks):
    x = tt.dmatrix("x")
    function = synk.function([x], tt.sqr(x.reshape((ROWS, -1)).sum(axis=1)).mean())
    message = (
        f"this rank computes . of the {ROWS} rows of the call; the graph fixes {ROWS}, by Reshape.*"
        "x.shape\\[0\\], in its place, or flatten\\(2\\)"
    )
    with pytest.raises(ValueError, match=message):
        function(IMAGES)
    with pytest.raises(ValueError, match=message):
        function(synk.data(np.concatenate([IMAGES, IMAGES])), batch=range(ROWS))
    if synk.size() == 2:  # one process would sum groups of two rows
        function(np.concatenate([IMAGES, IMAGES]))


def test_a_regrouping_is_an_error_in_slices(world_of):
    world_of(1)
    x = tt.dmatrix("x")
    function = synk.function([x], tt.sqr(x.reshape((ROWS, -1)).sum(axis=1)).mean())
    function(IMAGES)
    message = "computes 6 of the 12 rows of the call; the graph fixes 12"
    with pytest.warns(synk.SynkhronosWarning, match="in 2 slices, the call differs"):  # on fewer rows
        with pytest.raises(ValueError, match=message):
            function(IMAGES, num_slices=2)


@pytest.mark.parametrize("steps", [2, ROWS - 1])
def test_a_loop_over_some_of_the_rows_only_is_an_error(two, steps):
    x = tt.dmatrix("x")
    doubled = scan(lambda row: 2 * row, sequences=[x], n_steps=steps)
    function = synk.function([x], (doubled, "gather"))
    with pytest.raises(ValueError, match=f"n_steps={steps} uses the first .* rows by batch={steps}"):
        function(IMAGES)


ERRORS = {
    "the steps of a loop": lambda x: scan(
        lambda row, total: total + tt.tanh(row), sequences=[x],
        outputs_info=[tt.zeros_like(x[0])], n_steps=ROWS,
    )[-1].mean(),
    "an identity matrix": lambda x: tt.dot(tt.eye(ROWS), x).mean(),
    "a reshape": lambda x: x.reshape((2 * ROWS, 18)).mean(),
    "a loop with an array": lambda x: scan(
        lambda total: total + x + tt.zeros((ROWS, 36)), outputs_info=[x], n_steps=2
    )[-1].mean(),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors_of_the_compiler_say_which_number_is_fixed(two, name):
    x = tt.dmatrix("x")
    function = synk.function([x], ERRORS[name](x))
    with pytest.raises(Exception, match=f"this rank computes 6 of the {ROWS} rows of the call"):
        function(IMAGES)


@pytest.mark.parametrize("kind", [IndexError, ValueError])
def test_errors_of_rows_that_a_rank_lacks_say_which_it_has(two, kind):
    """Rows that an input numbers, and pairs of successive rows."""
    x, order = tt.dmatrix("x"), tt.lvector("order")
    value = x[order].mean() if kind is IndexError else (x[::2] - x[1::2]).mean() + order.sum()
    function = synk.function([x, order], value)
    with pytest.raises(kind, match="this rank computes 5 of the 10 rows of the call"):
        function(IMAGES[:10], np.arange(10)[::-1])


@theano_only
@pytest.mark.parametrize("makes_step", [False, True])
def test_errors_say_that_an_operand_has_all_rows(two, makes_step):
    """Targets that an index selects from a shared variable, beside rows that are divided."""
    x, index, w = tt.dmatrix("x"), tt.lscalar("index"), shared(np.ones(36), "w")
    targets = shared(RNG.randn(3, ROWS), "targets")
    loss = tt.sqr(tt.dot(x, w) - targets[index]).mean()
    if makes_step:
        updates = [(w, w - 0.1 * tt.grad(loss, w))]
        function = train.parallel_function([x, index], loss, updates=updates)
    else:
        function = synk.function([x], loss, bcast_inputs=[index])
    message = f"this rank computes 6 of the {ROWS} rows of the call, and .* an operand of {ROWS}"
    with pytest.raises(ValueError, match=message):
        function(IMAGES, 1)
    np.testing.assert_array_equal(w.get_value(), np.ones(36))


@theano_only
@pytest.mark.filterwarnings("ignore:.*conv2d is deprecated:UserWarning")
def test_the_old_convolution_of_theano(two):
    from theano.tensor.nnet import conv

    losses, images = [], IMAGES.reshape((ROWS, 1, 6, 6))
    for make in (train.parallel_function, compiler.function):
        x, filters = tt.dtensor4("x"), shared(np.ones((2, 1, 3, 3)), "filters")
        maps = conv.conv2d(x, filters, image_shape=(ROWS, 1, 6, 6), filter_shape=(2, 1, 3, 3))
        loss = tt.sqr(tt.tanh(maps)).mean()
        step = make([x], loss, updates=[(filters, filters - 0.1 * tt.grad(loss, filters))])
        losses.append([step(images) for _ in range(2)])
    np.testing.assert_allclose(losses[0], losses[1])
    large = conv.conv2d(x, filters, (ROWS, 1, 6, 6), (2, 1, 3, 3), "full", (2, 2))
    step = synk.function([x], tt.grad(tt.sqr(large).mean(), x).mean())
    with pytest.raises(Exception, match="this rank computes 6 of the 12 rows of the call"):
        step(images)


@theano_only
@pytest.mark.parametrize("length", [6, 2 * ROWS])
def test_filters_of_which_each_row_has_its_own(two, length):
    losses, rng = [], np.random.RandomState(0)
    values = rng.normal(size=(ROWS, length)), rng.normal(size=(ROWS, 3))
    for make in (train.parallel_function, compiler.function):
        x, s, w = tt.dmatrix("x"), tt.dmatrix("s"), shared(np.ones(length), "w")
        images = (x * w).reshape((x.shape[0], length)).dimshuffle(0, "x", "x", 1)
        known = {"input_shape": (ROWS, 1, 1, length), "filter_shape": (ROWS, 1, 1, 3)}
        maps = tt.nnet.conv2d(images, s.dimshuffle(0, "x", "x", 1), **known)
        rows = tt.arange(x.shape[0])
        loss = tt.sqr(maps[rows, rows, 0, :]).sum(axis=1).mean()
        step = make([x, s], loss, updates=[(w, w - 0.01 * tt.grad(loss, w))])
        losses.append([step(*values) for _ in range(2)])
    np.testing.assert_allclose(losses[0], losses[1])
