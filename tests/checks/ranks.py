"""Ranks that run programs, for the checks of communicators, stores and transports."""

import pickle
from typing import NamedTuple

from synkhronos._errors import CollectiveAbortedError, WorldBrokenError


class Outcome(NamedTuple):
    """The value that a rank returned, or the class and the message of the exception that it raised."""

    value: object
    error: type = None
    message: str = ""


class Ranks:
    """The ranks of a transport, not started yet; they run ``program(subject, *args)``.

    ``make(transport)`` returns the subject of a rank, which is the transport by default. `options` are
    further arguments of the start of the transport.
    """

    def __init__(self, transport, make=lambda transport: transport, *options):
        self.size = transport.size
        self.transport = transport
        self._make = make
        self._subject = make(transport)
        if self.size > 1:
            transport.start(self.serve, *options)

    def serve(self, transport):
        """Run programs as a worker, until the master closes the world."""
        # A forked rank inherits the master's subject.
        subject = self._subject if transport is self.transport else self._make(transport)
        while True:
            payload = transport.receive()
            if payload == b"":
                return
            transport.reply(pickle.dumps(self._attempt(transport, subject, payload)))
            assert transport.posted

    def _attempt(self, transport, subject, payload):
        program, args = pickle.loads(payload)
        try:
            return Outcome(program(subject, *args))
        except WorldBrokenError:
            raise
        except Exception as error:
            if not isinstance(error, CollectiveAbortedError):
                transport.abort()
            return Outcome(None, type(error), str(error))

    def run(self, program, *args):
        """Run a program on every rank, and return each rank's `Outcome`.

        The program and its arguments are pickled.
        """
        payload = pickle.dumps((program, args))
        if self.size == 1:
            return [self._attempt(self.transport, self._subject, payload)]
        self.transport.post(payload)
        assert self.transport.posted
        own = self._attempt(self.transport, self._subject, payload)
        replies = self.transport.collect()
        master = self.transport.master_rank
        assert [reply is None for reply in replies] == [rank == master for rank in range(self.size)]
        outcomes = [reply and pickle.loads(reply) for reply in replies]
        outcomes[master] = own
        return outcomes

    def values(self, program, *args):
        """Run a program on every rank, and return the values. Fail if a rank raises an exception."""
        return values(self.run(program, *args))

    def close(self):
        if self.size > 1:
            self.transport.post(b"")
        self.transport.close(5)


def values(outcomes):
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, f"rank {rank}: {outcome.error.__name__}: {outcome.message}"
    return [outcome.value for outcome in outcomes]
