"""Conformance checks for transports.

Each check takes `ranks`, a `checks.ranks.Ranks` whose subject is the transport of a rank.
"""

import itertools
import os
import threading
import time

from synkhronos._errors import CollectiveAbortedError, MissingRankError

LENGTHS = [0, 1, 7, 32_700, 32_768, 40_000, 200_000]

#: Held while a rank forks: ranks can be threads of one process, and filelock 4, which PyTensor uses,
#: refuses that two threads fork at the same time.
forking = threading.Lock()


def identify(transport):
    master, worker = transport.is_master_process(), transport.is_worker_process()
    return transport.rank, transport.size, transport.master_rank, transport.distance, master, worker


def echo(transport, payload, factor):
    return payload * factor + bytes([transport.rank])


def exchange(transport, lengths):
    """Exchange items of these lengths, one after the other; return a summary of the items received."""
    received = []
    for turn, length in enumerate(lengths):
        item = bytes([transport.rank, turn]) * (length + transport.rank)
        received.append(transport.exchange(item))
    return [
        [(len(item), item[:2], item == item[:2] * (len(item) // 2)) for item in items]
        for items in received
    ]


def wait_for_the_slowest(transport, slowest, pause):
    if transport.rank == slowest:
        time.sleep(pause)
    entered = time.time()  # machines may have other monotonic clocks
    transport.barrier()
    return entered, time.time()


def fail(transport, failing, before, after):
    """Pass some barriers, then fail on some ranks while the others continue to further barriers."""
    for _ in range(before):
        transport.exchange(b"before")
    if transport.rank in failing:
        raise ZeroDivisionError
    for _ in range(after):
        transport.exchange(b"after")
    return "passed"


def ask_forked_process(transport):
    """Return nonzero if a child process that this rank forks believes that it is a rank."""
    with forking:
        child = os.fork()
    if not child:
        os._exit(10 * transport.is_master_process() + transport.is_worker_process())
    return os.waitpid(child, 0)[1]


def sum_of_ranks(transport):
    import numpy as np

    [total] = transport.communicator().all_reduce([np.array([transport.rank + 1.0])], "sum")
    return total.tolist()


def work_at_own_pace(transport, failing):
    """Work without barriers until a rank fails; return how long it took to notice."""
    transport.begin_program()
    transport.barrier()
    if transport.rank == failing:
        raise ZeroDivisionError
    began = time.monotonic()
    while time.monotonic() < began + 5:
        transport.check()
        time.sleep(1e-3)


def meet_without(transport, missing, before):
    """Pass some barriers; one rank then ends while the others wait at another barrier."""
    transport.begin_program()
    for _ in range(before):
        transport.barrier()
    if transport.rank != missing:
        transport.barrier()


def check_every_rank_knows_itself(ranks):
    master, size = ranks.transport.master_rank, ranks.size
    assert ranks.values(identify) == [
        (rank, size, master, (rank - master) % size, rank == master, rank != master)
        for rank in range(size)
    ]
    assert 1 <= ranks.transport.ranks_here <= size


def check_a_process_that_a_rank_forks_is_no_rank(ranks):
    assert ranks.values(ask_forked_process) == [0] * ranks.size


def check_payloads_and_replies_of_any_length_arrive(ranks):
    for length in (0, 1, 1000, (1 << 16) - 1, 1 << 16, (1 << 20) + 1, 5 << 20):
        for payload, factor in ((b"ab" * length, 1), (b"x", length)):
            got = ranks.values(echo, payload, factor)
            assert got == [payload * factor + bytes([rank]) for rank in range(ranks.size)]
    assert ranks.values(echo, b"y", 3) == [b"yyy" + bytes([rank]) for rank in range(ranks.size)]


def check_items_of_any_length_are_exchanged_in_order(ranks):
    for lengths in ([], [0], LENGTHS, LENGTHS[::-1], [40_000] * 3, [0, 200_000, 0, 200_000, 1]):
        expected = [
            [
                (2 * (length + rank), bytes([rank, turn])[: 2 * (length + rank)], True)
                for rank in range(ranks.size)
            ]
            for turn, length in enumerate(lengths)
        ]
        assert ranks.values(exchange, lengths) == [expected] * ranks.size


def check_nobody_leaves_a_barrier_before_the_last_one_enters_it(ranks):
    for slowest in range(ranks.size):
        times = ranks.values(wait_for_the_slowest, slowest, 0.02)
        assert min(left for _, left in times) >= max(entered for entered, _ in times)


def check_ranks_leave_the_barrier_that_a_failed_one_never_reaches(ranks):
    everyone = range(ranks.size)
    several = [set(everyone), {0}, {ranks.size - 1}, set(everyone[::2])]
    for failing, before, after in itertools.product(several, (0, 1, 3), (0, 1, 2)):
        for rank, outcome in enumerate(ranks.run(fail, failing, before, after)):
            if rank in failing:
                assert outcome.error is ZeroDivisionError
            elif after:
                assert outcome.error is CollectiveAbortedError
            else:
                assert outcome.value == "passed"
        # A failed command must not affect the next one.
        lengths = [3, 50_000]
        assert all(len(one) == 2 for one in ranks.values(exchange, lengths))
        assert ranks.values(fail, set(), 3, 2) == ["passed"] * ranks.size


def check_ranks_that_do_not_wait_learn_that_another_one_has_failed(ranks):
    for failing in range(ranks.size):
        began = time.monotonic()
        for rank, outcome in enumerate(ranks.run(work_at_own_pace, failing)):
            expected = ZeroDivisionError if rank == failing else CollectiveAbortedError
            assert outcome.error is expected
        assert time.monotonic() < began + 1
    assert ranks.values(fail, set(), 3, 2) == ["passed"] * ranks.size


def check_a_rank_does_not_wait_for_one_that_has_ended(ranks):
    if ranks.size == 1:
        return
    for missing, before in itertools.product((0, ranks.size - 1), (0, 2)):
        outcomes = ranks.run(meet_without, missing, before)
        assert outcomes[missing].error is None
        others = [outcome for rank, outcome in enumerate(outcomes) if rank != missing]
        assert {one.error for one in others} <= {MissingRankError, CollectiveAbortedError}
        assert any(f"rank {missing}, which ended" in one.message for one in others)
        assert ranks.values(fail, set(), 3, 2) == ["passed"] * ranks.size


def check_an_attendant_runs_beside_the_ranks_and_uses_the_store(ranks):
    named_memory = ranks.transport.store.named_memory
    named_memory.clear()
    state = named_memory.array("state", (2,), "int64")

    def serve():
        deadline = time.monotonic() + 5
        own = named_memory.array("state", (2,), "int64")
        own[0] = 1
        while not own[1] and time.monotonic() < deadline:
            time.sleep(1e-3)
        own[0] = 2

    service_process = ranks.transport.attend("service_process", serve)
    deadline = time.monotonic() + 5
    while not state[0] and time.monotonic() < deadline:
        time.sleep(1e-3)
    assert state[0] == 1 and service_process.is_alive()
    assert ranks.values(exchange, [1])  # the ranks do not notice it
    state[1] = 1
    service_process.end(5)
    assert state[0] == 2


def check_it_has_a_communicator(ranks):
    assert ranks.values(sum_of_ranks) == [[ranks.size * (ranks.size + 1) / 2]] * ranks.size


CHECKS = [item for name, item in sorted(globals().items()) if name.startswith("check_")]
