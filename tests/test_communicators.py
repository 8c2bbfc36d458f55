"""The checks of `checks.communicators`, on each communicator, for 1 to 5 ranks."""

import pytest
from checks.communicators import CHECKS
from checks.ranks import Ranks

from synkhronos.comms.naive import NaiveCommunicator
from synkhronos.transports.local import LocalTransport
from synkhronos.transports.naive import NaiveTransport

SIZES = {1: 0, 2: 1, 3: 0, 4: 2, 5: 4}  # with the master's rank


def naive(size, master_rank):
    return Ranks(NaiveTransport(size, master_rank, timeout=30), NaiveCommunicator)


def shared_memory(size, master_rank):
    transport = LocalTransport(size, master_rank, timeout=30, may_poll=False)
    return Ranks(transport, LocalTransport.communicator)


COMMUNICATORS = [naive, shared_memory]


@pytest.fixture(
    scope="module",
    params=[(make, size) for make in COMMUNICATORS for size in SIZES],
    ids=lambda param: f"{param[0].__name__}-{param[1]}",
)
def ranks(request):
    make, size = request.param
    ranks = make(size, SIZES[size])
    yield ranks
    ranks.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__[len("check_"):])
def test_communicator(check, ranks):
    check(ranks)
