"""Tests of the arguments of calls: views of the data on each rank, and memory of any layout."""

import mmap

import numpy as np
import pytest

import synkhronos as synk
from compilers import Apply, compiler, NAME, Op, tt, tt as T
from synkhronos.arithmetic.conversion import usable


class Where(Op):
    __props__ = ()

    def make_node(self, x):
        return Apply(self, [x], [T.lmatrix()])

    def perform(self, node, inputs, outputs):
        (x,) = inputs
        outputs[0][0] = np.array([[x.__array_interface__["data"][0], x.strides[0], x.nbytes]])


@pytest.fixture(scope="module", params=[1, 3])
def where(request, open_world):
    open_world(request.param)
    x, whole = T.fmatrix("x"), T.fmatrix("whole")
    rows = compiler.shared(np.zeros((0, 5), "float32"), "rows")
    outputs = [(Where()(one), "gather") for one in (x, whole, rows)]
    f = synk.function([x], outputs, bcast_inputs=[whole], sliceable_shareds=[rows])
    synk.distribute()
    return request.param, f, rows


def address(array):
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize("batch", [None, 40, slice(3, 35), slice(0, 60, 2), slice(50, 10, -1)], ids=str)
@pytest.mark.parametrize("num_slices", [1, 2])
def test_slices_are_views_of_the_data_on_every_rank(where, batch, num_slices):
    ranks, f, rows = where
    data, whole = synk.data(np.ones((60, 5), "float32")), synk.data(np.ones((7, 5), "float32"))
    synk.scatter(rows, np.ones((60, 5), "float32"))
    found, found_whole, _ = f(data, whole, batch=batch, num_slices=num_slices)
    chosen = data.data[batch if isinstance(batch, slice) else slice(batch)]
    assert len(found) == ranks * num_slices
    assert (found[:, 1] == chosen.strides[0]).all()
    assert found[:, 2].sum() == chosen.nbytes
    assert found[0, 0] == address(chosen)
    parts = np.cumsum([0, *found[:-1, 2]]) // chosen[:1].nbytes
    assert found[:, 0].tolist() == [address(chosen[part:]) for part in parts]
    assert (found_whole[:, 0] == address(whole.data)).all()


def test_a_mapped_file_is_read_where_it_is(where, tmp_path):
    ranks, f, rows = where
    np.save(tmp_path / "x.npy", np.arange(300, dtype="float32").reshape(60, 5))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    synk.scatter(rows, np.ones((60, 5), "float32"))
    data = synk.data(mapped)
    found, _, _ = f(data, data)
    again, _, _ = f(data, data)
    assert found.tolist() == again.tolist()
    assert found[0, 0] % mmap.PAGESIZE == mapped.offset  # an address in the mapping of the file
    assert found[:, 2].sum() == mapped.nbytes


def test_a_call_in_a_fused_step_keeps_the_memory_of_its_data(where):
    _, f, rows = where
    synk.scatter(rows, np.ones((60, 5), "float32"))
    data = synk.data(np.ones((60, 5), "float32"))
    (before, _, _) = f(data, data)  # so that the call below is a repeated one
    with synk.fuse():
        pending = f(data, data)
        data.free_memory()
        others = [synk.data(np.zeros((60, 5), "float32")) for _ in range(3)]
    assert before[:, 0].tolist() == pending.result()[0][:, 0].tolist()
    places = [address(other.data) for other in others]
    assert before[0, 0] not in places


def test_minibatches_may_be_longer_than_the_batch_but_not_unequal_without_one(where):
    x, y = T.fmatrix("x"), T.fmatrix("y")
    f = synk.function([x, y], [(x.sum(), "sum"), (y.sum(), "sum")], mode="FAST_COMPILE")
    short = synk.data(np.arange(6, dtype="float32").reshape(6, 1), minibatch=True)
    long = synk.data(np.arange(8, dtype="float32").reshape(8, 1), minibatch=True)
    for batch in (4, 6):  # fewer rows than both have, or all rows of the shorter one
        assert f(short, long, batch=batch) == f(long, short, batch=batch) == [sum(range(batch))] * 2
    with pytest.raises(ValueError, match="minibatch data of 8 rows"):
        f(long, short, batch=8)
    for args in ((short, long), (long, short)):
        with pytest.raises(ValueError, match="the same number of rows"):
            f(*args)


BATCHES = [
    None,
    slice(2, 9),
    slice(2, 9),
    7,
    None,
    [3, 1, 1, 8],
    np.arange(10) % 3 == 0,
    slice(9, 1, -2),
    slice(0, 2),  # fewer rows than ranks
    None,
]


@pytest.fixture(scope="module", params=[1, 3])
def summed(request, open_world):
    open_world(request.param)
    x, scale = T.dmatrix("x"), T.dvector("scale")
    f = synk.function([x], [((x * scale).sum(), "sum"), (x, "gather")], bcast_inputs=[scale])
    synk.distribute()
    return f


def expected(x, scale, batch):
    rows = x.data[slice(batch) if isinstance(batch, int) else slice(None) if batch is None else batch]
    return (rows * scale.data).sum(), rows.tolist()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("minibatch", [False, True])
def test_a_call_may_be_repeated_on_any_rows(summed, fused, minibatch):
    x, scale = synk.data(np.arange(20.0).reshape(10, 2), minibatch=minibatch), synk.data([1.0, 3.0])
    batches = [batch for batch in BATCHES if not minibatch or batch is None or type(batch) is int]
    found = []
    for batch in batches:
        if fused:
            with synk.fuse():
                pending = [summed(x, scale, batch=batch) for _ in range(2)]
            first, second = [one.result() for one in pending]
            assert np.array_equal(first[1], second[1])
        else:
            first = summed(x, scale, batch=batch)
        found.append((first[0], first[1].tolist()))
    assert found == [expected(x, scale, batch) for batch in batches]


def test_the_rows_of_a_repeated_call_are_checked(summed):
    x, scale = synk.data(np.arange(20.0).reshape(10, 2)), synk.data([1.0, 3.0])
    for batch, error in [
        ([3, 10], IndexError), ("rows", TypeError), (True, TypeError), (slice(0, 5, 0), ValueError),
        ([0.5], (TypeError, IndexError)), (slice(4, 4), ValueError), (np.zeros(10, bool), ValueError),
        (np.zeros(9, bool), IndexError),
    ]:  # fmt: skip
        summed(x, scale, batch=5)
        with pytest.raises(error):
            summed(x, scale, batch=batch)
        assert summed(x, scale, batch=3)[0] == expected(x, scale, 3)[0]


def test_a_repeated_call_needs_all_inputs(summed):
    x, scale = synk.data(np.ones((10, 2))), synk.data([1.0, 3.0])
    summed(x, scale)
    for args in ((x,), (x, scale, x), ()):
        with pytest.raises(TypeError, match="input"):
            summed(*args)


def test_a_call_is_not_repeated_with_data_that_have_moved_or_changed_their_length(summed):
    x, scale = synk.data(np.arange(20.0).reshape(10, 2)), synk.data([1.0, 3.0])
    summed(x, scale, batch=4)
    for rows in (50, 6, 10):
        x.set_value(np.arange(2.0 * rows).reshape(rows, 2))
        for batch in (slice(5, None), 4):
            assert summed(x, scale, batch=batch)[0] == expected(x, scale, batch)[0]
    x.data[:] = 1
    assert summed(x, scale, batch=4)[0] == 16
    other = synk.data(np.ones((10, 2)))
    assert summed(other, scale, batch=10)[0] == 40
    x.free_memory()
    with pytest.raises((ValueError, RuntimeError)):
        summed(x, scale, batch=4)


def test_a_repeated_call_without_rows_for_the_master_is_refused(open_world):
    open_world(3, master_rank=2)
    x = T.dmatrix("x")
    f = synk.function([x], (x.sum(), None))
    data = synk.data(np.ones((9, 2)))
    for _ in range(2):
        assert f(data, batch=3) == 2
        with pytest.raises(ValueError, match="of 2 rows rank 2, the master, gets none"):
            f(data, batch=2)


RNG = np.random.RandomState(2)


def unaligned(array):
    return np.frombuffer(b"\0" + array.tobytes(), array.dtype, array.size, 1).reshape(array.shape)


def field(array):
    """Return a field of a structured array: unaligned, with strides that are no whole items."""
    records = np.zeros(array.shape, [("flag", "i1"), ("value", array.dtype)])
    records["value"] = array
    return records["value"]


def aligned_field(array):
    """Return a field whose items are aligned, but whose strides are no whole numbers of items."""
    gap = np.dtype("i4") if array.itemsize == 8 else np.dtype("i2")
    records = np.zeros(array.shape, [("value", array.dtype), ("gap", gap)])
    records["value"] = array
    return records["value"]


LAYOUTS = {
    "unaligned": unaligned,
    "field": field,
    "aligned field": aligned_field,
    "rows repeated": lambda a: np.broadcast_to(a[:1], a.shape),
    "columns repeated": lambda a: np.broadcast_to(a[..., :1], a.shape),
    "one number": lambda a: np.broadcast_to(a.reshape(-1)[0], a.shape),
    "rows reversed": lambda a: a[::-1].copy()[::-1],
    "columns reversed": lambda a: a[..., ::-1].copy()[..., ::-1],
    "every other": lambda a: np.repeat(a, 2, axis=-1)[..., ::2],
    "byte order": lambda a: a.astype(a.dtype.newbyteorder()),
    "order of Fortran": np.asfortranarray,
}
DTYPES = ["float32", "float64"]


def in_layout(layout, *arrays):
    """Return arrays in a layout, and their copies in the usual one."""
    given = [LAYOUTS[layout](array) for array in arrays]
    return given, [np.array(one, one.dtype.newbyteorder("="), order="C") for one in given]


class Pool:
    """Functions that BLAS computes, of scattered and broadcast inputs, and the compiler's own."""

    def __init__(self, dtype):
        x, w = tt.matrix("x", dtype=dtype), tt.vector("w", dtype=dtype)
        y, m = tt.vector("y", dtype=dtype), tt.matrix("m", dtype=dtype)
        self.inputs, self.bcast = [x, y], [w, m]
        outputs = [x.dot(w), x.dot(m), y.dot(x), x.T.dot(x), y.dot(y), x * 2 + w, x.sum(axis=0)]
        ops = ["gather", "gather", "sum", "sum", "sum", "gather", "sum"]
        pairs = list(zip(outputs, ops))
        self.f = synk.function(self.inputs, pairs, bcast_inputs=self.bcast)
        self.serial = compiler.function([*self.inputs, *self.bcast], outputs)
        self.rows = compiler.shared(np.zeros((2, 4), dtype), "rows")
        self.held = synk.function(
            [], (self.rows.dot(w), "gather"), bcast_inputs=[w], sliceable_shareds=[self.rows]
        )
        self.arrays = [RNG.normal(size=shape).astype(dtype) for shape in ((7, 4), (7,), (4,), (4, 3))]


@pytest.fixture(scope="module")
def pools(open_world):
    open_world(2)
    made = {dtype: Pool(dtype) for dtype in DTYPES}
    synk.distribute()
    return made


@pytest.fixture(params=DTYPES)
def pool(pools, request):
    return pools[request.param]


def assert_same(got, expected):
    assert len(got) == len(expected)
    for one, other in zip(got, expected):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_calls_checks_and_the_master_alone_take_any_layout(pool, layout):
    given, usual = in_layout(layout, *pool.arrays)
    expected = pool.serial(*usual)
    assert_same(pool.f(*given), expected)
    assert_same(pool.f(*given, num_slices=2), expected)
    assert_same(pool.f.as_theano(*given), expected)
    pool.f.check(*given, atol=2e-5)
    for batch in (slice(None, None, -1), slice(1, None, 2), [3, 0, 6]):
        chosen = pool.serial(usual[0][batch], usual[1][batch].copy(), *usual[2:])
        assert_same(pool.f(*given, batch=batch), chosen)
        pool.f.check(*given, batch=batch, atol=2e-5)
    data = synk.data(given[0])
    assert_same(pool.f(data, *given[1:]), expected)


def calls_of_a_rank(rank, f, given):
    found = [rank.call(f, *given)]
    return found + [rank.call(f, *given, batch=batch) for batch in (slice(None, None, -1), [3, 0, 6])]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_call_in_a_program_takes_any_layout(pool, layout):
    given, usual = in_layout(layout, *pool.arrays)
    for whole, backwards, listed in synk.spmd(calls_of_a_rank, pool.f, given):
        assert_same(whole, pool.serial(*usual))
        for got, batch in ((backwards, slice(None, None, -1)), (listed, [3, 0, 6])):
            assert_same(got, pool.serial(usual[0][batch].copy(), usual[1][batch].copy(), *usual[2:]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_a_sliceable_variable_may_have_any_layout_that_the_compiler_takes(pool, layout):
    x, _, w, _ = pool.arrays
    [given], [usual] = in_layout(layout, x)
    if usable(given) is not given and "repeated" not in layout:
        return  # the compiler refuses it
    pool.rows.set_value(given, borrow=True)
    own = [usual, np.ones((2, 4), x.dtype)]
    synk.set_value(1, pool.rows, own[1])
    np.testing.assert_allclose(pool.held(w), np.concatenate(own).dot(w), rtol=1e-4)
    got = pool.held(w, batch_s=slice(None, None, -1))
    np.testing.assert_allclose(got, np.concatenate([one[::-1] for one in own]).dot(w), rtol=1e-4)
    pool.held.check(w, atol=2e-5)
    pool.rows.set_value(given, borrow=True)
    np.testing.assert_allclose(pool.held.as_theano(w), usual.dot(w), rtol=1e-4)


if NAME == "theano":
    import scipy.sparse
    import theano.sparse

    @pytest.mark.parametrize("layout", ["unaligned", "byte order", "rows reversed"])
    def test_the_arrays_of_a_sparse_matrix_may_have_any_layout(pools, layout):
        s, w = theano.sparse.csr_matrix("s", dtype="float64"), tt.dvector("w")
        f = synk.function([s], (theano.sparse.structured_dot(s, w.dimshuffle(0, "x")), "gather"),
                          bcast_inputs=[w])  # fmt: skip
        dense = np.where(RNG.uniform(size=(7, 4)) < 0.5, RNG.normal(size=(7, 4)), 0)
        matrix, weights = scipy.sparse.csr_matrix(dense), RNG.normal(size=4)
        matrix.data = LAYOUTS[layout](matrix.data)
        if layout == "unaligned":
            matrix.indices, matrix.indptr = unaligned(matrix.indices), unaligned(matrix.indptr)
        kept = matrix.data
        expected = dense.dot(weights)[:, None]
        np.testing.assert_allclose(f(matrix, weights), expected)
        np.testing.assert_allclose(f.as_theano(matrix, weights), expected)
        f.check(matrix, weights)
        for got in synk.spmd(lambda rank: rank.call(f, matrix, weights)):
            np.testing.assert_allclose(got, expected)
        assert matrix.data is kept
