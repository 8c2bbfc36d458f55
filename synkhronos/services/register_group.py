"""A group of processes that have named memory, but no transport: they exchange bytes through registers.

Each process has two registers, which it uses alternately. A process that writes for this exchange has
the items of the last exchange, so every process has begun that one, and has therefore read the register
of the exchange before.
"""

from __future__ import annotations

from typing import Callable

from synkhronos.services.channel import Register
from synkhronos.services.wakeups import wakeup_semaphores
from synkhronos.stores.named_memory import NamedMemory

_AWAKE = 0.1  # seconds between two checks of the processes that are waited for


class RegisterGroup:
    """The group, as one of its processes sees it: a `Group` for communicators.

    Parameters
    ----------
    named memory : Commons
        Where the registers are.
    rank, size : int
        The number of this process, and the number of processes.
    check : callable
        ``check(rank)`` is called from time to time while this process waits for another; it raises if
        that process will not come.
    name : str, default: "group"
        The name by which its processes know the group.
    """

    def __init__(
        self,
        named_memory: NamedMemory,
        rank: int,
        size: int,
        check: Callable[[int], None],
        name: str = "group",
    ) -> None:
        self.rank, self.size, self._check = rank, size, check
        self._registers = [
            [Register(named_memory, f"{name}, register {turn} of {rank}") for rank in range(size)]
            for turn in range(2)
        ]
        self._bells = wakeup_semaphores(named_memory, name, size)
        self._number = 0  # of the exchange

    def barrier(self) -> None:
        """Wait until every process has called this method."""
        self.exchange(b"")

    def exchange(self, item: bytes) -> list[bytes]:
        """Return the bytes `item` of every process, by rank. It is also a barrier."""
        self._number += 1
        registers = self._registers[self._number % 2]
        self._bells[self.rank].drain()
        registers[self.rank].write(self._number, item)
        for rank, bell in enumerate(self._bells):
            if rank != self.rank:
                bell.post()
        return [
            item if rank == self.rank else self._wait_for(rank, register)
            for rank, register in enumerate(registers)
        ]

    def _wait_for(self, rank: int, register: Register) -> bytes:
        while True:
            complete = register.read() if register.label()[0] == self._number else None
            if complete is not None:
                return complete[1]
            if not self._bells[self.rank].wait(_AWAKE):
                self._check(rank)
