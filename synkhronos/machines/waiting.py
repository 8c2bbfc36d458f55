"""What a leader checks while it waits for its own machine or for others."""

from __future__ import annotations

from synkhronos._errors import REMEDY, CollectiveAbortedError, SynkhronosError, WorldBrokenError


class Watch:
    """What the leader of this machine checks.

    Parameters
    ----------
    transport : MachinesTransport
    leaders : Leaders
    inside : Inside
        The ranks of this machine.
    flag : SpreadFlag
    courier : Courier
    """

    def __init__(self, transport, leaders, inside, flag, courier):
        self._transport, self._leaders, self._inside, self._flag = transport, leaders, inside, flag
        self._courier = courier

    def others(self, inside):
        """Called while it waits for other machines: raise if this machine's ranks cannot continue."""
        self._flag.pass_on()
        self._courier.check()
        try:
            self._inside.guard(self._transport.local.check)
        except CollectiveAbortedError:
            if inside:
                raise
        if self._transport.is_master:
            self._transport.while_waiting()

    def own(self):
        """Called while it waits for its own machine: raise if other machines cannot continue."""
        self._leaders.read_notices()
        self._courier.check()
        self._flag.pass_on()
        if self._transport.is_master:
            self._transport.while_waiting()

    def expire(self, seconds):
        """Called while it waits for other machines in a command: raise if it has waited too long."""
        limit = self._transport.timeout
        if limit is None or seconds <= limit:
            return
        if self._transport.is_master:
            self._transport.kill()
            raise WorldBrokenError(
                f"a barrier lasted longer than fork(timeout={limit}) seconds, for ranks of other "
                f"machines; every worker was ended; {REMEDY}"
            )
        if self._transport.in_program:
            raise SynkhronosError(
                f"rank {self._transport.rank} waited longer than fork(timeout={limit}) seconds inside a "
                f"program, for ranks of other machines"
            )
