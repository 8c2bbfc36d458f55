"""Tests of functions of C code and of Numba: how they are called, fail, and share their variables.

Numba compiles for seconds, so each mode has one world of two ranks, and few functions in it.
"""

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from compilers import RandomStreams, check_mode, default_mode
from processes import FOLDER, find_test
from pytensor.raise_op import Assert

import synkhronos as synk
from synkhronos.extensions import train, updates

ROWS = np.arange(33.0).reshape(11, 3)
LABELS = np.arange(11, dtype="int32")
TABLE = np.arange(6.0).reshape(3, 2)
SHARES = np.array_split(ROWS, 2)


class Made:
    """Functions in one mode, and their variables; `reset` gives these their first values."""

    def __init__(self):
        self.total = pytensor.shared(np.zeros(3), "total")
        self.calls = pytensor.shared(np.int64(0), "calls")
        self.table = pytensor.shared(TABLE, "table")
        x, labels, scale = pt.dmatrix("x"), pt.ivector("labels"), pt.dscalar("scale")
        checked = Assert("a row is negative")(x, pt.all(x >= 0))
        self.step = synk.function(
            [x, labels],
            [
                (pt.dot(checked, self.table) + labels[:, None] * scale, "gather"),
                (x.sum(axis=0), "sum"),
                (x.max(), "max"),
                x.mean(),
            ],
            [synk.In(scale, value=1)],
            updates=[
                (self.total, self.total + x.sum(axis=0), "sum"),
                (self.calls, self.calls + 1, "max"),
            ],
            name="step",
        )
        self.draw = synk.function([], (RandomStreams(5).normal(size=(2,)), "gather"))
        synk.distribute()

    def reset(self):
        synk.broadcast([self.total, self.calls, self.table], [np.zeros(3), np.int64(0), TABLE])

    def check(self, rows=ROWS, labels=LABELS, scale=1, chosen=slice(None), **how):
        """Call the step; compare with NumPy."""
        self.reset()
        found = self.step(rows, labels, scale, **how)
        wanted, numbers = np.asarray(ROWS)[chosen], LABELS[chosen]
        np.testing.assert_allclose(found[0], wanted.dot(TABLE) + scale * numbers[:, None])
        np.testing.assert_allclose(found[1], wanted.sum(axis=0))
        assert found[2] == wanted.max()
        np.testing.assert_allclose(found[3], wanted.mean())
        np.testing.assert_allclose(sum(synk.gather(self.total)), wanted.sum(axis=0))
        assert sum(synk.gather(self.calls)) == min(len(wanted), 2)  # none on a rank without rows


@pytest.fixture(scope="module", params=["CVM", "NUMBA"])
def mode(request):
    return request.param


@pytest.fixture(scope="module")
def in_mode(mode, open_world):
    """The functions of a mode, in a world of its own."""
    open_world(2, master_rank=1, timeout=60)
    with default_mode(mode):
        return Made()


@pytest.fixture
def made(in_mode):
    in_mode.reset()
    return in_mode


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


def unaligned(array):
    out = np.zeros(array.nbytes + 1, "uint8")[1:].view(array.dtype).reshape(array.shape)
    out[...] = array
    return out


LAYOUTS = {
    "C": np.copy,
    "Fortran": np.asfortranarray,
    "every other row": lambda array: np.repeat(array, 2, axis=0)[::2],
    "every other column": lambda array: np.repeat(array, 2, axis=1)[:, ::2],
    "backwards": lambda array: array[::-1].copy()[::-1],
    "read-only": read_only,
    "unaligned": unaligned,
}

# Arguments


@pytest.mark.parametrize("layout", [*LAYOUTS, "list", "data", "file"])
def test_outputs_and_updates_are_those_of_numpy_for_any_layout_and_batch(made, layout, tmp_path):
    np.save(tmp_path / "rows.npy", ROWS)
    given = {
        "list": np.ndarray.tolist, "data": synk.data,
        "file": lambda _: np.load(tmp_path / "rows.npy", mmap_mode="r"), **LAYOUTS,
    }[layout](ROWS)  # fmt: skip
    labels = np.repeat(LABELS, 2)[::2]
    made.check(given, labels)
    for batch in (7, 1, slice(9, 1, -2), [4, 0, 0, 10], LABELS % 2 == 0):
        chosen = slice(batch) if isinstance(batch, int) else batch
        for slices in (1, 3):
            made.check(given, labels, 2, chosen, batch=batch, num_slices=slices)


@pytest.mark.parametrize("layout", [one for one in LAYOUTS if one != "unaligned"])
def test_shared_values_may_have_any_layout(made, layout):
    value = np.array([[1.0, -2.0], [0.5, 3.0], [4.0, 0.25]])
    wanted = ROWS.dot(value) + LABELS[:, None]
    for give in (
        lambda given: synk.broadcast(made.table, given),
        lambda given: [synk.set_value(rank, made.table, given) for rank in (0, 1)],
        lambda given: (made.table.set_value(given, borrow=True), synk.broadcast(made.table)),
    ):
        synk.broadcast(made.table, TABLE)
        give(LAYOUTS[layout](value))
        np.testing.assert_allclose(made.step(ROWS, LABELS)[0], wanted)


# What goes wrong inside of a function

BAD = [(0, synk.WorkerError, "rank 0"), (10, AssertionError, "^a row")]  # the master is rank 1


@pytest.mark.parametrize("row, error, words", BAD, ids=["worker", "master"])
def test_an_error_of_a_compiled_function_comes_from_its_rank_and_the_others_go_on(
    made, row, error, words
):
    bad = ROWS.copy()
    bad[row] = -1
    for call in (
        lambda: made.step(bad, LABELS),
        lambda: made.step(bad, LABELS, batch=np.arange(11), num_slices=2),
        lambda: synk.spmd(lambda rank: rank.call(made.step, bad, LABELS, batch=rank.rows(11))),
    ):
        with pytest.raises(error, match=f"(?s){words}.*negative|a row is negative"):
            call()
        made.check()
    with pytest.raises(error):
        with synk.fuse():
            made.step(bad, LABELS)
            synk.all_reduce(made.total)
    made.check()


def test_shapes_that_a_graph_cannot_multiply_are_an_error_and_the_ranks_go_on(made):
    with pytest.raises(ValueError, match="(?i)shape|size|align"):
        made.step(ROWS[:, :2], LABELS)
    made.check()


@pytest.mark.parametrize("idle", [True, False], ids=["idle", "calling"])
def test_functions_go_on_after_a_worker_has_died_and_a_restart(made, idle):
    (pid, _) = synk.spmd(lambda rank: os.getpid())
    kill = threading.Timer(0 if idle else 0.3, os.kill, [pid, signal.SIGKILL])
    kill.start()
    with pytest.raises(synk.WorldBrokenError, match="rank 0 .*SIGKILL"):
        if idle:
            kill.join()
        until = time.monotonic() + 30
        while time.monotonic() < until:
            made.step(ROWS, LABELS)
    assert synk.restart() == 2
    made.check()
    made.check(synk.data(ROWS), chosen=[4, 0, 9], batch=[4, 0, 9])
    assert len({*made.draw()}) == 4


# Variables of all ranks


def test_functions_see_the_results_of_collectives_and_these_what_functions_have_written(made):
    own = [share.sum(axis=0) for share in SHARES]
    reductions = {"sum": sum(own), "max": np.maximum(*own), "prod": own[0] * own[1]}
    for op, wanted in {**reductions, "avg": sum(own) / 2}.items():
        made.reset()
        made.step(ROWS, LABELS)
        np.testing.assert_array_equal(synk.gather(made.total), own)
        synk.all_reduce(made.total, op=op)
        np.testing.assert_allclose(synk.gather(made.total), [wanted] * 2)
        made.step(ROWS, LABELS)
        np.testing.assert_allclose(synk.gather(made.total), [wanted + one for one in own])
    synk.set_value(0, made.table, 2 * TABLE)
    outputs = made.step(ROWS, LABELS)[0]
    scales = np.repeat([2, 1], [len(share) for share in SHARES])[:, None]
    np.testing.assert_allclose(outputs, ROWS.dot(TABLE) * scales + LABELS[:, None])
    synk.all_gather(made.table)
    assert synk.get_value(0, made.table).tolist() == [*(2 * TABLE).tolist(), *TABLE.tolist()]


def test_a_checkpoint_has_the_variables_of_all_ranks_and_the_states_of_random_numbers(made, tmp_path):
    made.step(ROWS, LABELS)
    made.draw()
    synk.save(tmp_path / "saved", {"step": 1})
    before, drawn = synk.gather(made.total), made.draw()
    made.step(ROWS[:4], LABELS[:4])
    synk.broadcast(made.table, np.zeros((3, 2)))
    assert synk.load(tmp_path / "saved") == {"step": 1}
    np.testing.assert_array_equal(synk.gather(made.total), before)
    np.testing.assert_array_equal(made.draw(), drawn)
    assert not np.array_equal(made.draw(), drawn)
    np.testing.assert_allclose(made.step(ROWS, LABELS)[0], ROWS.dot(TABLE) + LABELS[:, None])
    np.testing.assert_allclose(synk.gather(made.total), 2 * np.array(before))


def test_a_program_calls_functions_averages_variables_and_has_a_center(made):
    def program(rank):
        center = rank.center(made.total)
        rank.barrier()  # a center that has changed would change the variable
        found = rank.call(made.step, ROWS, LABELS, batch=rank.rows(11), scale=0)
        np.testing.assert_allclose(found[0], SHARES[rank.rank].dot(TABLE))
        for batch in ([10, 3], slice(8, 2, -3), 4):
            chosen = ROWS[slice(batch) if isinstance(batch, int) else batch]
            found = rank.call(made.step, ROWS, LABELS, batch=batch, num_slices=2)
            np.testing.assert_allclose(found[1], chosen.sum(axis=0))
        own = made.total.get_value()
        center.push()
        rank.barrier()
        center.pull()
        pulled = made.total.get_value()
        rank.all_reduce(made.calls, "sum")
        return own, pulled, int(made.calls.get_value())

    first, second = synk.spmd(program)
    for one in (first, second):
        np.testing.assert_allclose(one[1], first[0] + second[0])
        assert one[2] == 8


# Training


class Regression:
    """A loss with new parameters; of rows and labels."""

    def __init__(self):
        self.x, self.y = pt.dmatrix("x"), pt.ivector("y")
        self.params = [pytensor.shared(np.full(3, 0.1), "weights"), pytensor.shared(0.2, "bias")]
        rows = Assert("a row is negative")(self.x, pt.all(self.x >= 0))
        prediction = pt.tanh(pt.dot(rows / 33, self.params[0]) + self.params[1])
        self.loss = pt.sqr(prediction - self.y / 11).mean()


SLOW_RULES = [
    pytest.param(getattr(updates, name), marks=pytest.mark.slow)
    for name in ("sgd", "nesterov_momentum", "adam", "adagrad", "rmsprop", "adadelta", "adamax")
]


@pytest.mark.parametrize("rule", [updates.momentum, *SLOW_RULES], ids=lambda rule: rule.__name__)
def test_training_steps_equal_the_serial_steps(made, mode, rule):
    steps, models = [], []
    for make, own in ((train.make_train_function, mode), (train.make_train_function_theano, "CVM")):
        models.append(one := Regression())
        options = {"learning_rate": 0.1, "function_options": {"mode": own}}
        steps.append(make(one.loss, one.params, one.x, one.y, rule, **options))
    for batch in (slice(0, 11), [3, 1, 2, 7, 10], 1, slice(10, 3, -2)):
        ours, theirs = (step(ROWS, LABELS, batch=batch) for step in steps)
        np.testing.assert_allclose(ours, theirs)
    for ours, theirs in zip(models[0].params, models[1].params):
        np.testing.assert_allclose(synk.gather(ours), [theirs.get_value()] * 2)


@pytest.mark.parametrize(
    "bad_row", [pytest.param(0, id="worker"), pytest.param(10, id="master", marks=pytest.mark.slow)]
)
def test_a_parallel_function_equals_the_serial_one_and_no_rank_takes_a_step_that_fails_on_one(
    made, mode, bad_row
):
    def make(function, own, **options):
        models.append(one := Regression())
        gradients = pt.grad(one.loss, one.params)
        updates = [(old, old - 0.1 * gradient) for old, gradient in zip(one.params, gradients)]
        options = {name: getattr(one, name) for name in options}
        return function([one.x, one.y], one.loss, updates=updates, mode=own, **options)

    models, bad = [], ROWS.copy()
    step = make(train.parallel_function, mode, loss=True, params=True)
    serial = make(pytensor.function, "CVM")
    bad[bad_row] = -1
    for _ in range(2):
        np.testing.assert_allclose(step(ROWS, LABELS), serial(ROWS, LABELS))
        with pytest.raises((AssertionError, synk.WorkerError), match="a row is negative"):
            step(bad, LABELS)
        for ours, theirs in zip(models[0].params, models[1].params):
            np.testing.assert_allclose(synk.gather(ours), [theirs.get_value()] * 2)


# Faults

WORKER = {"how": "SIGKILL", "step": "function", "seam": "perform", "who": "worker", "others": ""}
FAULTS = {
    "a killed worker": WORKER,
    "an exception in the master": {**WORKER, "how": "exception", "who": "master", "caught": True},
    "no memory": {**WORKER, "how": "memory"},
    "a segmentation fault in a collective": {"how": "SIGSEGV", "step": "fused", "restarts": True},
    "a stopped worker": {"how": "stop", "step": "function", "seam": "started", "who": "worker"},
    "a pickle": {"how": "exit", "step": "distribute again", "seam": "command", "who": "worker"},
    "a program": {"how": "exit", "step": "program", "seam": "perform", "on_death": "continue"},
}
OF_FAULTS = [
    pytest.param(fault, id=name, marks=[] if fault is WORKER else pytest.mark.slow)
    for name, fault in FAULTS.items()
]


@pytest.mark.parametrize("fault", OF_FAULTS)
def test_faults_in_functions_of_either_mode_are_reported_in_time(mode, fault, monkeypatch):
    """Run a scenario of ``tests/faults``."""
    monkeypatch.setenv("PYTENSOR_FLAGS", flags_of(mode))
    monkeypatch.syspath_prepend(FOLDER / "faults")
    import harness
    from scenarios import PROGRAMS, first

    seed = first(range(PROGRAMS if fault["step"] == "program" else 0, 2 * PROGRAMS), fault)
    (result,) = harness.run([seed], 1, 120, f"import compilers; compilers.check_mode({mode!r})")
    assert not result["problem"], f"{result['scenario']}: {result['problem']}"


# Other tests

OTHERS = (
    "bad_input", "checkpoint", "collectives_oracle", "failures", "parallel_function", "restart",
    "rules_train", "spmd", "train", "train_rules", "uneven", "updates",
)  # fmt: skip


def flags_of(mode):
    """Return PyTensor's flags for processes whose functions are built in a mode."""
    return f"{os.environ['PYTENSOR_FLAGS']},mode={mode}"


def test_the_mode_of_the_flags_is_that_of_the_tests_and_of_their_programs(programs):
    mode = pytensor.config.mode
    check_mode(mode)
    programs.run(check_mode, mode).check()


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_what_passes_otherwise_passes_with_numba(name):
    """Run the tests of a file, and the programs that they start, with Numba for all functions."""
    files = find_test(f"test_{name}.py"), f"{__file__}::{MODE_TEST}"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *files],
        cwd=FOLDER, env={**os.environ, "PYTENSOR_FLAGS": flags_of("NUMBA")}, capture_output=True,
        text=True, timeout=3600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


MODE_TEST = test_the_mode_of_the_flags_is_that_of_the_tests_and_of_their_programs.__name__
