"""Conformance checks for all-reduces in wire formats, and what they must give, computed in one place.

Each check takes `ranks`, a `checks.ranks.Ranks` whose subject is a communicator. On a single machine
every format gives the exact result.
"""

import math

import numpy as np
from checks.communicators import same_bits
from checks.ranks import values

from synkhronos.arithmetic.partition import share
from synkhronos.comms.coded import _CHUNK
from synkhronos.comms.formats import PowerSGD, TopK, make_wire

LENGTH = 70_003  # of several chunks, more than what travels as it is
SHAPES = ((150, 301), (301,), (8, 40, 5, 15), (3, 100))  # the last is too small for a low rank
LOW_RANK = PowerSGD(3, SHAPES)
FORMATS = ["float16", "bfloat16", "int8", TopK(0.125), LOW_RANK, PowerSGD(3, SHAPES, exact_steps=1)]


def is_low_rank(wire):
    return isinstance(wire, PowerSGD)


def length_of(wire):
    return sum(map(math.prod, SHAPES)) if is_low_rank(wire) else LENGTH


def draw(wire, seed, rank):
    """Return integers, so that sums are exact."""
    rng = np.random.default_rng([seed, rank])
    return rng.integers(-60, 60, length_of(wire)).astype("float32")


# The specification


def rounded(wire, numbers):
    """Return what the code of numbers stands for."""
    numbers = np.array(numbers)
    if wire == "bfloat16":
        bits = numbers.view("uint32").astype("uint64")
        even = (bits >> np.uint64(16)) & np.uint64(1)
        upper = (bits + np.uint64(0x7FFF) + even) >> np.uint64(16) << np.uint64(16)
        return np.where(np.isnan(numbers), numbers, upper.astype("uint32").view("float32"))
    step = 256 if wire == "int8" else 32768
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
    """All reductions of an array in a format, given the shares of all machines."""

    def __init__(self, wire, machines):
        self.wire, self.machines = wire, machines
        self.rests = [np.zeros(length_of(wire), "float32") for _ in range(machines)]
        self.rights = {}
        self.exact_steps = getattr(wire, "exact_steps", 0)

    def reduce(self, shares):
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
        total = np.empty_like(given[0])
        step = _CHUNK // {"int8": 260, "float16": 516}.get(self.wire, 512) * 256
        for owner in range(self.machines):
            start, stop = share(len(total), self.machines, owner)
            for low in range(start, stop, step):
                part = slice(low, min(low + step, stop))
                sent = {m: rounded(self.wire, one[part]) for m, one in enumerate(given) if m != owner}
                whole = sum(sent.values(), given[owner][part].copy())
                total[part] = rounded(self.wire, whole)
                for machine, rest in enumerate(self.rests if self.wire == "int8" else ()):
                    is_owner = machine == owner
                    own = whole if is_owner else given[machine][part]
                    other = total[part] if is_owner else sent[machine]
                    rest[part] = own - other
        return total

    def reduce_matrices(self, given):
        total, start = sum(given), 0
        for shape in SHAPES:
            rows, columns = shape[0], math.prod(shape[1:])
            place = slice(start, start + rows * columns)
            start = place.stop
            if 3 * (rows + columns) >= rows * columns:
                continue
            matrix = total[place].reshape(rows, columns).astype("float64")
            first = np.random.Generator(np.random.PCG64([place.start, columns, 3])).random((3, columns))
            right = self.rights.get(place.start, first - 0.5)
            left, _ = np.linalg.qr(matrix @ right.T)
            self.rights[place.start] = left.T @ matrix
            total[place] = (left @ left.T @ matrix).reshape(-1)
            for own, rest in zip(given, self.rests):
                one = own[place].reshape(rows, columns).astype("float64")
                rest[place] = (one - left @ left.T @ one).reshape(-1)
        return total


# Programs that run on each rank


def reduce_in(comm, wire, seeds, op="sum", weights=None, spoil=None):
    """Reduce arrays of several steps in a format, and return the results."""
    kept, results = make_wire(wire, [(length_of(wire),)]), []
    for turn, seed in enumerate(seeds):
        array = np.zeros(length_of(wire), "float32") if seed is None else draw(wire, seed, comm.rank)
        if spoil is not None and turn == 0 and comm.rank == comm.size - 1:
            array[spoil[0]] = spoil[1]
        if weights and not weights[comm.rank]:
            array[:] = np.nan
        weight = weights[comm.rank] if weights else 1
        results.append(np.array(comm.all_reduce_in([kept], [array], op, weight)[0]))
    return results


def forget_and_reduce(comm, wire, forgetful):
    """Let one rank forget what it keeps between two reductions."""
    kept, results = make_wire(wire, [(length_of(wire),)]), []
    for seed in range(3):
        if seed == 1 and comm.rank in forgetful:
            kept.reset()
        results.append(np.array(comm.all_reduce_in([kept], [draw(wire, seed, comm.rank)], "sum")[0]))
    return results


def reduce_kept(comm, wire, seed, failing=None):
    """Reduce an array once more; one leader fails when the others are inside the reduction."""
    kept = comm.__dict__.setdefault("kept", {}).setdefault(wire, make_wire(wire, SHAPES))
    if comm.rank == failing:
        kept.all_reduce = fail
    try:
        return np.array(comm.all_reduce_in([kept], [draw(wire, seed, comm.rank)], "sum")[0])
    finally:
        vars(kept).pop("all_reduce", None)


def fail(*args):
    raise RuntimeError("failed inside")


def reduce_lists(comm, wires, wrong=None):
    """Reduce arrays of several sizes and layouts together; `wrong` has another shape."""
    arrays = [draw("int8", number, comm.rank) for number in range(len(wires))]
    arrays[1] = arrays[1][:500]
    arrays[2] = np.asfortranarray(arrays[2][:60_000].reshape(300, 200))
    arrays[3].flags.writeable = False
    if wrong == comm.rank:
        arrays[0] = arrays[0][:-1]
    kept = [make_wire(wire, [array.shape]) for wire, array in zip(wires, arrays)]
    return [np.array(one) for one in comm.all_reduce_in(kept, arrays, "sum")]


# Checks


def machines_of(ranks):
    """Return the ranks of each machine."""
    return getattr(ranks.transport, "_machines", [range(ranks.size)])


def shares(ranks, wire, seed):
    """Return the sum of the arrays of each machine."""
    if seed is None:
        return [np.zeros(length_of(wire), "float32") for _ in machines_of(ranks)]
    return [sum(draw(wire, seed, rank) for rank in own) for own in machines_of(ranks)]


def check_sums_are_those_of_the_specification(ranks):
    for wire in FORMATS:
        naive, seeds = Naive(wire, len(machines_of(ranks))), [1, 2, 2, None, 3]
        by_rank = values(ranks.run(reduce_in, wire, seeds))
        for seed, got in zip(seeds, zip(*by_rank)):
            wanted = naive.reduce(shares(ranks, wire, seed))
            assert same_bits(got), wire
            if is_low_rank(wire):
                np.testing.assert_allclose(got[0], wanted, rtol=1e-3, atol=0.02)
            else:
                np.testing.assert_array_equal(got[0], wanted, err_msg=str(wire))


def check_what_is_not_sent_is_sent_later(ranks):
    # Eight times an eighth, after the last numbers.
    [got, *_] = values(ranks.run(reduce_in, TopK(0.125), [1, 2, *[None] * 8]))
    exact = sum(sum(shares(ranks, TopK(0.125), seed)) for seed in (1, 2))
    np.testing.assert_array_equal(sum(got), exact)
    [got, *_] = values(ranks.run(reduce_in, "int8", [1, 2, None, None]))
    np.testing.assert_allclose(sum(got), exact, atol=0.01)
    if len(machines_of(ranks)) > 1:
        assert np.abs(sum(got[:2]) - exact).max() > 0.01


def check_averages_are_weighted_and_a_weight_of_zero_leaves_a_rank_out(ranks):
    size = ranks.size
    bounds = {"float16": 1e-3, "bfloat16": 1e-2, "int8": 2e-2, TopK(1.0): 1e-6}
    zeros = [0] * (size - 1)
    for weights in ([1] * size, list(range(1, size + 1)), [*zeros, 2], [3, *zeros]):
        for wire, bound in bounds.items():
            arrays = [draw(wire, 5, rank) for rank in range(size)]
            wanted = np.average(arrays, axis=0, weights=weights)
            got = [one[0] for one in values(ranks.run(reduce_in, wire, [5], "avg", weights))]
            assert same_bits(got)
            np.testing.assert_allclose(got[0], wanted, rtol=0, atol=60 * bound, err_msg=str(wire))


def check_numbers_that_are_not_finite_arrive_and_the_next_sum_is_right(ranks):
    if len(machines_of(ranks)) == 1:
        return
    for wire in FORMATS:
        for number in (np.nan, np.inf, -np.inf):
            by_rank = values(ranks.run(reduce_in, wire, [1, 2], "sum", None, (20_000, number)))
            assert same_bits([one[0] for one in by_rank]) and same_bits([one[1] for one in by_rank])
            spoilt, after = by_rank[0]
            assert np.isfinite(after).all(), wire
            where = np.flatnonzero(~np.isfinite(spoilt))
            if wire == LOW_RANK:
                assert list(where) == list(range(150 * 301)), wire
            elif wire == "int8":
                assert 20_000 in where and 0 < len(where) <= 256
            else:
                np.testing.assert_array_equal(where, [20_000])
                np.testing.assert_array_equal(spoilt[where], [number])


def check_all_begin_anew_if_one_has_lost_what_it_kept(ranks):
    forgetful = machines_of(ranks)[-1]
    for wire in FORMATS:
        naive, wanted = Naive(wire, len(machines_of(ranks))), []
        for seed in range(3):
            naive = Naive(wire, len(machines_of(ranks))) if seed == 1 else naive
            wanted.append(naive.reduce(shares(ranks, wire, seed)))
        for got in values(ranks.run(forget_and_reduce, wire, list(forgetful))):
            for one, other in zip(got, wanted):
                np.testing.assert_allclose(one, other, rtol=1e-3, atol=0.02, err_msg=str(wire))


def check_a_leader_may_fail_inside_and_the_next_sums_are_right(ranks):
    if len(machines_of(ranks)) == 1:
        return
    failing = machines_of(ranks)[-1][0]
    for wire in FORMATS:
        for _ in range(2):
            naive = Naive(wire, len(machines_of(ranks)))
            for seed in range(2):
                got = values(ranks.run(reduce_kept, wire, seed))
                assert same_bits(got)
                wanted = naive.reduce(shares(ranks, wire, seed))
                np.testing.assert_allclose(got[0], wanted, rtol=1e-3, atol=0.02, err_msg=str(wire))
            outcomes = ranks.run(reduce_kept, wire, 2, failing)
            assert outcomes[failing].error is RuntimeError
            assert all(one.error is not None for one in outcomes)


def check_arrays_of_any_size_and_layout_travel_together_and_wrong_ones_are_refused(ranks):
    wires = ["float16", "int8", PowerSGD(2), TopK(0.5)]
    shapes = [(LENGTH,), (500,), (300, 200), (LENGTH,)]
    for wrong in (None, ranks.size - 1, None) if ranks.size > 1 else (None,):
        outcomes = ranks.run(reduce_lists, wires, wrong)
        if wrong is not None:
            assert [one.error for one in outcomes] == [ValueError] * ranks.size
            continue
        by_rank = values(outcomes)
        assert all(map(same_bits, zip(*by_rank)))
        assert [one.shape for one in by_rank[0]] == shapes
        exact = sum(draw("int8", 1, rank)[:500] for rank in range(ranks.size))
        np.testing.assert_array_equal(by_rank[0][1], exact)
        np.testing.assert_allclose(
            by_rank[0][0], sum(draw("int8", 0, rank) for rank in range(ranks.size)), atol=0.5
        )


CHECKS = [item for name, item in sorted(globals().items()) if name.startswith("check_")]
