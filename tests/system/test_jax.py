"""Tests of PyTensor on JAX, on its CPU device.

JAX starts threads, so each test has a process of its own, and no process is forked from it afterwards.
"""

import os
import re
import signal
import warnings
from importlib.util import find_spec

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from checks.engines import CHECKS
from compilers import RandomStreams, scan
from processes import own_process
from pytensor.raise_op import Assert

import synkhronos as synk
from synkhronos.extensions import train, updates
from synkhronos.world.rank_state import Command
from synkhronos.world.devices import Fact, place
from synkhronos.world.world import current_world

pytestmark = [
    pytest.mark.skipif(find_spec("jax") is None, reason="needs JAX"),
    pytest.mark.skipif(not hasattr(pt.random, "shared_rng"), reason="needs PyTensor 3"),
]

TWO = ["jax:cpu", "jax:cpu"]
ROWS = np.arange(21.0).reshape(7, 3)


class JaxLab:
    """The `lab` of the checks of engines."""

    dtype = "float64"
    is_immutable = True
    times_operations = False
    fixable = (1, 4)
    shared = staticmethod(pytensor.shared)
    streams = staticmethod(RandomStreams)

    def __init__(self):
        from synkhronos.engines.pytensor.jax_engine import PyTensorJaxEngine

        self.engine = PyTensorJaxEngine()
        self.engine.setup("jax:cpu")

    def tensor(self, name, ndim):
        return self.fixed(name, (None,) * ndim)

    def fixed(self, name, extents):
        return pt.tensor(name, dtype=self.dtype, shape=extents)

    def uniform(self, streams, size):
        return streams.uniform(size=size)


class Kinds(Command):
    """Return the type of the storage of each shared variable on this rank, and JAX's platform."""

    def run(self, rank_state):
        kinds = [type(rank_state.engine.storage(one)).__name__ for one in rank_state.shareds.values()]
        return kinds, rank_state.device, rank_state.engine._jax.default_backend()


def error_of(call):
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call()
    return f"{caught.type.__name__}: {caught.value}"


@own_process
def test_the_engine_passes_the_checks_of_engines():
    checks = [check for check in CHECKS if "collectives" not in check.__name__]  # there are none
    for check in checks:
        check(JaxLab())
    assert len(checks) > 15
    for device, words in (("cpu", "expected 'jax:cpu'"), ("jax:cuda0", "JAX computes on")):
        with pytest.raises(ValueError, match=words):
            JaxLab().engine.setup(device)


@own_process
def test_functions_compute_what_numpy_does():
    assert synk.fork(devices=TWO) == 2
    x, b, w = pt.dmatrix("x"), pt.dvector("b"), pytensor.shared(np.ones(3), "w")
    outputs = [(x.sum(axis=0), "sum"), (x + b, "gather"), (x.max(), "max"), x.mean(), (b.sum(), None)]
    f = synk.function([x], outputs, [b], updates=[(w, w + x.sum(axis=0), "sum")])
    given, weights = np.array([1.0, 2.0, 3.0]), np.ones(3)
    for batch in (slice(None), slice(6, 0, -2), [3, 1, 1], slice(0, 1)):
        for number in (1, 2):
            rows = ROWS[batch]
            total, shifted, largest, mean, own = f(ROWS, given, batch=batch, num_slices=number)
            np.testing.assert_allclose(total, rows.sum(axis=0))
            np.testing.assert_array_equal(shifted, rows + given)
            assert (largest, own) == (rows.max(), 6)
            np.testing.assert_allclose(mean, rows.mean())
            assert total.flags.writeable and type(total) is np.ndarray
            ranks = synk.gather(w)
            weights = weights + rows.sum(axis=0)
            if number == 1 and len(rows) > 1:  # each rank adds its own rows
                np.testing.assert_allclose(ranks.sum(axis=0) - 2, weights - 1)
            weights = np.ones(3)
            synk.broadcast(w, weights)
    kept = synk.data(ROWS)
    first = f(kept, given)[1]
    kept[:] = 0
    np.testing.assert_array_equal(first, ROWS + given)  # it has no memory of the data
    assert f.as_theano(ROWS, given, output_subset=[0])[0].tolist() == ROWS.sum(axis=0).tolist()


@own_process
def test_sliceable_variables_and_functions_that_are_built_late():
    synk.fork(devices=TWO)
    x, table = pt.dmatrix("x"), pytensor.shared(np.zeros((1, 3)), "table")
    count = pytensor.shared(np.int64(0), "count")
    f = synk.function([], [(table.sum(axis=0), "sum")], updates=[(count, count + 1, None)],
                      sliceable_shareds=[table])  # fmt: skip
    synk.distribute()
    synk.scatter(table, ROWS)
    np.testing.assert_array_equal(f()[0], ROWS.sum(axis=0))
    np.testing.assert_array_equal(f(num_slices=2)[0], ROWS.sum(axis=0))
    np.testing.assert_array_equal(f(batch_s=slice(0, 1))[0], ROWS[0] + ROWS[4])
    np.testing.assert_array_equal(f(batch_s=[[1, 0], [2]])[0], ROWS[[0, 1, 6]].sum(axis=0))
    late = synk.function([x], (x + table.sum() + count, "gather"))
    assert late(ROWS).shape == (7, 3)
    current_world().run(Kinds())  # ranks refer to the rows of their last call until the next command
    late(ROWS)
    by_rank = current_world().run(Kinds())
    assert by_rank == [(["ArrayImpl", "ArrayImpl"], "jax:cpu", "cpu")] * 2
    count.set_value(10)  # on the master, as in a script
    with pytest.warns(synk.SynkhronosWarning, match="uses count, whose replicas differ"):
        f()
    assert synk.gather(count).tolist() == [11, 5]


@own_process
def test_results_and_updates_have_the_dtypes_of_their_variables():
    synk.fork(devices=TWO[:1])
    rng = pt.random.shared_rng(np.random.default_rng(3))
    x = pt.tensor("x", dtype="float32", shape=(None, 3))
    new, coins = rng.bernoulli(0.9, size=(40,))
    state = pytensor.shared(np.zeros(3, "float32"), "state")
    count = pytensor.shared(np.zeros(40, "int64"), "count")
    draws = new.multinomial(5, [0.5, 0.5], size=(3,))[1]
    steps, first = x.dimshuffle(0, "x", 1), pt.zeros(3, "float32")
    totals = scan(lambda step, total: total + step.sum(axis=0), sequences=steps, outputs_info=first)
    outputs = [x.sum(axis=0), coins, coins + coins, pt.sqr(coins).sum(), draws, totals]
    updates = [(rng, new), (state, x.sum(axis=0)), (count, coins)]
    f = synk.function([], [(one, None) for one in outputs], [x], updates)
    for _ in range(2):
        found = f(np.ones((4, 3), "float32"))
        assert [one.dtype for one in found] == [one.dtype for one in outputs]
        assert found[2].max() == 2 and found[3] == found[1].sum()
        assert [one.get_value().dtype for one in (state, count)] == ["float32", "int64"]


@own_process
def test_sums_are_computed_in_the_dtype_that_was_asked_for():
    """PyTensor converts the finished sum, so that a half overflows, and a float32 loses small terms."""
    synk.fork(devices=TWO)
    x, half = pt.vector("x", dtype="float32"), pt.vector("half", dtype="float16")
    f = synk.function([x], [(x.sum(dtype="float64"), "sum")])
    g = synk.function([half], [(half.sum(dtype="float32"), "sum"), half.mean()])
    synk.distribute()
    assert f(np.array([2**24, 1, 1, 2**24, 1, 1], "float32"))[0] == 2**25 + 4
    assert [float(one) for one in g(np.ones(150000, "float16"))] == [150000, 1]


def recurrences(x, state):
    """Return loops over the second axis of the rows, and over numbers of steps that follow from it."""
    steps, first = x.dimshuffle(1, 0, 2), pt.zeros((x.shape[0], 2))

    def step(*values):
        return pt.tanh(sum(values[:-1]) + pt.dot(values[-1], state))

    both = pt.zeros((2, x.shape[0], 2))
    return [
        scan(step, sequences=steps, outputs_info=first)[-1],
        scan(step, sequences=steps, outputs_info={"initial": both, "taps": [-1, -2]})[-1],
        scan(step, sequences=steps).sum(axis=0),
        scan(step, sequences=steps, outputs_info=first, truncate_gradient=2, go_backwards=True)[-1],
        scan(step, outputs_info=x[:, 0], n_steps=x.shape[1] - 1)[-1],
    ]


@pytest.mark.slow
@own_process(timeout=120)
def test_loops_over_a_sequence_have_gradients():
    synk.fork(devices=TWO)
    rows = np.random.RandomState(0).normal(size=(6, 5, 2))
    x, value = pt.dtensor3("x"), np.array([[0.5, 0.1], [-0.2, 0.3]])

    def losses():
        state = pytensor.shared(value)
        found = [pt.sqr(loop.sum(axis=1) - 1).mean() for loop in recurrences(x, state)]
        return [[loss, pt.grad(loss, state)] for loss in found]

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PyTensor's conversion warns of assertions about shapes
        for outputs, plain in zip(losses(), losses()):
            results = synk.function([x], outputs)(rows)
            for ours, wanted in zip(results, pytensor.function([x], plain, mode="FAST_COMPILE")(rows)):
                np.testing.assert_allclose(ours, wanted, rtol=1e-10)


@own_process
def test_assertions_about_shapes_are_checked_and_those_about_values_are_not():
    synk.fork(devices=TWO)
    x = pt.dmatrix("x")
    columns = Assert("expected three columns")(x, pt.eq(x.shape[1] * 2, 6))
    f = synk.function([x], (columns.sum(), "sum"))
    assert f(ROWS) == ROWS.sum()
    with pytest.raises(AssertionError, match="expected three columns"):
        f(ROWS[:, :2])
    positive = Assert("expected positive numbers")(x, pt.all(x > 0))
    g = synk.function([x], (positive.sum(), "sum"))
    with pytest.warns(UserWarning, match="leaves out the check .* .expected positive numbers."):
        assert g(-ROWS) == -ROWS.sum()


@own_process
def test_collectives_on_replicas():
    synk.fork(devices=TWO)
    v = pytensor.shared(np.zeros(3), "v")
    step = synk.function([], updates=[(v, v * 2)])
    step()
    for op, wanted in (("sum", [8, 8, 8]), ("avg", [4, 4, 4]), ("max", [6, 6, 6]), ("prod", [12] * 3)):
        for rank in (0, 1):
            synk.set_value(rank, v, np.full(3, 1.0 + 2 * rank))
        step()
        synk.all_reduce(v, op)
        assert synk.gather(v).tolist() == [wanted, wanted], op
    for rank in (0, 1):
        synk.set_value(rank, v, np.full(3, 1.0 + rank))
    assert synk.reduce(v, "min", in_place=False).tolist() == [1, 1, 1]
    synk.all_reduce(v, weights=[3, 1])
    assert synk.get_value(1, v).tolist() == [1.25] * 3
    synk.broadcast(v, np.arange(3.0))
    step()
    synk.reduce(v, "sum")
    assert synk.gather(v).tolist() == [[0, 4, 8], [0, 2, 4]]
    synk.broadcast(v)
    assert synk.gather(v, nd_up=0).tolist() == [0, 4, 8] * 2 and synk.in_sync(v)
    synk.all_gather(v)
    step()
    assert synk.get_shapes(v) == [(6,), (6,)]
    synk.scatter(v, np.arange(5.0))
    assert [synk.get_value(rank, v).tolist() for rank in (0, 1)] == [[0, 1, 2], [3, 4]]
    step()
    assert synk.get_value(1, v).tolist() == [6, 8]


@own_process
def test_programs_have_centers_and_collectives():
    synk.fork(devices=TWO)
    w = pytensor.shared(np.zeros(4), "w")
    step = synk.function([], updates=[(w, w + 1)])

    def program(rank):
        center = rank.center(w)
        for _ in range(3):
            rank.call(step)
            center.push()
        rank.barrier()
        center.pull()
        rank.all_reduce(w, "sum")
        return np.asarray(w.get_value()).tolist()

    assert synk.spmd(program) == [[12.0] * 4] * 2


@own_process(timeout=120)
def test_training_steps_equal_the_serial_step():
    synk.fork(devices=TWO)
    data = [np.random.RandomState(0).normal(size=(41, 3)), np.random.RandomState(1).normal(size=41)]
    x, target = pt.dmatrix("x"), pt.dvector("target")
    for rule in (updates.momentum, updates.adam, updates.adadelta):
        made = []
        for make in (train.make_train_function, train.make_train_function_theano):
            u = pytensor.shared(np.ones(3), "u")
            loss = pt.sqr(pt.dot(x, u) - target).mean()
            made.append((u, make(loss, [u], x, target, rule, 0.1)))
        (ours, step), (theirs, serial) = made
        for rows in (slice(0, 40), [3, 1, 2, 7], 1, slice(40, 3, -2)):
            np.testing.assert_allclose(step(*data, batch=rows), serial(*data, batch=rows))
        for replica in synk.gather(ours):
            np.testing.assert_allclose(replica, theirs.get_value())


@own_process(timeout=120)
def test_a_second_step_takes_variables_that_the_first_has_moved_to_the_device():
    synk.fork(devices=TWO)
    x, target, u = pt.dmatrix("x"), pt.dvector("target"), pytensor.shared(np.zeros(3), "u")
    mean = pytensor.shared(np.zeros(3), "mean")
    loss, wanted = pt.sqr(pt.dot(x, u) - target).mean(), np.zeros(3)
    for rule in (updates.sgd, updates.adam):
        step = train.make_train_function(
            loss, [u], x, target, rule, 0.01, updates=[(mean, 0.5 * mean + x.mean(axis=0))]
        )
        step(ROWS, ROWS.sum(axis=1))
        wanted = 0.5 * wanted + ROWS.mean(axis=0)
        np.testing.assert_allclose(synk.gather(mean), [wanted, wanted])
    assert synk.in_sync(u)


@own_process
def test_ranks_draw_from_keys_of_their_own_and_repeat(tmp_path):
    synk.fork(devices=TWO)
    rng = pt.random.shared_rng(np.random.default_rng(3))
    new, numbers = rng.normal(size=(3,))
    draw = synk.function([], (numbers, "gather"), updates=[(rng, new)])
    other = synk.function([], (numbers * 2, "gather"), updates=[(rng, new)])
    first, second = draw(), other()
    assert len({*first, *second / 2}) == 12
    again = pt.random.shared_rng(np.random.default_rng(3))
    renewed, drawn = again.normal(size=(3,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that a copy of the generator is used
        plain = pytensor.function([], drawn, updates={again: renewed}, mode="JAX")
    np.testing.assert_array_equal([plain(), 2 * plain()], [first[:3], second[:3]])
    synk.save(tmp_path / "saved")
    third = draw()
    synk.load(tmp_path / "saved")
    np.testing.assert_array_equal(draw(), third)
    synk.reseed(rng, 3)
    np.testing.assert_array_equal((draw(), other()), (first, second))
    streams = RandomStreams(5)
    late = synk.function([], (streams.uniform(size=(2,)), "gather"))
    drawn = [late(), late()]
    assert len({*np.ravel(drawn)}) == 8
    synk.reseed(streams)
    np.testing.assert_array_equal([late(), late()], drawn)
    rng = pt.random.shared_rng(np.random.Generator(np.random.Philox(1)))
    new, numbers = rng.uniform(size=(2,))
    with pytest.raises(TypeError, match="a generator of PCG64.*got one of Philox"):
        synk.function([], (numbers, "gather"), updates=[(rng, new)])


@own_process
def test_a_checkpoint_has_the_values_and_is_not_that_of_another_compiler(tmp_path):
    rng = pt.random.shared_rng(np.random.default_rng(3))
    w = pytensor.shared(np.zeros(3), "w")

    def build():
        new, numbers = rng.normal(size=(3,))
        return synk.function([], w.sum(), updates=[(w, w + numbers), (rng, new)])

    synk.fork(2)
    step = build()
    step()
    synk.save(tmp_path / "numpy")
    synk.close()
    w.set_value(np.zeros(3))
    synk.fork(devices=TWO)
    step = build()
    step()
    synk.save(tmp_path / "jax")
    step()
    wanted = synk.gather(w)
    synk.load(tmp_path / "jax")
    step()
    np.testing.assert_array_equal(synk.gather(w), wanted)
    with pytest.raises(ValueError, match=r"uint32 \(2,\), in the file uint64"):
        synk.load(tmp_path / "numpy")
    np.testing.assert_array_equal(synk.gather(w), wanted)


@own_process
def test_what_jax_cannot_do_is_refused_in_words():
    synk.fork(devices=TWO)
    x, index = pt.dmatrix("x"), pt.lscalar("index")
    data = pytensor.shared(ROWS, "data")
    from pytensor import sparse

    matrix = sparse.csr_matrix("matrix")
    for call, words in (
        (lambda: synk.function([x], x.mean(), mode="CVM"), "ValueError: function: mode: .* got 'CVM'"),
        (lambda: synk.function([x], synk.ops.all_reduce(x.mean(), "avg")), "ValueError: .*in graphs"),
        (lambda: synk.function([index], x.sum(), givens={x: data[index : index + 2]}),
         "ValueError: function: givens: slices whose bounds are inputs"),
        (lambda: synk.function([matrix], sparse.dense_from_sparse(matrix).sum()),
         "TypeError: .*JAX takes dense tensors"),
        (synk.restart, "RuntimeError: restart.*this process uses JAX"),
        (lambda: synk.fork(2, restart=True), "RuntimeError: fork.*this process uses JAX"),
    ):  # fmt: skip
        assert re.match(words, error_of(call)), error_of(call)
    f = synk.function([x], (x[x[:, 0] > 4] * 2, "gather"))  # the number of rows depends on values
    with pytest.raises(Exception, match="boolean indices must be concrete"):
        f(ROWS)
    g = synk.function([x], (x.sum(), "sum"))
    with pytest.raises(TypeError, match="expected 2 dimension"):
        g(np.ones(3))
    assert g(ROWS) == ROWS.sum()


@own_process
def test_devices_of_jax_are_checked_before_anything_starts():
    for devices, words in (
        (["jax:cpu", "cpu"], "expected devices of one kind"),
        (["jax:tpu0", "jax:tpu1"], "expected names such as"),
        (["jax:cuda", "jax:cuda"], "expected names such as"),
        (["jax:cuda0", "jax:cuda0"], "JAX needs a GPU for each rank"),
    ):
        with pytest.raises(ValueError, match=words):
            synk.fork(devices=devices)
    with pytest.raises(ValueError, match="use_gpu is True, but"):
        synk.fork(devices=TWO, use_gpu=True)
    facts = [Fact(host, ("1", "3.11", "2"), "", 1, 1, 0, None) for host in "ab"]
    with pytest.raises(ValueError, match="devices of JAX are for a single machine"):
        place(facts, None, None, TWO)
    with pytest.raises(ValueError, match="devices of JAX are for a single machine"):
        place([fact._replace(devices=["jax:cpu"]) for fact in facts], None, None, None)


def test_without_jax_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("synkhronos.world.devices.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="need JAX, which is not installed: python -m pip install"):
        synk.fork(devices=TWO)


@pytest.mark.parametrize("visible, wanted", [(None, "1"), ("3,5", "5"), ("3", None)])
def test_a_rank_sees_one_gpu_of_those_that_it_may_use(monkeypatch, visible, wanted):
    from synkhronos.engines.pytensor.jax_engine import _show_only

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES=3 has no GPU number 1"):
            _show_only(1)
    else:
        _show_only(1)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == wanted


@own_process
def test_a_process_that_has_used_jax_forks_no_more_but_computes_alone():
    synk.fork(devices=TWO)
    x, w = pt.dmatrix("x"), pytensor.shared(np.zeros(3), "w")
    synk.function([x], updates=[(w, w + x.sum(axis=0))])(ROWS)
    synk.all_reduce(w, "sum")
    synk.close()
    with pytest.raises(synk.ClosedError):
        synk.gather(w)
    np.testing.assert_array_equal(w.get_value(), ROWS.sum(axis=0))
    with pytest.raises(RuntimeError, match="JAX is in use in this process already"):
        synk.fork(devices=TWO)
    assert not synk.is_forked()
    synk.fork(devices=["jax:cpu"])
    assert synk.function([x], (x.sum() + w.sum(), "sum"))(ROWS) == 2 * ROWS.sum()


@own_process
def test_a_dead_worker_breaks_the_world():
    synk.fork(devices=TWO)
    x = pt.dmatrix("x")
    f = synk.function([x], x.mean())
    f(ROWS)
    [worker] = [pid for pid in current_world().run(Pid()) if pid != os.getpid()]
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(synk.WorldBrokenError, match="rank 1"):
        f(ROWS)


class Pid(Command):
    def run(self, rank_state):
        return os.getpid()
