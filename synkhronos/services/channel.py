"""Questions of a rank to another process, and the answers, in the named memory and without locks.

There is a register for the questions, and a register for the answers: bytes that one process writes and
another process reads. The writer may die at any time, and its replacement may then write to the register
while it is being read. A checksum tells the reader whether it has read complete contents. If not, the
reader can sleep, because the writer wakes it when it is done.
"""

from __future__ import annotations

import struct
import time
import zlib
from typing import Callable

from synkhronos.stores.named_memory import NamedMemory
from synkhronos.transports.waiting import Semaphore

_HEAD = struct.Struct("=qqqI")  # the number, the time, the length, and the checksum of number and bytes
_LEAST_ROOM = 1 << 10  # bytes


class Register:
    """Numbered bytes of any length. There is room for the latest only.

    Parameters
    ----------
    named memory : Commons
        Where its memory is.
    name : str
        The name by which both processes know it.
    """

    def __init__(self, named_memory: NamedMemory, name: str) -> None:
        self._named_memory, self._name = named_memory, name
        self._head = named_memory.array(f"{name} head", _HEAD.size, "uint8").data
        self._rooms: dict[int, memoryview] = {}
        self._seen = 0  # the number that `read_new` has returned last

    def write(self, number: int, data: bytes) -> None:
        """Replace the contents. `number` must be larger than all earlier numbers."""
        self._room(len(data))[: len(data)] = data
        _HEAD.pack_into(self._head, 0, number, time.monotonic_ns(), len(data), _checksum(number, data))

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

    def written_since(self) -> int | None:
        """Return when bytes were written that `read_new` has not returned; None if there are none."""
        number, moment = self.label()
        return None if number == self._seen else moment

    def _room(self, length: int) -> memoryview:
        """Return memory for this many bytes."""
        nbytes = max(_LEAST_ROOM, 1 << (length - 1).bit_length())
        if nbytes not in self._rooms:
            self._rooms[nbytes] = self._named_memory.array(
                f"{self._name} of {nbytes}", nbytes, "uint8"
            ).data
        return self._rooms[nbytes]


def _checksum(number: int, data: bytes) -> int:
    return zlib.crc32(data, number & 0xFFFFFFFF)


class Channel:
    """The questions of one rank, and the answers to them. There is one question at a time.

    Parameters
    ----------
    named memory : Commons
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
        while True:
            is_there = self.answer.label()[0] == number  # and not the previous answer
            answer = self.answer.read() if is_there else None
            if answer is not None:
                return answer[1]
            if not self._bell.wait(awake):
                check()

    def put(self, number: int, question: bytes) -> None:
        """Write a question, and wake the process that answers."""
        self.question.write(number, question)
        if self._call is not None:
            self._call()

    def reply(self, number: int, answer: bytes) -> None:
        """Answer the question with a number."""
        self.answer.write(number, answer)
        self._bell.post()
