"""Conformance checks on each communicator for the CPU, with 1 to 5 ranks."""

import numpy as np
import pytest
from checks import wires
from checks.communicators import CHECKS, RepeatingCommunicator
from checks.ranks import Ranks

from synkhronos.comms.base import SingleRankCommunicator
from specifications.communicator import NaiveCommunicator
from synkhronos.comms.shm import SharedMemoryCommunicator
from synkhronos.stores.memory import SharedMemory
from synkhronos.stores.base import SharedMemoryStore
from synkhronos.transports.local import LocalTransport
from specifications.transport import NaiveTransport

SIZES = {1: 0, 2: 1, 3: 0, 4: 2, 5: 4}  # the master's rank by number of ranks


def naive(size, master_rank):
    return Ranks(NaiveTransport(size, master_rank, timeout=30), NaiveCommunicator)


def shared_memory(size, master_rank):
    transport = LocalTransport(size, master_rank, timeout=30, may_poll=False)
    return Ranks(transport, LocalTransport.communicator)


def alone(size, master_rank):
    return Ranks(NaiveTransport(size, master_rank, timeout=30), SingleRankCommunicator)


def prepared(size, master_rank):
    transport = LocalTransport(size, master_rank, timeout=30, may_poll=False)
    return Ranks(transport, lambda one: RepeatingCommunicator(one.communicator()))


COMMUNICATORS = [naive, shared_memory, prepared]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((make, size), marks=[pytest.mark.slow] * (size == 4))
        for make in COMMUNICATORS
        for size in SIZES
    ]
    + [(alone, 1)],
    ids=lambda param: f"{param[0].__name__}-{param[1]}",
)
def ranks(request):
    make, size = request.param
    ranks = make(size, SIZES[size])
    yield ranks
    ranks.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__[len("check_") :])
def test_communicator(check, ranks):
    check(ranks)


@pytest.mark.parametrize("check", wires.CHECKS, ids=lambda check: check.__name__[len("check_") :])
@pytest.mark.parametrize(
    "ranks",
    [(alone, 1), (naive, 3), *((shared_memory, size) for size in (1, 2, 3, 4))],
    indirect=True,
    ids=lambda param: f"{param[0].__name__}-{param[1]}",
)
def test_wire_formats_have_no_effect_on_one_machine(check, ranks):
    check(ranks)


def describe(comm):
    is_over_cpu = comm.over_cpu is comm
    return comm.rank, comm.size, comm.reduces_in_place, comm.takes(np.ones(3)), is_over_cpu


def test_it_knows_its_rank_and_reduces_no_array_where_it_is(ranks):
    size = ranks.size
    assert ranks.values(describe) == [(rank, size, False, False, True) for rank in range(size)]


def broadcast_dtypes(comm, root):
    dtype = "float64" if comm.rank == root else "int8"
    [result] = comm.broadcast([np.arange(4, dtype=dtype) + np.array(comm.rank, dtype)], root)
    return result


def test_a_broadcast_replaces_arrays_of_another_dtype(ranks):
    root = ranks.size - 1
    for result in ranks.values(broadcast_dtypes, root):
        assert result.dtype == "float64"
        np.testing.assert_array_equal(result, np.arange(4) + root)


def test_a_reduction_in_which_a_handler_has_raised_sends_its_new_arrays_the_next_time(monkeypatch):
    store, sent = SharedMemoryStore(SharedMemory(1)), []

    class Alone:
        rank, size = 0, 1

        def barrier(self):
            pass

        def exchange(self, item):
            sent.append(item)
            return [item]

    def interrupt(array):
        raise KeyboardInterrupt

    reduce = SharedMemoryCommunicator(Alone(), store).prepare_reduction("sum")
    reduce([np.ones(3)])
    other = store.place(np.ones(3))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(store, "put", interrupt)
        reduce([other])
    reduce([other])
    assert len(sent) == 2 and sent[0] != sent[1]
