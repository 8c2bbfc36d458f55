"""Commons that can be joined by a process that was not forked from their creator.

Their memory and their locks are files without names. A process of the same user opens them by the
process id of their creator and the numbers of its descriptors.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from synkhronos.stores.commons import LockFile, SharedCommons, open_unnamed
from synkhronos.stores.memory import SharedMemory


class Address(NamedTuple):
    """Where another process finds the files."""

    pid: int
    memory: int
    locks: int


class JointCommons(SharedCommons):
    """Commons in separate memory.

    Parameters
    ----------
    address : Address, optional
        The address of the commons to join. By default, new commons are created.

    Attributes
    ----------
    address : Address
    """

    def __init__(self, address: Address | None = None) -> None:
        if address is None:
            self._memory_file = open_unnamed("synkhronos-commons")
            locks = open_unnamed("synkhronos-locks")
            self.address = Address(os.getpid(), self._memory_file.fileno(), locks.fileno())
        else:
            self._memory_file, locks = (
                open(f"/proc/{address.pid}/fd/{number}", "r+b", buffering=0) for number in address[1:]
            )
            self.address = address
        super().__init__(SharedMemory(1, self._memory_file.fileno()), LockFile(locks))

    def use_in_fork(self) -> None:
        """Called in a process that was forked from a rank and is itself a rank."""
        self.memory.use_span(0)  # nothing is allocated from it

    def close(self) -> None:
        super().close()
        self._memory_file.close()
