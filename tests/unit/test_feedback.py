"""Tests of what wire formats keep in checkpoints: on machines that are threads of one process."""

import json

import numpy as np
import pytest
from checks.machines import ThreadedMachines, start_world
from test_engines import NaiveLab

import synkhronos as synk
from synkhronos.arithmetic.partition import Buckets
from synkhronos.checkpoints import archive
from synkhronos.checkpoints.manifest import Feedback
from specifications.transport import NaiveTransport
from synkhronos.world.rank_state import Command
from synkhronos.world.world import current_world

SHAPE = (300, 200)
FORMATS = ["float16", "int8", synk.TopK(0.1), synk.PowerSGD(3),
           synk.PowerSGD(3, exact_steps=1, min_saving=2)]  # fmt: skip


class Opened:
    """A world of machines with so many ranks, and a variable in it."""

    def __init__(self, *sizes):
        close()
        lab = NaiveLab()
        transport = ThreadedMachines(sizes, 0, 60) if len(sizes) > 1 else NaiveTransport(*sizes, 0, 60)
        start_world(transport, lab.engine)
        self.w, self.v = (lab.shared(np.zeros(SHAPE, "float32"), name) for name in "wv")
        self.functions = [synk.function([], one.sum()) for one in (self.w, self.v)]
        synk.distribute()

    def reduce(self, wire, seeds, op="sum", weights=None, variable=None):
        """Return the results of reductions of random integers, or of zeros if the seed is None."""
        found, variable = [], self.w if variable is None else variable
        for seed in seeds:
            for rank, value in enumerate(values(seed)):
                synk.set_value(rank, variable, value)
            synk.all_reduce(variable, op, weights=weights, wire=wire)
            found.append(synk.gather(variable))
            assert (found[-1] == found[-1][0]).all()
        return np.array(found)[:, 0]


def values(seed):
    """Return the value of each rank: a matrix of rank 1, so that PowerSGD sends it soon."""
    if seed is None:
        return np.zeros((synk.size(), *SHAPE), "float32")
    rng = np.random.default_rng(seed)
    made = [rng.integers(-8, 8, length) for length in SHAPE for _ in range(synk.size())]
    return np.einsum("ri,rj->rij", made[: synk.size()], made[synk.size() :]).astype("float32")


def close():
    if synk.is_forked():
        synk.close()


@pytest.fixture(autouse=True)
def closed():
    yield
    close()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "checkpoint.npz"


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 2, 2)], ids=str)
@pytest.mark.parametrize("wire", FORMATS, ids=repr)
def test_a_run_that_is_resumed_is_the_same_bit_for_bit(path, sizes, wire):
    """In the same world and in a new one, also if another machine has another number of ranks."""
    world = Opened(*sizes)
    world.reduce(wire, range(3))
    synk.save(path)
    expected = world.reduce(wire, [3, 4, None])
    for _ in range(2):
        synk.load(path)
        np.testing.assert_array_equal(world.reduce(wire, [3, 4, None]), expected)
        world = Opened(*sizes)
    if wire != "float16":
        assert (world.reduce(wire, [3, 4, None]) != expected).any()


def test_each_format_and_variable_has_its_own(path):
    world = Opened(1, 2)
    owners = [("int8", world.w), (synk.TopK(0.1), world.w), (synk.TopK(0.2), world.v)]
    for seed, (wire, variable) in enumerate(owners):
        world.reduce(wire, [seed], variable=variable)
    synk.save(path)
    expected = [world.reduce(wire, [9], variable=variable) for wire, variable in owners]
    synk.load(path)
    got = [world.reduce(wire, [9], variable=variable) for wire, variable in owners]
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("before, after", [((1, 1, 1), (1, 2)), ((2, 1), (1, 1, 1))], ids=str)
@pytest.mark.parametrize("wire", [synk.TopK(0.25), "int8", synk.PowerSGD(2)], ids=repr)
def test_on_another_number_of_machines_what_was_not_sent_is_sent(path, before, after, wire):
    world = Opened(*before)
    exact = sum(values(seed).sum(axis=0) for seed in range(2))
    sent = world.reduce(wire, range(2)).sum(axis=0)
    synk.save(path)
    assert abs(sent - exact).max() > 0.1
    world = Opened(*after)
    synk.load(path)
    sent += world.reduce(wire, [None] * 12).sum(axis=0)
    np.testing.assert_allclose(sent, exact, rtol=0, atol=0 if wire == synk.TopK(0.25) else 1e-3)


def test_on_one_machine_nothing_is_kept(path):
    world = Opened(1, 2)
    world.reduce("int8", [1])
    synk.save(path)
    world = Opened(3)
    synk.load(path)
    np.testing.assert_array_equal(world.reduce("int8", [2, 3]), [values(2).sum(0), values(3).sum(0)])


def test_variables_that_are_left_out_go_on_as_they_were(path):
    world = Opened(1, 1)
    world.reduce("int8", [1])
    synk.save(path, without=world.w)
    assert not described(path)
    first = world.reduce("int8", [2])
    world = Opened(1, 1)
    world.reduce("int8", [1])
    synk.load(path)
    np.testing.assert_array_equal(world.reduce("int8", [2]), first)


class Forget(Command):
    """Let the leader of machine 1 forget what it has kept, as if a collective had failed."""

    def run(self, state):
        for _, wire in state.wires.values():
            if state.transport.machine == 1:
                wire.reset()


def test_what_a_machine_has_lost_is_not_saved(path):
    world = Opened(2, 1)
    world.reduce("int8", [1])
    current_world().run(Forget())
    synk.save(path)
    assert not described(path)
    world.reduce("int8", [1])
    synk.restart()
    synk.save(path)
    assert not described(path)
    synk.load(path)
    begun_anew = world.reduce("int8", [1])
    np.testing.assert_array_equal(Opened(2, 1).reduce("int8", [1]), begun_anew)


def described(path):
    """Return what a file says of what is kept."""
    with np.load(path) as file:
        return json.loads(file.zip.read("synkhronos.json"))["kept"]


def rewritten(path, change, arrays=None):
    """Rewrite a file, after a change of its description, with other arrays of these names."""
    with np.load(path) as file:
        description = json.loads(file.zip.read("synkhronos.json"))
        members = {name: file[name] for name in file.files if name != "synkhronos.json"}
    change(description)
    archive.write(path, description, {**members, **(arrays or {})}.items())


@pytest.mark.parametrize(
    "change, arrays",
    [
        (lambda kept: kept.update(members=["shared_0"]), {}),
        (lambda kept: kept.update(members=["nowhere"]), {}),
        (lambda kept: kept.update(members=[]), {}),
        (lambda kept: kept.update(name="other"), {}),
        (lambda kept: kept.update(wire="int4"), {}),
        (lambda kept: kept.update(wire=["eval", "1"]), {}),
        (lambda kept: kept.update(wire=["TopK", 3]), {}),
        (lambda kept: kept.update(wire=None), {}),
        (lambda kept: kept.update(counts=[-1]), {}),
        (lambda kept: kept.update(counts=[1 << 63]), {}),
        (lambda kept: kept.update(counts=["many"]), {}),
        (lambda kept: kept.update(counts=3), {}),
        (lambda kept: None, {"kept_0_machine_1": np.zeros(SHAPE, "float32")}),
        (lambda kept: None, {"kept_0_machine_1": np.zeros(SHAPE[0] * SHAPE[1])}),
        (lambda kept: None, {"kept_0_machine_1": np.zeros(7, "float32")}),
    ],
)
def test_a_damaged_file_is_refused_and_nothing_is_changed(path, change, arrays):
    world, wire = Opened(1, 1), synk.TopK(0.1)
    world.reduce(wire, [1])
    synk.save(path)

    def change_all(description):
        kept = dict(zip(Feedback._fields, description["kept"][0]))
        change(kept)
        description["kept"][0] = list(kept.values())

    rewritten(path, change_all, arrays)
    with pytest.raises(ValueError, match="is damaged, or is not a checkpoint"):
        synk.load(path)
    got = world.reduce(wire, [2])
    world = Opened(1, 1)
    np.testing.assert_array_equal(world.reduce(wire, [1, 2])[1:], got)


def test_after_a_file_of_an_older_version_all_begin_anew(path):
    world = Opened(1, 1)
    first = world.reduce("int8", [1])
    assert (world.reduce("int8", [1]) != first).any()
    synk.save(path)
    rewritten(path, lambda description: description.pop("kept"))
    synk.load(path)
    np.testing.assert_array_equal(world.reduce("int8", [1]), first)


def test_what_does_not_fit_begins_anew_with_a_warning(path, caplog):
    wire = synk.PowerSGD(2, shapes=[SHAPE])
    world = Opened(1, 1)
    first = world.reduce(wire, [1])
    synk.save(path)

    def change(description):
        description["kept"][0][2][2] = [[SHAPE[0] + 1, SHAPE[1]]]

    rewritten(path, change)
    synk.load(path)
    assert "has kept for 'w' does not fit it any more, so it begins anew" in caplog.text
    np.testing.assert_array_equal(world.reduce(wire, [1]), first)


SHAPES = (((300, 100), (300,)), ((40, 3), (20,)), ((200, 110),))


class Step(Command):
    """Reduce vectors of random integers in buckets, or of zeros if the seed is None."""

    def __init__(self, buckets, seed):
        self.buckets, self.seed = buckets, seed

    def vector(self, rank):
        if self.seed is None:
            return np.zeros(self.buckets.size, "float32")
        rng = np.random.default_rng([self.seed, rank])
        return rng.integers(-60, 60, self.buckets.size).astype("float32")

    def run(self, state):
        vector = self.vector(state.rank)
        for number in range(len(self.buckets.shapes)):
            state.overlap.start(self.buckets, number, vector, 1, 0)
        state.overlap.finish(vector)
        return vector


class Sending:
    """The same as `Opened`, for a vector that progress processes reduce in buckets."""

    def __init__(self, wire, *sizes):
        self._opened = Opened(*sizes)  # it keeps the variable alive
        self.buckets, w = Buckets(0, "sum", wire, "float32", SHAPES), self._opened.w
        current_world().rank_state.engine.buckets_of = lambda one: self.buckets if one is w else None

    def reduce(self, seeds):
        """Return the results of some steps."""
        return np.array([current_world().run(Step(self.buckets, seed))[0] for seed in seeds])


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1, 1)], ids=str)
@pytest.mark.parametrize("wire", FORMATS, ids=repr)
def test_what_couriers_keep_is_saved_and_restored_bit_for_bit(path, sizes, wire):
    world = Sending(wire, *sizes)
    world.reduce(range(2))
    synk.save(path)
    expected = world.reduce([2, 3, None])
    for _ in range(2):
        synk.load(path)
        np.testing.assert_array_equal(world.reduce([2, 3, None]), expected)
        world = Sending(wire, *sizes)
    if wire != "float16":
        assert (world.reduce([2, 3, None]) != expected).any()
        [kept] = described(path)
        assert Feedback(*kept).counts == [2, 0, 2], "a small bucket travels as it is"


def test_without_what_couriers_have_kept_they_begin_anew(path, caplog):
    world = Sending("int8", 1, 1)
    first = world.reduce([1])
    for change, words in (
        (lambda kept: kept.clear(), ""),
        (lambda kept: kept[0].__setitem__(2, ["TopK", 0.5]), "TopK(fraction=0.5) has kept for 'w'"),
        (lambda kept: kept[0].__setitem__(3, False), ""),
        (lambda kept: kept[0][4].pop(), "'int8' has kept for 'w' does not fit"),
    ):
        world.reduce([1])
        synk.save(path)
        rewritten(path, lambda description, change=change: change(description["kept"]))
        synk.load(path)
        assert words in caplog.text
        np.testing.assert_array_equal(world.reduce([1]), first)
