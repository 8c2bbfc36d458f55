"""Conformance checks for the links between the leaders of machines.

Each check takes the `Links` of a leader; all leaders run it at the same time.
"""

import time

import numpy as np

from synkhronos.machines.leaders import as_bytes

# Some are multiples of the pieces in which MPI sends, or about as long.
LENGTHS = [0, 1, 7, 4096, 49_151, 49_152, 63_488, 65_536, 98_304, 294_912, 294_913, 1 << 20,
           (1 << 20) + 63_488, 5_000_000]  # fmt: skip
ARRAYS = [
    np.float64(3.5), np.zeros(0), np.zeros((0, 3), "int8"), np.arange(6, dtype="int16").reshape(2, 3),
    np.array(True), np.arange(4) * 1j, np.random.default_rng(0).normal(size=625_000),
    np.arange(12_288, dtype="float32"), np.arange(20_000).reshape(4, 5000),
]  # fmt: skip
TAGS = 100, 101, (1 << 20) * 3 + 15  # the largest is as large as the tags of commands


def wait(ready, seconds=20):
    """Return the value of ``ready()`` when it is true."""
    until = time.monotonic() + seconds
    while not (found := ready()):
        assert time.monotonic() < until, "a message does not arrive"
        time.sleep(1e-5)
    return found


def others(links):
    return [rank for rank in range(links.size) if rank != links.rank]


def meet(links):
    """Wait for all other leaders, by messages with a tag of their own."""
    for rank in others(links):
        links.send(rank, 99, b"here")
    for rank in others(links):
        assert wait(lambda rank=rank: links.receive(rank, 99)) == (rank, b"here")


def text(links, length, turn=0):
    return bytes([links.rank, turn]) * length


def check_bytes_of_any_length_arrive(links):
    for length in LENGTHS:
        sent = [links.send(to, 100, bytes([links.rank]) * length) for to in others(links)]
        for rank in others(links):
            source, got = wait(lambda rank=rank: links.receive(rank, 100))
            assert source == rank and bytes(got) == bytes([rank]) * length
        for number in sent:
            wait(lambda number=number: links.is_sent(number))


def check_arrays_of_any_shape_are_received_in_place(links):
    for array in ARRAYS:
        array = np.array(array, order="C")
        sent = [links.send(to, 100, array) for to in others(links)]
        for rank in others(links):
            room = np.full_like(array, 1)
            receipt = links.receive_into(rank, 100, room)
            wait(receipt.is_complete)
            assert receipt.is_complete()  # also when it is asked again
            np.testing.assert_array_equal(room, array)
        for number in sent:
            wait(lambda number=number: links.is_sent(number))


def check_what_was_sent_as_an_array_is_received_as_bytes_and_the_other_way(links):
    array = np.arange(3000.0) + links.rank
    for to in others(links):
        links.send(to, 100, array)
        links.send(to, 100, array.tobytes())
    for rank in others(links):
        wanted = np.arange(3000.0) + rank
        assert wait(lambda rank=rank: links.receive(rank, 100))[1] == wanted.tobytes()
        room = np.empty(3000)
        wait(links.receive_into(rank, 100, room).is_complete)
        np.testing.assert_array_equal(room, wanted)
    meet(links)  # the array may change now


def check_messages_with_one_tag_arrive_in_order(links):
    lengths = [5_000_000, 0, 49_152, 10, 98_304, 70_000, 1, 300_000] * 5
    for to in others(links):
        for turn, length in enumerate(lengths):
            links.send(to, 100, text(links, length, turn))
    for rank in others(links):
        for turn, length in enumerate(lengths):
            got = wait(lambda rank=rank: links.receive(rank, 100))[1]
            assert got == bytes([rank, turn]) * length
    meet(links)


def check_receipts_that_are_made_first_get_the_messages_in_order(links):
    rooms = {rank: [np.zeros(50_000) for _ in range(4)] for rank in others(links)}
    receipts = [links.receive_into(rank, 100, room) for rank, each in rooms.items() for room in each]
    assert not any(receipt.is_complete() for receipt in receipts) or links.size == 1
    meet(links)
    arrays = [np.full(50_000, 10.0 * links.rank + turn) for turn in range(4)]
    for array in arrays:
        for to in others(links):
            links.send(to, 100, array)
    for receipt in receipts:
        wait(receipt.is_complete)
    for rank, each in rooms.items():
        assert [set(room.tolist()) for room in each] == [{10.0 * rank + turn} for turn in range(4)]
    meet(links)


def check_tags_are_apart(links):
    for to in others(links):
        for tag in TAGS:
            links.send(to, tag, b"%d" % tag)
    for rank in others(links):
        for tag in TAGS[::-1]:
            assert wait(lambda rank=rank, tag=tag: links.receive(rank, tag))[1] == b"%d" % tag
    assert links.receive(None, TAGS[0]) is None
    meet(links)


def check_a_message_from_anyone_says_from_whom(links):
    assert links.receive(None, 100) is None
    meet(links)
    for to in others(links):
        links.send(to, 100, text(links, 1))
    got = dict(wait(lambda: links.receive(None, 100)) for _ in others(links))
    assert got == {rank: bytes([rank, 0]) for rank in others(links)}
    meet(links)  # before the next check, which sends with the same tag


def check_discarded_messages_are_gone_and_others_are_not(links):
    for to in others(links):
        for length in (0, 10, 100_000, 500_000):
            links.send(to, 100, bytes(length))
        links.send(to, 101, b"kept")
    for rank in others(links):
        wait(lambda rank=rank: links.receive(rank, 101))
    until = time.monotonic() + 0.2  # large messages may arrive after small ones with another tag
    while time.monotonic() < until:
        links.discard(100)
    assert links.receive(None, 100) is None
    meet(links)
    for to in others(links):
        links.send(to, 100, b"next")
    for rank in others(links):
        assert wait(lambda rank=rank: links.receive(rank, 100)) == (rank, b"next")


def check_a_cancelled_receipt_writes_no_more(links):
    rooms = {rank: np.zeros(100_000) for rank in others(links)}
    for rank, room in rooms.items():
        links.receive_into(rank, 100, room).cancel()
    meet(links)
    for to in others(links):
        links.send(to, 100, np.ones(100_000))
    for rank, room in rooms.items():
        source, got = wait(lambda rank=rank: links.receive(rank, 100))
        assert source == rank and got == np.ones(100_000).tobytes()
        assert not room.any()
    meet(links)


def check_receipts_are_cancelled_from_the_last_one_on_while_messages_arrive(links):
    arrays, tags = [np.ones(8000)] * 6, range(1000, 1300)
    for tag in tags:
        rooms = [(rank, np.zeros_like(array)) for rank in others(links) for array in arrays]
        receipts = [links.receive_into(rank, tag, room) for rank, room in rooms]
        for array in arrays:
            for to in others(links):
                links.send(to, tag, array)
        time.sleep(5e-5 * (tag % 10))
        for receipt in reversed(receipts):
            receipt.cancel()
        found = [room.copy() for _, room in rooms]
    meet(links)
    for tag in tags:
        links.discard(tag)
    for (_, room), before in zip(rooms, found):
        np.testing.assert_array_equal(room, before)
    meet(links)


def check_two_leaders_that_both_send_much_first_do_not_wait_for_each_other(links):
    large = [np.full(1 << 18, float(turn)) for turn in range(16)]
    sent = [links.send(to, 100, array) for array in large for to in others(links)]
    for rank in others(links):
        for array in large:
            room = np.empty_like(array)
            wait(links.receive_into(rank, 100, room).is_complete)
            np.testing.assert_array_equal(room, array)
    for number in sent:
        wait(lambda number=number: links.is_sent(number))


def check_the_memory_of_bytes_is_as_they_were(links):
    assert as_bytes(b"").size == 0 and as_bytes(np.float32(1)[...]).size == 4


CHECKS = [item for name, item in sorted(globals().items()) if name.startswith("check_")]
