"""Tests of what differs with PyTensor: static shapes, Numba, random generators, and what is refused."""

import signal
import warnings

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from compilers import RandomStreams, default_mode
from pytensor.graph.rewriting.utils import rewrite_graph
from pytensor.link.numba.cache import FunctionIdentity
from pytensor.xtensor import as_xtensor, xtensor
from pytensor.xtensor.type import xtensor_shared
from test_docs import test_examples_print_what_is_shown as check_page
from test_modes import read_only

import synkhronos as synk
from synkhronos.engines.base import PARTLY_SUM, ROWS, SUM
from synkhronos.engines.pytensor.engine import PyTensorEngine
from synkhronos.engines.analysis.rows import extents
from synkhronos.engines.analysis.difference_causes import difference_causes
from synkhronos.extensions import batch_norm, updates
from synkhronos.extensions.train import make_train_function, parallel_function
from synkhronos.world.rank_state import Command
from synkhronos.world.world import current_world

#: PyTensor 2.38, which PyMC needs, has shared generators too, but makes them otherwise.
of_pytensor_3 = pytest.mark.skipif(not hasattr(pt.random, "shared_rng"), reason="needs PyTensor 3")


def draws(size, seed=3):
    """Return a shared generator, and a function that draws from it on every rank."""
    rng = pt.random.shared_rng(np.random.default_rng(seed))
    new, numbers = rng.uniform(size=size)
    return rng, synk.function([], (numbers, "gather"), updates=[(rng, new)])


def late(*_):
    raise TimeoutError("late")


def test_an_input_of_a_fixed_number_of_rows_is_not_split(two):
    x, row = pt.tensor("x", shape=(4, None), dtype="float64"), pt.tensor("row", shape=(1, 3))
    for fixed in (x, row):
        with pytest.raises(ValueError, match="cannot be split along axis 0; give it in bcast_inputs"):
            synk.function([fixed], fixed.sum())
    y = pt.dmatrix("y")
    f = synk.function([y], (y.sum() + x.sum(), "sum"), bcast_inputs=[x])
    assert f(np.ones((5, 2)), np.ones((4, 3))) == 10 + 2 * 12
    with pytest.raises(TypeError, match=r"input 'x': expected extent 4 on axis 0, got shape \(3, 3\)"):
        f(np.ones((5, 2)), np.ones((3, 3)))


def test_fixed_columns_are_checked(two):
    x = pt.tensor("x", shape=(None, 3), dtype="float64")
    f = synk.function([x], (x.sum(), "sum"))
    assert f(np.ones((5, 3))) == 15
    with pytest.raises(TypeError, match="expected extent 3 on axis 1"):
        f(np.ones((5, 2)))


def test_a_variable_of_a_fixed_number_of_rows_is_not_scattered(two):
    w = pytensor.shared(np.zeros(2), "w", shape=(2,))
    f = synk.function([], w.sum())
    f()
    for call in (lambda: synk.scatter(w, np.ones(4)), lambda: synk.all_gather(w)):
        with pytest.raises(ValueError, match="rows that can be split|extent 2 on axis 0 by its type"):
            call()
    with pytest.raises(TypeError, match="expected extent 2 on axis 0"):
        synk.broadcast(w, np.ones(3))


x, v, y = pt.dmatrix("x"), pt.dvector("v"), pt.ivector("y")
w = pytensor.shared(np.ones((3, 2)), "w")
prediction = pt.special.softmax(pt.dot(x, w), axis=1)
picked = pt.log(prediction)[pt.arange(y.shape[0]), y]
GRAPHS = [
    (x.sum(), SUM),
    (x.sum(axis=0), SUM),
    (0.5 * pt.sqr(pt.dot(x, w)).sum(), SUM),
    (-picked.sum(), SUM),
    (pt.grad(pt.sqr(pt.dot(x, w)).sum(), w), SUM),
    (pt.dot(v, v), SUM),
    (pt.cast(x.shape[0], "float64"), SUM),
    (picked.sum() + pt.sqr(w).sum(), PARTLY_SUM),
    (prediction, ROWS),
    (pt.argmax(prediction, axis=1), ROWS),
    (w[y], ROWS),
    (x[:, 1], ROWS),
    (x.mean(), None),
    (-picked.mean(), None),
    (pt.grad(-picked.mean(), w), None),
    (x.sum() / x.shape[0], None),
    (x.max(), None),
    (pt.special.softmax(x, axis=0), None),
    (w[:, y[:1]].sum(), None),
]


@pytest.mark.parametrize("graph, wanted", GRAPHS)
def test_sums_over_the_rows_are_recognized(graph, wanted):
    assert extents([x, v, y], [0, 0, 0], [graph]) == [wanted]


@pytest.mark.parametrize(
    "graph, wanted",
    [
        (x.sum() / 6, ["constant"]),
        ((x.sum(axis=1) * v).sum() / v.sum(), ["quotient"]),
        (x[v > 0].mean(), ["quotient"]),
        (pt.sqr(x - x.mean(axis=0)).mean(), ["statistics"]),
        (pt.sqrt(pt.sqr(x).mean()), ["nonlinear"]),
        (x.mean(), []),
    ],
)
def test_what_is_suspect_in_a_graph(graph, wanted):
    assert sorted(difference_causes([x, v], [0, 0], [graph])[0].possible) == wanted


def test_a_step_with_random_numbers_is_checked_with_others_that_follow_from_the_rows(two):
    uniform = RandomStreams(1).uniform(size=x.shape)
    w = pytensor.shared(np.ones(2), "w")
    loss = pt.sqr((x * (uniform < 0.5)).dot(w) - 1).mean()
    step = parallel_function([x], loss, updates=[(w, w - 0.1 * pt.grad(loss, w))])
    rows = np.arange(12.0).reshape(6, 2)
    assert set(step.check(rows, random=True).differences) == {"output 0", "shared variable w"}
    assert "shared variable w" in step.check(rows).not_compared


@of_pytensor_3
def test_a_draw_of_one_number_does_not_depend_on_the_rows():
    _, number = pt.random.shared_rng(seed=1).uniform()
    assert extents([x, v, y], [0, 0, 0], [number, number + x.sum()]) == [None, PARTLY_SUM]


class Named:
    """An array whose axes have names, as an ``xarray.DataArray``."""

    def __init__(self, array, *dims):
        self.array, self.dims = np.asarray(array), dims

    def __array__(self, dtype=None, copy=None):
        return self.array

    def transpose(self, *dims):
        return Named(self.array.transpose([self.dims.index(one) for one in dims]), *dims)


def test_variables_with_named_dimensions_are_inputs_outputs_and_shared(two):
    x, y = xtensor("x", dims=("row", "column")), xtensor("y", dims=("column", "row"))
    scale = xtensor_shared(np.ones(3), dims=("column",), name="scale")
    product = x * y * scale
    outputs = [product.mean(), synk.Out(product.transpose("column", "row"), "gather", axis="row")]
    f = synk.function(
        [x, synk.In(y, axis="row")], outputs, updates=[(scale, scale + x.mean("row"))]
    )  # fmt: skip
    rows, others = np.arange(21.0).reshape(7, 3), np.ones((3, 7))
    for given in (rows, Named(rows.T, "column", "row"), Named(rows, "row", "column")):
        mean, each = f(given, others, batch=slice(1, 6))
        np.testing.assert_allclose(mean, rows[1:6].mean())
        np.testing.assert_allclose(each, rows[1:6].T)
        synk.all_reduce(scale, weights=f)
        np.testing.assert_allclose(synk.gather(scale), [1 + rows[1:6].mean(axis=0)] * 2)
        synk.broadcast(scale, Named(np.ones(3), "column"))
    with pytest.raises(ValueError, match="input 'x': expected the dimensions row, column, got row, day"):
        f(Named(rows, "row", "day"), others)
    with pytest.raises(ValueError, match="value for scale: expected the dimensions column, got row"):
        synk.broadcast(scale, Named(np.ones(3), "row"))
    with pytest.raises(
        ValueError, match="In: axis: expected a number, or a dimension of x: .*got 'day'"
    ):
        synk.In(x, axis="day")


def test_a_loss_with_named_dimensions_is_lowered_or_refused(two):
    x, v = xtensor("x", dims=("row", "column")), pytensor.shared(np.ones(3), "v")
    loss = ((x * as_xtensor(v, dims=("column",))).sum("column") ** 2).mean()
    params = [xtensor_shared(np.ones(3), dims=("column",), name="named")]
    for wrong, given, words in (
        (loss, [v], "loss: expected a scalar tensor, got an xtensor; give rewrite_graph"),
        (loss.values, [v], "loss: an operation of xtensor has no gradient; give rewrite_graph"),
        (loss.values, params, r"params\[0\] .*expected a shared tensor variable, got XTensorShared"),
    ):
        with pytest.raises(TypeError, match=words):
            make_train_function(wrong, given, x, None, updates.sgd, learning_rate=0.1)
    lowered = rewrite_graph(loss.values, include=("lower_xtensor",))
    step = make_train_function(lowered, [v], x, None, updates.sgd, learning_rate=0.1)
    rows = np.random.RandomState(0).normal(size=(7, 3))
    np.testing.assert_allclose(step(rows), np.square(rows.sum(axis=1)).mean())
    wanted = 1 - 0.1 * 2 * (rows.sum(axis=1)[:, None] * rows).mean(axis=0)
    np.testing.assert_allclose(synk.gather(v), [wanted] * 2)


class Signatures(Command):
    """Return how often Numba has compiled each function on this rank."""

    def run(self, rank_state):
        return [len(one.compiled.vm.jit_fn.signatures) for one in rank_state.functions.values()]


def test_numba_compiles_a_function_once_on_each_rank_whatever_the_layout_of_its_arrays(two, tmp_path):
    table, columns = pytensor.shared(np.asfortranarray(np.ones((3, 2))), "table"), pt.dmatrix("columns")
    outputs = [(x.sum(axis=0), "sum"), (pt.dot(x, table), "gather"), (pt.dot(x, columns), "gather")]
    f = synk.function([x], outputs, bcast_inputs=[columns], mode="NUMBA")
    rows = np.arange(24.0).reshape(8, 3)
    np.save(tmp_path / "rows.npy", rows)
    for given in (
        np.asfortranarray(rows),
        rows,
        rows[::2],
        np.repeat(rows, 2, axis=1)[:, ::2],
        read_only(rows),
        np.load(tmp_path / "rows.npy", mmap_mode="r"),
        np.broadcast_to(rows[1], (5, 3)),
        synk.data(rows),
        synk.data(rows, constant=True),
    ):
        part = np.asarray(given[:3, :2])
        value = part.copy(order="K")
        table.set_value(value, borrow=True)
        synk.set_value(1, table, value)  # the master is rank 0
        for columns_given in (part, value, read_only(value), np.asfortranarray(value)):
            total, product, other = f(given, columns_given)
            np.testing.assert_array_equal(total, given[:].sum(axis=0))
            np.testing.assert_array_equal(product, given[:].dot(value))
            np.testing.assert_array_equal(other, product)
    (total,) = f(rows, value, output_subset=[0], batch=slice(6, 0, -2))
    np.testing.assert_array_equal(total, rows[6:0:-2].sum(axis=0))
    assert current_world().run(Signatures()) == [[1], [1]]


def test_ranks_name_what_numba_compiles_differently(two):
    """One name of two functions is a crash later: https://github.com/numba/numba/issues/10486."""
    drawn = synk.spmd(lambda rank: [next(FunctionIdentity._unique_ids) for _ in range(3)])
    assert len({*drawn[0], *drawn[1]}) == 6


@pytest.mark.parametrize("name", ["adadelta", "adam"])
def test_rules_are_machine_code_of_numba(name):
    w = pytensor.shared(np.ones(3), "w")
    _, param_updates, _ = getattr(updates, name)((w**2).sum(), [w])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as of operations that Numba leaves to Python
        pytensor.function([], updates=param_updates, mode="NUMBA")()


@pytest.mark.parametrize(
    "handler, error", [(signal.default_int_handler, KeyboardInterrupt), (late, TimeoutError)]
)
def test_what_a_signal_handler_raises_in_a_function_of_numba_reaches_the_script(
    world_of, handler, error
):
    world_of(1)
    x = pt.dmatrix("x")
    f = synk.function([x], (pt.exp(pt.sin(x)).sum(), "sum"), mode="NUMBA")
    rows = np.ones((400, 1000))
    f(rows)
    former = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(error):  # a SystemError, with Numba alone
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            while True:
                f.as_theano(rows)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


def test_functions_of_numba_are_sent_to_workers_that_run(two):
    state = pytensor.shared(np.zeros(3), "state")
    synk.function([], state.sum(), mode="CVM")()
    late = synk.function([x], (x.sum(), "sum"), updates=[(state, state + x.sum(axis=0))], mode="NUMBA")
    assert late(np.ones((4, 3))) == 12
    assert [synk.get_value(rank, state).tolist() for rank in (0, 1)] == [[2, 2, 2]] * 2


@pytest.mark.parametrize("mode, name", [("JAX", "JAX"), ("PYTORCH", "Pytorch")])
def test_modes_that_do_not_survive_a_fork_are_refused(two, mode, name):
    with pytest.raises(ValueError, match=f"function: mode: {name} keeps .*use mode='NUMBA'"):
        synk.function([x], x.mean(), mode=mode)


def test_collectives_in_graphs_are_c_code_where_numba_is_the_default(two):
    mean = synk.ops.all_reduce(x.mean(axis=0), "avg")
    outputs = [pt.sqr(x - mean).mean(), (x - mean, "gather")]
    with pytest.raises(ValueError, match="mode: collectives in graphs .* use mode='CVM'"):
        synk.function([x], outputs, mode="NUMBA")
    rows = np.arange(14.0).reshape(7, 2)
    with default_mode("NUMBA"):
        f = synk.function([x], outputs)
    square, centred = f(rows)
    np.testing.assert_allclose(square, rows.var(axis=0).mean())
    np.testing.assert_allclose(centred, rows - rows.mean(axis=0))


@pytest.mark.parametrize("axes", ["per-activation", "spatial"])
def test_batch_normalization_uses_the_rows_of_all_ranks(two, axes):
    images = pt.dtensor4("images")
    data = np.random.RandomState(0).normal(3, 2, size=(7, 2, 3, 4))
    over = (0,) if axes == "per-activation" else (0, 2, 3)
    mean, variance = data.mean(axis=over), data.var(axis=over)
    old = [pytensor.shared(np.zeros(mean.shape)), pytensor.shared(np.ones(mean.shape))]
    out, *_, new_mean, new_variance = batch_norm.batch_normalization_train(
        images, np.full(mean.shape, 2.0), np.ones(mean.shape), axes, 1e-3, 0.25,
        running_mean=old[0], running_var=old[1])  # fmt: skip
    f = synk.function([images], (out, "gather"), updates=list(zip(old, (new_mean, new_variance))))
    shape = [1 if axis in over else extent for axis, extent in enumerate(data.shape)]
    expected = (data - mean.reshape(shape)) / np.sqrt(variance.reshape(shape) + 1e-3) * 2 + 1
    np.testing.assert_allclose(f(data), expected)
    count = data.size // mean.size
    unbiased = variance * count / (count - 1)
    for one, value in zip(old, (0.25 * mean, 0.75 + 0.25 * unbiased)):
        np.testing.assert_allclose(synk.gather(one), [value] * 2)


@of_pytensor_3
def test_ranks_draw_from_substreams_of_a_shared_generator_and_repeat(two, tmp_path):
    rng, draw = draws((3,))
    first, second = draw(), draw()
    assert len({*first, *second}) == 12
    np.testing.assert_array_equal(first[:3], np.random.default_rng(3).uniform(size=3))
    substream = np.random.Generator(np.random.PCG64(3).jumped())
    np.testing.assert_array_equal(first[3:], substream.uniform(size=3))
    synk.save(tmp_path / "saved")
    third = draw()
    synk.load(tmp_path / "saved")
    np.testing.assert_array_equal(draw(), third)
    synk.reseed(rng, 3)
    np.testing.assert_array_equal(draw(), first)


@of_pytensor_3
def test_several_generators_are_seeded_as_different_ones(two):
    (one, draw), (other, draw_other) = draws((2,)), draws((2,))
    np.testing.assert_array_equal(draw(), draw_other())
    synk.reseed([one, other], 8)
    seeded = draw(), draw_other()
    assert len({*seeded[0], *seeded[1]}) == 8
    synk.reseed([one, other], 8)
    np.testing.assert_array_equal((draw(), draw_other()), seeded)


@of_pytensor_3
def test_generators_that_cannot_be_seeded_or_split_are_refused(two):
    rng, _ = draws((2,))
    with pytest.raises(TypeError, match="seed: expected an int"):
        synk.reseed(rng)
    for wrong in (x, [], [rng, w], "rng"):
        with pytest.raises(TypeError, match="expected a RandomStream, or shared random generators"):
            synk.reseed(wrong, 1)
    rng = pt.random.shared_rng(np.random.Generator(np.random.SFC64(1)))
    new, numbers = rng.uniform(size=(2,))
    with pytest.raises(TypeError, match="substreams for the ranks, got one of SFC64"):
        synk.function([], (numbers, "gather"), updates=[(rng, new)])


def test_random_streams_update_by_themselves(two):
    streams = RandomStreams(5)
    draw = synk.function([], (streams.normal(size=(2,)), "gather"))
    first = draw()
    assert len({*first, *draw()}) == 8
    synk.reseed(streams)
    np.testing.assert_array_equal(draw(), first)
    streams.seed(5)
    with pytest.warns(synk.SynkhronosWarning, match="1 random stream.s. whose state was set on"):
        assert not np.array_equal(draw(), first)


def test_a_default_value_is_an_option_of_the_librarys_own_input(two):
    scale = pt.dscalar("scale")
    f = synk.function([x], (x * scale).mean(), [synk.In(scale, value=3)])
    assert f(np.ones((2, 2))) == 3 and f(np.ones((2, 2)), 2) == 2
    kept = pytensor.In(scale, value=pytensor.shared(1.0))
    with pytest.raises(TypeError, match="keeps a value between calls .pytensor.In"):
        synk.function([x], (x * scale).mean(), [kept])


def test_devices_and_keras_are_refused_in_words():
    assert synk.get_n_gpu() == 0
    with pytest.raises(ValueError, match="with PyTensor all ranks compute on the CPU"):
        synk.fork(2, use_gpu=True)
    with pytest.raises(ValueError, match="with PyTensor all ranks compute on the CPU"):
        synk.fork(devices=["cuda0", "cuda1"])
    with pytest.raises(ImportError, match="builds graphs of Theano"):
        synk.extensions.keras  # noqa: B018


@of_pytensor_3
def test_a_generator_is_no_tensor():
    with pytest.raises(TypeError, match="expected a PyTensor tensor variable"):
        PyTensorEngine().type_of(pt.random.shared_rng(seed=1))


@of_pytensor_3
def test_the_examples_of_the_page_print_what_is_shown(programs, tmp_path):
    check_page(programs, tmp_path, "pytensor.rst")
