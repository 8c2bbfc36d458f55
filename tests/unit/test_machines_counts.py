"""Tests of how many messages and bytes travel between machines, which no noise changes."""

import gc
import itertools
import threading

import numpy as np
import pytest
from checks.machines import ThreadedMachines, start_world
from test_engines import NaiveLab

import synkhronos as synk
from synkhronos.machines.leaders import _FIRST, as_bytes
from specifications.links import NaiveLinks
from synkhronos.world.world import current_world

SMALL = 5000  # bytes of a message without arrays, at most


class Traffic:
    """Between machines since the last call: messages by sender and receiver, and their bytes.

    They are those `between` commands, that is commands, replies and notices, those `inside` them, and
    those `of_progress_processes`; each is sender, receiver and bytes.
    """

    def __init__(self, monkeypatch):
        send = NaiveLinks.send

        def counted(links, to, tag, data):
            found = self.between if tag < _FIRST else self.inside
            if threading.current_thread().name == "synkhronos-progress process":
                found = self.of_progress_processes
            found.append((links.rank, to, as_bytes(data).size))
            return send(links, to, tag, data)

        monkeypatch.setattr(NaiveLinks, "send", counted)
        self.clear()

    def clear(self):
        self.between, self.inside, self.of_progress_processes = [], [], []

    def nbytes(self, source, to):
        found = self.between + self.inside + self.of_progress_processes
        return sum(size for *ends, size in found if ends == [source, to])

    def of(self, call):
        """Return the bytes that a call sends, by sender and receiver, without those from a machine to
        itself."""
        self.clear()
        call()
        size = current_world().transport.leaders.size
        return {ends: self.nbytes(*ends) for ends in itertools.permutations(range(size), 2)}


def open_lab(*sizes):
    """Return a factory of variables, in a world of machines with so many ranks."""
    made = NaiveLab()
    start_world(ThreadedMachines(sizes, 0, 60), made.engine)
    return made


@pytest.fixture
def lab():
    """Factory of variables, in a world of two machines with two ranks each."""
    yield open_lab(2, 2)
    synk.close()


@pytest.fixture
def on_machines():
    """The same, as a function of the numbers of ranks."""
    yield open_lab
    synk.close()


@pytest.fixture
def traffic(monkeypatch):
    return Traffic(monkeypatch)


def test_a_trivial_call_is_a_message_there_and_one_back(lab, traffic):
    x = lab.tensor("x", 1)
    f = synk.function([x], (x.sum(), "sum"))
    assert f(np.ones(4)) == 4  # replicates it
    for given in (np.ones(4), synk.data(np.ones(4))):
        traffic.clear()
        assert f(given) == 4
        assert [ends[:2] for ends in traffic.between] == [(0, 1), (1, 0)], traffic.between
        assert not traffic.inside


def test_rows_travel_once_and_only_where_they_are_needed(lab, traffic):
    x, y = lab.tensor("x", 2), lab.tensor("y", 2)
    f = synk.function([x, y], ((x + y).sum(), "sum"))
    rows = synk.data(np.ones((1024, 2500)))  # 20 kB each
    f(rows[:4], rows[:4])
    traffic.clear()
    assert f(rows, rows) == 2 * 1024 * 2500
    assert 0 <= traffic.nbytes(0, 1) - rows.data.nbytes // 2 < SMALL
    assert traffic.nbytes(1, 0) < SMALL
    with synk.fuse():
        traffic.clear()
        one, other = f(rows, rows, batch=256), f(rows, rows, batch=slice(0, 512))
    assert (one.result(), other.result()) == (2 * 256 * 2500, 2 * 512 * 2500)
    # Rows 128 to 256 and 256 to 512.
    assert 0 <= traffic.nbytes(0, 1) - 384 * 20_000 < SMALL


def test_nothing_travels_for_sliceable_variables(lab, traffic):
    rows, w = lab.shared(np.zeros((1, 100)), "rows"), lab.shared(np.zeros(100), "w")
    f = synk.function([], (rows.sum(), "sum"), sliceable_shareds=[rows], updates=[(w, w + 1)])
    synk.scatter(rows, np.ones((4000, 100)))
    f()
    for batch in (slice(0, 500), [list(range(one, 900)) for one in range(4)]):
        traffic.clear()
        f(batch_s=batch)
        listed = 0 if isinstance(batch, slice) else 8 * 4 * 900
        assert traffic.nbytes(0, 1) < SMALL + listed and traffic.nbytes(1, 0) < SMALL


LENGTHS = {None: 4, "float16": 2, "bfloat16": 2, "int8": 1 + 4 / 256}


@pytest.mark.parametrize("wire", LENGTHS)
def test_codes_send_their_bytes_once_each_way(lab, traffic, wire):
    w = lab.shared(np.ones(300_000, "float32"), "w")
    synk.function([], w.sum())
    synk.distribute()
    for _ in range(2):
        traffic.clear()
        synk.all_reduce(w, "avg", wire=wire)
        for ends in ((0, 1), (1, 0)):
            assert 0 <= traffic.nbytes(*ends) - 300_000 * LENGTHS[wire] < SMALL, traffic.nbytes(*ends)
    assert (synk.get_value(3, w) == 1).all()


@pytest.mark.parametrize(
    "wire, nbytes",
    [
        # Two bytes for the place of a number in a block of 65 536, and four for the number.
        (synk.TopK(0.01), 6 * 3000 + 4 * 5),
        (synk.PowerSGD(2), 2 * 4 * (600 + 500)),
        (synk.PowerSGD(2, shapes=[(200, 1000), (99_950,), (10, 5)]), 2 * 4 * 1215 + 4 * 99_950),
        (synk.PowerSGD(4, shapes=[(200, 1000), (99_950,), (10, 5)]), 4 * 4 * 1200 + 4 * 100_000),
        # The products have an 83rd of the numbers of 200 x 1000, and a 79th of those of 300 x 333.
        (synk.PowerSGD(2, [(200, 1000), (300, 333), (100,)], min_saving=81), 2 * 4 * 1200 + 4 * 100_000),
    ],
)
def test_what_compresses_sends_a_fraction_each_way(lab, traffic, wire, nbytes):
    w = lab.shared(np.ones((600, 500), "float32"), "w")
    synk.function([], w.sum())
    synk.distribute()
    for _ in range(2):
        traffic.clear()
        synk.all_reduce(w, "avg", wire=wire)
        for ends in ((0, 1), (1, 0)):
            assert 0 <= traffic.nbytes(*ends) - nbytes < SMALL, traffic.nbytes(*ends)


def test_a_variable_that_does_not_fit_the_shapes_any_more_is_refused(lab):
    w, wire = lab.shared(np.ones(60_000, "float32"), "w"), synk.PowerSGD(2, [(300, 200)])
    function = synk.function([], w.sum())
    for length in (60_000, 50_000):
        for rank in range(4):
            synk.set_value(rank, w, np.ones(length, "float32"))
        if length == 60_000:
            synk.all_reduce(w, wire=wire)
    for _ in range(2):
        with pytest.raises((ValueError, synk.WorkerError), match="expected shapes of 50000 elements"):
            synk.all_reduce(w, wire=wire)
    synk.all_reduce(w, "sum", wire="float16")
    assert function() == 200_000


def test_what_a_format_keeps_ends_with_the_variable_and_with_the_load_of_a_file_without_it(
    lab, tmp_path
):
    def kept():
        return [key[1] for key in current_world().rank_state.wires]

    w, v = lab.shared(np.ones(40_000, "float32"), "w"), lab.shared(np.ones(40_000, "float32"), "v")
    functions = [synk.function([], one.sum()) for one in (w, v)]
    synk.save(tmp_path / "checkpoint", without=v)
    synk.all_reduce(w, wire="int8")
    synk.all_reduce([w, v], wire=synk.TopK(0.5))
    assert kept() == ["int8", synk.TopK(0.5), synk.TopK(0.5)]
    del v, functions[1]
    gc.collect()
    functions[0]()
    assert kept() == ["int8", synk.TopK(0.5)]
    synk.load(tmp_path / "checkpoint")
    assert kept() == []


def test_collectives_send_to_a_machine_what_its_ranks_need(lab, traffic):
    w = lab.shared(np.ones(10_000), "w")
    synk.function([], w.sum())
    synk.distribute()
    nbytes = 80_000
    wanted = {
        "broadcast": (lambda: synk.broadcast(w), nbytes, 0),
        "broadcast a value": (lambda: synk.broadcast(w, np.ones(10_000)), nbytes, 0),
        "reduce": (lambda: synk.reduce(w, in_place=False), nbytes // 2, nbytes),
        "gather": (lambda: synk.gather(w), 0, 2 * nbytes),
        "get a value": (lambda: synk.get_value(2, w), 0, nbytes),
        "get one of the own machine": (lambda: synk.get_value(1, w), 0, 0),
        "set a value": (lambda: synk.set_value(3, w, np.ones(10_000)), nbytes, 0),
        "scatter": (lambda: synk.scatter(w, np.ones(40_000)), 2 * nbytes, 0),
        "all-gather": (lambda: synk.all_gather(w), 2 * nbytes, 2 * nbytes),
    }
    wrong = {}
    for name, (call, there, back) in wanted.items():
        traffic.clear()
        call()
        sent = traffic.nbytes(0, 1), traffic.nbytes(1, 0)
        if not all(0 <= got - least < SMALL for got, least in zip(sent, (there, back))):
            wrong[name] = sent, (there, back)
    assert not wrong


LENGTH = 9999
NBYTES = 8 * LENGTH


def differences(traffic, call, expected):
    """Return what a call sends, by sender and receiver, and what was expected, where they differ."""
    sent = traffic.of(call)
    return {ends: (sent[ends], least) for ends, least in expected.items()
            if not 0 <= sent[ends] - least < SMALL}  # fmt: skip


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 3)], ids=str)
def test_an_all_reduce_of_three_machines_sends_two_thirds_each_way(on_machines, traffic, sizes):
    w = on_machines(*sizes).shared(np.ones(5 * LENGTH), "w")  # too large for doubling
    synk.function([], w.sum())
    synk.distribute()
    expected = dict.fromkeys(itertools.permutations(range(3), 2), 2 * 5 * NBYTES // 3)
    assert not differences(traffic, lambda: synk.all_reduce(w, "sum"), expected)
    assert (synk.get_value(2, w) == sum(sizes)).all()


@pytest.mark.parametrize(
    "op, there, back",
    [
        ("sum", NBYTES // 2, NBYTES), ("avg", NBYTES // 2, NBYTES), ("max", NBYTES // 2, NBYTES),
        ("gather", 0, 2 * NBYTES), (None, 0, 0),
    ],
)  # fmt: skip
def test_large_outputs_are_reduced_on_each_machine_first(lab, traffic, op, there, back):
    """Each of the four ranks has an output of `NBYTES`. Halves of it are reduced on either machine."""
    x = lab.tensor("x", 2)
    f = synk.function([x], (x if op == "gather" else x.sum(axis=0), op))
    synk.distribute()
    rows = synk.data(np.ones((4, LENGTH)), constant=True)  # sent in the first call only
    for slices in (1, 2):
        f(rows, num_slices=slices)
        expected = {(0, 1): there, (1, 0): back}
        assert not differences(traffic, lambda slices=slices: f(rows, num_slices=slices), expected)


@pytest.mark.parametrize("sizes", [(2, 2), (1, 2, 1), (1, 1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("what", ["barrier", "exchange"])
def test_a_leader_sends_a_message_per_round_of_a_meeting(on_machines, traffic, what, sizes):
    """In round k, a leader sends a message to the leader ``2**k`` before it."""
    on_machines(*sizes)

    def meet(rank, times):
        for _ in range(times):
            rank.barrier() if what == "barrier" else rank.exchange(rank.rank)

    def messages(times):
        traffic.clear()
        synk.spmd(meet, times)
        return [ends[:2] for ends in map(list, traffic.inside)]

    number, meetings = len(sizes), 10
    few, many = messages(0), messages(meetings)
    distances = [1 << turn for turn in range(number) if 1 << turn < number]
    for source, to in itertools.permutations(range(number), 2):
        sent = many.count([source, to]) - few.count([source, to])
        assert sent == meetings * ((source - to) % number in distances), (source, to)


def ask_controller(rank, w):
    rank.ask("what", np.ones(LENGTH))


def send(rank, w):
    assert rank.send(0, w.storage)


# What the last rank does, for which its own machine and the first one send so many times `NBYTES`
IN_A_PROGRAM = {
    "pull from a center": (lambda rank, w: rank.center(w).pull(), 0, 1),
    "value of a center": (lambda rank, w: rank.center(w).value(), 0, 1),
    "push to a center": (lambda rank, w: rank.center(w).push(), 1, 1),
    "elastic average": (lambda rank, w: rank.center(w).elastic(0.5), 1, 1),
    "send": (send, 1, 0),
    "ask the controller": (ask_controller, 1, 0),
}


@pytest.mark.parametrize("sizes", [(2, 2), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("what", IN_A_PROGRAM)
def test_couriers_send_what_a_rank_does_once(on_machines, traffic, what, sizes):
    w = on_machines(*sizes).shared(np.ones(LENGTH), "w")
    synk.function([], w.sum())
    synk.distribute()
    act, there, back = IN_A_PROGRAM[what]

    def program(rank, times):
        if rank.rank == rank.size - 1:
            rank.center(w)
            for _ in range(times):
                act(rank, w)
        rank.barrier()
        if rank.rank == 0:
            while rank.receive() is not None:
                pass

    def run(times):
        controller = lambda request, rank, info: len(info)  # noqa: E731
        return traffic.of(lambda: synk.spmd(program, times, controller=controller))

    few, many, times = run(0), run(4), 4
    last = len(sizes) - 1
    expected = dict.fromkeys(few, 0)
    expected[last, 0], expected[0, last] = there * times * NBYTES, back * times * NBYTES
    found = {ends: many[ends] - few[ends] for ends in few}
    assert all(abs(found[ends] - expected[ends]) < SMALL for ends in few), (found, expected)


def test_a_checkpoint_sends_variables_to_the_other_machine_and_only_what_differs_back(
    lab, traffic, tmp_path
):
    w, v = lab.shared(np.ones(LENGTH), "w"), lab.shared(np.ones(LENGTH), "v")
    synk.function([], (w + v).sum())
    synk.distribute()
    save, load = lambda: synk.save(tmp_path / "checkpoint"), lambda: synk.load(tmp_path / "checkpoint")
    assert not differences(traffic, save, {(0, 1): 0, (1, 0): 0})
    assert not differences(traffic, load, {(0, 1): 2 * NBYTES, (1, 0): 0})
    for rank, value in ((2, 2.0), (3, 3.0)):
        synk.set_value(rank, w, np.full(LENGTH, value))
    assert not differences(traffic, save, {(0, 1): 0, (1, 0): 2 * NBYTES})
    assert not differences(traffic, load, {(0, 1): 3 * NBYTES, (1, 0): 0})


@pytest.fixture
def sent(traffic):
    """Function that returns the bytes of the large messages since its last call, from machine 0."""

    def since():
        messages = traffic.between + traffic.inside + traffic.of_progress_processes
        traffic.clear()
        return [size for source, _, size in messages if source == 0 and size > 10_000]

    return since


ROWS = np.arange(80_000.0).reshape(1000, 80)
HALF = ROWS.nbytes // 2


@pytest.fixture
def total(lab):
    x = lab.tensor("x", 2)
    made = synk.function([x], (x.sum(axis=0), "sum"))
    synk.distribute()
    return made


def test_a_constant_array_travels_once_and_is_dropped_with_its_data(total, sent):
    constant = synk.data(ROWS, constant=True)
    sent()
    for batch in (None, slice(0, 500), np.arange(999, -1, -2)):
        chosen = ROWS if batch is None else ROWS[batch]
        np.testing.assert_allclose(total(constant, batch=batch), chosen.sum(axis=0))
    assert sent() == [ROWS.nbytes]
    with pytest.raises(ValueError, match="read-only"):
        constant[0] = 1
    for change, value in ((constant.set_value, ROWS), (constant.set_length, 1)):
        with pytest.raises(ValueError, match="is constant; create another Data"):
            change(value)
    del constant, change
    gc.collect()
    other = synk.data(2 * ROWS, constant=True)
    np.testing.assert_allclose(total(other), 2 * ROWS.sum(axis=0))
    assert sent() == [ROWS.nbytes]
    np.testing.assert_allclose(total(other), 2 * ROWS.sum(axis=0))
    assert sent() == []


def test_a_file_that_each_machine_has_is_mapped_and_another_is_sent(total, sent, tmp_path, monkeypatch):
    np.save(tmp_path / "rows.npy", ROWS)
    mapped = synk.data(np.load(tmp_path / "rows.npy", mmap_mode="r"))
    sent()
    for _ in range(2):
        np.testing.assert_allclose(total(mapped), ROWS.sum(axis=0))
    assert sent() == []
    monkeypatch.setattr("synkhronos.stores.handle.digest", lambda array: b"another")
    np.save(tmp_path / "changed.npy", 3 * ROWS)
    changed = synk.data(np.load(tmp_path / "changed.npy", mmap_mode="r"))
    for _ in range(2):
        np.testing.assert_allclose(total(changed), 3 * ROWS.sum(axis=0))
        assert sent() == [HALF]


def test_after_a_restart_a_constant_array_travels_again_and_results_are_the_same(total, sent):
    data = synk.data(ROWS, constant=True)
    assert total(data).tolist() == ROWS.sum(axis=0).tolist()
    sent()
    for size in (4, 2, 3):
        assert synk.restart(size) == size
        assert total(data).tolist() == ROWS.sum(axis=0).tolist()
        assert ROWS.nbytes in sent()
        assert total(data).tolist() == ROWS.sum(axis=0).tolist()
        assert ROWS.nbytes not in sent()
    for wrong in (1, 5):
        with pytest.raises(ValueError, match="expected 2 to 4, from one process per machine"):
            synk.restart(wrong)
