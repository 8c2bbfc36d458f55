"""Tests of centers: against NumPy, and with ranks that exchange at once, are stopped and killed."""

import functools
import os
import re
import signal
import time

import numpy as np
import pytest
from checks.children import as_rank, begin, die, end, kill, wait_until

from specifications.engine import NaiveEngine, Shared
from synkhronos.programs import center as module
from synkhronos.programs.center import Center
from synkhronos.services.stripes import Stripes
from synkhronos.stores.memory import SharedMemory
from specifications.store import NaiveNamedMemory
from synkhronos.stores.base import SharedMemoryStore

ENGINE = NaiveEngine()
STRIPE = 512  # bytes, in all tests
SIZE = 1000  # int64 numbers, 16 stripes
COUNT = -(-8 * SIZE // STRIPE)


class Ended(Exception):
    """Raised by a pause."""


def pause():
    os.sched_yield()


def refuse():
    raise Ended


@pytest.fixture(autouse=True)
def small_stripes(monkeypatch):
    monkeypatch.setattr(module, "_STRIPE_BYTES", STRIPE)
    monkeypatch.setattr(module, "_PIECE_BYTES", 192)


@pytest.fixture
def store():
    return SharedMemoryStore(SharedMemory(5))


@pytest.fixture(params=["naive", "shared"])
def named_memory(request, store):
    return NaiveNamedMemory() if request.param == "naive" else store.named_memory


VALUES = [((7, 30), "float32"), ((), "float32"), ((0, 3), "float64"), ((100,), "float16"),
          ((3, 4, 5), "float64"), ((65,), "int64"), ((40,), "uint8"), ((20,), "complex64")]  # fmt: skip
FLOATS = [one for one in VALUES if np.dtype(one[1]).kind == "f"]


def draw(types, seed):
    random = np.random.default_rng(seed)
    return [np.asarray(random.integers(0, 200, shape) / (1 if "int" in dtype else 8), dtype)
            for shape, dtype in types]  # fmt: skip


def center_in(named_memory, *arguments):
    """Return a center whose stripes are in this named memory."""
    return Center(functools.partial(Stripes, named_memory), *arguments)


class Rank:
    """A rank in this process: its variables, and what they should be."""

    def __init__(self, named_memory, types, seed, model, engine=ENGINE):
        self.values = draw(types, seed)
        self.variables = [Shared(value, f"v{k}") for k, value in enumerate(self.values)]
        self.center = center_in(named_memory, engine, self.variables, "c", pause)
        if "center" in model:
            self.values = [one.copy() for one in model["center"]]
        else:
            model["center"] = [one.copy() for one in self.values]
        self.model, self.base = model, [one.copy() for one in self.values]

    def train(self, seed):
        """Change the variables, half of them by replacing the storage, which may get another layout."""
        for k, added in enumerate(draw([(one.shape, one.dtype.str) for one in self.values], seed)):
            self.values[k] = self.values[k] + added
            storage = self.variables[k].storage
            if k % 2:
                storage[...] = self.values[k]
            else:
                self.variables[k].storage = np.asfortranarray(self.values[k])

    def push(self, scale=1, reset=False):
        for k, (center, value) in enumerate(zip(self.model["center"], self.values)):
            wide = np.float32 if center.dtype == "float16" else center.dtype
            change = np.subtract(value, self.base[k], dtype=wide) * np.array(scale).astype(wide)
            self.model["center"][k] = np.asarray(center + change, center.dtype)
            self.values[k] = np.zeros_like(value) if reset else value
            self.base[k] = self.values[k].copy()
        self.center.push(scale, reset)

    def pull(self, keep_changes=False):
        for k, (center, value) in enumerate(zip(self.model["center"], self.values)):
            wide = np.float32 if center.dtype == "float16" else center.dtype
            change = np.subtract(value, self.base[k], dtype=wide) * keep_changes
            self.values[k] = center.copy()
            self.base[k] = np.asarray(center - change.astype(wide), center.dtype)
        self.center.pull(keep_changes)

    def elastic(self, alpha):
        for k, (center, value) in enumerate(zip(self.model["center"], self.values)):
            wide = np.promote_types(center.dtype, np.float32)
            d = wide.type(alpha) * np.subtract(value, center, dtype=wide)
            self.values[k] = np.asarray(value - d, center.dtype)
            self.model["center"][k] = np.asarray(center + d, center.dtype)
        self.center.elastic(alpha)

    def update(self):
        for k, (center, value) in enumerate(zip(self.model["center"], self.values)):
            self.model["center"][k] = np.asarray(center + value, center.dtype)
            self.values[k] = np.ones_like(value)

        def add(center, own):
            for there, state in zip(center, own):
                there += state
                state[...] = 1

        self.center.update(add)

    def check(self):
        there = [one.storage for one in self.variables]
        for got, expected in ((there, self.values), (self.center.value(), self.model["center"])):
            for one, other in zip(got, expected):
                assert (one.shape, one.dtype) == (other.shape, other.dtype)
                np.testing.assert_array_equal(one, other)


def test_pushes_and_pulls_are_those_of_numpy(named_memory):
    model = {}
    first, second = Rank(named_memory, VALUES, 0, model), Rank(named_memory, VALUES, 1, model)
    for step, scale in enumerate((1, 1, -3, 2)):
        for rank in (first, second):
            rank.train(step)
            rank.push(scale)
            rank.check()
        if step % 2:
            first.pull()
        first.push()  # nothing has changed
        first.check()
        second.check()
    third = Rank(named_memory, VALUES, 2, model)  # a fresh rank starts from the center
    third.check()
    with pytest.raises(TypeError, match="must be an int, got 0.5, because the variable v5 has .* int64"):
        first.push(0.5)


def test_a_pull_may_keep_changes_for_the_next_push(named_memory):
    model = {}
    first, second = Rank(named_memory, VALUES, 0, model), Rank(named_memory, VALUES, 1, model)
    for step in range(3):
        for rank, other in ((first, second), (second, first)):
            rank.train(step)
            rank.pull(keep_changes=True)
            rank.check()
            other.train(step)
            other.push()
            rank.train(step)
            rank.push()
            rank.check()


def test_a_rank_that_adds_up_pushes_and_begins_again_at_zero(named_memory):
    model = {}
    first, second = Rank(named_memory, VALUES, 0, model), Rank(named_memory, VALUES, 1, model)
    for step in range(4):
        for rank in (first, second):
            rank.train(step)
            rank.push(reset=True)
            rank.check()
    assert not any(one.storage.any() for one in first.variables)


def test_an_update_by_a_function_is_that_of_numpy(named_memory):
    model = {}
    first, second = Rank(named_memory, VALUES, 0, model), Rank(named_memory, VALUES, 1, model)
    for step in range(3):
        for rank in (first, second):
            rank.train(step)
            rank.update()
            rank.check()
    with pytest.raises(RuntimeError, match=r"push\(\) after elastic\(\) or update\(\)"):
        first.center.push()
    with pytest.raises(RuntimeError, match=r"pull\(keep_changes=True\) after elastic\(\) or update\(\)"):
        first.center.pull(keep_changes=True)
    first.pull()
    first.push()
    first.check()


def test_an_update_that_raises_leaves_the_center_as_it_was_and_free(named_memory):
    variable = Shared(np.ones(SIZE), "w")
    center = center_in(named_memory, ENGINE, variable, "c", refuse)

    def fail(there, own):
        there += 5
        raise KeyError("of the function")

    with pytest.raises(KeyError, match="of the function"):
        center.update(fail)
    with pytest.raises(TypeError, match="changes the arrays in place.* got 3"):
        center.update(lambda there, own: 3)
    with pytest.raises(TypeError, match="expected a function"):
        center.update(None)
    assert set(center.value()) == {1}
    other = center_in(named_memory, ENGINE, Shared(np.zeros(SIZE), "w"), "c", refuse)
    other.pull()  # would be refused if a lock were held


def test_elastic_exchanges_are_those_of_numpy(named_memory):
    model = {}
    ranks = [Rank(named_memory, FLOATS, seed, model) for seed in (0, 1)]
    for step, alpha in enumerate((0.5, 0.1, 1, np.float32(0.3))):
        for rank in ranks:
            rank.train(step)
            rank.elastic(alpha)
            rank.check()
    with pytest.raises(RuntimeError, match=r"call pull\(\) before"):
        ranks[0].center.push(0.5)
    ranks[0].pull()
    ranks[0].train(9)
    ranks[0].push(0.5)
    ranks[0].check()
    with pytest.raises(TypeError, match="for floats, and the variable v0 has the dtype int64"):
        center_in(named_memory, ENGINE, [Shared(np.zeros(3, int), "v0")], "i", pause).elastic(0.5)


def test_assigned_values_are_the_centers_and_not_the_variables(named_memory):
    variable = Shared(np.zeros((30, 20)), "w")
    center = center_in(named_memory, ENGINE, variable, "c", pause)
    new = np.arange(600.0).reshape(20, 30).T
    center.assign(new)
    np.testing.assert_array_equal(center.value(), new)
    assert not variable.storage.any()
    center.value()[...] = 3  # a copy
    center.pull()
    np.testing.assert_array_equal(variable.storage, new)


class DeviceArray:
    """An array that only its engine can read and write."""

    def __init__(self, value):
        self.hidden, self.shape, self.dtype = value, value.shape, value.dtype


class DeviceEngine(NaiveEngine):
    def storage(self, shared):
        if not isinstance(shared.storage, DeviceArray):
            shared.storage = DeviceArray(shared.storage)
        return shared.storage

    def read(self, array, out):
        out[...] = array.hidden

    def write(self, shared, value):
        shared.storage.hidden[...] = value


def test_arrays_of_a_device_are_exchanged_by_way_of_the_host(named_memory):
    own, other = Shared(np.full(300, 4.0), "w"), Shared(np.zeros(300), "w")
    on_device = center_in(named_memory, DeviceEngine(), own, "c", pause)
    on_host = center_in(named_memory, ENGINE, other, "c", pause)
    assert set(other.storage) == {4}
    other.storage += 2
    on_host.push()
    on_device.elastic(0.25)
    assert set(own.storage.hidden) == {4.5} and set(on_host.value()) == {5.5}
    on_device.pull()
    own.storage.hidden += 1
    on_device.push(2)
    assert set(own.storage.hidden) == {6.5} and set(on_device.value()) == {7.5}


def make(named_memory, shareds, name="c"):
    return center_in(named_memory, ENGINE, shareds, name, pause)


def test_wrong_arguments_are_refused_in_words(store):
    named_memory = store.named_memory
    w, b = Shared(np.zeros((3, 4)), "w"), Shared(np.zeros(4, "float32"), "b")
    center = make(named_memory, [w, b])
    streams = Shared(np.random.RandomState(0), "s")
    for call, error, words in (
        (lambda: make(named_memory, w, ""), TypeError, "expected a name"),
        (lambda: make(named_memory, []), ValueError, "at least one shared variable"),
        (lambda: make(named_memory, [w, w]), ValueError, "twice"),
        (lambda: make(named_memory, [np.zeros(3)]), TypeError, "expected shared variables, got array"),
        (lambda: make(named_memory, streams, "s"), TypeError, "the variable s .*RandomState"),
        (lambda: make(named_memory, Shared(np.zeros(2, bool), "m"), "m"),
         TypeError, "variable m .* bool"),
        (lambda: make(named_memory, w), ValueError, "has 2 variables, this rank asked for one with 1"),
        (lambda: make(named_memory, [b, w]), ValueError,
         r"variable b has the shape \(4,\) and the dtype "
         r"float32, and the center has \(3, 4\) and float64"),
        (lambda: center.push("1"), TypeError, "expected a number as scale, got '1'"),
        (lambda: center.push(np.nan), ValueError, "finite"),
        (lambda: center.elastic(0), ValueError, r"alpha in \(0, 1\], got 0"),
        (lambda: center.elastic(np.nan), ValueError, "alpha"),
        (lambda: center.elastic(True), TypeError, "expected a number as alpha"),
        (lambda: center.assign([w.storage]), ValueError, "list of 2 arrays, .* got 1"),
        (lambda: center.assign([w.storage, np.zeros(4)[:, None]]), ValueError, "for the variable b"),
        (lambda: center.assign([w.storage, np.zeros(4, complex)]), ValueError, "complex128"),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            call()
    w.storage = np.zeros((4, 4))
    for operation in (center.pull, center.push, lambda: center.elastic(1)):
        with pytest.raises(ValueError, match=re.escape("has got the shape (4, 4)")):
            operation()
    assert not center.value()[0].any()


def make_integers(store, value=0):
    variable = Shared(np.full(SIZE, value), "w")
    return variable, center_in(store.named_memory, ENGINE, variable, "c", pause)


def stripes_of(array):
    """Return the values of the stripes; all items of a stripe must be equal."""
    parts = [set(array[start : start + STRIPE // 8].tolist()) for start in range(0, SIZE, STRIPE // 8)]
    assert all(len(part) == 1 for part in parts), "a stripe is torn"
    return np.array([part.pop() for part in parts])


def push_often(store, rank, done, times):
    variable, center = make_integers(store)
    for _ in range(times):
        variable.storage += rank
        center.push()
        done[rank] += 1
        if done[rank] % 10 == 0:
            stripes_of(center.value())
            center.pull()


@pytest.mark.parametrize("killed", [0, 3])
def test_what_four_ranks_push_at_once_adds_up_exactly(store, killed):
    """A killed rank has added its last change to each stripe as a whole, or not at all."""
    variable, center = make_integers(store)
    done = store.named_memory.array("done", 5, "int64")
    endless = 10**9
    ranks = {k: begin(as_rank, store, k, push_often, store, k, done, 150 if k > killed else endless)
             for k in (1, 2, 3, 4)}  # fmt: skip
    try:
        for rank in range(1, killed + 1):
            wait_until(lambda rank=rank: stripes_of(center.value()).size and done[rank] >= 17 * rank)
            kill(ranks.pop(rank))
        assert [end(pid) for pid in ranks.values()] == [0] * len(ranks)
    finally:
        for pid in ranks.values():
            kill(pid)
    assert [number for number in done[killed + 1 :]] == [150] * (4 - killed)
    surplus = stripes_of(center.value()) - done @ np.arange(5)
    # The last push of ranks 1, 2 and 3 may be in a stripe or not.
    assert set(surplus) <= set(range(0, 7 if killed else 1))
    assert_all_memories_are_used_once(center, 4)
    variable.storage += 1
    before = center.value()
    center.push()
    np.testing.assert_array_equal(center.value(), before + 1)


def make_pair(store):
    """Return a center of two variables: updates change both, and pushes the second one."""
    pair = [Shared(np.zeros(SIZE, int), name) for name in ("updated", "pushed")]
    return pair, center_in(store.named_memory, ENGINE, pair, "pair", pause)


def update_often(store, rank, done, times):
    _, center = make_pair(store)

    def add_one(there, own):
        assert len(set(there[0])) == 1, "another update has been interrupted"
        there[0][: SIZE // 2] += 1
        time.sleep(1e-4)
        there[0][SIZE // 2 :] += 1
        there[1] += 1

    for _ in range(times):
        center.update(add_one)
        done[rank] += 1


def push_second_often(store, rank, done, times):
    pair, center = make_pair(store)
    for _ in range(times):
        pair[1].storage += 1
        center.push()
        done[rank] += 1


@pytest.mark.parametrize("is_killed", [False, True])
def test_no_other_rank_interrupts_an_update_or_loses_a_change_by_it(store, is_killed):
    _, center = make_pair(store)
    done = store.named_memory.array("done", 5, "int64")
    others = [
        begin(as_rank, store, 1, push_second_often, store, 1, done, 10**9 if is_killed else 60),
        begin(as_rank, store, 2, update_often, store, 2, done, 30),
        begin(as_rank, store, 3, update_often, store, 3, done, 30),
        begin(as_rank, store, 4, push_second_often, store, 4, done, 60),
    ]
    try:
        if is_killed:
            wait_until(lambda: done[1] >= 20)
            kill(others.pop(0))
        assert [end(pid) for pid in others] == [0] * len(others)
    finally:
        for pid in others:
            kill(pid)
    updated, pushed = center.value()
    assert set(updated) == {60}
    assert set(pushed - (60 + done[1] + done[4])) <= ({0, 1} if is_killed else {0})


def test_a_rank_that_is_killed_in_an_update_leaves_nothing_locked(store):
    _, center = make_pair(store)
    done = store.named_memory.array("done", 5, "int64")
    pid = begin(as_rank, store, 1, update_often, store, 1, done, 10**9)
    wait_until(lambda: done[1] >= 5)
    kill(pid)
    before = center.value()
    center.update(lambda there, own: np.copyto(there[0], there[1]))
    assert set(before[1]) <= set(range(done[1], done[1] + 2))
    np.testing.assert_array_equal(center.value()[0], center.value()[1])


def assert_all_memories_are_used_once(center, others):
    """After each member's number was taken over, each memory is in the table or is one rank's spare."""
    # They take the numbers of those that ended.
    more = [center_in(center._stripes._named_memory, ENGINE, Shared(np.zeros(SIZE, int)), "c", pause)
            for _ in range(others)]  # fmt: skip
    table, members = center._stripes._table, center._stripes._members
    used = [table[k, 0] for k in range(COUNT)] + [members[k, 0] for k in range(1 + others)]
    assert sorted(used) == list(range(1, COUNT + others + 2))
    assert not members[1 + others, 0]
    del more


def die_in(store, what):
    variable, center = make_integers(store)
    stripes = center._stripes
    variable.storage += 5
    if what == "writing":  # half of the sixth stripe is written

        def write_half(number, memory, new):
            add = new.view("int64")
            if number == 5:
                add = add[:30]
            add[...] = memory.view("int64")[: add.size] + 5
            if number == 5:
                die()

        stripes.order = list(range(COUNT))
        stripes.change(write_half)
    else:
        members = stripes._members

        class Members:
            def __getitem__(self, key):
                return members[key]

            def __setitem__(self, key, value):
                if key[1] == 0 and members[key[0], 2] == 5:  # its next spare
                    die()
                members[key] = value

        stripes.order, stripes._members = list(range(COUNT)), Members()
        center.push()


@pytest.mark.parametrize("taken_over", [False, True])
@pytest.mark.parametrize("what, changed", [("writing", 5), ("entered", 6)])
def test_a_killed_rank_leaves_its_stripe_free_and_whole(store, what, changed, taken_over):
    variable, center = make_integers(store, 1)
    assert end(begin(as_rank, store, 1, die_in, store, what)) == signal.SIGKILL
    if taken_over:
        other, successor = make_integers(store)
        assert stripes_of(other.storage).tolist() == [6] * changed + [1] * (COUNT - changed)
    for _ in range(3):
        variable.storage += 1
        center.push()
        if taken_over:
            other.storage += 1
            successor.push()
    added = 6 if taken_over else 3
    values = stripes_of(center.value()).tolist()
    assert values == [6 + added] * changed + [1 + added] * (COUNT - changed)
    if taken_over:
        successor._stripes._own.release()  # as at the end of a program
    assert_all_memories_are_used_once(center, 1)


def die_first(store):
    filled = Center._fill

    def fill(self, arrays, number, memory):
        filled(self, arrays, number, memory)
        if number == 3:
            die()

    Center._fill = fill
    make_integers(store, 7)


def test_a_center_that_a_killed_rank_has_begun_is_begun_again(store):
    assert end(begin(as_rank, store, 1, die_first, store)) == signal.SIGKILL
    variable, center = make_integers(store, 8)
    assert set(center.value()) == set(variable.storage) == {8}
    assert make_integers(store, 9)[0].storage.tolist() == [8] * SIZE


def stop_in_a_stripe(store):
    variable, center = make_integers(store)
    center._stripes.order = [3, *range(3), *range(4, COUNT)]
    variable.storage += 5

    def stop(number, memory, new):
        os.kill(os.getpid(), signal.SIGSTOP)
        np.add(memory.view("int64"), 5, out=new.view("int64"))

    center._stripes.change(stop)


def test_a_stripe_of_a_stopped_rank_comes_last_and_is_waited_for(store):
    variable, center = make_integers(store)
    stopped = begin(as_rank, store, 1, stop_in_a_stripe, store)
    try:
        assert os.WIFSTOPPED(os.waitpid(stopped, os.WUNTRACED)[1])
        center._stripes._pause = refuse
        variable.storage += 1
        with pytest.raises(Ended):
            center.push()
        with pytest.raises(Ended):
            center.value()
        with pytest.raises(Ended):
            center.push()  # adds nothing twice
        pauses = []

        def kill_it():
            pauses.append(1)
            kill(stopped)

        center._stripes._pause = kill_it
        center.push()
        assert pauses and stripes_of(center.value()).tolist() == [1] * COUNT
    finally:
        kill(stopped)
