"""Functions and shared variables are freed on every rank when the script drops them."""

import gc
import resource

import numpy as np
import psutil
import pytest
import theano
import theano.tensor as T
from processes import own_process

import synkhronos as synk
from synkhronos import ops
from synkhronos.functions.replica_tracker import replica_tracker_of
from synkhronos.functions.replica import Replica
from synkhronos.world.rank_state import Command
from synkhronos.world.world import current_world

MEBIBYTE = 1 << 20


class Held(Command):
    def run(self, state):
        return sorted(state.functions), sorted(state.shareds)


OWNED = []


class Dropping(Command):
    """Drops what is in `OWNED`, on the master, while it runs."""

    def run(self, state):
        if state.is_master:
            OWNED.clear()


def held():
    return current_world().run(Held())


class Kept(Command):
    NAMES = ("functions", "shareds", "rows", "peers", "wires", "_buffers")

    def run(self, state):
        found = {name: len(getattr(state, name)) for name in self.NAMES}
        return {**found, "replicas": count_replicas()}


def count_replicas():
    gc.collect()
    return sum(type(one) is Replica for one in gc.get_objects())


class InStore(Command):
    def run(self, state):
        memory = state.store.memory
        memory.collect()
        (_, start, stop), free = memory.parts_of_span(state.transport.distance), memory._large.holes()
        return (stop - start - sum(last - first for first, last in free)) // MEBIBYTE


def known():
    groups = vars(replica_tracker_of(current_world()))
    return {name: len(one) for name, one in groups.items() if isinstance(one, (set, dict))}


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


@pytest.mark.parametrize("late", [False, True], ids=["inherited", "sent"])
def test_a_clone_that_is_dropped_leaves_the_value_to_the_original(two, late):
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


def test_a_variable_that_only_a_recorded_call_uses_is_kept_until_the_call_runs(two):
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


def test_a_checkpoint_does_not_contain_what_was_dropped(two, tmp_path):
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


def test_what_is_dropped_while_a_command_runs_is_dropped_by_the_next_one(two):
    before, during, kept = model(), model(), model()
    before(), during(), kept()
    OWNED.append(during)
    del before, during
    current_world().run(Dropping())
    assert not OWNED
    assert [(len(functions), len(shareds)) for functions, shareds in held()] == [(1, 2)] * 2
    assert kept() == [2 * 3 * 4 * 2]


def test_what_is_dropped_is_dropped_although_the_next_command_fails(two):
    x = T.dvector("x")
    kept, dropped = synk.function([x], (x[1], "sum"), mode="FAST_COMPILE"), model()
    kept([1.0, 2.0, 3.0, 4.0]), dropped()
    del dropped
    with pytest.raises(synk.WorkerError, match="IndexError"):
        kept([1.0, 2.0, 3.0])  # the worker has one row
    assert [len(functions) for functions, _ in held()] == [1, 1]
    assert kept([1.0, 2.0, 3.0, 4.0]) == 6


def call_and_drop(shared):
    """Use functions and variables in all ways for which ranks keep something, and drop them."""
    x = T.dvector("x")
    rows, own = theano.shared(np.ones(6), "rows"), theano.shared(np.ones(3), "own")
    updates = [(own, own + ops.all_reduce(x.mean(), "avg")), (shared, shared + own.sum())]
    function = synk.function([x], (x.sum(), "sum"), updates=updates, mode="FAST_COMPILE")
    sliced = synk.function([], (rows.sum(), "sum"), sliceable_shareds=[rows], mode="FAST_COMPILE")
    data = synk.data(np.ones(8))
    for _ in range(3):
        function(data, batch=[1, 3, 4, 6])
        sliced(batch_s=[0, 2])
        with synk.fuse():
            function(data)
            synk.all_reduce(own)
    synk.scatter(rows, np.ones(6))
    synk.set_value(0, own, np.ones(3))
    synk.broadcast(own, np.ones(3))


@own_process  # without replicas of other tests
@pytest.mark.parametrize("ranks", [1, 3])
def test_of_dropped_functions_and_variables_nothing_is_left_on_any_rank(ranks):
    synk.fork(ranks, use_gpu=False)
    shared = theano.shared(1.0, "shared")
    counts = []
    for _ in range(3):
        call_and_drop(shared)
        counts.append((current_world().run(Kept()), known()))
    assert counts[1:] == counts[:1] * 2
    for kept in counts[0][0]:
        assert kept == {**dict.fromkeys(kept, 0), "shareds": 1}
    synk.close()


def test_an_array_of_the_last_collective_is_freed_with_its_variable(two):
    variable, other = theano.shared(np.ones(MEBIBYTE)), theano.shared(np.ones(3))
    synk.broadcast([variable, other])
    synk.all_reduce([variable, other])
    before = current_world().run(InStore())
    del variable
    synk.broadcast(other)
    assert [start - end for start, end in zip(before, current_world().run(InStore()))] == [8] * 2
    synk.all_reduce(other)
    assert other.get_value().tolist() == [1] * 3


@pytest.mark.parametrize("known_to_ranks", [False, True])
def test_what_was_dropped_is_forgotten_before_a_restart(two, known_to_ranks):
    shared = theano.shared(1.0, "shared")
    synk.broadcast(shared)
    before = known()
    function = model()
    if known_to_ranks:
        function()
    del function
    synk.restart()
    assert known() == before


def is_mapped():
    """Whether this process has mapped shared memory: a range as large as the machine's memory."""
    with open("/proc/self/maps") as file:
        limits = [line.split()[0].split("-") for line in file]
    return any(int(stop, 16) - int(start, 16) > psutil.virtual_memory().total for start, stop in limits)


@own_process
@pytest.mark.parametrize("ranks", [1, 2])
def test_close_unmaps_the_shared_memory_at_once(ranks):
    gc.disable()
    theano.config.mode = "FAST_COMPILE"
    assert not is_mapped()
    x, w = T.dvector("x"), theano.shared(np.ones(3), "w")
    for _ in range(2):
        synk.fork(ranks, use_gpu=False)
        data = synk.data(np.ones(100_000))
        mean = ops.all_reduce(x.mean(), "avg")
        function = synk.function([x], [(x.sum(), "sum"), (x * 2, "gather")], updates=[(w, w + mean)])
        outputs = [function(data), function(data, batch=[1, 2, 3]), function(np.ones(10))]
        synk.all_reduce(w)
        with synk.fuse():
            pending = function(data), synk.all_reduce(w)
        assert is_mapped()
        synk.close()
        assert not is_mapped()
    assert len(outputs) == 3 and pending[0].result()[0] == 100_000 and w.get_value().shape == (3,)
    data.free_memory()
    with pytest.raises(synk.ClosedError):
        function(data)


@own_process
def test_arrays_in_the_shared_memory_are_readable_after_close_and_unmapped_with_the_last():
    gc.disable()
    synk.fork(2, use_gpu=False)
    data, small = synk.data(np.arange(100_000)), synk.data(np.arange(3))
    views = [data.data[5:], small.data]
    synk.close()
    assert is_mapped()
    synk.fork(2, use_gpu=False)
    synk.data(np.ones(200_000))
    synk.close()
    assert views[0].tolist() == list(range(5, 100_000)) and views[1].tolist() == [0, 1, 2]
    assert is_mapped()
    del views[0]
    assert is_mapped() and views[0].tolist() == [0, 1, 2]
    views.clear()
    assert not is_mapped()


@own_process
def test_worlds_one_after_another_have_the_same_address_space_if_it_is_limited():
    gc.disable()
    room = psutil.Process().memory_info().vms + (9 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (room, resource.RLIM_INFINITY))
    spans = []
    for _ in range(4):
        synk.fork(2, use_gpu=False)
        spans.append(synk.world.world.current_world().rank_state.store.memory._span)
        data = synk.data(np.ones(1000))
        data.itself = data  # such objects are freed when Python collects garbage
        synk.spmd(lambda rank, data: rank.barrier(), data)
        synk.close()
    assert spans == spans[:1] * 4, spans


class KeptForCalls(Command):
    """Returns how much a rank keeps for calls, and whether the resident pages it lists are free."""

    def run(self, state):
        memory = state.store.memory
        memory.collect()
        are_free = all(
            any(low <= start and stop <= high for low, high in memory._large.holes())
            for start, stop in memory._resident.holes()
        )
        gc.collect()
        return len(state._buffers), len(state.schedules), len(state.rows), are_free


def test_calls_of_changing_shape_leave_nothing_behind(two):
    x, random = T.dmatrix("x"), np.random.RandomState(0)
    function = synk.function([x], [(x.sum(), "sum"), (x * 2, "gather")], mode="FAST_COMPILE")
    values, kept, found = np.ones((20_000, 3)), [], []
    for _ in range(3):
        for index in range(50):
            rows = values[: random.randint(2, len(values))]
            kept = [*kept, synk.data(rows)][-5:]
            assert function(rows, batch=[0, 1, 1] if index % 2 else None)[0] > 0
        found.append(current_world().run(KeptForCalls()))
    assert found[1:] == found[:1] * 2
    assert all(are_free for *_, are_free in found[0])
