"""Conformance checks for communicators.

Each check takes `ranks`, a `checks.ranks.Ranks` whose subject is a communicator.
"""

import functools
import pickle
import time

import numpy as np
from checks.ranks import values

from synkhronos.comms.base import Communicator

FLOATS = ["float16", "float32", "float64"]
INTS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
COMPLEX = ["complex64", "complex128"]
DTYPES = [*FLOATS, *INTS, *COMPLEX, "bool"]
OPS = {
    "avg": [*FLOATS, *COMPLEX],
    "sum": [*FLOATS, *INTS, *COMPLEX],
    "prod": [*FLOATS, *INTS, *COMPLEX],
    "min": [*FLOATS, *INTS, "bool"],
    "max": [*FLOATS, *INTS, "bool"],
}
# These include more elements than fit in one piece of a reduction, and fewer elements than ranks.
SHAPES = [(), (0,), (1,), (3,), (2, 0, 3), (2, 3, 2), (40_001,)]


class RepeatingCommunicator(Communicator):
    """Prepares each kind of collective of a communicator once, and calls it again and again."""

    def __init__(self, comm):
        super().__init__(comm.group)
        self._comm, self.reduces_in_place, self.takes = comm, comm.reduces_in_place, comm.takes
        self._broadcast = functools.lru_cache(None)(comm.prepare_broadcast)
        self._reduction = functools.lru_cache(None)(comm.prepare_reduction)

    def gather(self, arrays, root):
        return self._comm.gather(arrays, root)

    def all_gather(self, arrays):
        return self._comm.all_gather(arrays)

    def prepare_broadcast(self, root):
        return self._broadcast(root)

    def prepare_reduction(self, op, root=None):
        return self._reduction(op, root)


def single(comm, name, array, *args, **kwargs):
    """Call a collective with one array, and return this rank's result."""
    result = getattr(comm, name)([array], *args, **kwargs)
    return None if result is None else result[0]


def collective(comm, name, arrays, *args):
    return single(comm, name, arrays[comm.rank], *args)


def weighted(comm, name, arrays, args, weights):
    return single(comm, name, arrays[comm.rank], *args, weight=weights[comm.rank])


def awkward(comm, name, kind, dtype, *args):
    """Call a collective with an array of an unusual memory layout."""
    array = np.arange(24).reshape(4, 6).astype(dtype) + comm.rank
    if kind == "transposed":
        array = array.T
    elif kind == "strided":
        array = np.repeat(array, 2, axis=1)[::-1, ::2]
    elif kind == "broadcast":
        array = np.broadcast_to(np.array(comm.rank + 1, dtype), (4, 6))
    elif kind == "read-only":
        array.flags.writeable = False
    elif kind == "unaligned":
        buffer = np.zeros(array.nbytes + 1, np.uint8)[1:]
        buffer[:] = np.frombuffer(array.tobytes(), np.uint8)
        array = buffer.view(dtype).reshape(4, 6)
    before = array.copy()
    result = single(comm, name, array, *args)
    return before, result, array


def unchanged_by_others(comm):
    """Return the results of collectives after every rank has modified its own in place."""
    [gathered] = comm.all_gather([np.full(1000, comm.rank)])
    [received] = comm.broadcast([np.full(1000, comm.rank)], comm.size - 1)
    [reduced] = comm.all_reduce([np.full(1000, comm.rank + 1)], "sum")
    comm.group.barrier()
    received += 100 * (comm.rank + 1)
    reduced += 100 * (comm.rank + 1)
    for array in gathered:
        array += 1000 * (comm.rank + 1)
    comm.group.barrier()
    return gathered, received, reduced


def hurried(comm, name, args, slow):
    """Call a collective and overwrite its result immediately, while the rank `slow` lags behind."""
    [array] = comm.all_reduce([np.zeros(1000)], "sum")
    array[...] = comm.rank + 1
    group = comm.group
    exchange = group.exchange

    def exchange_and_sleep(item):
        items = exchange(item)
        time.sleep(0.02)
        return items

    if comm.rank == slow:
        group.exchange = exchange_and_sleep
    try:
        result = getattr(comm, name)([array], *args)
    finally:
        group.exchange = exchange
    kept = pickle.dumps(result)
    array[...] = -1
    if result is not None and name not in ("gather", "all_gather"):
        result[0][...] = -1
    comm.group.barrier()
    return pickle.loads(kept)


def draw(size, shape, dtype, low=1):
    """Return one array of small numbers per rank."""
    rng = np.random.default_rng(len(shape) + size)
    numbers = [np.asarray(rng.integers(low, 4, shape)) for _ in range(size)]
    if np.dtype(dtype).kind == "b":
        return [np.asarray(number % 2, bool) for number in numbers]
    if np.dtype(dtype).kind == "c":
        return [np.asarray(number + 1j * rank, dtype) for rank, number in enumerate(numbers)]
    return [number.astype(dtype) for number in numbers]


def expected(op, arrays, weights=None):
    stack = np.array(arrays)
    if op == "avg":
        wide = stack.astype(np.promote_types(stack.dtype, float))
        if weights is None:
            return wide.mean(axis=0)
        used = [rank for rank, weight in enumerate(weights) if weight]
        return np.tensordot(np.array(weights)[used], wide[used], 1) / sum(weights)
    with np.errstate(over="ignore"):
        name = {"sum": "add", "prod": "multiply", "min": "minimum", "max": "maximum"}[op]
        return getattr(np, name).reduce(stack, axis=0, dtype=stack.dtype)


def assert_reduced(got, wanted, dtype, shape):
    assert got.dtype == dtype and got.shape == shape
    if np.dtype(dtype).kind in "fc":
        rtol = 4e-3 if dtype == "float16" else 1e-5
        np.testing.assert_allclose(got, wanted, rtol=rtol)
    else:
        np.testing.assert_array_equal(got, wanted)


def same_bits(arrays):
    return len({np.ascontiguousarray(array).tobytes() for array in arrays}) == 1


def check_all_reduce_is_the_numpy_reduction_with_the_same_bits_everywhere(ranks):
    for op, dtypes in OPS.items():
        for dtype in dtypes:
            for shape in SHAPES:
                arrays = draw(ranks.size, shape, dtype)
                got = values(ranks.run(collective, "all_reduce", arrays, op))
                wanted = expected(op, arrays)
                for one in got:
                    assert_reduced(one, wanted, dtype, shape)
                assert same_bits(got)


def check_reduce_gives_the_root_the_reduction_and_the_others_their_own(ranks):
    for op, dtypes in OPS.items():
        for root in range(ranks.size):
            for dtype, shape in zip(dtypes, [(), (0,), (3,), (2, 3, 2), (40_001,)] * 3):
                arrays = draw(ranks.size, shape, dtype)
                got = values(ranks.run(collective, "reduce", arrays, op, root))
                assert_reduced(got[root], expected(op, arrays), dtype, shape)
                for rank, one in enumerate(got):
                    if rank != root:
                        np.testing.assert_array_equal(one, arrays[rank])


def check_sums_of_random_numbers_have_the_same_bits_everywhere(ranks):
    rng = np.random.default_rng(0)
    for dtype in FLOATS:
        arrays = list(rng.normal(size=(ranks.size, 70_001)).astype(dtype))
        for op in ("sum", "avg", "prod"):
            assert same_bits(values(ranks.run(collective, "all_reduce", arrays, op)))
        weights = list(range(1, ranks.size + 1))
        assert same_bits(values(ranks.run(weighted, "all_reduce", arrays, ["avg"], weights)))


def check_an_average_is_weighted_and_a_weight_of_zero_leaves_a_rank_out(ranks):
    size = ranks.size
    choices = [
        [1] * size,
        [0.5] * size,
        list(range(1, size + 1)),
        [3, *[0] * (size - 1)],
        [*[0] * (size - 1), 2],
    ]
    for dtype in [*FLOATS, *COMPLEX]:
        for shape in [(), (5,), (2, 3)]:
            for weights in choices:
                arrays = draw(size, shape, dtype)
                for rank, weight in enumerate(weights):
                    if not weight:
                        arrays[rank] = np.full(shape, np.nan, dtype)
                wanted = expected("avg", arrays, weights)
                got = values(ranks.run(weighted, "all_reduce", arrays, ["avg"], weights))
                for one in got:
                    assert_reduced(one, wanted, dtype, shape)
                for root in {0, size - 1}:
                    got = values(ranks.run(weighted, "reduce", arrays, ["avg", root], weights))
                    assert_reduced(got[root], wanted, dtype, shape)


def check_weights_are_for_averages_alone(ranks):
    arrays = draw(ranks.size, (4,), "float32")
    weights = [2, *[0] * (ranks.size - 1)]
    for op in ("sum", "prod", "min", "max"):
        for one in values(ranks.run(weighted, "all_reduce", arrays, [op], weights)):
            assert_reduced(one, expected(op, arrays), "float32", (4,))


def check_wrong_reductions_are_errors_on_every_rank_and_the_next_is_right(ranks):
    size = ranks.size
    fine = draw(size, (4,), "float32")
    shapes = [np.ones(4 + rank, "float32") for rank in range(size)]
    same_size = [np.ones((2, 3) if rank else (3, 2)) for rank in range(size)]
    dtypes = [np.ones(4, "float64" if rank else "float32") for rank in range(size)]
    wrong = [
        ("all_reduce", fine, ["mean"], None, ValueError),
        ("all_reduce", draw(size, (4,), "int32"), ["avg"], None, TypeError),
        ("all_reduce", draw(size, (4,), "bool"), ["sum"], None, TypeError),
        ("all_reduce", fine, ["avg"], [0] * size, ValueError),
    ]
    if size > 1:
        for arrays in (shapes, same_size, dtypes):
            wrong.append(("all_reduce", arrays, ["sum"], None, ValueError))
            wrong.append(("reduce", arrays, ["avg", size - 1], [1] * size, ValueError))
    for name, arrays, args, weights, error in wrong:
        for _ in range(10):
            outcomes = ranks.run(weighted, name, arrays, args, weights or [1] * size)
            assert [outcome.error for outcome in outcomes] == [error] * size
            if arrays is shapes:
                for outcome in outcomes:
                    for rank in range(size):
                        assert f"rank {rank}: {arrays[rank].shape}" in outcome.message
            got = values(ranks.run(collective, "all_reduce", fine, "max"))
            assert_reduced(got[0], expected("max", fine), "float32", (4,))


def refused(comm, length):
    """Reduce an array where it is, except that one rank passes one of another shape."""
    [array] = comm.all_reduce([np.ones(length)], "sum")
    array[...] = comm.rank + 1
    try:
        comm.all_reduce([array[1:] if comm.rank == 0 else array], "sum")
    except ValueError:
        return array.copy()


def check_a_reduction_that_is_refused_changes_no_array(ranks):
    if ranks.size == 1:
        return
    for length in (5, 40_001):
        for rank, array in enumerate(values(ranks.run(refused, length))):
            np.testing.assert_array_equal(array, np.full(length, rank + 1))


def check_broadcast_sends_the_array_of_the_root_whatever_the_others_have(ranks):
    for dtype in DTYPES:
        for shape in SHAPES:
            for root in range(ranks.size):
                arrays = draw(ranks.size, shape, dtype)
                if root % 2:
                    arrays = [
                        a if rank == root else np.zeros((rank, 2), dtype)
                        for rank, a in enumerate(arrays)
                    ]
                for one in values(ranks.run(collective, "broadcast", arrays, root)):
                    assert one.dtype == dtype and one.shape == shape
                    np.testing.assert_array_equal(one, arrays[root])


def check_gather_and_all_gather_bring_every_ranks_array_also_of_unequal_shapes(ranks):
    for dtype in DTYPES:
        for shape in SHAPES:
            arrays = draw(ranks.size, shape, dtype)
            if shape:
                arrays = [array[: 2 * rank] for rank, array in enumerate(arrays)]
            for root in {0, ranks.size - 1}:
                got = values(ranks.run(collective, "gather", arrays, root))
                assert [one is None for one in got] == [r != root for r in range(ranks.size)]
                assert_equal_lists(got[root], arrays)
            for one in values(ranks.run(collective, "all_gather", arrays)):
                assert_equal_lists(one, arrays)


def assert_equal_lists(got, arrays):
    assert len(got) == len(arrays)
    for one, other in zip(got, arrays):
        assert one.dtype == other.dtype and one.shape == other.shape
        np.testing.assert_array_equal(one, other)


def check_arrays_of_any_layout_are_taken(ranks):
    for kind in ("transposed", "strided", "broadcast", "read-only", "unaligned"):
        for dtype in ("float32", "int64"):
            outcomes = values(ranks.run(awkward, "all_reduce", kind, dtype, "max"))
            wanted = np.maximum.reduce([before for before, _, _ in outcomes])
            for _, result, _ in outcomes:
                np.testing.assert_array_equal(result, wanted)
                assert result.flags.writeable
            root = ranks.size - 1
            outcomes = values(ranks.run(awkward, "broadcast", kind, dtype, root))
            for _, result, _ in outcomes:
                np.testing.assert_array_equal(result, outcomes[root][0])
            outcomes = values(ranks.run(awkward, "all_gather", kind, dtype))
            for _, result, _ in outcomes:
                assert_equal_lists(result, [before for before, _, _ in outcomes])
            for before, _, array in outcomes:
                np.testing.assert_array_equal(array, before)


def check_what_a_rank_does_with_its_result_is_its_own_affair(ranks):
    for rank, (gathered, received, reduced) in enumerate(values(ranks.run(unchanged_by_others))):
        for other, array in enumerate(gathered):
            assert (array == other + 1000 * (rank + 1)).all()
        assert (received == ranks.size - 1 + 100 * (rank + 1)).all()
        total = ranks.size * (ranks.size + 1) // 2
        assert (reduced == total + 100 * (rank + 1)).all()


def check_no_rank_leaves_before_the_others_have_read_and_written(ranks):
    size, root = ranks.size, ranks.size - 1
    own = [[[rank + 1.0] * 1000] for rank in range(size)]
    every = [[rank + 1.0] * 1000 for rank in range(size)]
    total = [[size * (size + 1) / 2] * 1000]
    wanted = {
        ("broadcast", root): [own[root]] * size,
        ("gather", root): [None] * root + [[every]],
        ("all_gather",): [[every]] * size,
        ("reduce", "sum", root): own[:root] + [total],
        ("all_reduce", "sum"): [total] * size,
    }
    for (name, *args), results in wanted.items():
        for slow in range(size):
            got = values(ranks.run(hurried, name, args, slow))
            for one, other in zip(got, results):
                assert (one is None) == (other is None)
                if one is not None:
                    np.testing.assert_array_equal(np.array(one), other)


def twice(comm, name, arrays, args, weights):
    """Call a collective, and once more on the memory of its result."""
    own = np.array(arrays[comm.rank])
    first = single(comm, name, arrays[comm.rank], *args, weight=weights[comm.rank])
    kept = np.array(first)
    comm.group.barrier()  # others may have copied to this rank's memory
    first[...] = own
    return kept, np.array(single(comm, name, first, *args, weight=weights[comm.rank]))


def check_averages_of_finite_numbers_are_finite_with_the_same_bits_everywhere(ranks):
    size = ranks.size
    for dtype in [*FLOATS, *COMPLEX]:
        largest = np.finfo(dtype).max
        for shape in [(), (3,), (2, 70_001)]:
            arrays = [np.full(shape, largest, dtype) for _ in range(size)]
            for weights in ([1] * size, list(range(1, size + 1))):
                wanted = np.full(shape, largest, dtype)
                if shape:
                    for rank, array in enumerate(arrays):
                        array.reshape(-1)[:2] = np.inf if dtype in FLOATS and not rank else 1, rank
                    infinite = np.inf if dtype in FLOATS else 1
                    wanted.reshape(-1)[:2] = infinite, np.average(range(size), weights=weights)
                got = values(ranks.run(twice, "all_reduce", arrays, ["avg"], weights))
                assert same_bits([one for each in got for one in each])
                got += values(ranks.run(twice, "reduce", arrays, ["avg", size - 1], weights))[-1:]
                for one in [one for each in got for one in each]:
                    assert one.dtype == dtype and one.shape == shape
                    np.testing.assert_allclose(one, wanted, rtol=4e-3)


def check_not_a_number_at_one_rank_is_in_every_reduction_of_its_place(ranks):
    for dtype in [*FLOATS, *COMPLEX]:
        for shape, place in [((), ()), ((5,), 3), ((70_001,), -1)]:
            for owner in {0, ranks.size - 1}:
                arrays = draw(ranks.size, shape, dtype)
                arrays[owner][place] = np.nan
                for op in (op for op, dtypes in OPS.items() if dtype in dtypes):
                    got = values(ranks.run(collective, "all_reduce", arrays, op))
                    for one in got:
                        np.testing.assert_array_equal(np.isnan(one), np.isnan(arrays[owner]), op)


def check_weights_of_any_size_are_relative_to_each_other(ranks):
    for dtype in FLOATS:
        arrays = [np.full(4, rank + 1, dtype) for rank in range(ranks.size)]
        for unit in (1e-300, 1e-40, 1e40, 8e307 / ranks.size):
            weights = [unit * (rank + 1) for rank in range(ranks.size)]
            wanted = expected("avg", arrays, [rank + 1 for rank in range(ranks.size)])
            for one in values(ranks.run(weighted, "all_reduce", arrays, ["avg"], weights)):
                assert_reduced(one, wanted, dtype, (4,))


def check_averages_of_halves_are_accumulated_in_single_precision(ranks):
    for length in (3, 40_001):
        arrays = [np.full(length, 40_000, "float16")] * ranks.size
        for weights in ([1] * ranks.size, list(range(1, ranks.size + 1))):
            for name, args in (("all_reduce", ["avg"]), ("reduce", ["avg", 0])):
                got = values(ranks.run(weighted, name, arrays, args, weights))
                assert_reduced(got[0], arrays[0], "float16", (length,))


def joint(comm, name, lists, calls):
    """Call a collective repeatedly on the same list of arrays, with different arguments each time."""
    arrays = [array.copy() for array in lists[comm.rank]]
    results = []
    for args, kwargs in calls:
        result = getattr(comm, name)(arrays, *args, **{key: by[comm.rank] for key, by in kwargs.items()})
        results.append(pickle.loads(pickle.dumps(result)))
        if name != "gather" and result is not None and name != "all_gather":
            for array, first in zip(result, lists[comm.rank]):
                array[...] = first  # in place, as the next call takes the same arrays
            arrays = result
    return results


def lengthen_and_shorten(comm, numbers):
    """Call collectives on lists of different lengths that begin with the same arrays."""
    arrays = comm.all_reduce([np.full(4, comm.rank + place) for place in range(max(numbers))], "max")
    results = []
    for number in numbers:
        for place, array in enumerate(arrays):
            array[...] = comm.rank + place
        reduced = comm.all_reduce(arrays[:number], "sum")
        results.append([array.tolist() for array in reduced])
        gathered = comm.all_gather(arrays[:number])
        assert [len(one) for one in gathered] == [comm.size] * number
    return results


def check_lists_may_be_longer_or_shorter_than_the_last(ranks):
    numbers = [3, 2, 1, 2, 3]
    total = sum(range(ranks.size))
    wanted = [[[total + ranks.size * place] * 4 for place in range(one)] for one in numbers]
    assert ranks.values(lengthen_and_shorten, numbers) == [wanted] * ranks.size


def replace_in_turn(comm):
    """Repeat a reduction. Each time, one rank passes a new array."""
    [array] = comm.all_reduce([np.zeros(4)], "sum")
    results, kept = [], []  # keep earlier arrays, so that their addresses are not reused
    for turn in range(2 * comm.size):
        array[...] = comm.rank + turn
        if turn % comm.size == comm.rank:
            kept.append(array)
            array = array.copy()
        [array] = comm.all_reduce([array], "sum")
        results.append(array.tolist())
    return results


def check_any_rank_may_come_with_a_new_array(ranks):
    size, total = ranks.size, sum(range(ranks.size))
    wanted = [[total + size * turn] * 4 for turn in range(2 * size)]
    assert ranks.values(replace_in_turn) == [wanted] * size


def check_arrays_of_any_number_shape_and_dtype_travel_together(ranks):
    size = ranks.size
    kinds = [((3,), "float32"), ((0,), "float64"), ((40_001,), "float32"), ((), "float64")]
    kinds += [((2, 3), "int64"), ((1,), "int8")]
    drawn = [draw(size, shape, dtype) for shape, dtype in kinds]
    lists = [[arrays[rank] for arrays in drawn] for rank in range(size)]
    ops = ["sum", "sum", "max", "sum", "prod"]
    for outcome in values(ranks.run(joint, "all_reduce", lists, [((op,), {}) for op in ops])):
        for op, results in zip(ops, outcome):
            for result, arrays in zip(results, drawn):
                np.testing.assert_allclose(result, expected(op, arrays), rtol=1e-6)
    outcomes = values(ranks.run(joint, "gather", lists, [((size - 1,), {})] * 2))
    for result, arrays in zip(outcomes[-1][1], drawn):
        for one, array in zip(result, arrays):
            np.testing.assert_array_equal(one, array)
    assert all(outcome == [None, None] for outcome in outcomes[:-1])
    root = size // 2
    for first, second in values(ranks.run(joint, "broadcast", lists, [((root,), {})] * 2)):
        for one, two, arrays in zip(first, second, drawn):
            np.testing.assert_array_equal(one, arrays[root])
            np.testing.assert_array_equal(two, arrays[root])


def check_weights_may_change_from_call_to_call(ranks):
    size = ranks.size
    lists = [[np.full(3, 1.0 + rank), np.full(50_000, 10.0 * rank)] for rank in range(size)]
    odd = [rank % 2 for rank in range(size)]
    weights = [odd, [1] * size, [rank + 1 for rank in range(size)], odd[::-1], odd, [1] * size]
    weights = [one for one in weights if any(one)]
    calls = [(("avg",), {"weight": one}) for one in weights]
    for outcome in values(ranks.run(joint, "all_reduce", lists, calls)):
        for one, (small, large) in zip(weights, outcome):
            mean = np.average(range(size), weights=one)
            np.testing.assert_allclose(small, 1 + mean)
            np.testing.assert_allclose(large, 10 * mean)


CHECKS = [item for name, item in sorted(globals().items()) if name.startswith("check_")]
