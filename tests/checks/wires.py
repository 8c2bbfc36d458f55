"""Conformance checks for all-reduces in wire formats, which ``wire_specification`` defines.

Each check takes `ranks`, a `checks.ranks.Ranks` whose subject is a communicator. On a single machine
every format gives the exact result.
"""

import math

import numpy as np
from checks.communicators import same_bits
from checks.ranks import values
from checks.wire_specification import (
    FORMATS, LENGTH, LOW_RANK, SHAPES, Naive, is_low_rank, is_product, length_of,
)  # fmt: skip

from synkhronos.comms.formats import PowerSGD, TopK, make_wire
from synkhronos.comms.wires import Kept, kept_by, restore


def draw(wire, seed, rank):
    """Return integers, so that sums are exact."""
    rng = np.random.default_rng([seed, rank])
    return rng.integers(-60, 60, length_of(wire)).astype("float32")


def all_reduce_in(comm, wires, arrays, op, weight=1):
    """Return the reductions of arrays that are sent between machines in wire formats."""
    return comm.prepare_reduction(op)(arrays, weight, wires)


def reduce_in(comm, wire, seeds, op="sum", weights=None, spoil=None):
    """Reduce arrays of several steps in a format, and return the results.

    `weights` has those of all ranks for each step. Where one is zero, the rank has NaN.
    """
    kept, results = make_wire(wire, [(length_of(wire),)]), []
    for turn, seed in enumerate(seeds):
        array = np.zeros(length_of(wire), "float32") if seed is None else draw(wire, seed, comm.rank)
        if spoil is not None and turn == 0 and comm.rank == comm.size - 1:
            array[spoil[0]] = spoil[1]
        weight = weights[turn][comm.rank] if weights else 1
        if not weight:
            array[:] = np.nan
        results.append(np.array(all_reduce_in(comm, [kept], [array], op, weight)[0]))
    return results


def forget_and_reduce(comm, wire, forgetful):
    """Let one rank forget what it keeps between two reductions."""
    kept, results = make_wire(wire, [(length_of(wire),)]), []
    for seed in range(3):
        if seed == 1 and comm.rank in forgetful:
            kept.reset()
        results.append(np.array(all_reduce_in(comm, [kept], [draw(wire, seed, comm.rank)], "sum")[0]))
    return results


def reduce_kept(comm, wire, seed, failing=None):
    """Reduce an array once more; one leader fails when the others are inside the reduction."""
    kept = comm.__dict__.setdefault("kept", {}).setdefault(wire, make_wire(wire, SHAPES))
    if comm.rank == failing:
        kept.all_reduce = fail
    try:
        return np.array(all_reduce_in(comm, [kept], [draw(wire, seed, comm.rank)], "sum")[0])
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
    return [np.array(one) for one in all_reduce_in(comm, kept, arrays, "sum")]


def reduce_and_show(comm, wire, arrays, factors=None):
    """Reduce the arrays of a rank, which `arrays` has by step; return the results and what is kept.

    `factors` are those with which the first product begins.
    """
    size = arrays[0][0].size
    kept, found = make_wire(wire, [(size,)]), []
    if factors is not None:
        restore([kept], [size], Kept([1], np.zeros(0, "float32"), factors))
    for own in arrays:
        total = np.array(all_reduce_in(comm, [kept], [own[comm.rank].copy()], "sum")[0])
        found.append((total, np.array(kept_by([kept]).rest)))
    return found


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


def by_ranks(ranks, sums, rng):
    """Return arrays of integers of the ranks, given those that each machine's have to add up to."""
    arrays = [None] * ranks.size
    for own, total in zip(machines_of(ranks), sums):
        others = [rng.integers(-9, 10, total.shape) for _ in own[1:]]
        for rank, one in zip(own, [total - sum(others), *others]):
            arrays[rank] = one.astype("float32")
    return arrays


def lost(ranks, wire, arrays, factors=None):
    """Return, for each step, what is in neither the sums up to then nor what machines keep."""
    by_rank = values(ranks.run(reduce_and_show, wire, arrays, factors))
    sent = given = 0
    for own, found in zip(arrays, zip(*by_rank)):
        sent = sent + found[0][0].astype("float64")
        given = given + np.sum(own, axis=0, dtype="float64")
        rests = [rest.astype("float64") for _, rest in found if rest.size]
        assert any(rest.any() for rest in rests) == (len(machines_of(ranks)) > 1)
        yield sent + in_place(wire, sum(rests)) - given


def in_place(wire, rest):
    """Return what is kept where it belongs in the array: nothing is kept of small arrays."""
    if not is_low_rank(wire) or not np.ndim(rest):
        return rest
    found, place, start = np.zeros(sum(map(math.prod, wire.shapes))), 0, 0
    for shape in wire.shapes:
        size, rows = math.prod(shape), shape[0]
        if is_product(wire, rows, size // rows):
            found[place : place + size] = rest[start : start + size]
            start += size
        place += size
    assert start == rest.size
    return found


def check_sums_and_what_is_kept_are_exactly_what_was_given(ranks):
    """Of integers: multiples of what the codes of int8 are multiples of are integers."""
    rng, machines = np.random.default_rng(4), machines_of(ranks)
    bounds = [part[0] for part in np.array_split(np.arange(LENGTH), len(machines))]
    for wire in ("int8", TopK(0.125)):
        arrays = []
        for _ in range(4):
            sums = rng.integers(-120, 121, (len(machines), LENGTH))
            for start, stop in zip(bounds, [*bounds[1:], LENGTH]):
                # Blocks begin anew in each machine's part. 254 is 127 times 2, without a remainder.
                places = np.append(np.arange(start, stop, 256), stop - 1)
                sums[:, places] = 254 * rng.choice([-1, 1], len(places))
            arrays.append(by_ranks(ranks, sums, rng))
        for step in lost(ranks, wire, arrays):
            np.testing.assert_array_equal(step, 0, err_msg=str(wire))


EXACT_SHAPES = ((64, 200), (30,), (16, 400))


def signs(rows, number):
    """Return vectors of 1 and -1 that are orthogonal to each other."""
    return np.array([[(-1) ** bin(row & one).count("1") for row in range(rows)]
                     for one in range(number)])  # fmt: skip


def check_low_rank_loses_nothing_where_its_factors_are_exact_and_little_otherwise(ranks):
    """Exact ones: the sum has multiples of orthogonal vectors of signs in the columns that are used.

    The lengths of these are powers of two, so all products are multiples of a power of two.
    """
    wire, rng = PowerSGD(2, EXACT_SHAPES), np.random.default_rng(3)
    sums, factors = [], []
    for shape in EXACT_SHAPES:
        own = rng.integers(-60, 61, (len(machines_of(ranks)), *shape))
        if len(shape) == 2:
            columns = rng.choice(shape[1], 2, replace=False)
            factors.append(np.eye(shape[1], dtype="float32")[columns].reshape(-1))
            for column, one in zip(columns, signs(shape[0], 2)):
                own[0, :, column] = 12 * one - own[1:, :, column].sum(axis=0)
        sums.append(own.reshape(len(own), -1))
    shares = np.concatenate(sums, axis=1)
    arrays = [by_ranks(ranks, shares, rng)]
    arrays += [by_ranks(ranks, rng.integers(-60, 61, shares.shape), rng) for _ in range(3)]
    exact, *others = lost(ranks, wire, arrays, np.concatenate(factors))
    np.testing.assert_array_equal(exact, 0)
    last_place = np.spacing(np.float32(np.abs(np.sum(arrays[1:], axis=1)).max()))
    for step, one in enumerate(others, 1):
        assert abs(one).max() <= 4 * step * last_place


def check_averages_are_weighted_within_the_bounds_of_the_format(ranks):
    size = ranks.size
    bounds = {"float16": 1e-3, "bfloat16": 1e-2, "int8": 2e-2, TopK(1.0): 1e-6}
    for weights in ([1] * size, list(range(1, size + 1))):
        for wire, bound in bounds.items():
            arrays = [draw(wire, 5, rank) for rank in range(size)]
            wanted = np.average(arrays, axis=0, weights=weights)
            got = [one[0] for one in values(ranks.run(reduce_in, wire, [5], "avg", [weights]))]
            assert same_bits(got)
            np.testing.assert_allclose(got[0], wanted, rtol=0, atol=60 * bound, err_msg=str(wire))


def exact_weights(ranks):
    """Return weights of the ranks with which averages, inside machines too, have no rounding errors."""

    def of(number):
        """Return positive weights whose sum is a power of two."""
        return [*[1] * (number - 1), (1 << number) - number + 1]

    machines = machines_of(ranks)
    most = 1 << max(map(len, machines))
    weights = [0] * ranks.size
    for own, weight in zip(machines, of(len(machines))):
        for rank, one in zip(own, of(len(own))):
            weights[rank] = one * weight * most // (1 << len(own))
    return weights


def check_averages_are_those_of_the_specification_and_a_weight_of_zero_leaves_a_rank_out(ranks):
    """In turn, all ranks, the last one alone and the first one alone have a weight."""
    machines, zeros = machines_of(ranks), [0] * (ranks.size - 1)
    whole = exact_weights(ranks)
    weights = [whole, [*zeros, 2], whole, [3, *zeros]]
    for wire in FORMATS:
        naive, seeds = Naive(wire, len(machines)), range(len(weights))
        by_rank = values(ranks.run(reduce_in, wire, [*seeds], "avg", weights))
        for seed, each, got in zip(seeds, weights, zip(*by_rank)):
            sums = [sum(each[rank] for rank in own) for own in machines]
            arrays = [
                sum(draw(wire, seed, rank) * np.float32(each[rank] / total) for rank in own)
                if total
                else None
                for own, total in zip(machines, sums)
            ]
            wanted = naive.reduce(arrays, [total / sum(each) for total in sums])
            assert same_bits(got), wire
            if is_low_rank(wire):
                np.testing.assert_allclose(got[0], wanted, rtol=1e-3, atol=0.02)
            else:
                np.testing.assert_array_equal(got[0], wanted, err_msg=str(wire))


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
