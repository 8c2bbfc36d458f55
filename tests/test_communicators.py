"""The checks of `checks`, on each communicator, for 1 to 5 ranks."""

import pickle

import pytest
from checks import CHECKS, Outcome

from synkhronos._errors import CollectiveAbortedError
from synkhronos.comms.naive import NaiveCommunicator
from synkhronos.comms.shm import SharedMemoryCommunicator
from synkhronos.transports.local import LocalTransport

COMMUNICATORS = [NaiveCommunicator, SharedMemoryCommunicator]
SIZES = {1: 0, 2: 1, 3: 0, 4: 2, 5: 4}  # with the master's rank


class Ranks:
    """Forked processes that run programs on a communicator."""

    def __init__(self, make, size, master_rank):
        self.size = size
        self.transport = LocalTransport(size, master_rank, timeout=30, spin=False)
        self.comm = make(self.transport)
        if size > 1:
            self.transport.start(self._serve)

    def _serve(self):
        while True:
            payload = self.transport.receive()
            if payload == b"":
                return
            self.transport.reply(pickle.dumps(self._attempt(payload)))

    def _attempt(self, payload):
        program, args = pickle.loads(payload)
        try:
            return Outcome(program(self.comm, *args))
        except Exception as error:
            if not isinstance(error, CollectiveAbortedError):
                self.transport.abort()
            return Outcome(None, type(error), str(error))

    def run(self, program, *args):
        payload = pickle.dumps((program, args))
        if self.size == 1:
            return [self._attempt(payload)]
        self.transport.post(payload)
        own = self._attempt(payload)
        outcomes = [reply and pickle.loads(reply) for reply in self.transport.collect()]
        outcomes[self.transport.rank] = own
        return outcomes

    def close(self):
        if self.size > 1:
            self.transport.post(b"")
        self.transport.close(5)


@pytest.fixture(
    scope="module",
    params=[(make, size) for make in COMMUNICATORS for size in SIZES],
    ids=lambda param: f"{param[0].__name__}-{param[1]}",
)
def ranks(request):
    make, size = request.param
    ranks = Ranks(make, size, SIZES[size])
    yield ranks
    ranks.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__[len("check_"):])
def test_communicator(check, ranks):
    check(ranks)
