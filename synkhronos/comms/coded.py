"""The wire formats that are codes of single float32 numbers: ``float16``, ``bfloat16`` and ``int8``.

A code makes one pass over the numbers, in pieces that fit in the cache. All codes round to nearest, ties
to even, so the same numbers have the same code on every machine. Decoding uses only operations whose
results are fixed bit by bit by IEEE 754.

========== ================== ==================================== =================================
code       bytes per number   error, at most                       NaN and infinities
========== ================== ==================================== =================================
float16    2 and 4 per 32768  2**-11 of a number, and 2**-29 of    arrive
                              the largest one of its piece
bfloat16   2                  2**-8 of a number                    arrive
int8       1 and 4 per 256    1/254 of the largest one of the 256  make the 256 numbers NaN
========== ================== ==================================== =================================

The all-reduce is a reduce-scatter and an all-gather, as in `linked`: each leader receives the code of
its part of the elements from every other leader, adds the decoded values to its own share, and sends the
code of the sum to all. It also decodes this code itself, so all leaders have the same result. If the
format has error feedback, the leader that encoded a share or a sum keeps the error of the code.

Chunks are encoded while others are being sent: first chunks of the parts, then, a few chunks later, of
their sums.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np

from synkhronos.comms.linked import ChunkedReduction, LinkedCommunicator, chunks
from synkhronos.comms.wires import Wire, WireReduction

_PIECE = 1 << 15  # numbers; float16 has a scale for each piece: part of its format

_ABSOLUTE = np.uint32(0x7FFFFFFF)
_INFINITY = 0x7F800000  # the bits of a float32

# float16: a piece is multiplied by a power of two, so that its largest number has this exponent.
_TOP = 14
_LEAST, _MOST = -112, 29  # exponents for which all factors are normal float32 numbers
_SHIFT, _REBIAS = 13, 112 << 23  # from the bits of a float32 to the bits of a float16

_BLOCK = 256  # numbers of an int8 scale
_LARGEST_CODE = 127
_TINY = 1e-36  # below, a block is sent as zeros: its inverse scale would be infinite


class Code(ABC):
    """A code of float32 numbers: a number for each, and before them a float32 for each block of them.

    Attributes
    ----------
    dtype : numpy.dtype
        Of the numbers of the code.
    block : int
        The length of a block; 0 if blocks have no numbers.
    has_feedback : bool
        Whether its errors are so large that they have to be kept, and added to the next numbers.
    """

    dtype: np.dtype
    block = 0
    has_feedback = False

    def _start(self, size: int) -> int:
        return 4 * -(-size // self.block) if self.block else 0

    def nbytes(self, size: int) -> int:
        """Return the length of the code of `size` numbers."""
        return self._start(size) + self.dtype.itemsize * size

    def split(self, data: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return views of the numbers of the blocks, and of the others, in the bytes of a code."""
        start = self._start(size)
        return data[:start].view(np.float32), data[start:].view(self.dtype)

    @abstractmethod
    def encode(self, values: np.ndarray, out: np.ndarray) -> None:
        """Write the code of float32 numbers to `out`, the bytes of a float32 array."""

    @abstractmethod
    def decode(self, data: np.ndarray, out: np.ndarray) -> None:
        """Write the float32 numbers of a code to `out`."""


class Bfloat16(Code):
    """The upper half of a float32, rounded to nearest."""

    dtype = np.dtype(np.uint16)

    def encode(self, values: np.ndarray, out: np.ndarray) -> None:
        codes, scratch = out.view(np.uint16), _scratch(values, 1)[0]
        for piece in _pieces(values.size):
            bits = values[piece].view(np.uint32)
            rounded = scratch[: bits.size]
            has_nan = np.bitwise_and(bits, _ABSOLUTE, out=rounded).max() > _INFINITY
            np.right_shift(bits, 16, out=rounded)
            rounded &= np.uint32(1)
            rounded += bits
            rounded += np.uint32(0x7FFF)
            rounded >>= np.uint32(16)
            if has_nan:
                rounded[np.isnan(values[piece])] = 0x7FC0  # rounding may make another number of a NaN
            np.copyto(codes[piece], rounded, casting="unsafe")

    def decode(self, data: np.ndarray, out: np.ndarray) -> None:
        np.left_shift(data.view(np.uint16), 16, out=out.view(np.uint32), dtype=np.uint32)


class Float16(Code):
    """IEEE's half precision, with a power of two for each piece, so that no number overflows.

    Numbers below ``2**-29`` of the largest number of their piece become zero.
    """

    dtype, block = np.dtype(np.int16), _PIECE

    def encode(self, values: np.ndarray, out: np.ndarray) -> None:
        scales, codes = self.split(out, values.size)
        scratch = _scratch(values, 3)
        for number, piece in enumerate(_pieces(values.size)):
            scales[number] = _encode_half(values[piece], codes[piece], scratch)

    def decode(self, data: np.ndarray, out: np.ndarray) -> None:
        scales, codes = self.split(data, out.size)
        for number, piece in enumerate(_pieces(out.size)):
            _decode_half(codes[piece], scales[number], out[piece])


def _pieces(size: int) -> list[slice]:
    return chunks(0, size, _PIECE)


def _scratch(values: np.ndarray, count: int) -> np.ndarray:
    """Return memory for `count` pieces of the bits of numbers."""
    return np.empty((count, min(values.size, _PIECE)), np.uint32)


def _encode_half(values: np.ndarray, codes: np.ndarray, scratch: np.ndarray) -> np.float32:
    """Write halves of the scaled numbers; return the scale, negative if not all of them are finite."""
    scaled, half, odd = scratch[:, : values.size]
    np.bitwise_and(values.view(np.uint32), _ABSOLUTE, out=scaled)
    largest = int(scaled.max())
    if largest >= _INFINITY:
        scale = _scale_of_halves(np.abs(values[np.isfinite(values)]).max(initial=0).view(np.uint32))
        np.multiply(values, scale, out=scaled.view(np.float32))
        np.copyto(codes.view(np.float16), scaled.view(np.float32), casting="same_kind")
        return -scale
    scale = _scale_of_halves(largest)
    np.multiply(values, scale, out=scaled.view(np.float32))
    bits, half, odd = scaled.view(np.int32), half.view(np.int32), odd.view(np.int32)
    np.bitwise_and(bits, np.int32(_ABSOLUTE), out=half)
    np.right_shift(half, _SHIFT, out=odd)
    odd &= 1
    half += odd
    half += (1 << _SHIFT - 1) - 1 - _REBIAS
    half >>= _SHIFT
    np.maximum(half, 0, out=half)
    bits >>= 16
    bits &= -0x8000
    half |= bits
    np.copyto(codes, half, casting="unsafe")
    return scale


def _scale_of_halves(largest: int) -> np.float32:
    """Return the factor for a piece, given the bits of its largest absolute value."""
    return np.float32(2.0 ** (_TOP - max(_LEAST, (int(largest) >> 23) - 127)))


def _decode_half(codes: np.ndarray, scale: np.float32, out: np.ndarray) -> None:
    if scale < 0 or scale < 2.0 ** (_TOP - _MOST):
        np.divide(codes.view(np.float16), abs(scale), out=out, dtype=np.float32)
        return
    bits = out.view(np.int32)
    np.left_shift(codes, _SHIFT, out=bits, dtype=np.int32)
    bits &= np.int32(-0x70000001)  # without the copies of the sign in the exponent
    out *= np.float32(2.0**112 / float(scale))


class Int8(Code):
    """Multiples of 1/127 of the largest number in a block of 256 numbers."""

    dtype, block, has_feedback = np.dtype(np.int8), _BLOCK, True

    def encode(self, values: np.ndarray, out: np.ndarray) -> None:
        scales, codes = self.split(out, values.size)
        whole = values.size - values.size % _BLOCK
        scratch = _scratch(values, 1).view(np.float32)[0]
        for piece in _pieces(whole):
            blocks = values[piece].reshape(-1, _BLOCK)
            own = scales[piece.start // _BLOCK : piece.stop // _BLOCK]
            _encode_blocks(blocks, own, codes[piece].reshape(-1, _BLOCK), scratch)
        if whole < values.size:
            _encode_blocks(values[None, whole:], scales[-1:], codes[None, whole:], scratch)

    def decode(self, data: np.ndarray, out: np.ndarray) -> None:
        scales, codes = self.split(data, out.size)
        whole = out.size - out.size % _BLOCK
        blocks = codes[:whole].reshape(-1, _BLOCK), out[:whole].reshape(-1, _BLOCK)
        np.multiply(blocks[0], scales[: whole // _BLOCK, None], out=blocks[1])
        if whole < out.size:
            np.multiply(codes[whole:], scales[-1], out=out[whole:])


def _encode_blocks(
    blocks: np.ndarray, scales: np.ndarray, codes: np.ndarray, scratch: np.ndarray
) -> None:
    scaled = np.abs(blocks, out=scratch[: blocks.size].reshape(blocks.shape))
    largest = scaled.max(axis=1)
    is_used = (largest >= _TINY) & np.isfinite(largest)
    scales[:] = np.where(is_used, largest / np.float32(_LARGEST_CODE), np.float32(0))
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(largest), where=is_used)
    if not np.isfinite(largest).all():
        blocks = np.where(np.isfinite(largest)[:, None], blocks, np.float32(0))
        scales[~np.isfinite(largest)] = np.nan
    np.multiply(blocks, inverse[:, None], out=scaled)
    np.rint(scaled, out=scaled)
    np.copyto(codes, scaled, casting="unsafe")


CODES = {"float16": Float16(), "bfloat16": Bfloat16(), "int8": Int8()}


# The all-reduce

# Bytes of a chunk's code. OpenMPI sends up to 64 kB over TCP at once. For more it waits for an answer,
# which is queued behind everything that the other leader is sending.
_CHUNK = 60_000
_UNIT = 256  # the length of a chunk is a multiple of this number
_SENT, _RECEIVED, _SUMS = range(3)  # memories for codes


class CodedWire(Wire):
    """A code. With feedback, it keeps an array of the errors."""

    @property
    def keeps_rest(self) -> bool:  # type: ignore[override]  # nothing sets it
        return CODES[self.format].has_feedback

    def all_reduce(self, wires: WireReduction, array: np.ndarray, scale: float, are_alike: bool) -> None:
        rest = self.state()[0] if self.keeps_rest else None
        _CodedReduction(wires.leaders, CODES[self.format], array, scale, rest).run()


class _CodedReduction(ChunkedReduction):
    """One all-reduce of a flat array, in place."""

    window = 4

    def __init__(
        self,
        leaders: LinkedCommunicator,
        code: Code,
        array: np.ndarray,
        scale: float,
        rest: np.ndarray | None,
    ) -> None:
        length, everyone = _CHUNK // code.nbytes(_UNIT) * _UNIT, range(leaders.size)
        super().__init__(leaders, array, length, [True] * leaders.size, everyone)
        self._code, self._scale, self._rest = code, scale, rest
        self._scratch = np.empty((2, min(array.size, length)), np.float32)
        shape = 3, leaders.size, self.window, code.nbytes(length)
        self._memory = leaders.memory(math.prod(shape), np.dtype(np.uint8)).reshape(shape)

    def _room(self, kind: int, rank: int, number: int, chunk: slice) -> np.ndarray:
        """Return the memory for the code of a chunk."""
        nbytes = self._code.nbytes(chunk.stop - chunk.start)
        return self._memory[kind, rank, number % self.window, :nbytes]

    def part(self, rank: int, number: int) -> np.ndarray:
        chunk = self.parts[rank][number]
        data, values = self._room(_SENT, rank, number, chunk), self._share(chunk)
        self._encode(values, data, chunk, self._scratch[1, : values.size])
        return data

    def room_for_part(self, rank: int, number: int) -> np.ndarray:
        return self._room(_RECEIVED, rank, number, self.own[number])

    def room_for_result(self, rank: int, number: int) -> np.ndarray:
        return self._room(_SUMS, rank, number, self.parts[rank][number])

    def take_result(self, rank: int, number: int) -> None:
        self._code.decode(self.room_for_result(rank, number), self.array[self.parts[rank][number]])

    def _share(self, chunk: slice) -> np.ndarray:
        """Return this leader's share of some elements, plus the errors that it has kept."""
        values = self.array[chunk]
        if self._scale == 1 and self._rest is None:
            return values
        out = self._scratch[0, : values.size]
        if self._scale:
            np.multiply(values, np.float32(self._scale), out=out)
        else:
            out[:] = 0
        if self._rest is not None:
            out += self._rest[chunk]
        return out

    def _encode(self, values: np.ndarray, data: np.ndarray, chunk: slice, decoded: np.ndarray) -> None:
        """Write the code of some values; keep its errors."""
        self._code.encode(values, data)
        if self._rest is not None:
            self._code.decode(data, decoded)
            _subtract(values, decoded, self._rest[chunk])

    def reduce(self, number: int) -> np.ndarray:
        """Add up a chunk of this leader's part, and return the code of the sum."""
        chunk, data = self.own[number], self.room_for_result(self.rank, number)
        total, decoded = self._share(chunk), self._scratch[1, : chunk.stop - chunk.start]
        for other in sorted(self.others):
            self._code.decode(self.room_for_part(other, number), decoded)
            total += decoded
        self._encode(total, data, chunk, decoded)
        self.take_result(self.rank, number)
        return data


def _subtract(values: np.ndarray, decoded: np.ndarray, rest: np.ndarray) -> None:
    """Set `rest` to the errors of a code; zero for numbers that are not finite."""
    with np.errstate(invalid="ignore"):
        np.subtract(values, decoded, out=rest)
    if not np.isfinite(rest).all():
        rest[~np.isfinite(rest)] = 0
