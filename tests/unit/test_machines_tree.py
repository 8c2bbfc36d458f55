"""Tests of commands that travel to the leaders of machines along a tree, and of replies that return."""

import pickle
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
from synkhronos.machines.commands import Bundle, CommandReceiver, CommandSender, Replies
from synkhronos.machines.leaders import (
    CONTROL, NO_WORLD, REPLY, ControlMessage, Inbox, Leaders, as_bytes,
)  # fmt: skip
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


def hops(senders, member):
    """Return the length of a message's way to a member, by the sender of the message to each."""
    return 0 if member == 0 else 1 + hops(senders, senders[member])


@pytest.mark.parametrize("count", [2, 3, 4, 8, 16, 32, 64])
def test_the_master_handles_a_message_each_way_for_each_doubling_of_the_machines(ranks_of, sent, count):
    ranks = ranks_of(*[1] * count)
    rounds = (count - 1).bit_length()
    for _ in range(2):
        sent.clear()
        assert ranks.values(number_of) == list(range(count))
        there, back = edges(sent, CONTROL), edges(sent, REPLY)
        assert [source for source, _ in there].count(0) == rounds
        assert [to for _, to in back].count(0) == rounds
        assert sorted(to for _, to in there) == list(range(1, count))
        assert sorted(source for source, _ in back) == list(range(1, count))
        senders = {to: source for source, to in there}
        assert {source: to for source, to in back} == senders
        longest = max(hops(senders, member) for member in senders)
        assert longest == (1 if count == 3 else rounds)
        assert len(sent) == 2 * (count - 1)  # nothing else is sent


def members(*sizes):
    """Return the parts of leaders of machines that send and receive commands, by machine."""
    machines, found = ranks_of_machines(sizes), []
    for links in NaiveNetwork(len(sizes)).links():
        leaders = Leaders(links)
        store = MachinesStore(NaiveStore(1), leaders.rank, machines[leaders.rank].start)
        kind = CommandReceiver(leaders, store) if leaders.rank else None
        sender = None if leaders.rank else CommandSender(leaders, store, machines)
        replies = Replies(leaders, store)
        found.append(
            SimpleNamespace(leaders=leaders, store=store, receiver=kind, sender=sender, replies=replies)
        )
    return found


def test_small_arrays_go_along_and_large_ones_go_to_the_machine_that_needs_them(sent):
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
        for one in (others[1], others[0], others[2]):  # the second machine passes it on to the third
            number = one.receiver.receive()
            assert number == turn + 1
            one.leaders.begin(number)
            one.store.begin()
            assert one.receiver.open()[0] == payload
            commands.append(one.receiver._command)
        for one, machine, wanted in zip(others, handles, arrays):
            for handle, array in zip(machine, wanted):
                np.testing.assert_array_equal(one.store.get(handle), array)
        assert sorted(edges(sent, CONTROL)) == [(0, 1), (0, 2), (2, 3)]
        assert [(*ends, size) for *ends, tag, size in sent if tag > REPLY] == [(0, 1, LARGE)]
        if turn:
            # A repeated message is neither unpickled nor made again, on any machine.
            assert all(one is other for one, other in zip(commands, former))
        former = commands


def test_the_end_is_sent_to_each_machine_directly(sent):
    own, *others = members(1, 1, 1, 1)
    own.leaders.begin(1)
    own.sender.send(b"", own.sender.find_needed(None), [], [])
    assert edges(sent, CONTROL) == [(0, 1), (0, 2), (0, 3)]
    for one in others:
        assert one.receiver.receive() == 1
    assert len(sent) == 3


def put(transport, lengths):
    """Put an array of a length for each rank into the store; return its handle."""
    return transport.store.put(np.full(lengths[transport.rank], transport.rank, np.uint8))


def test_small_arrays_return_with_the_replies_and_large_ones_directly(ranks_of, sent):
    ranks = ranks_of(1, 1, 1, 1)
    lengths = [0, 5, LARGE, LARGE + 1]
    for _ in range(2):
        sent.clear()
        handles = ranks.values(put, lengths)
        for rank, (handle, length) in enumerate(zip(handles, lengths)):
            assert ranks.transport.store.get(handle).tolist() == [rank] * length
        assert sorted(edges(sent, REPLY)) == [(1, 0), (2, 0), (3, 2)]
        direct = sorted((*ends, size) for *ends, tag, size in sent if tag > REPLY)
        assert direct == [(2, 0, LARGE), (3, 0, LARGE + 1)]


def test_a_bundle_is_taken_apart_and_put_together():
    parts, following = [b"a", b"", b"ccc", b"dd"], [1, 0, 5, 2]
    bundle = Bundle(*pickle.loads(Bundle(b"common", parts, following).pack()))
    assert bundle == (b"common", parts, following)
    some = Bundle(*pickle.loads(bundle.part_of(slice(1, 3)).pack()))
    assert some == (b"common", parts[1:3], [0, 5])
    assert bundle.place_of(slice(1, 3)) == slice(1, 6) and bundle.place_of(slice(3, 4)) == slice(6, 8)


def letters(*numbers):
    """Return an inbox that gets commands, as pairs of a number and a world, and orders, as numbers."""
    arriving = [
        ControlMessage(one, NO_WORLD, b"") if isinstance(one, int) else ControlMessage(*one, b"")
        for one in numbers
    ]
    return Inbox(iter(arriving).__next__)


def test_commands_of_other_worlds_are_no_commands_of_this_one():
    inbox = letters((3, 1), (4, 1), (9, 8), (5, 1), 7, (5, 1), (10, 8))
    assert inbox.next_command(1, 3).number == 4  # the third one was received before
    # Leaders below another one may get a command of the next world before the order that starts it.
    assert inbox.next_command(1, 4).number == 5
    order = inbox.next_command(1, 5)
    assert order.is_order and order.number == 7
    inbox.postpone(order)
    assert inbox.next_order(5) is order
    assert inbox.next_command(8, 7).number == 9
    assert inbox.next_command(8, 9).number == 10  # what is left of the former world has been dropped


def test_commands_that_arrive_between_worlds_are_kept_for_the_next_one():
    inbox = letters((5, 1), (6, 1), (9, 8), 8, (10, 8))
    assert inbox.next_order(5).number == 8
    assert inbox.next_command(8, 8).number == 9
    assert inbox.next_command(8, 9).number == 10


def test_arrays_of_a_command_that_has_not_come_are_discarded_before_the_next_world(sent):
    own, _, second, third = members(1, 1, 1, 1)
    own.leaders.begin(1)
    array = np.ones(LARGE, np.uint8)
    needed = [[], [], [RequiredRows(own.store.put(array))]]
    own.sender.send(b"command", needed, [[], [], [array]], [])  # the second machine does not pass it on
    own.leaders.begin_first(2)
    third.leaders.begin_first(2)
    queues = second.leaders.links._network.queues
    assert not any(queue for (_, to, _), queue in queues.items() if to == 3)


def test_a_failed_collection_goes_on_where_it_was(monkeypatch):
    own, first, second, _ = members(1, 1, 1, 1)
    for one in (own, first, second):
        one.leaders.begin(5)
    received, receive = [], Leaders.receive

    def fail_once(leaders, source, tag, idle=False):
        received.append(source)
        if source == 2 and received.count(2) == 1:
            raise MemoryError
        return receive(leaders, source, tag, idle)

    monkeypatch.setattr(Leaders, "receive", fail_once)
    for number, text in ((3, b"former"), (5, b"own")):
        first.leaders.number = number
        first.leaders.send(0, REPLY, ControlMessage(number, 1, text))
    second.leaders.send(0, REPLY, ControlMessage(5, 1, b"two"))
    with pytest.raises(MemoryError):
        own.replies.gather(False)
    assert own.replies.gather(False) == [b"own", b"two"]
    assert received == [1, 1, 2, 2]  # the first message was for a former command


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
def test_leaders_that_wait_for_others_below_them_end_with_the_world(staying):
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


def test_a_leader_that_waits_for_one_below_it_says_that_its_ranks_have_ended(ranks_of):
    ranks = ranks_of(1, 1, 1, 1)
    for missing in (1, 2):
        outcomes = ranks.run(meet_without, missing, 1)
        assert outcomes[missing].error is None
        assert MissingRankError in {one.error for one in outcomes}
    assert ranks.values(number_of) == [0, 1, 2, 3]
