"""Tests of commands that travel to the leaders of machines, and of replies that return."""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from checks.machines import ThreadedMachines
from checks.ranks import Ranks
from checks.transports import meet_without

from synkhronos._errors import MissingRankError, WorldBrokenError
from synkhronos.arithmetic.machines import ranks_of_machines
from synkhronos.machines.commands import CommandReceiver, CommandSender
from synkhronos.machines.leaders import CONTROL, REPLY, ControlMessage, Leaders, as_bytes
from specifications.links import NaiveLinks, NaiveNetwork
from synkhronos.machines.store import MachinesStore
from specifications.store import NaiveStore
from synkhronos.stores.handle import RequiredRows

LARGE = 10_000  # bytes of an array that is no part of a message


@pytest.fixture
def sent(monkeypatch):
    """The messages between leaders: sender, receiver, tag and bytes."""
    found, send = [], NaiveLinks.send

    def recorded(links, to, tag, data):
        found.append((links.rank, to, tag, as_bytes(data).size))
        return send(links, to, tag, data)

    monkeypatch.setattr(NaiveLinks, "send", recorded)
    return found


@pytest.fixture
def ranks_of(request):
    """Function that starts machines with so many ranks; returns their `Ranks`."""
    started = []

    def start(*sizes):
        started.append(Ranks(ThreadedMachines(sizes, timeout=60, have_progress_processes=False)))
        return started[-1]

    yield start
    for ranks in started:
        ranks.close()


def number_of(transport):
    return transport.rank


def edges(sent, tag):
    return [(source, to) for source, to, one, _ in sent if one == tag]


@pytest.mark.parametrize("count", [2, 3, 8, 64])
def test_each_machine_gets_a_message_for_a_command_and_sends_one_back(ranks_of, sent, count):
    ranks = ranks_of(*[1] * count)
    for _ in range(2):
        sent.clear()
        assert ranks.values(number_of) == list(range(count))
        assert edges(sent, CONTROL) == [(0, machine) for machine in range(1, count)]
        assert sorted(edges(sent, REPLY)) == [(machine, 0) for machine in range(1, count)]
        assert len(sent) == 2 * (count - 1)  # nothing else is sent


def members(*sizes):
    """Return the parts of leaders of machines that send and receive commands, by machine."""
    machines, found = ranks_of_machines(sizes), []
    for links in NaiveNetwork(len(sizes)).links():
        leaders = Leaders(links)
        store = MachinesStore(NaiveStore(1), leaders.rank, machines[leaders.rank].start)
        kind = CommandReceiver(leaders, store) if leaders.rank else None
        sender = None if leaders.rank else CommandSender(leaders, store, machines)
        found.append(SimpleNamespace(leaders=leaders, store=store, receiver=kind, sender=sender))
    return found


def test_small_arrays_are_part_of_the_message_and_large_ones_follow_it(sent):
    own, *others = members(1, 1, 1, 1)
    payload, former = b"command", []
    lengths = [(10, LARGE), (), (20, 30)]  # of the arrays for each other machine
    for turn in range(3):
        arrays = [
            [np.full(length, (length + turn) % 256, np.uint8) for length in one] for one in lengths
        ]
        if turn == 0:
            handles = [[own.store.put(array) for array in one] for one in arrays]
            needed = [[RequiredRows(handle) for handle in one] for one in handles]
        own.leaders.begin(own.leaders.number + 1)
        sent.clear()
        own.sender.send(payload, needed, arrays, [])
        commands = []
        for one in others:
            number = one.receiver.receive()
            assert number == turn + 1
            one.leaders.begin(number)
            one.store.begin()
            assert one.receiver.open()[0] == payload
            commands.append(one.receiver._command)
        for one, machine, wanted in zip(others, handles, arrays):
            for handle, array in zip(machine, wanted):
                np.testing.assert_array_equal(one.store.get(handle), array)
        assert edges(sent, CONTROL) == [(0, 1), (0, 2), (0, 3)]
        assert [(*ends, size) for *ends, tag, size in sent if tag > REPLY] == [(0, 1, LARGE)]
        if turn:
            # A repeated message is not unpickled again, on any machine.
            assert all(one is other for one, other in zip(commands, former))
        former = commands


def put(transport, lengths):
    """Put an array of a length for each rank into the store; return its handle."""
    return transport.store.put(np.full(lengths[transport.rank], transport.rank, np.uint8))


def test_small_arrays_return_with_the_replies_and_large_ones_follow_them(ranks_of, sent):
    ranks = ranks_of(1, 1, 1, 1)
    lengths = [0, 5, LARGE, LARGE + 1]
    for _ in range(2):
        sent.clear()
        handles = ranks.values(put, lengths)
        for rank, (handle, length) in enumerate(zip(handles, lengths)):
            assert ranks.transport.store.get(handle).tolist() == [rank] * length
        assert sorted(edges(sent, REPLY)) == [(1, 0), (2, 0), (3, 0)]
        direct = sorted((*ends, size) for *ends, tag, size in sent if tag > REPLY)
        assert direct == [(2, 0, LARGE), (3, 0, LARGE + 1)]


def test_commands_of_a_broken_world_are_dropped_before_the_order_that_starts_the_next():
    own, other = (Leaders(links) for links in NaiveNetwork(2).links())
    for number, is_order in ((5, False), (6, False), (7, True), (8, False), (9, True)):
        own.send(1, CONTROL, ControlMessage(number, is_order, b""))
    order = other.receive_order()
    assert order.is_order and order.number == 7
    assert other.receive_command().number == 8
    order = other.receive_command()
    assert order.is_order and order.number == 9
    other.postpone(order)
    assert other.receive_order() is order


def test_arrays_of_a_command_that_was_not_opened_are_discarded_before_the_next_world():
    own, other = members(1, 1)
    own.leaders.begin(1)
    array = np.ones(LARGE, np.uint8)
    own.sender.send(b"command", [[RequiredRows(own.store.put(array))]], [[array]], [])
    own.leaders.begin_first(2)
    other.leaders.begin_first(2)
    queues = other.leaders.links._network.queues
    assert not any(queue for (_, to, tag), queue in queues.items() if to == 1 and tag != CONTROL)


def test_replies_to_a_command_of_a_broken_world_are_dropped():
    own, first, second = members(1, 1, 1)
    own.leaders.begin(5)
    for member, number, text in ((first, 3, b"former"), (first, 5, b"one"), (second, 5, b"two")):
        member.leaders.number = number
        member.receiver.send(*member.receiver.pack([text], []))
    assert own.sender.collect(False) == [[b"one"], [b"two"]]


@pytest.mark.parametrize("ends_first", [False, True])
def test_a_leader_that_left_because_of_a_failure_is_not_said_to_be_missing(sent, ends_first):
    """The notice of the failure may reach the leader that waits after those of other leaders."""
    failing, left, waiting = (Leaders(links) for links in NaiveNetwork(3).links())
    for one in (failing, left, waiting):
        one.begin(1)
    failing.abort()
    left.read_notices()
    for step in (lambda: left.ended.end(0), lambda: waiting.ended.ask(0))[:: 1 if ends_first else -1]:
        step()
        left.read_notices()
    waiting.links.receive(0, 0)  # as if it had not arrived
    waiting.read_notices()
    assert waiting.ended.find(0) is None and not waiting.is_aborted
    failing.abort()
    waiting.read_notices()
    assert waiting.is_aborted


def leave_or_stay(transport, staying):
    """Return, but on one rank go on for as long as the world exists."""
    while transport.rank == staying:
        transport.check()
        time.sleep(1e-3)


@pytest.mark.parametrize("staying", [1, 2, 3])
def test_a_master_that_waits_for_a_leader_ends_with_the_world(staying):
    """As after an interrupt in the master."""
    ranks = Ranks(ThreadedMachines([1, 1, 1, 1], timeout=60, have_progress_processes=False))
    ranks.values(number_of)
    errors = []

    def run():
        try:
            ranks.run(leave_or_stay, staying)
        except WorldBrokenError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(0.1)
    ranks.transport.leaders._broken = ranks.transport.leaders.number, "interrupted"
    thread.join(10)
    assert not thread.is_alive() and "interrupted" in str(errors[0])
    ranks.transport.kill()
    ranks.transport.close(5)  # checks that all threads have ended


def test_a_leader_says_that_its_ranks_have_ended(ranks_of):
    ranks = ranks_of(1, 1, 1, 1)
    for missing in (1, 2):
        outcomes = ranks.run(meet_without, missing, 1)
        assert outcomes[missing].error is None
        assert MissingRankError in {one.error for one in outcomes}
    assert ranks.values(number_of) == [0, 1, 2, 3]
