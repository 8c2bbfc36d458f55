"""Arrays that other machines keep between commands: constant arrays, and files that they have.

A constant array is sent once to each machine that needs it. A machine that has a file with the same name
and contents, according to the digests, maps it; otherwise its rows are sent like the rows of other
arrays.
"""

from __future__ import annotations

import numpy as np

from synkhronos.machines.leaders import CONTROL, REPLY
from synkhronos.machines.store import Part, lasts, name_of
from synkhronos.stores.files import FileHandle, digest, find_same_file
from synkhronos.stores.required_rows import Need, combine

COMMAND, FILE = "command", "file"  # messages between commands


class Lasting:
    """What the master knows of the other machines' arrays, and what their leaders do about files.

    Parameters
    ----------
    leaders : Leaders
    store : MachinesStore
    machines : list of range
        The ranks of each machine.
    """

    def __init__(self, leaders, store, machines):
        self._leaders, self._store, self._machines = leaders, store, machines
        self._size = sum(map(len, machines))
        self._kept = [{} for _ in machines]  # for each machine by name, whether it keeps the array
        self._digests = {}  # of files
        self._found = [(None, [])] * len(machines)  # what each machine needs for the last command

    # The master

    def still_needed(self, machine, needs):
        """Return what a machine needs for a command and does not have, a list of `Need`.

        A repeated command gets the same list, unless the machine keeps some of the arrays.
        """
        if needs is None:
            return []
        last, found = self._found[machine]
        if needs != last:
            found = combine(needs(self._machines[machine], self._size))
            self._found[machine] = needs, found
        if not any([lasts(need.handle) for need in found]):
            return found
        return [one for one in [self._missing(machine, need) for need in found] if one is not None]

    def _missing(self, machine, need):
        """Return a need in the form in which it is sent, or None if the machine has the array."""
        handle, kept = need.handle, self._kept[machine]
        if not lasts(handle):
            return need
        name = name_of(handle)
        if isinstance(handle, FileHandle):
            if name not in kept:
                kept[name] = self._ask_for_file(machine, handle)
            return None if kept[name] else need
        return None if name in kept else Need(handle, lasts=True)

    def mark_sent(self, machine, needs):
        """Record what has been sent to a machine."""
        self._kept[machine].update((name_of(need.handle), True) for need in needs if need.lasts)

    def take_dropped(self):
        """Return the keys of constant arrays that machines no longer need to keep."""
        keys, self._store.dropped[:] = list(self._store.dropped), []
        for kept in self._kept:
            for key in keys:
                kept.pop(key, None)
        return keys

    def _ask_for_file(self, machine, handle):
        if handle not in self._digests:
            self._digests[handle] = digest(self._store.get(handle))
        self._leaders.send(machine, CONTROL, (FILE, handle, self._digests[handle]))
        answer = None
        while answer is None or answer[0] != FILE:  # otherwise it replies to a command of a former world
            _, answer, _ = self._leaders.receive(machine, REPLY, np.empty)
        return answer[1]

    # Other leaders

    def find_file(self, handle, expected):
        """Answer whether this machine has a file of the master; return its `Part` in a list."""
        own = find_same_file(handle, expected)
        self._leaders.send(0, REPLY, (FILE, own is not None))
        if own is None:
            return []
        parts = [Part(Need(handle, lasts=True), own)]
        self._store.keep(parts)
        return parts
