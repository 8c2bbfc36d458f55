"""Tests of functions of C code and of Numba: how they are called, fail, and share their variables.

Numba compiles for seconds, so each mode has one world of two ranks, and few functions in it.
"""

import os

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from compilers import check_mode, default_mode
from processes import FOLDER, find_test, run_interpreter
from pytensor.raise_op import Assert

import synkhronos as synk

ROWS = np.arange(33.0).reshape(11, 3)
LABELS = np.arange(11, dtype="int32")
TABLE = np.arange(6.0).reshape(3, 2)


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
    words = "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *files
    environment = {"PYTENSOR_FLAGS": flags_of("NUMBA")}
    run_interpreter(*words, cwd=FOLDER, environment=environment, timeout=3600)


MODE_TEST = test_the_mode_of_the_flags_is_that_of_the_tests_and_of_their_programs.__name__
