"""The program in which faults occur. Every rank runs it, and counts what it does in shared memory.

It computes, exchanges with two centers, sends and receives messages, asks the controller and, in some
scenarios, meets the others in collectives. Ranks find this module by its name, so what `board` and
`reach` are in the script they are on every rank.
"""

import mmap
import time

import numpy as np

from synkhronos.programs import center
from synkhronos.services import messages

ROUNDS = 4
MOST_MESSAGES = 200  # of a rank, until it dies or ends
LONGEST = 12.0  # seconds for a fault that does not come
FADES = 3.0  # seconds until an exception at a random moment counts as swallowed, e.g. in a destructor
_PAYLOAD = 3000  # items of a message: several chunks
_RESTARTS, _MOST_RANKS = 5, 4

# Several stripes and several chunks with little to copy.
center._STRIPE_BYTES, center._PIECE_BYTES = 4096, 2048
messages._CHUNK_BYTES, messages.BOX_BYTES = 4096, 256 * 4096
ITEMS = 1500  # of the variables of a center: three stripes


def reach(seam):
    """Come to a place where a fault may occur. The injector replaces it."""


class Tally:
    """What has happened, as counted by the ranks in shared memory."""

    def __init__(self):
        self._memory = np.frombuffer(mmap.mmap(-1, 1 << 20), np.int64)
        pieces = np.split(self._memory[: 5 * 4096], 5)
        # Per rank: the pushes that began and those that returned, whether it receives no more.
        self.begun, self.done, self.ended = (one[:_MOST_RANKS] for one in pieces[:3])
        # Per message: whether it was sent to a rank that receives, how often it was received.
        self.sent, self.received = pieces[3:]

    def clear(self):
        self._memory[:] = 0


tally = Tally()
board = None  # set by the script before it forks
current_round = 0  # of this rank; the injector reads it


class Answers:
    """A controller that repeats the question."""

    def __call__(self, request, rank, info):
        reach("controller")
        if request == "slowly":
            time.sleep(0.02)
        return request, rank, info


def program(rank, f, inputs, count, weights, go, request, meets, lasts):
    """Do all that a program can do: in some rounds, "until the fault", or "until the end".

    `f` doubles `inputs`, `count` is pushed, `weights` are exchanged elastically, and the ranks meet in
    collectives, one of which sends in `go` whether to go on, if `meets` is true.
    """
    global current_round
    current_round = 0
    began = time.monotonic()
    if rank.restarts:
        board.back_at = began
    tally.ended[rank.rank] = 0
    count.set_value(np.zeros(ITEMS, "int64"))
    weights.set_value(np.zeros(ITEMS))
    counts, elastic = rank.center(count), rank.center(weights)
    rank.center(weights, f"of rank {rank.rank}, {rank.restarts}")  # arrays that it makes itself
    messages = 0
    while True:
        reach("code")
        doubled = rank.call(f, inputs, batch=slice(rank.rank, None))[0]
        np.testing.assert_array_equal(doubled, 2 * inputs[rank.rank :])
        push_one(rank, count, counts)
        weights.set_value(weights.get_value() + 1)
        elastic.elastic(0.5)
        elastic.pull()
        check_whole(weights.get_value())
        messages = send_one(rank, messages)
        receive_all(rank)
        question = rank.restarts, current_round
        assert rank.ask(request, question) == (request, rank.rank, question), "another one's answer"
        if not goes_on(rank, began, go, meets, lasts):
            break
        current_round += 1
    tally.ended[rank.rank] = 1
    receive_all(rank)
    return rank.restarts, counts.value(), elastic.value()


def goes_on(rank, began, go, meets, lasts):
    now, more = time.monotonic(), current_round + 1 < ROUNDS
    if lasts == "until the fault" and board.armed:
        more = now < began + LONGEST
    if lasts == "until the end":
        more = more or now < (board.died_at + FADES if board.died_at else began + LONGEST)
    board.asked_at = board.asked_at or now
    if current_round >= ROUNDS:
        time.sleep(0.005)
    if meets:
        if rank.is_master:
            go.set_value(np.array([float(more)]))
        rank.broadcast(go)
        more = bool(go.get_value()[0])
    return more


def push_one(rank, count, center):
    count.set_value(count.get_value() + 1)
    tally.begun[rank.rank] += 1
    center.push()
    tally.done[rank.rank] += 1
    center.pull()
    check_whole(count.get_value())


def check_whole(values):
    """Check that no stripe is a mixture of two states."""
    items = center._STRIPE_BYTES // values.itemsize
    for start in range(0, values.size, items):
        assert len(set(values[start : start + items].tolist())) == 1, "a stripe is torn"


def send_one(rank, number):
    to = (rank.rank + 1) % rank.size
    if number == MOST_MESSAGES or tally.ended[to]:
        return number
    message = (rank.rank * _RESTARTS + rank.restarts) * MOST_MESSAGES + number
    if not rank.send(to, np.full(_PAYLOAD, message)):
        return number  # the box is full
    if not tally.ended[to]:
        tally.sent[message] += 1
    return number + 1


def receive_all(rank):
    while (came := rank.receive()) is not None:
        source, values = came
        [message] = set(values.tolist())  # or it was half written
        assert message // (_RESTARTS * MOST_MESSAGES) == source, "from another rank"
        tally.received[message] += 1


def judge(results, restarts, lost, partial):
    """Check what a program has returned that ended well, whose ranks were replaced `restarts` times.

    So many messages may be lost, and so many pushes may be partly done.
    """
    assert [one for one, _, _ in results] == restarts, [one for one, _, _ in results]
    value = np.max([counts for _, counts, _ in results], axis=0)  # as it only grows
    done, begun = tally.done.sum(), tally.begun.sum()
    assert begun - done <= partial, f"{begun} pushes began, {done} returned"
    assert done <= value.min() and value.max() <= begun, f"{value} for {done} to {begun} pushes"
    for _, counts, weights in results:
        check_whole(counts)
        check_whole(weights)
    judge_messages()
    missing = (tally.sent > tally.received).sum()
    assert missing <= lost, f"{missing} of {tally.sent.sum()} messages are lost"


def judge_messages():
    assert tally.received.max() <= 1, "a message was received twice"
