"""Functions and shared variables are freed on every rank when the script drops them."""

import gc
import weakref

import numpy as np
import psutil
import pytest
import theano
import theano.tensor as T
from processes import own_process

import synkhronos as synk
from synkhronos.world.here import Command
from synkhronos.world.world import current_world

MEBIBYTE = 1 << 20


class Held(Command):
    """Returns the numbers of the functions and shared variables that a rank has."""

    def run(self, here):
        return sorted(here.functions), sorted(here.shareds)


OWNED = []


class Dropping(Command):
    """Drops what is in `OWNED`, on the master, while it runs."""

    def run(self, here):
        if here.is_master:
            OWNED.clear()


def held():
    return current_world().run(Held())


def model(length=3):
    """Return a function with two variables of its own. It slices one of them."""
    weights = theano.shared(np.ones(length), "weights")
    rows = theano.shared(np.ones((4, 1)), "rows")
    outputs = [(weights.sum() * rows.sum(), "sum")]
    updates = [(weights, weights * 2)]
    return synk.function([], outputs, updates=updates, sliceable_shareds=[rows], mode="FAST_COMPILE")


@pytest.mark.parametrize("late", [False, True], ids=["inherited", "sent"])
def test_dropped_functions_and_their_variables_are_dropped_by_every_rank(world_of, late):
    world_of(3)
    kept = model()
    if late:
        synk.distribute()
    dropped = model()
    dropped()
    before = held()
    assert [len(functions) for functions, _ in before] == [2] * 3
    del dropped
    after = held()
    assert [(len(functions), len(shareds)) for functions, shareds in after] == [(1, 2)] * 3
    assert kept() == [3 * 4 * 3]
    assert after == held()


def test_what_a_function_uses_is_kept_with_it(world_of):
    world_of(2)
    function = model()
    function()
    gc.collect()
    assert [len(shareds) for _, shareds in held()] == [2, 2]
    assert [shared.name for shared in function.get_shared()] == ["weights", "rows"]
    assert function() == [2 * 3 * 4 * 2]


def test_a_variable_of_two_functions_is_dropped_with_the_second(world_of):
    world_of(2)
    shared = theano.shared(2.0, "shared")
    first = synk.function([], shared + 1, mode="FAST_COMPILE")
    second = synk.function([], shared + 2, mode="FAST_COMPILE")
    synk.distribute()
    del shared, first
    assert [len(one) for one in held()[1]] == [1, 1]
    assert second() == 4
    del second
    assert held() == [([], [])] * 2


@pytest.mark.parametrize("late", [False, True], ids=["inherited", "sent"])
def test_a_clone_that_is_dropped_leaves_the_value_to_the_original(world_of, late):
    world_of(2)
    if late:
        synk.distribute()
    original = theano.shared(np.ones(3), "original")
    clone = theano.clone(original, share_inputs=False)
    step = synk.function([], updates=[(clone, clone + 1)], mode="FAST_COMPILE")
    read = synk.function([], original, mode="FAST_COMPILE")
    step()
    del clone, step
    assert [len(shareds) for _, shareds in held()] == [1, 1]
    np.testing.assert_array_equal(synk.gather(original), np.full((2, 3), 2))
    np.testing.assert_array_equal(read(), np.full(3, 2))


def test_what_was_dropped_before_it_was_replicated_is_not_sent(world_of):
    world_of(2)
    synk.distribute()
    model()
    gc.collect()
    synk.distribute()
    assert held() == [([], [])] * 2
    function = model()
    assert function() == [3 * 4 * 2]


def test_a_variable_that_only_a_recorded_call_uses_is_kept_until_the_call_runs(world_of):
    world_of(2)
    function = model()
    synk.distribute()
    variable = theano.shared(np.arange(3.0))
    synk.broadcast(variable)
    with synk.fuse():
        result = synk.gather(variable)
        pending = function()
        del variable, function
        gc.collect()
        late = model()()  # this replicates a function, which is dropped at once
    np.testing.assert_array_equal(result.result(), [np.arange(3.0)] * 2)
    assert pending.result() == late.result() == [3 * 4 * 2]
    assert held() == [([], [])] * 2


def test_functions_and_variables_are_freed_after_close(world_of):
    world_of(2)
    function = model()
    function()
    variable = weakref.ref(function.get_shared()[0])
    synk.close()
    del function
    gc.collect()
    assert variable() is None


def test_a_checkpoint_does_not_contain_what_was_dropped(world_of, tmp_path):
    world_of(2)
    weights = theano.shared(np.ones(2), "weights")
    update = synk.function([], updates=[(weights, weights + 1)], mode="FAST_COMPILE")
    model()()
    synk.save(tmp_path / "checkpoint.npz")
    with np.load(tmp_path / "checkpoint.npz") as archive:
        arrays = [name for name in archive.files if name.startswith("shared")]
    assert len(arrays) == 1
    model()()
    update()
    synk.load(tmp_path / "checkpoint.npz")
    np.testing.assert_array_equal(synk.gather(weights), np.ones((2, 2)))


def test_new_workers_after_a_restart_have_what_is_left(world_of):
    world_of(2)
    first, second = model(), model()
    first(), second()
    del first
    synk.restart()
    assert second() == [2 * 3 * 4 * 2]
    assert [(len(functions), len(shareds)) for functions, shareds in held()] == [(1, 2)] * 2


def test_data_bound_to_a_variable_is_freed_with_the_variable(world_of):
    world_of(2)
    x = T.dvector("x")
    data = weakref.ref(synk.set_shmems({x: np.ones(3)})[x])
    del x
    gc.collect()
    assert data() is None


def test_a_repeated_reduction_keeps_nothing_alive(world_of):
    world_of(2)
    weights = theano.shared(np.ones(3), "weights")
    function = synk.function([], updates=[(weights, weights + 1)], mode="FAST_COMPILE")
    for _ in range(3):
        function()
        synk.all_reduce([weights], "avg", weights=function)
    assert weights.get_value().tolist() == [4] * 3
    references = weakref.ref(weights), weakref.ref(function)
    del weights, function
    gc.collect()
    assert [one() for one in references] == [None, None]


def test_dropping_takes_no_further_command(world_of):
    world_of(2)
    kept, dropped = model(), model()
    kept(), dropped()
    with synk.profile() as measured:
        del dropped
        kept()
    assert measured.seconds.shape[:2] == (1, 2)
    assert [len(functions) for functions, _ in held()] == [1, 1]


def test_what_is_dropped_while_a_command_runs_is_dropped_by_the_next_one(world_of):
    world_of(2)
    before, during, kept = model(), model(), model()
    before(), during(), kept()
    OWNED.append(during)
    del before, during
    current_world().run(Dropping())
    assert not OWNED
    assert [(len(functions), len(shareds)) for functions, shareds in held()] == [(1, 2)] * 2
    assert kept() == [2 * 3 * 4 * 2]


def test_what_is_dropped_is_dropped_although_the_next_command_fails(world_of):
    world_of(2)
    x = T.dvector("x")
    kept, dropped = synk.function([x], (x[1], "sum"), mode="FAST_COMPILE"), model()
    kept([1.0, 2.0, 3.0, 4.0]), dropped()
    del dropped
    with pytest.raises(synk.WorkerError, match="IndexError"):
        kept([1.0, 2.0, 3.0])  # the worker has one row
    assert [len(functions) for functions, _ in held()] == [1, 1]
    assert kept([1.0, 2.0, 3.0, 4.0]) == 6


@own_process
@pytest.mark.parametrize("late", [False, True], ids=["inherited", "sent"])
def test_dropped_models_do_not_accumulate(late):
    synk.fork(2, use_gpu=False)
    if late:
        synk.distribute()
    models = [model(MEBIBYTE) for _ in range(8)]  # 64 MB
    for each in models:
        each()
    processes = [psutil.Process(), *psutil.Process().children()]
    before = [process.memory_info().rss for process in processes]
    del models, each
    held()
    for process, resident in zip(processes, before):
        assert resident - process.memory_info().rss > 0.8 * 64 * MEBIBYTE
