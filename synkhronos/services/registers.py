"""Registers: bytes in the named memory that one process writes and others read, without locks.

The writer may die at any time, and its replacement may then write to the register while it is being
read. A checksum tells the reader whether it has read complete contents. If not, the reader can sleep,
because the writer wakes it when it is done.

A `Channel` has the questions of a rank to another process, and the answers. A `RegisterGroup` is a group
of processes that have named memory, but no transport. `Reports` are numbers that each rank shows to all.
"""

from __future__ import annotations

import functools
import json
import struct
import time
import zlib
from numbers import Real
from typing import Any, Callable

import numpy as np

from synkhronos.stores.named_memory import NamedMemory
from synkhronos.transports.waiting import NBYTES, Semaphore

#: Arrays in the named memory with a number for each rank, which only the rank itself sets: its clock,
#: how often it was replaced, and whether it has ended its program
CLOCKS, RESTARTS, ENDED = NUMBERS = "clocks", "restarts", "ended"

_HEAD = struct.Struct("=qqqI")  # the number, the time, the length, and the checksum of number and bytes
_LEAST_ROOM = 1 << 10  # bytes
_AWAKE = 0.1  # seconds between two checks of the processes that a group waits for
_REPORT_BYTES = 4094  # bytes
_MOST_READS = 100  # attempts, for a rank that reports all the time


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


class Register:
    """Numbered bytes of any length. There is room for the latest only.

    Parameters
    ----------
    named_memory : NamedMemory
        Where its memory is.
    name : str
        The name by which both processes know it.
    """

    def __init__(self, named_memory: NamedMemory, name: str) -> None:
        self._head = named_memory.array(f"{name} head", _HEAD.size, "uint8").data
        self._bytes = functools.lru_cache(None)(
            lambda nbytes: named_memory.array(f"{name} of {nbytes}", nbytes, "uint8").data
        )
        self._seen = 0  # the number that `read_new` has returned last

    def write(self, number: int, data: bytes) -> None:
        """Replace the contents. `number` must be larger than all earlier numbers."""
        self._room(len(data))[: len(data)] = data
        # Not by `pack_into`, which sets it to zero first, as if nothing had been written
        head = _HEAD.pack(number, time.monotonic_ns(), len(data), _checksum(number, data))
        self._head[:] = head

    def label(self) -> tuple[int, int]:
        """Return the number, initially 0, and when it was written, in nanoseconds."""
        return _HEAD.unpack_from(self._head)[:2]

    def read(self) -> tuple[int, bytes] | None:
        """Return the number and the bytes, or None if they are not complete."""
        number, _, length, checksum = _HEAD.unpack_from(self._head)
        if not number or length < 0:
            return None
        data = bytes(self._room(length)[:length])
        return (number, data) if checksum == _checksum(number, data) else None

    def read_new(self) -> tuple[int, bytes] | None:
        """Return the number and the bytes, once; None if there are no new bytes that are complete."""
        complete = self.read() if self.label()[0] != self._seen else None
        if complete is not None:
            self._seen = complete[0]
        return complete

    def wait_for(self, number: int, bell: Semaphore, awake: float, check: Callable[[], object]) -> bytes:
        """Return the bytes that are written with a number, after which `bell` is posted.

        `check` is called when `awake` seconds have passed.
        """
        while True:
            is_there = self.label()[0] == number  # and not the previous one
            complete = self.read() if is_there else None
            if complete is not None:
                return complete[1]
            if not bell.wait(awake):
                check()

    def written_since(self) -> int | None:
        """Return when bytes were written that `read_new` has not returned; None if there are none."""
        number, moment = self.label()
        return None if number == self._seen else moment

    def _room(self, length: int) -> memoryview:
        """Return memory for this many bytes."""
        return self._bytes(max(_LEAST_ROOM, 1 << (length - 1).bit_length()))


def _checksum(number: int, data: bytes) -> int:
    return zlib.crc32(data, number & 0xFFFFFFFF)


class Channel:
    """The questions of one rank, and the answers to them. There is one question at a time.

    Parameters
    ----------
    named_memory : NamedMemory
        Where its memory is.
    name : str
        The name by which both processes know it.
    bell : Semaphore
        Posted with each answer.
    call : callable, optional
        Called after each question; it wakes the process that answers.
    """

    def __init__(
        self,
        named_memory: NamedMemory,
        name: str,
        bell: Semaphore,
        call: Callable[[], object] | None = None,
    ) -> None:
        self.question = Register(named_memory, f"{name}: question")
        self.answer = Register(named_memory, f"{name}: answer")
        self._bell, self._call = bell, call

    def ask(self, question: bytes, awake: float, check: Callable[[], None]) -> bytes:
        """Return the answer to a question. `check` is called when `awake` seconds have passed."""
        number = self.question.label()[0] + 1  # continue after the numbers of a dead predecessor
        self._bell.drain()
        self.put(number, question)
        return self.answer.wait_for(number, self._bell, awake, check)

    def put(self, number: int, question: bytes) -> None:
        """Write a question, and wake the process that answers."""
        self.question.write(number, question)
        if self._call is not None:
            self._call()

    def reply(self, number: int, answer: bytes) -> None:
        """Answer the question with a number."""
        self.answer.write(number, answer)
        self._bell.post()


class RegisterGroup:
    """A group of processes, as one of them sees it: a `Group` for communicators.

    Each process has two registers, which it uses alternately. A process that writes for this exchange
    has the items of the last exchange, so every process has begun that one, and has therefore read the
    register of the exchange before.

    Parameters
    ----------
    named_memory : NamedMemory
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
        bell, check = self._bells[self.rank], functools.partial(self._check, rank)
        return register.wait_for(self._number, bell, _AWAKE, check)


class LatestReports:
    """The latest reports of all ranks.

    The latest report of a rank is in one of two registers, to which the rank writes alternately, so no
    reader waits and no report is lost.

    Parameters
    ----------
    named_memory : NamedMemory
        Where they are.
    """

    def __init__(self, named_memory: NamedMemory) -> None:
        self._registers = functools.lru_cache(None)(
            lambda rank: [Register(named_memory, f"report of {rank}, {turn}") for turn in range(2)]
        )

    def write(self, rank: int, number: int, text: bytes) -> None:
        """Write a report of a rank. The numbers of its reports increase from 1."""
        self._registers(rank)[number % 2].write(number, text)

    def read(self, rank: int) -> tuple[int, bytes]:
        """Return the number and the text of the latest report of a rank; ``(0, b"")`` if it has none."""
        registers = self._registers(rank)
        for _ in range(_MOST_READS):
            n_written = sum(register.label()[0] > 0 for register in registers)
            found = list(filter(None, [register.read() for register in registers]))
            # If one is being written, the other may have become outdated since it was read.
            if len(found) >= n_written:
                break
        return max(found, default=(0, b""))


class Reports:
    """The reports of a rank, and the latest reports of all ranks.

    Parameters
    ----------
    named_memory : NamedMemory
        Where they are.
    rank, size : int
        This rank, and the number of ranks.

    Attributes
    ----------
    own : list of dict
        This rank's reports, each with ``"seconds"`` since the start of the program on this rank.
    """

    def __init__(self, named_memory: NamedMemory, rank: int, size: int) -> None:
        self._latest, self._rank, self._size = LatestReports(named_memory), rank, size
        self._number = self._latest.read(rank)[0]  # of a rank that died
        self._began = time.perf_counter()
        self.own: list[dict[str, float]] = []

    def add(self, numbers: dict[str, Any]) -> None:
        """Report numbers by name."""
        if not numbers:
            raise TypeError("rank.report: expected numbers by name, as report(loss=0.5), got nothing")
        report = {"seconds": time.perf_counter() - self._began}
        for name, number in numbers.items():
            if isinstance(number, np.ndarray) and number.ndim == 0:
                number = number.item()
            if not isinstance(number, Real):
                raise TypeError(f"rank.report: {name}: expected a number, got {number!r}")
            report[name] = float(number)
        text = json.dumps(report).encode()
        if len(text) > _REPORT_BYTES:
            raise ValueError(
                f"rank.report: expected numbers that take at most {_REPORT_BYTES} bytes with their "
                f"names, got {len(text)}; report fewer at a time"
            )
        self.own.append(report)
        self._number += 1
        self._latest.write(self._rank, self._number, text)

    def latest(self) -> list[dict[str, float] | None]:
        """Return the latest report of each rank; None for a rank that has none."""
        texts = [self._latest.read(rank)[1] for rank in range(self._size)]
        return [json.loads(text) if text else None for text in texts]
