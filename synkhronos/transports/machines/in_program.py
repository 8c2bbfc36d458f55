"""The part of a transport of several machines that uses the couriers, in programs and during calls."""

from __future__ import annotations

import pickle

from synkhronos._errors import WorldBrokenError
from synkhronos.transports.base import Transport


def _of_local(name):
    """Return a property that is an attribute of the transport of this machine."""
    return property(
        lambda self: getattr(self.local, name), lambda self, value: setattr(self.local, name, value)
    )


class InProgram(Transport):
    """The base class of `MachinesTransport`."""

    can_replace = True

    in_program, is_copy, pass_fds = map(_of_local, ("in_program", "is_copy", "pass_fds"))

    @property
    def on_death(self):
        return self._on_death

    @on_death.setter
    def on_death(self, on_death):
        """Let it be called with the ranks' numbers in the world."""
        self._on_death, self.local.on_death = on_death, None
        if on_death is not None:
            self.local.on_death = lambda dead: on_death(
                {self.near[rank]: cause for rank, cause in dead.items()}
            )

    def replace(self, rank, prepare):
        self.local.replace(self.near.index(rank), prepare)

    def answer_for(self, rank, payload):
        own = [], False, payload
        self.local.answer_for(self.near.index(rank), pickle.dumps(own, pickle.HIGHEST_PROTOCOL))

    def attend(self, name, serve):
        def serve_here():
            self._courier.use_in_fork()
            serve()

        return self.local.attend(name, serve_here)

    def relay(self, make_work):
        if self.is_leader:
            self._courier.start(self.leaders.number, make_work(self._machines))

    def _end_relay(self):
        self._courier.end()
        self.leaders.wait(self._courier.has_stopped)

    def _begin_ahead(self):
        if self.ahead is not None:
            self.ahead.begin_command()

    def _end_ahead(self):
        if self.ahead is not None:
            self.ahead.end()

    def spread(self, flag):
        if self.is_leader:
            self._flag.begin(flag)

    def _end_program(self):
        """On machines other than the master's: forget the program, which has ended on all ranks."""
        self._end_relay()
        self.store.commons.clear()
        replacing, self.on_death = self.on_death, None
        complaint = None if replacing is None else replacing.complaint()
        if complaint is not None:
            raise WorldBrokenError(complaint)
