"""Pings between the master's leader and the others, which compare the clocks of their machines."""

from __future__ import annotations

import struct

from synkhronos.arithmetic.clocks import Ping, Reading, read_clock
from synkhronos.machines.leaders import Leaders

#: The number of pings for a reading. Some of them are short, also on machines that are busy.
PINGS = 30
_TIME = struct.Struct("=d")


def compare_clocks(leaders: Leaders) -> list[Reading]:
    """Read the clock of each machine, a meeting of all leaders.

    The master's machine reads one after another, as messages that travel at the same time would hold
    each other up.

    Returns
    -------
    list of Reading
        By machine; empty for other leaders than the master's.
    """
    readings = []
    if leaders.rank == 0:
        now = leaders.clock()
        readings = [Reading(now, now, 0.0)]
        for machine in range(1, leaders.size):
            readings.append(read_clock([_ping(leaders, machine) for _ in range(PINGS)]))
    else:
        for _ in range(PINGS):
            leaders.receive_inside(0)
            leaders.send_inside(0, _TIME.pack(leaders.clock()))
    leaders.passed += 1
    return readings


def _ping(leaders, machine):
    sent = leaders.clock()
    leaders.send_inside(machine, b"")
    answer = leaders.receive_inside(machine)
    received = leaders.clock()
    return Ping(sent, _TIME.unpack(answer)[0], received)
