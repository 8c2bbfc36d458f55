"""Conformance checks for stores.

Each check takes `ranks`, a `checks.ranks.Ranks` whose subject is the transport of a rank.
"""

import gc
import pickle

import numpy as np

from synkhronos.arithmetic.partition import take_rows

DTYPES = ["bool", "int8", "uint16", "int64", "float16", "float32", "float64", "complex128"]
SHAPES = [(), (0,), (3, 0, 2), (5,), (3, 4), (70, 80)]
ROWS = [range(0), range(2, 7), range(9, -1, -3), range(0, 10, 4),
        np.array([3, 3, 0, 9]), np.array([], int)]  # fmt: skip


def draw(shape, dtype, seed=0):
    return np.random.default_rng(seed).integers(0, 100, shape).astype(dtype)


def laid_out(kind):
    """Return an array whose memory layout requires the store to copy it."""
    array = np.arange(24.0).reshape(4, 6)
    return {
        "transposed": array.T,
        "strided": array[:, ::2],
        "reversed": array[::-1],
        "broadcast": np.broadcast_to(np.array(3.0), (2, 3)),
    }[kind]


def share(transport, array):
    """Put this rank's array into the store; return its handle, and the handles of all ranks."""
    handle = transport.store.put(array)
    received = transport.exchange(pickle.dumps(handle))
    return handle, [pickle.loads(one) for one in received]


def exchange_arrays(transport, shape, dtype):
    """Put an array on every rank, and get all of them.

    Return the arrays, the size of a pickled handle, and the shapes and dtypes of the handles.
    """
    kept, handles = share(transport, draw(shape, dtype, transport.rank))
    got = [transport.store.get(handle).copy() for handle in handles]
    transport.barrier()
    return got, len(pickle.dumps(kept)), [(one.shape, one.dtype) for one in handles]


def change_after_put(transport):
    """Modify an array in the store, and one that was copied to it, after sending their handles."""
    own = transport.store.empty((4,), "float64")
    foreign = np.zeros(4)
    own[...] = 0
    kept, [own_handles, foreign_handles] = [], [[], []]
    for array, handles in ((own, own_handles), (foreign, foreign_handles)):
        handle, others = share(transport, array)
        kept.append(handle)
        handles.extend(others)
    own[:2], foreign[:2] = transport.rank + 1, -1
    transport.barrier()
    each = own_handles, foreign_handles
    got = [[transport.store.get(one).tolist() for one in handles] for handles in each]
    transport.barrier()
    return got


def get_rows(transport, rows, with_out):
    """Get rows of every rank's array, into an existing array if `with_out` is true."""
    kept, handles = share(transport, draw((10, 3), "int32", transport.rank))
    got, used = [], []
    for handle in handles:
        out = np.empty((len(rows), 3), "int32") if with_out else None
        result = take_rows(*transport.store.find(handle, rows), out)
        got.append(result.copy())
        used.append(with_out and np.shares_memory(result, out))
    transport.barrier()
    return got, used


def put_layout(transport, kind):
    kept, handles = share(transport, laid_out(kind))
    got = [transport.store.get(handle).copy() for handle in handles]
    transport.barrier()
    return got, laid_out(kind) in transport.store


def recognise(transport):
    """Return, for several arrays, whether the store can take them without a copy."""
    store = transport.store
    own = store.empty((4, 6), "float64")
    return [one in store for one in (own, own[1:3], own[2], own.T, own[:, ::2], np.zeros(3))]


def keep_copies(transport, number):
    """Put many arrays into the store, and read all of them afterwards."""
    kept = [transport.store.put(np.full(1000, value)) for value in range(number)]
    gc.collect()
    received = transport.exchange(pickle.dumps(kept))
    got = [[set(transport.store.get(one).tolist()) for one in pickle.loads(each)] for each in received]
    transport.barrier()
    for handle in kept:
        transport.store.free(handle)
    return got


def map_file(transport, path):
    """Get an array, and rows of it, by a handle of its location in a file."""
    from synkhronos.stores.handle import locate_in_file

    mapped = np.memmap(path, "float32", "r", shape=(10, 3))
    place = pickle.loads(pickle.dumps(locate_in_file(mapped[2:])))
    whole, rows = transport.store.get(place), transport.store.find(place, np.array([7, 0]))
    return whole.copy(), take_rows(*rows), whole.flags.writeable


def check_every_rank_gets_what_any_rank_has_put(ranks):
    for dtype in DTYPES:
        for shape in SHAPES:
            for got, nbytes, types in ranks.values(exchange_arrays, shape, dtype):
                assert nbytes < 250
                assert [(tuple(one), np.dtype(kind)) for one, kind in types] == [
                    (shape, np.dtype(dtype))
                ] * ranks.size
                for rank, array in enumerate(got):
                    assert array.dtype == dtype and array.shape == shape
                    np.testing.assert_array_equal(array, draw(shape, dtype, rank))


def check_an_array_of_the_store_is_read_as_it_is_and_a_copy_as_it_was(ranks):
    for own, foreign in ranks.values(change_after_put):
        assert own == [[rank + 1.0, rank + 1.0, 0, 0] for rank in range(ranks.size)]
        assert foreign == [[0.0] * 4] * ranks.size


def check_rows_are_those_of_numpy(ranks):
    for rows in ROWS:
        for with_out in (False, True):
            for got, used in ranks.values(get_rows, rows, with_out):
                for rank, array in enumerate(got):
                    expected = draw((10, 3), "int32", rank)[np.array(list(rows), int)]
                    np.testing.assert_array_equal(array, expected)
                    assert array.shape == expected.shape
                if with_out and isinstance(rows, np.ndarray) and len(rows):
                    assert all(used)


def check_an_array_of_any_layout_is_put_as_a_copy(ranks):
    for kind in ("transposed", "strided", "reversed", "broadcast"):
        for got, taken in ranks.values(put_layout, kind):
            assert not taken
            for array in got:
                np.testing.assert_array_equal(array, laid_out(kind))


def check_it_knows_its_arrays_and_contiguous_views_of_them(ranks):
    assert ranks.values(recognise) == [[True, True, True, False, False, False]] * ranks.size


def check_copies_live_as_long_as_their_handles(ranks):
    for got in ranks.values(keep_copies, 30):
        assert got == [[{value} for value in range(30)]] * ranks.size


def check_a_file_is_mapped_by_every_rank(ranks, path):
    np.arange(30, dtype="float32").tofile(path)
    expected = np.arange(30, dtype="float32").reshape(10, 3)[2:]
    for whole, rows, writeable in ranks.values(map_file, str(path)):
        np.testing.assert_array_equal(whole, expected)
        np.testing.assert_array_equal(rows, expected[[7, 0]])
        assert not writeable


CHECKS = [item for name, item in sorted(globals().items()) if name.startswith("check_")]
