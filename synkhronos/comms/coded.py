"""The wire formats that are codes of single numbers: ``float16``, ``bfloat16`` and ``int8``.

A reduce-scatter and an all-gather, as in `linked`: each leader receives the code of its part of the
elements from every other leader, adds the decoded values to its own share, and sends the code of the sum
to all. It also decodes this code itself, so all leaders have the same result. If the format has error
feedback, the leader that encoded a share or a sum keeps the error of the code.

Chunks are encoded while others are being sent: first chunks of the parts, then, a few chunks later, of
their sums.
"""

from __future__ import annotations

import itertools

import numpy as np

from synkhronos.arithmetic.codes import CODES, Code
from synkhronos.arithmetic.partition import share
from synkhronos.comms.wires import Wire, WireReduction

# Bytes of a chunk's code. OpenMPI sends up to 64 kB over TCP at once. For more it waits for an answer,
# which is queued behind everything that the other leader is sending.
_CHUNK = 60_000
_UNIT = 256  # the length of a chunk is a multiple of this number
_LAG = 4  # chunks
_PARTS, _SUMS = range(2)  # streams of arrays


class CodedWire(Wire):
    """A code. With feedback, it keeps an array of the errors."""

    def reset(self) -> None:
        self.count = 0
        self._rest: np.ndarray | None = None

    @property
    def _code(self) -> Code:
        return CODES[self.format]

    def state(self) -> tuple[np.ndarray, np.ndarray]:
        if self._code.has_feedback and self._rest is None:
            self._rest = np.zeros(self._size, np.float32)
        return super().state() if self._rest is None else (self._rest, super().state()[1])

    def all_reduce(self, wires: WireReduction, array: np.ndarray, scale: float, are_alike: bool) -> None:
        rest = self.state()[0] if self._code.has_feedback else None
        _Exchange(wires, self._code, array, scale, rest).run()


class _Exchange:
    """One all-reduce of a flat array, in place."""

    def __init__(
        self, wires: WireReduction, code: Code, array: np.ndarray, scale: float, rest: np.ndarray | None
    ) -> None:
        self.group, self.rank = wires.group, wires.rank
        self.code, self.array, self.scale, self.rest = code, array, scale, rest
        self.others = [rank for rank in range(wires.size) if rank != wires.rank]
        length = _CHUNK // code.nbytes(_UNIT) * _UNIT
        self.parts = [
            _chunks(*share(array.size, wires.size, rank), length) for rank in range(wires.size)
        ]
        self.own = self.parts[self.rank]
        self.scratch = np.empty((2, min(array.size, length)), np.float32)
        places = [
            *itertools.product((_PARTS, _SUMS), self.others, (True,)),
            *itertools.product((_PARTS, _SUMS), self.others, (False,)),
        ]
        lists = {place: self._coded_chunks(*place) for place in places}
        sizes = [size for place in places for size in lists[place]]
        memory = iter(wires.memory([*sizes, *map(self._nbytes, self.own)]))
        self.codes = {place: [next(memory) for _ in lists[place]] for place in places}
        self.sums = list(memory)

    def _coded_chunks(self, stream: int, other: int, is_sent: bool) -> list[int]:
        """Return the lengths of the codes that are sent to another leader, or received from it."""
        if is_sent and stream == _SUMS:
            return []  # the same for all others
        mine = is_sent == (stream == _SUMS)
        return list(map(self._nbytes, self.own if mine else self.parts[other]))

    def _nbytes(self, chunk: slice) -> int:
        return self.code.nbytes(chunk.stop - chunk.start)

    def run(self) -> None:
        receipts = {
            (stream, number): [
                self.group.receive_array(other, self.codes[stream, other, False][number], stream)
                for other in self.others
                if number < len(self.codes[stream, other, False])
            ]
            for stream in (_PARTS, _SUMS)
            for number in range(max(map(len, self.parts)))
        }
        self.sent: list[int] = []
        length = max(map(len, self.parts))
        for turn in range(length + 2 * _LAG):
            self._send_parts(turn)
            for stream, number in ((_PARTS, turn - _LAG), (_SUMS, turn - 2 * _LAG)):
                if 0 <= number < length:
                    self.group.complete(receipts[stream, number])
                    (self._reduce if stream == _PARTS else self._take_sums)(number)
        self.group.complete([], self.sent)

    def _send_parts(self, number: int) -> None:
        for other in self.others:
            if number < len(self.parts[other]):
                chunk = self.parts[other][number]
                data = self.codes[_PARTS, other, True][number]
                values = self._share(chunk)
                self._encode(values, data, chunk, self.scratch[1, : values.size])
                self.sent.append(self.group.send_array(other, data, _PARTS))

    def _share(self, chunk: slice) -> np.ndarray:
        """Return this leader's share of some elements, plus the errors that it has kept."""
        values = self.array[chunk]
        if self.scale == 1 and self.rest is None:
            return values
        out = self.scratch[0, : values.size]
        if self.scale:
            np.multiply(values, np.float32(self.scale), out=out)
        else:
            out[:] = 0
        if self.rest is not None:
            out += self.rest[chunk]
        return out

    def _encode(self, values: np.ndarray, data: np.ndarray, chunk: slice, decoded: np.ndarray) -> None:
        """Write the code of some values; keep its errors."""
        self.code.encode(values, data)
        if self.rest is not None:
            self.code.decode(data, decoded)
            _subtract(values, decoded, self.rest[chunk])

    def _reduce(self, number: int) -> None:
        """Add up a chunk of this leader's part, and send the sum."""
        if number >= len(self.own):
            return
        chunk, data = self.own[number], self.sums[number]
        total, decoded = self._share(chunk), self.scratch[1, : chunk.stop - chunk.start]
        for other in self.others:
            self.code.decode(self.codes[_PARTS, other, False][number], decoded)
            total += decoded
        self._encode(total, data, chunk, decoded)
        self.sent += [self.group.send_array(other, data, _SUMS) for other in self.others]
        self.code.decode(data, self.array[chunk])

    def _take_sums(self, number: int) -> None:
        for other in self.others:
            if number < len(self.parts[other]):
                data = self.codes[_SUMS, other, False][number]
                self.code.decode(data, self.array[self.parts[other][number]])


def _chunks(start: int, stop: int, length: int) -> list[slice]:
    return [slice(low, min(low + length, stop)) for low in range(start, stop, length)]


def _subtract(values: np.ndarray, decoded: np.ndarray, rest: np.ndarray) -> None:
    """Set `rest` to the errors of a code; zero for numbers that are not finite."""
    with np.errstate(invalid="ignore"):
        np.subtract(values, decoded, out=rest)
    if not np.isfinite(rest).all():
        rest[~np.isfinite(rest)] = 0
