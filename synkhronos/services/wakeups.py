"""Semaphores in the named memory, which wake processes that wait for a change there."""

from __future__ import annotations

from synkhronos.stores.named_memory import NamedMemory
from synkhronos.transports.waiting import NBYTES, Semaphore


def wakeup_semaphores(named_memory: NamedMemory, name: str, count: int) -> list[Semaphore]:
    """Return the semaphores that all processes know by this name. The first process creates them."""
    places = named_memory.array(f"{name} bells", (count, NBYTES), "uint8")
    are_made = named_memory.array(f"{name} bells are made", 1, "int64").data
    [lock] = named_memory.locks(f"{name} bells", 1)
    while not lock.try_acquire():
        named_memory.pause()
    try:
        is_new = not are_made[0]
        made = [Semaphore(array=place, is_new=is_new) for place in places]
        are_made[0] = 1
    finally:
        lock.release()
    return made
