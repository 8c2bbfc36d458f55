"""What all-reduces in wire formats must give, computed in one place, from the documentation alone."""

import math

import numpy as np

from synkhronos.comms.formats import PowerSGD, TopK

LENGTH = 70_003  # of several chunks, more than what travels as it is
SHAPES = ((150, 301), (301,), (8, 40, 5, 15), (3, 100))  # the last is too small for a low rank
LOW_RANK = PowerSGD(3, SHAPES)
SOME_EXACT = PowerSGD(3, SHAPES, exact_steps=1, min_saving=10)  # a product for the first matrix only
FORMATS = ["float16", "bfloat16", "int8", TopK(0.125), LOW_RANK, SOME_EXACT]


def is_low_rank(wire):
    return isinstance(wire, PowerSGD)


def is_product(wire, rows, columns):
    """Return whether a matrix is sent as a product."""
    return wire.rank * (rows + columns) < rows * columns / wire.min_saving


def length_of(wire):
    return sum(map(math.prod, SHAPES)) if is_low_rank(wire) else LENGTH


def rounded(wire, numbers):
    """Return what the code of numbers stands for.

    They are one machine's part of an array, or the beginning of it.
    """
    numbers = np.array(numbers)
    if wire == "bfloat16":
        bits = numbers.view("uint32").astype("uint64")
        even = (bits >> np.uint64(16)) & np.uint64(1)
        upper = (bits + np.uint64(0x7FFF) + even) >> np.uint64(16) << np.uint64(16)
        return np.where(np.isnan(numbers), numbers, upper.astype("uint32").view("float32"))
    # Which halves have a scale in common makes no difference here: no number is very small.
    step = 256 if wire == "int8" else len(numbers)
    for start in range(0, len(numbers), step):
        block = numbers[start : start + step]
        finite = np.abs(block[np.isfinite(block)])
        largest = finite.max(initial=0)
        if wire == "int8":
            scale = np.float32(largest) / np.float32(127)
            whole = np.rint(block * (np.float32(1) / scale)) if scale else 0 * block
            block[:] = whole * scale if len(finite) == len(block) else np.nan
        elif largest:
            scale = np.float32(2.0 ** (14 - math.frexp(largest)[1] + 1))
            half = (block * scale).astype("float16").astype("float32")
            half[np.abs(block * scale) < 2**-14 * (1 - 2**-12)] = 0
            block[:] = half / scale
    return numbers


class Naive:
    """All reductions of an array in a format, given the arrays of all machines.

    The array consists of matrices of some shapes, by default those for the checks of the format.
    `rests` are what each machine keeps.
    """

    def __init__(self, wire, machines, shapes=None):
        self.wire, self.machines, self.shapes = wire, machines, shapes or SHAPES
        length = sum(map(math.prod, shapes)) if shapes else length_of(wire)
        self.rests = [np.zeros(length, "float32") for _ in range(machines)]
        self.rights = {}
        self.exact_steps = getattr(wire, "exact_steps", 0)

    def reduce(self, arrays, scales=None):
        """Return the sum of the arrays, each multiplied by its scale."""
        shares = arrays
        if scales is not None:
            shares = [
                one * np.float32(scale) if scale else 0 * self.rests[0]
                for one, scale in zip(arrays, scales)
            ]
        self.exact_steps -= 1
        if self.machines == 1 or self.exact_steps >= 0:
            return sum(shares)
        given = [share + rest for share, rest in zip(shares, self.rests)]
        if isinstance(self.wire, TopK):
            return self.reduce_largest(given)
        return self.reduce_matrices(given) if is_low_rank(self.wire) else self.reduce_codes(given)

    def reduce_largest(self, given):
        total = np.zeros_like(given[0])
        count = math.ceil(self.wire.fraction * len(total))
        for own, rest in zip(given, self.rests):
            chosen = np.argsort(-np.abs(own), kind="stable")[:count]
            total[chosen] += own[chosen]
            rest[:] = own
            rest[chosen] = 0
        return total

    def reduce_codes(self, given):
        """Each machine adds one part of the elements up, and sends the code of the sum."""
        total = np.empty_like(given[0])
        for owner, part in enumerate(np.array_split(np.arange(len(total)), self.machines)):
            sent = {m: rounded(self.wire, one[part]) for m, one in enumerate(given) if m != owner}
            whole = sum(sent.values(), given[owner][part])
            total[part] = rounded(self.wire, whole)
            for machine, rest in enumerate(self.rests if self.wire == "int8" else ()):
                is_owner = machine == owner
                own = whole if is_owner else given[machine][part]
                other = total[part] if is_owner else sent[machine]
                rest[part] = own - other
        return total

    def reduce_matrices(self, given):
        total, start, rank = sum(given), 0, self.wire.rank
        for shape in self.shapes:
            rows, columns = shape[0], math.prod(shape[1:])
            place = slice(start, start + rows * columns)
            start = place.stop
            if not is_product(self.wire, rows, columns):
                continue
            matrix = total[place].reshape(rows, columns).astype("float64")
            first = np.random.Generator(np.random.PCG64([place.start, columns, rank]))
            right = self.rights.get(place.start, first.random((rank, columns)) - 0.5)
            left, _ = np.linalg.qr(matrix @ right.T)
            self.rights[place.start] = left.T @ matrix
            total[place] = (left @ left.T @ matrix).reshape(-1)
            for own, rest in zip(given, self.rests):
                one = own[place].reshape(rows, columns).astype("float64")
                rest[place] = (one - left @ left.T @ one).reshape(-1)
        return total
