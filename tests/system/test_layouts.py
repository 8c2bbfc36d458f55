"""Tests of arrays of any memory layout, which compiled code in C and BLAS would misread."""

import numpy as np
import pytest
from compilers import NAME, compiler, tt

import synkhronos as synk
from synkhronos.arithmetic.conversion import usable

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
