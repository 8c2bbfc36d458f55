"""Conformance checks on several machines in one process, and tests of what they agree on."""

import itertools
import os

import numpy as np
import pytest
from checks import communicators, stores, transports, wires
from checks.machines import ThreadedMachines
from checks.ranks import Ranks

from synkhronos._errors import CollectiveAbortedError, SynkhronosError, WorldBrokenError
from synkhronos.arithmetic.machines import ranks_of_machines
from synkhronos.comms import wires as kept
from synkhronos.comms.formats import PowerSGD, TopK, make_wire
from synkhronos.comms.linked import LinkedCommunicator
from synkhronos.comms.staged import StagedCommunicator
from synkhronos.machines.store import MachinesStore
from specifications.store import NaiveStore
from synkhronos.stores.handle import RequiredRows, combine, positions
from synkhronos.machines.leaders import CONTROL, END, REPLY, Leaders
from specifications.links import NaiveLinks, NaiveNetwork
from synkhronos.machines.commands import CommandReceiver, CommandSender
from synkhronos.machines.transport import MachinesTransport
from specifications.transport import NaiveTransport
from synkhronos.world.devices import Fact, check_versions

WORLDS = {
    "1+1": ([1, 1], 0), "2+1": ([2, 1], 1), "1+2": ([1, 2], 2), "2+2+1": ([2, 2, 1], 3),
    "1+2+1+1": ([1, 2, 1, 1], 2),
    "1+1+1+1": ([1, 1, 1, 1], 0),
}  # fmt: skip


@pytest.fixture(scope="module", params=list(WORLDS)[:5])
def machines(request):
    transport = ThreadedMachines(*WORLDS[request.param], timeout=30)
    ranks = Ranks(transport)
    yield ranks
    ranks.close()


COMMUNICATING = [(world, False) for world in WORLDS if world != "1+2+1+1"] + [("2+2+1", True)]


@pytest.fixture(scope="module", params=COMMUNICATING, ids=lambda one: one[0] + ", prepared" * one[1])
def communicating(request):
    world, is_prepared = request.param

    def communicator(transport):
        made = transport.communicator()
        return communicators.RepeatingCommunicator(made) if is_prepared else made

    ranks = Ranks(ThreadedMachines(*WORLDS[world], timeout=30), communicator)
    yield ranks
    ranks.close()


def named(check):
    return check.__name__[len("check_") :]


@pytest.mark.parametrize("check", transports.CHECKS, ids=named)
def test_transport(check, machines):
    check(machines)


# A rank gets an array of another machine as it was when it was sent.
STORES = [one for one in stores.CHECKS if "read_as_it_is" not in one.__name__]


@pytest.mark.parametrize("check", STORES, ids=named)
def test_store(check, machines, tmp_path):
    wants_path = "path" in check.__code__.co_varnames[: check.__code__.co_argcount]
    check(machines, tmp_path / "array") if wants_path else check(machines)


@pytest.mark.parametrize("check", communicators.CHECKS, ids=named)
def test_communicator(check, communicating):
    check(communicating)


@pytest.fixture(scope="module")
def remaining():
    ranks = Ranks(ThreadedMachines([2], timeout=30), lambda one: one.communicator())
    yield ranks
    ranks.close()


@pytest.mark.parametrize("check", communicators.CHECKS, ids=named)
def test_the_communicator_of_the_only_machine_that_remains(check, remaining):
    check(remaining)


@pytest.mark.parametrize("check", wires.CHECKS, ids=named)
def test_wire_format(check, communicating):
    check(communicating)


class OnDevice:
    """An array of a device, which only copies."""

    def __init__(self, value):
        self.value = np.array(value)
        self.shape, self.dtype = self.value.shape, self.value.dtype

    def overwrite(self, value):
        self.value[...] = value
        return self


def staged(transport):
    def read(array, out):
        out[...] = array.value

    return StagedCommunicator(
        transport.communicator(), transport.store, read, OnDevice, OnDevice.overwrite
    )


def collect_on_device(transport):
    """Check each collective on an array of a device and one of NumPy."""
    comm, rank, size = staged(transport), transport.rank, transport.size

    def arrays():
        return [OnDevice([1.0 + rank, 5.0]), np.full(3, rank)]

    def are(results, device, host):
        assert type(results[0]) is OnDevice and type(results[1]) is np.ndarray
        assert results[0].value.tolist() == device and results[1].tolist() == host

    on_device, on_host = comm.all_gather(arrays())
    for one in range(size):
        are([on_device[one], on_host[one]], [1.0 + one, 5.0], [one] * 3)
    are(comm.broadcast(arrays(), 1), [2.0, 5.0], [1] * 3)
    are(comm.all_reduce(arrays(), "max"), [size, 5.0], [size - 1] * 3)
    own = [1.0 + rank, 5.0], [rank] * 3
    are(comm.reduce(arrays(), "max", 0), *(own if rank else ([size, 5.0], [size - 1] * 3)))
    gathered = comm.gather(arrays(), 0)  # for the user, in the memory of the CPU
    if rank == 0:
        assert [one.tolist() for one in gathered[0]] == [[1.0 + one, 5.0] for one in range(size)]
        assert [one.tolist() for one in gathered[1]] == [[one] * 3 for one in range(size)]


def test_collectives_return_arrays_of_the_device_that_they_got(machines):
    machines.values(collect_on_device)


def reduce_on_device(transport, wire):
    """Reduce an array of a device in a format; return the result, and whether it is the same array."""
    comm = staged(transport)
    assert comm.has_wires and comm.over_cpu is comm
    array = OnDevice(wires.draw(wire, 1, comm.rank))
    [reduced] = wires.all_reduce_in(comm, [make_wire(wire, wires.SHAPES)], [array], "sum")
    return reduced.value, reduced is array


def test_arrays_of_devices_travel_in_wire_formats(machines):
    for wire in wires.FORMATS:
        naive = wires.Naive(wire, len(wires.machines_of(machines)))
        wanted = naive.reduce(wires.shares(machines, wire, 1))
        for value, is_same in machines.values(reduce_on_device, wire):
            np.testing.assert_allclose(value, wanted, rtol=1e-3, atol=0.02)
            assert is_same


def test_low_rank_has_the_same_bits_where_blas_has_not(communicating, monkeypatch):
    """As between processors of different kinds: the leaders do not trust BLAS then."""
    monkeypatch.setattr("synkhronos.comms.low_rank.signature", lambda *args: os.urandom(8))
    monkeypatch.setattr(wires, "FORMATS", [wires.LOW_RANK])
    wires.check_sums_are_those_of_the_specification(communicating)


@pytest.fixture(scope="module")
def leaders():
    transport = ThreadedMachines([1, 1, 1], timeout=30)
    ranks = Ranks(transport, lambda one: LinkedCommunicator(one.leaders))
    yield ranks
    ranks.close()


@pytest.mark.parametrize("check", communicators.CHECKS, ids=named)
def test_the_communicator_of_leaders_alone(check, leaders):
    check(leaders)


def reduce_large(comm, length=300_000):
    [reduced] = comm.all_reduce([np.full(length, comm.rank + 1.0)], "sum")
    return set(reduced.tolist())


def test_when_a_collective_ends_its_messages_have_been_sent(monkeypatch):
    """Their memory may be changed then."""
    send, numbers, waiting, sent = NaiveLinks.send, itertools.count(1), set(), []

    def send_numbered(links, to, tag, data):
        send(links, to, tag, data)
        number = next(numbers)
        if isinstance(data, np.ndarray) and data.nbytes > 10_000:  # not the meeting before
            waiting.add(number)
            sent.append(number)
        return number

    monkeypatch.setattr(NaiveLinks, "send", send_numbered)
    monkeypatch.setattr(NaiveLinks, "is_sent", lambda _, number: waiting.discard(number) is None)
    ranks = Ranks(ThreadedMachines([1, 1, 1], timeout=30), lambda one: one.communicator())
    assert ranks.values(reduce_large) == [{6.0}] * 3
    ranks.close()
    assert len(sent) > 6 and not waiting


def test_what_a_checkpoint_has_of_other_wires_is_refused():
    wires = [make_wire("int8", [(100,)]), make_wire("float16", [(50,)])]
    assert kept.lengths(wires, [100, 50], [3, 0]) == (100, 0)
    for counts in ([3], [3, 0, 0]):
        with pytest.raises(ValueError, match=f"expected counts of 2 wires, got {len(counts)}"):
            kept.lengths(wires, [100, 50], counts)


@pytest.mark.parametrize("format", ["int8", TopK(0.25), PowerSGD(1)], ids=repr)
def test_the_states_of_several_wires_are_restored_each_to_its_own(format):
    shapes = [(3, 4), (5, 2), (2, 2)]
    sizes = [int(np.prod(shape)) for shape in shapes]
    wires, others = ([make_wire(format, [shape]) for shape in shapes] for _ in range(2))
    for number, (wire, size) in enumerate(zip(wires, sizes)):
        wire.prepare(size)
        for vector in wire.state():
            vector[:] = 100 * number + np.arange(vector.size)
        wire.count = 2 - number % 2 * 2  # the second one has no state
    kept.restore(others, sizes, kept.kept_by(wires))
    assert [one.count for one in others] == [2, 0, 2]
    for wire, other in zip(wires[::2], others[::2]):
        for given, restored in zip(wire.state(), other.state()):
            np.testing.assert_array_equal(restored, given)
    assert not others[1].state()[0].any()


def test_machines_with_other_versions_are_refused_by_name():
    versions = ("1.0", "3.11.2", "2.4.6", "PyTensor 3.0.7")
    first = Fact("a", versions, "code", None, 1, 0, None)
    check_versions([first, first._replace(host="b")])
    for place, name in enumerate(("Synkhronos", "Python", "NumPy", "the graph compiler")):
        others = tuple("0" if place == one else version for one, version in enumerate(versions))
        words = f"^{name} has the version {versions[place]} on a and 0 on c; install the same version"
        with pytest.raises(SynkhronosError, match=words):
            check_versions([first, first, first._replace(host="c", versions=others)])
    with pytest.raises(SynkhronosError, match="other source files on a than on c, though both .* 1.0;"):
        check_versions([first, first, first._replace(host="c", digest="other")])


def test_the_first_machine_has_the_master():
    assert ranks_of_machines([2, 3, 1]) == [range(0, 2), range(2, 5), range(5, 6)]
    assert ranks_of_machines([2, 3, 1], 3) == [range(3, 5), range(0, 3), range(5, 6)]
    assert ranks_of_machines([2, 3, 1], 5) == [range(4, 6), range(0, 3), range(3, 4)]
    with pytest.raises(ValueError, match="got 2"):
        ranks_of_machines([2, 3, 1], 2)


def test_a_successor_has_other_ranks_in_the_same_store():
    ranks = Ranks(ThreadedMachines([2, 2, 1], 4, timeout=30))
    store = ranks.transport.store
    handle = store.put(np.arange(3))
    ranks.close()
    successor = Ranks(ranks.transport.successor(4, 3))
    assert successor.transport.store is store and store.get(handle).tolist() == [0, 1, 2]
    assert store.put(np.zeros(1)) != handle and successor.transport.master_rank == 3
    assert successor.values(machine_of) == [1, 2, 0, 0]
    successor.close()


def machine_of(transport):
    return transport.machine


def test_what_is_for_the_next_world_is_kept_for_what_starts_it():
    """A script may end, or fork again, before the leaders have seen that the world is broken."""
    first, second = NaiveNetwork(2).links()
    leaders = Leaders(second)
    transport = MachinesTransport(NaiveTransport(1), leaders, ranks_of_machines([1, 1]))
    Leaders(first).send_order(1, CONTROL, "start", "order")
    with pytest.raises(WorldBrokenError, match="the master has ended the ranks"):
        transport.receive()
    assert leaders.receive_order().content() == ("start", "order")


def test_what_is_postponed_is_for_the_next_order_and_for_no_reply():
    first, second = (Leaders(links) for links in NaiveNetwork(2).links())
    first.send_order(1, CONTROL, "start")
    order = second.receive_order()
    second.postpone(order)
    first.send_order(1, REPLY, "reply")
    assert second.receive(0, REPLY).content() == ("reply",)
    assert second.receive_order() is order


def test_arrays_that_are_expected_are_cancelled_from_the_last_one_on(monkeypatch):
    class Logged:
        def __init__(self, array):
            self.name = array.size

        def is_complete(self):
            return self.name == 2

        def cancel(self):
            cancelled.append(self.name)

    cancelled = []
    monkeypatch.setattr(NaiveLinks, "receive_into", lambda links, source, tag, array: Logged(array))
    links, _ = NaiveNetwork(2).links()
    leaders = Leaders(links)
    leaders.begin(1)
    receipts = [leaders.receive_array(1, np.empty(size)) for size in (5, 2, 7, 3, 1)]
    leaders.complete(receipts[1:2])
    leaders.abort()
    for _ in range(2):
        with pytest.raises(CollectiveAbortedError):
            leaders.complete(receipts)
    assert cancelled == [1, 3, 7, 5]


def test_messages_of_an_aborted_command_are_discarded_also_if_they_arrive_later():
    network = NaiveNetwork(2)
    first, second = (Leaders(links) for links in network.links())
    first.begin(1)
    second.begin(1)
    second.abort()
    for number in (2, 3):
        first.send_array(1, np.ones(5))
        second.begin(number)
    first.begin(2)
    first.send_array(1, np.ones(6))
    second.begin(4)  # it leaves what is not of the aborted command
    kept = [queue for (_, to, _), queue in network.queues.items() if to == 1 and queue]
    assert [list(queue) for queue in kept] == [[np.ones(6).tobytes()]]


def senders_and_receiver(*sizes):
    """Return the master's leader and sender, and the receiver of machine 1."""
    machines = ranks_of_machines(sizes)
    first, second, *_ = (Leaders(links) for links in NaiveNetwork(len(sizes)).links())
    stores = [MachinesStore(NaiveStore(1), machine, machine) for machine in range(2)]
    return first, CommandSender(first, stores[0], machines), CommandReceiver(second, stores[1]), stores


def test_what_is_needed_is_found_once_for_a_repeated_command():
    _, sender, _, (store, _) = senders_and_receiver(1, 2, 1)
    rows, constant = store.put(np.arange(9)), store.put(np.arange(9), constant=True)
    calls = []

    def needs(ranks, size):
        calls.append((ranks, size))
        return [
            RequiredRows(rows, range(ranks.start, ranks.stop)),
            RequiredRows(rows, range(1)),
            RequiredRows(constant),
        ]

    def send():
        sender._leaders.begin(sender._leaders.number + 1)
        found = sender.find_needed(needs)
        sender.send(b"command", found, sender.cut(found), [])
        return found

    first, second, third = send(), send(), send()
    assert calls == [(range(1, 3), 4), (range(3, 4), 4)]
    assert [[one.lasts for one in needed] for needed in first] == [[False, True]] * 2
    assert [[one.lasts for one in needed] for needed in second] == [[False]] * 2
    assert third == second
    assert sender.find_needed(None) is sender.find_needed(None) == [[], []]
    assert sender.cut(sender.find_needed(None)) == []


@pytest.mark.parametrize(
    "one, other",
    [
        (range(0), range(3)),
        (range(3), range(0)),
        (range(8, 2, -2), range(1, 4)),
        (np.array([5, 1, 5]), range(2)),
        (np.array([], np.int64), np.array([4, 0])),
    ],
)
def test_rows_for_two_calls_are_sent_once_and_found_by_both(one, other):
    data = np.arange(10) * 10
    [need] = combine([RequiredRows("data", one), RequiredRows("data", other)])
    sent = data[need.rows]
    assert len(sent) == len({*one, *other})
    for rows in (one, other):
        wanted = np.asarray(rows, np.int64)
        np.testing.assert_array_equal(sent[positions(wanted, need.rows)], data[wanted])


def test_the_end_of_a_world_that_was_read_early_does_not_end_the_next_one():
    first, second = map(Leaders, NaiveNetwork(2).links())
    first.begin(4)
    first.notify(END, "ended")
    second.begin(3)
    with pytest.raises(WorldBrokenError, match="ended"):  # the command may not come any more
        second.read_notices()
    second.end_world()
    second.read_notices()
    second.begin(5)
    second.begin_world()
    second.read_notices()
    first.begin(5)
    first.notify(END, "ended again")
    for _ in range(2):  # a program may catch the first error
        with pytest.raises(WorldBrokenError, match="again"):
            second.read_notices()
    second.end_world()
    second.read_notices()
    first.notify(END, "late")
    second.read_notices()
