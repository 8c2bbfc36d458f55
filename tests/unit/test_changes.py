"""What a script changes on the master between the calls of a step reaches every rank."""

import functools
import logging

import numpy as np
import pytest
import scipy.sparse
from compilers import compiler

import synkhronos as synk
from synkhronos.engines import names
from synkhronos.extensions.train import parallel_function
from synkhronos.functions import replica_tracker

pytestmark = pytest.mark.usefixtures("in_python", "in_threads")
ROWS = np.random.RandomState(0).randn(6, 3)
tt = names.tensor
x = tt.dmatrix("x")


@pytest.fixture
def world(world_of):
    world_of(3)


def step_of(factor, build, more=()):
    """Return a function that trains, with a shared variable as a factor of the loss."""
    w = compiler.shared(np.ones(3), "w")
    loss = tt.sqr(tt.dot(x, w)).mean() * factor.sum()
    return build([x], loss, updates=[(w, w - 0.01 * tt.grad(loss, w)), *more])


def _call(v, new):
    compiler.function([], updates=[(v, new)])()


def _write(v, place, value):
    v.get_value(borrow=True)[place] = value


def _lend(v, lent):
    v.set_value(lent, borrow=True)


CHANGES = {
    "set_value": lambda v, lent: v.set_value(2 * v.get_value()),
    "a function": lambda v, lent: _call(v, v * 3),
    "a function that gives it another array": lambda v, lent: _call(v, tt.sort(-v)),
    "another shape": lambda v, lent: v.set_value(np.ones(4)),
    "its storage": lambda v, lent: v.container.storage.__setitem__(0, np.array([3.0, 1, 2, 5])),
    "an array that it keeps": _lend,
    "what is written into this array": lambda v, lent: lent.__setitem__(1, 5.0),
    "what is written into a view of it": lambda v, lent: lent[1:].__imul__(-1),
    "what is written into the array of get_value": lambda v, lent: _write(v, 0, 7.0),
    "its array once more": lambda v, lent: _write(v, np.s_[:], 0.5),
    "zero": lambda v, lent: v.zero(borrow=True),
}


def test_every_change_reaches_all_ranks_once(world, monkeypatch, caplog):
    results, sent = [], []
    carry = replica_tracker.carry_values
    counted = functools.wraps(carry)(lambda *args: (sent.append(1), carry(*args)))
    monkeypatch.setattr(replica_tracker, "carry_values", counted)
    caplog.set_level(logging.INFO, "synkhronos")
    for build in (compiler.function, parallel_function):
        v, lent = compiler.shared(np.array([1.0, 2, 3, 4]), "factor"), np.array([2.0, 1, 1, 3])
        step = step_of(v, build)
        results.append([step(ROWS)])
        for change in CHANGES.values():
            change(v, lent)
            results[-1].append(step(ROWS))
            step(ROWS)
    np.testing.assert_allclose(*results)
    assert len(sent) == 3 * len(CHANGES)
    assert synk.in_sync()
    assert [one.getMessage() for one in caplog.records if "factor" in one.getMessage()] == [
        "the script has changed factor: such changes are sent to all ranks before the next call"
    ]


def test_an_accumulator_that_the_script_resets(world):
    for how in ("set", "function", "write", "hold"):
        total, held = compiler.shared(np.zeros(2), "total"), None
        step = step_of(compiler.shared(np.ones(1)), parallel_function, [(total, total + x.mean())])
        reset = compiler.function([], updates=[(total, tt.zeros_like(total))])
        for _ in range(3):
            for _ in range(2):
                step(ROWS)
            np.testing.assert_allclose(total.get_value(), 2 * ROWS.mean())
            if how == "hold":
                held = total.get_value(borrow=True)
            {
                "set": lambda: total.set_value(np.zeros(2)),  # noqa: B023 - called here
                "function": reset,
                "write": lambda: _write(total, np.s_[:], 0),  # noqa: B023
                "hold": lambda: held.fill(0),  # noqa: B023
            }[how]()


def test_an_array_follows_the_updates_of_a_step_as_on_one_process(world):
    mode = names.package.compile.mode.Mode(linker="py", optimizer="fast_run")
    results = []
    for build in (compiler.function, parallel_function):
        total, lent = compiler.shared(np.zeros(2), "total"), np.zeros(2)
        total.set_value(lent, borrow=True)
        step = build([x], total.sum(), updates=[(total, total + x.mean())], mode=mode)
        results.append([])
        for _ in range(3):
            step(ROWS)
            results[-1] += [step(ROWS), lent[0]]
            lent[:] = 0
    np.testing.assert_allclose(*results)


def test_the_states_of_streams_and_other_objects_are_sent_too(world):
    shared = compiler.shared(scipy.sparse.csr_matrix(np.eye(3)), "matrix")
    held = names.package.sparse.dot(x, shared)
    w = compiler.shared(np.ones(3), "w")
    loss = tt.sqr(tt.dot(held, w)).mean()
    step = parallel_function([x], loss, updates=[(w, w - 0 * tt.grad(loss, w))])
    first = step(ROWS)
    shared.set_value(scipy.sparse.csr_matrix(2 * np.eye(3)))
    np.testing.assert_allclose(step(ROWS), 4 * first)
    shared.get_value(borrow=True).data[:] = 3
    np.testing.assert_allclose(step(ROWS), 9 * first)
    kept = shared.get_value(borrow=True)
    values = kept.data
    for factor in (4, 5, 6, 7):
        values[:] = factor
        np.testing.assert_allclose(step(ROWS), factor**2 * first)
        kept = None


def test_what_is_written_into_a_buffer_of_the_array_is_sent(world):
    v, buffer = compiler.shared(np.ones(1), "v"), bytearray(16)
    v.set_value(np.frombuffer(buffer), borrow=True)
    step = step_of(v, parallel_function)
    for value in (1, 3):
        np.frombuffer(buffer)[:] = value
        step(ROWS)
        assert synk.gather(v).ravel().tolist() == [value] * 6


def test_explicit_calls_keep_their_meaning(world):
    v, own = compiler.shared(np.ones(1), "v"), compiler.shared(np.ones(1), "own")
    step = step_of(v, parallel_function, [(own, own + 1, None)])
    step(ROWS)
    synk.set_value(1, v, np.zeros(1))
    v.set_value(np.full(1, 2.0))
    own.set_value(np.zeros(1))
    with pytest.warns(synk.SynkhronosWarning, match="own, whose replicas differ"):
        step(ROWS)
    assert synk.gather(v).ravel().tolist() == [2, 0, 1]
    assert synk.gather(own).ravel().tolist() == [1, 3, 3]
    synk.broadcast(v)
    v.set_value(np.full(1, 3.0))
    assert synk.gather(v).ravel().tolist() == [3, 3, 3]
    v.set_value(np.full(1, 4.0))
    synk.set_value(2, v, np.zeros(1))
    assert synk.gather(v).ravel().tolist() == [4, 4, 0]


def test_a_large_array_is_compared_in_parts_while_the_script_keeps_it(world, monkeypatch):
    monkeypatch.setattr(replica_tracker, "_WHOLE", 1 << 10)
    monkeypatch.setattr(replica_tracker, "_SAMPLED", 8)
    v, large = compiler.shared(np.ones(1), "large"), np.ones(1000)
    step = step_of(v, parallel_function)
    step(ROWS)
    v.set_value(large, borrow=True)
    step(ROWS)
    for place in (np.s_[:], 0):  # as the sample shows, and when the script asks for the array
        large[place] += 1
        step(ROWS)
        assert synk.in_sync(v)
    v.get_value(borrow=True)[777] = 5
    step(ROWS)
    assert synk.in_sync(v)
    large[777] = 6
    with pytest.warns(synk.SynkhronosWarning, match="large: the script has written into the array"):
        for _ in range(8):
            step(ROWS)
    assert synk.in_sync(v)
