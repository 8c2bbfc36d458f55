"""Tests of functions in special cases: created late, with default updates, or unusual arguments."""

import numpy as np
import pytest
import scipy.sparse
from compilers import RandomStreams, Streams, compiler, sparse, tt
from oracle import assert_same

import synkhronos as synk

pytestmark = [
    pytest.mark.usefixtures("in_python"),
    pytest.mark.filterwarnings("ignore:Setting default_update:DeprecationWarning"),
]


def test_shared_variables_updated_by_default_see_old_values_in_every_slice(two):
    x = tt.fvector("x")
    mean = compiler.shared(np.float64(0), "mean")
    mean.default_update = 0.5 * mean + x.mean()
    f = synk.function([x], (x.mean() + mean, "avg"))
    f(np.arange(8, dtype="float32"), num_slices=4)
    assert_same(synk.get_value(0, mean), 1.5)
    assert_same(synk.get_value(1, mean), 5.5)


def test_an_average_of_an_integer_update_under_slices_is_a_type_error(two):
    x = tt.fvector("x")
    calls = compiler.shared(np.int32(0))
    f = synk.function([x], x.mean(), updates=[(calls, calls + 1)])
    f(np.ones(4, "float32"))
    assert_same(synk.get_value(1, calls), 1)
    with pytest.raises(TypeError, match="avg"):
        f(np.ones(4, "float32"), num_slices=2)
    with pytest.raises(TypeError, match="averaged by default .'avg'.*, give it as .output, 'gather'"):
        synk.function([x], calls + x.shape[0])
    with pytest.raises(TypeError, match="operation 'avg' of outputs.*not defined for dtype bool"):
        synk.function([x], (x > 0, "avg"))


def test_an_unknown_option_of_a_function_is_named(two):
    x = tt.fvector("x")
    with pytest.raises(TypeError, match="^function: .*, got .op.; an operation is given with"):
        synk.function([x], x.sum(), op="sum")
    assert synk.function([x], x.mean(), on_unused_input="ignore")(np.ones(2, "float32")) == 1


def test_functions_without_inputs_and_with_broadcast_inputs_only_run_on_every_rank(world_of):
    world_of(3, master_rank=1)
    v = tt.fvector("v")
    s = compiler.shared(np.float32(0))
    f = synk.function([], [(v.sum() + s, "sum"), (s, "gather")], bcast_inputs=[v])
    g = synk.function([], s)
    synk.distribute()
    for rank in range(3):
        synk.set_value(rank, s, rank)
    total, each = f([1.0, 2.0])
    assert_same(total, 12.0)
    assert_same(each, [0.0, 1.0, 2.0])
    assert_same(g(), 1.0)
    for options in ({"num_slices": 2}, {"batch": 1}, {"batch_s": slice(1)}):
        with pytest.raises(ValueError):
            g(**options)


def test_constants_may_be_updates_and_givens_of_a_function_with_sliceable_variables(two):
    rows = compiler.shared(np.ones((4, 2)), "rows")
    scale = tt.dscalar("scale")
    shared = compiler.shared(np.ones(2)), compiler.shared(1.0)
    updates = [(shared[0], np.zeros(2)), (shared[1], 7.0)]
    f = synk.function([], (rows.sum() * scale, "sum"), updates=updates, givens={scale: 3.0},
                      sliceable_shareds=[rows])  # fmt: skip
    assert_same(f(batch_s=slice(1, 3)), 24.0)
    for rank in range(2):
        for got, expected in zip(synk.get_value(rank, shared), [[0.0, 0.0], 7.0]):
            assert_same(got, expected)


def test_updates_by_default_use_the_chosen_rows_of_sliceable_variables(two):
    rows = compiler.shared(np.ones((6, 2)), "rows")
    seen, given_seen = compiler.shared(0.0, "seen"), compiler.shared(0.0, "given_seen")
    through = tt.dmatrix("through")
    seen.default_update = seen + rows.sum()
    given_seen.default_update = given_seen + through.sum()
    f = synk.function([], (seen + given_seen + rows.sum(), "sum"), givens={through: 2 * rows},
                      sliceable_shareds=[rows])  # fmt: skip
    f(batch_s=slice(0, 2))
    assert_same(synk.gather([seen, given_seen]), [[4.0, 4.0], [8.0, 8.0]])
    assert f.get_shared().count(rows) == 1


@pytest.mark.parametrize("streams", [Streams, RandomStreams])
def test_random_numbers_in_the_shape_of_sliceable_rows_are_drawn_once(two, streams):
    rows = compiler.shared(np.ones((6, 2)), "rows")
    numbers = streams(1).uniform(size=rows.shape)
    f = synk.function([], (numbers, "gather"), sliceable_shareds=[rows])
    assert f.get_shared().count(rows) == 1  # not once more for the stream's new state
    drawn = [f(batch_s=slice(1, 3)), f(num_slices=3)]
    assert [len(one) for one in drawn] == [4, 12]
    assert len(np.unique(np.concatenate(drawn))) == 32


def test_a_value_that_may_not_be_written_to_is_replaced_by_accumulated_updates(two):
    x, value = tt.dmatrix("x"), np.arange(3.0)
    value.flags.writeable = False
    s = compiler.shared(value, "s", borrow=True)
    f = synk.function([x], updates=[(s, s + x.sum(axis=0))])
    f(np.ones((4, 3)), num_slices=2)
    assert_same(synk.gather(s), [[1.0, 2.0, 3.0]] * 2)
    assert_same(value, np.arange(3.0))


def test_updates_of_what_is_no_tensor_cannot_accumulate(two):
    x, s = tt.dmatrix("x"), compiler.shared(scipy.sparse.identity(3, format="csr"), "s")
    f = synk.function([x], (sparse.dot(x, s), "gather"), updates=[(s, s + s)])
    assert_same(f(np.ones((2, 3))), np.ones((2, 3)))
    with pytest.raises(TypeError, match="num_slices: the update of .*s.* not a tensor but Sparse"):
        f(np.ones((4, 3)), num_slices=2)
    assert_same(f(np.ones((2, 3))), 2 * np.ones((2, 3)))


def test_values_that_cannot_be_put_together_are_listed(two):
    x, s = tt.dmatrix("x"), compiler.shared(np.zeros((1, 2)), "s")
    f = synk.function([x], (x.T, "gather"))
    g = synk.function([x], updates=[(s, x)])
    with pytest.raises(ValueError, match=r"output 0 .* rank 0: \(2, 2\), rank 1: \(2, 1\)"):
        f(np.ones((3, 2)))
    with pytest.raises(ValueError, match=r"update of s: .*\(2, 2\) and \(1, 2\); use op None"):
        g(np.ones((5, 2)), num_slices=2)
    assert_same(f(np.ones((4, 2))), np.ones((4, 2)))


def test_inputs_may_have_any_name_that_python_has(two):
    named = [tt.dvector(name) for name in ("self", "args", "batch", "twin", "twin")]
    f = synk.function(named, (sum(named).sum(), "sum"))
    ones = np.ones(2)
    assert_same(f(*[ones] * 5), 10.0)
    assert_same(f.as_theano(*[ones] * 5), 10.0)
    one = synk.function(named[:2], (named[0].sum() - named[1].sum(), "sum"))
    assert_same(one(self=3 * ones, args=ones), 4.0)
    assert_same(one.as_theano(self=3 * ones, args=ones), 4.0)
    assert len(one.set_input_shmems(self=ones, args=ones)) == 2
    with pytest.raises(TypeError, match="2 inputs are named 'twin'; give these by position"):
        f(ones, ones, ones, twin=ones)
    with pytest.raises(TypeError, match="'batch'.*by position"):
        f(ones, ones, batch=ones)


@pytest.mark.parametrize(
    ("dtype", "value", "fits"),
    [
        ("float32", np.float64(1.5), True),
        ("float32", np.float64(0.1), False),
        ("float32", np.int64(3), True),
        ("float32", np.int64(2**24 + 1), False),
        ("float32", np.float64("nan"), True),
        ("float32", 0.1, True),
        ("float32", 1e300, False),
        ("float32", float("inf"), True),
        ("int8", np.int64(3), True),
        ("int8", np.int64(300), False),
        ("int8", np.float64(3), False),
        ("complex64", 1 + 2j, True),
        ("complex64", 1e300j, False),
        ("float64", 2j, False),
    ],
)
def test_single_numbers_are_taken_if_the_dtype_of_the_input_can_hold_them(world_of, dtype, value, fits):
    world_of(1)
    x, k = tt.vector("x", dtype=dtype), tt.scalar("k", dtype=dtype)
    f = synk.function([x], (x * k, "gather"), bcast_inputs=[k], mode="FAST_COMPILE")
    ones = np.ones(2, dtype)
    if fits:
        np.testing.assert_array_equal(f(ones, value), ones * np.dtype(dtype).type(value))
    else:
        with pytest.raises(TypeError, match=f"'k': expected {dtype}"):
            f(ones, value)


def test_allow_input_downcast_does_not_drop_imaginary_parts(world_of):
    world_of(1)
    x = tt.fvector("x")
    f = synk.function([x], (x, "gather"), allow_input_downcast=True, mode="FAST_COMPILE")
    assert_same(f(np.array([1.5, 2.0])), [1.5, 2.0])
    for value in ([1j, 2], np.array([1j, 2])):
        with pytest.raises(TypeError, match="complex"):
            f(value)


@pytest.mark.parametrize("num_slices", [1, 2, 3, 4, 7])
def test_no_row_is_lost_of_sliceable_variables_of_unequal_lengths(two, num_slices):
    a, b = compiler.shared(np.arange(6.0), "a"), compiler.shared(np.arange(3.0), "b")
    x = tt.dvector("x")
    outputs = [(a.sum() + b.sum(), "sum"), (a, "gather"), (b, "gather")]
    f = synk.function([], outputs, sliceable_shareds=[a, b])
    g = synk.function([x], [*outputs, (x, "gather")], sliceable_shareds=[a, b])
    expected = [36.0, [*range(6)] * 2, [*range(3)] * 2, [1.0, 2.0, 3.0]]
    got = [*f(num_slices=num_slices), *g([1.0, 2.0, 3.0], num_slices=num_slices)]
    for one, other in zip(got, [*expected[:3], *expected]):
        assert_same(one, other)
    synk.set_value(1, b, [])
    for one, other in zip(f(num_slices=num_slices), [33.0, [*range(6)] * 2, [*range(3)]]):
        assert_same(one, other)


def test_batch_s_takes_ranges_and_data_as_it_takes_lists(two):
    rows = compiler.shared(np.arange(4.0), "rows")
    f = synk.function([], (rows, "gather"), sliceable_shareds=[rows])
    for batch_s in (range(1, 3), synk.data([1, 2]), [range(1, 3)] * 2, (synk.data([1, 2]), [1, 2])):
        assert_same(f(batch_s=batch_s), [1.0, 2.0, 1.0, 2.0])
