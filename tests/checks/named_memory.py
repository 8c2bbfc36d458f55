"""Conformance checks for the named memory of a store: arrays and locks that belong to no rank.

Each check takes `ranks`, a `checks.ranks.Ranks` whose subject is the transport of a rank.
"""

import itertools
import time

import numpy as np

FRESH = itertools.count()  # the checks of one world must not have arrays or locks in common
SHAPES = [(), (0,), (7,), (3, 4), (70, 80, 3), (1 << 19,)]
DTYPES = ["bool", "int8", "int64", "float16", "float32", "complex128"]
COUNTED = 300


def fresh(name):
    return f"{name} {next(FRESH)}"


def create_many(transport, name):
    """Create arrays in an order of the rank's own, each rank at once; return what they were."""
    named_memory = transport.store.named_memory
    asked = list(itertools.product(SHAPES, DTYPES))
    transport.barrier()
    order = np.random.default_rng(transport.rank).permutation(len(asked))
    arrays = {k: named_memory.array(f"{name} {k}", *asked[k]) for k in order}
    wrong = [asked[k] for k, one in arrays.items() if (one.shape, one.dtype) != asked[k] or one.any()]
    transport.barrier()
    if transport.rank == transport.size - 1:
        for k, one in arrays.items():
            one[...] = k + 1
    transport.barrier()
    differ = [asked[k] for k, one in arrays.items() if (one != np.array(k + 1, one.dtype)).any()]
    transport.barrier()
    return wrong, differ


def create_differently(transport, name):
    named_memory = transport.store.named_memory
    array = named_memory.array(name, (2, 3), "float32")
    array[...] = 1
    transport.barrier()
    errors = []
    for shape, dtype in (((3, 2), "float32"), ((2, 3), "float64"), (6, "float32")):
        try:
            named_memory.array(name, shape, dtype)
        except ValueError as error:
            errors.append(str(error))
    transport.barrier()
    return errors, named_memory.array(name, (2, 3), "float32").sum()


def give_wrong_arguments(transport):
    named_memory, errors = transport.store.named_memory, []
    for call in (
        lambda: named_memory.array("", 3, "int8"),
        lambda: named_memory.array(3, 3, "int8"),
        lambda: named_memory.array("x", -1, "int8"),
        lambda: named_memory.array("x", 3, object),
        lambda: named_memory.lock(-1),
        lambda: named_memory.lock(1 << 62),
        lambda: named_memory.lock(3).release(),
        lambda: named_memory.locks("x", 1 << 21),
    ):
        try:
            errors.append(call())
        except Exception as error:
            errors.append(type(error))
    return errors


def count(transport, name):
    """Increment two numbers that must always be equal, in several steps under a lock."""
    named_memory = transport.store.named_memory
    numbers, [lock] = named_memory.array(name, (2,), "int64"), named_memory.locks(name, 1)
    transport.barrier()
    done, refused, unequal = 0, 0, 0
    while done < COUNTED:
        if not lock.try_acquire():
            refused += 1
            time.sleep(0)
            continue
        before = numbers.copy()
        unequal += int(before[0] != before[1])
        numbers[0] = before[0] + 1
        if done % 50 == 0:
            time.sleep(1e-4)  # let the others try
        numbers[1] = before[1] + 1
        lock.release()
        done += 1
    transport.barrier()
    return numbers.tolist(), unequal


def look_at_a_lock(transport, name):
    """Let rank 0 take a lock; return what each rank sees of it, and of its neighbour."""
    held, other = transport.store.named_memory.locks(name, 2)
    seen = [held.is_free()]
    transport.barrier()
    if transport.rank == 0:
        seen.append(held.try_acquire())
    transport.barrier()
    seen += [held.is_free(), held.try_acquire(), other.is_free()]
    transport.barrier()
    if transport.rank == 0:
        transport.store.named_memory.release_locks()
    transport.barrier()
    seen.append(held.is_free())
    transport.barrier()
    return seen


def fill_and_clear(transport, name):
    named_memory = transport.store.named_memory
    small, large = (named_memory.array(f"{name} {n}", n, "uint8") for n in (9, 1 << 21))
    transport.barrier()
    if transport.rank == 0:
        small[...] = large[...] = 7
        named_memory.clear()
    transport.barrier()
    seen = [small.any(), large.any()]
    # The names are free again, also for other shapes.
    again = [named_memory.array(f"{name} {n}", n + 1, "int8") for n in (1 << 21, 9)]
    transport.barrier()
    seen += [one.any() for one in again]
    transport.barrier()
    again[0][...] = again[1][...] = 1
    transport.barrier()
    return [bool(one) for one in seen], [int(one.sum()) for one in again]


def check_ranks_that_create_the_same_names_at_once_get_the_same_arrays(ranks):
    assert ranks.values(create_many, fresh("many")) == [([], [])] * ranks.size


def check_another_shape_or_dtype_is_refused(ranks):
    for errors, total in ranks.values(create_differently, fresh("differ")):
        assert total == 6 and len(errors) == 3
        assert all("the shape (2, 3) and the dtype float32" in one for one in errors)
        assert "(2, 3) and float64" in errors[1] and "(6,) and float32" in errors[2]


def check_wrong_arguments_are_refused(ranks):
    expected = [TypeError, TypeError, ValueError, TypeError]
    expected += [IndexError, IndexError, RuntimeError, ValueError]
    assert ranks.values(give_wrong_arguments) == [expected] * ranks.size


def check_a_lock_excludes_the_others(ranks):
    total = ranks.size * COUNTED
    assert ranks.values(count, fresh("count")) == [([total, total], 0)] * ranks.size


def check_a_lock_is_held_by_one_rank(ranks):
    for rank, seen in enumerate(ranks.values(look_at_a_lock, fresh("lock"))):
        assert seen == [True, *[True] * (rank == 0), False, False, True, True]


def check_what_was_cleared_is_zero_and_its_name_is_free(ranks):
    expected = [False] * 4, [(1 << 21) + 1, 10]
    assert ranks.values(fill_and_clear, fresh("clear")) == [expected] * ranks.size


CHECKS = [item for name, item in sorted(globals().items()) if name.startswith("check_")]
