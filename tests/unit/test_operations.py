"""Tests of the arithmetic of the operations on arrays."""

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as arrays_of
from oracle import combine, examples

from synkhronos.arithmetic.operations import OPERATIONS, Accumulator, find_operation, parse_output_mode

DTYPES = [
    "float16", "float32", "float64", "complex64", "complex128", "int8", "int16", "int32", "int64",
    "uint8", "uint32", "bool",
]  # fmt: skip
DEFINED = [
    (op, dtype)
    for op in OPERATIONS
    for dtype in DTYPES
    if np.dtype(dtype).kind in {"avg": "fc", "sum": "iufc", "prod": "iufc"}.get(op, "biufc")
]
shapes = arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)


def draw_values(draw, shape, dtype, number):
    kind = np.dtype(dtype).kind
    one = {"b": st.booleans(), "u": st.integers(0, 3)}.get(kind, st.integers(-3, 3))
    return [draw(arrays_of.arrays(np.int64, shape, elements=one)).astype(dtype) for _ in range(number)]


def assert_close(got, expected):
    rtol = {"float16": 3e-3}.get(got.dtype.name, 2e-6)
    np.testing.assert_allclose(got, expected, rtol=rtol, atol=rtol)


@given(data=st.data(), which=st.sampled_from(DEFINED), shape=shapes, number=st.integers(1, 5))
@examples(200)
def test_a_reduction_is_the_numpy_one_in_the_same_dtype(data, which, shape, number):
    op, dtype = which
    values = draw_values(data.draw, shape, dtype, number)
    weights = data.draw(
        st.none()
        | st.lists(st.sampled_from([0, 1, 2, 0.5, 7]), min_size=number, max_size=number).filter(any)
    )
    before = [value.copy() for value in values]
    got = OPERATIONS[op].reduce(values, weights)
    assert got.dtype == dtype and got.shape == shape
    assert_close(got, combine(op, values, weights))
    assert not any(np.shares_memory(got, value) for value in values if value.size)
    for value, old in zip(values, before):
        np.testing.assert_array_equal(value, old)
    OPERATIONS[op].reduce_each([(values[0], values, ())], weights)
    np.testing.assert_array_equal(values[0], got)


def test_values_of_weight_zero_take_no_part_whatever_they_are():
    values = [np.array([np.nan, np.inf]), np.array([1.0, 2.0]), np.array([3.0, 4.0])]
    got = OPERATIONS["avg"].reduce(values, [0, 1, 3])
    assert got.tolist() == [2.5, 3.5]


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
@pytest.mark.parametrize("number", [1, 2, 3, 4, 6, 8])
def test_an_average_of_equal_weights_is_the_rounded_quotient(number, dtype):
    kind = np.dtype(dtype)
    info = np.finfo(kind)
    one = [info.tiny, info.tiny * info.eps, info.max / 16, -0.0, 1 / 3, 1e3, np.inf, np.nan]
    with np.errstate(invalid="ignore"):  # infinity by a complex number
        got = OPERATIONS["avg"].reduce([np.array(one, kind)] * number, [5] * number)
        total = np.array(one, kind)
        for _ in range(number - 1):
            total = total + np.array(one, kind)
        expected = total / kind.type(number) if number > 1 else total
    assert got.tobytes() == expected.tobytes()


def near_the_largest(dtype):
    """Return lists of numbers to be averaged, and weights: finite ones near the largest, and others."""
    largest = float(np.finfo(dtype).max)
    lists = [
        [largest] * 3, [largest, -largest, largest], [largest, largest / 2, 1], [-largest] * 5,
        [largest, 0, 0], [np.inf, largest, largest], [np.nan, largest, largest],
        [np.inf, -np.inf, largest], [largest, largest], [1.5, 2.5, -3],
    ]  # fmt: skip
    choices = [[None, [5] * len(one), range(1, 1 + len(one))] for one in lists]
    return [(one, weights) for one, each in zip(lists, choices) for weights in each]


def exact_average(numbers, weights, dtype):
    """Return the average in a wider type."""
    with np.errstate(invalid="ignore"):
        average = np.average(np.array(numbers, "longdouble"), weights=weights)
    return np.asarray(average).astype(dtype)


FLOATS = ["float16", "float32", "float64"]


@pytest.mark.parametrize("dtype", FLOATS)
@np.errstate(invalid="ignore")  # of infinities
def test_an_average_of_finite_numbers_is_finite(dtype):
    for numbers, weights in near_the_largest(dtype):
        wanted = exact_average(numbers, weights, dtype)
        for shape in ((), (3,), (70_001,)):
            arrays = [np.full(shape, number, dtype) for number in numbers]
            got = OPERATIONS["avg"].reduce(arrays, weights)
            assert got.dtype == dtype and got.shape == shape
            assert_close(got, np.full(shape, wanted))
            in_pieces = arrays[0].copy()
            OPERATIONS["avg"].reduce_in_pieces(in_pieces, [in_pieces, *arrays[1:]], weights)
            assert in_pieces.tobytes() == got.tobytes()
        if dtype == "float64":
            got = OPERATIONS["avg"].reduce_floats(numbers, weights or [1] * len(numbers))
            assert_close(np.array(got), wanted)


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_an_average_of_finite_complex_numbers_is_finite_in_each_part(dtype):
    largest = np.finfo(dtype).max
    for weights in (None, [1, 2, 3]):
        for one, wanted in (
            (largest + 1j, largest + 1j),
            (1 + largest * 1j, 1 + largest * 1j),
            (largest - largest * 1j, largest - largest * 1j),
        ):
            for shape in ((), (70_001,)):
                got = OPERATIONS["avg"].reduce([np.full(shape, one, dtype)] * 3, weights)
                np.testing.assert_allclose(got, np.full(shape, wanted, dtype), rtol=1e-6)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("unit", [1e-300, 1e-40, 1e-30, 1e40, 8e307])
def test_weights_of_any_size_are_relative_to_each_other(dtype, unit):
    arrays = [np.full(3, number, dtype) for number in (1, 4)]
    got = OPERATIONS["avg"].reduce(arrays, [unit, unit * 2])
    assert_close(got, [3] * 3)


@pytest.mark.parametrize("dtype", FLOATS)
@np.errstate(invalid="ignore")
def test_an_average_over_slices_of_finite_numbers_is_finite(dtype):
    for numbers, weights in near_the_largest(dtype):
        for shape in ((), (3,), (70_001,)):
            accumulator = Accumulator("avg")
            for number, weight in zip(numbers, weights or [1] * len(numbers)):
                accumulator.add(np.full(shape, number, dtype), weight)
            got = accumulator.result(np.dtype(dtype))
            assert got.dtype == dtype and got.shape == shape
            assert_close(got, np.full(shape, exact_average(numbers, weights, dtype)))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_an_average_of_many_halves_does_not_overflow_or_lose_its_small_terms(dtype):
    values = [np.full(3, 40000, dtype)] * 4
    for weights in (None, [1, 2, 3, 4]):
        assert_close(OPERATIONS["avg"].reduce(values, weights), [40000] * 3)
        accumulator = Accumulator("avg")
        for value, weight in zip(values, weights or [1] * 4):
            accumulator.add(value.copy(), weight)
        assert_close(accumulator.result(np.dtype(dtype)), [40000] * 3)
    large = np.full(1, 2048, dtype)  # in half precision, 2048 + 1 is 2048
    small = [np.ones(1, dtype)] * 7
    for weights in (None, [1, *[2] * 7]):
        expected = np.average([2048, *[1] * 7], weights=weights)
        assert_close(OPERATIONS["avg"].reduce([large, *small], weights), [expected])


@given(
    data=st.data(),
    which=st.sampled_from([*DEFINED, ("gather", "int8"), (None, "int8")]),
    shape=shapes,
    weights=st.lists(st.integers(1, 9), min_size=1, max_size=6),
)
@examples(200)
def test_accumulated_slices_equal_the_weighted_reduction(data, which, shape, weights):
    op, dtype = which
    values = draw_values(data.draw, shape, dtype, len(weights))
    accumulator = Accumulator(op)
    for value, weight in zip(values, weights):
        accumulator.add(value.copy(), weight)  # a copy, as it takes ownership of the array
    got = accumulator.result(np.dtype(dtype))
    assert got.dtype == dtype
    expected = combine(op, values, weights)
    assert got.shape == expected.shape
    assert_close(got, expected)


@pytest.mark.parametrize("op", ["avg", "sum", "prod", "max"])
def test_a_view_of_memory_that_a_function_uses_again_is_accumulated_as_it_was(op):
    memory, accumulator = np.array(4.0), Accumulator(op)
    for number in (4.0, 3.0, 3.0):  # as of PyTensor's `Shape_i` in Python, which writes in place
        memory[...] = number
        accumulator.add(memory[None], 1)
    numbers = [np.array([number]) for number in (4.0, 3.0, 3.0)]
    assert_close(accumulator.result(np.dtype(float)), combine(op, numbers, [1] * 3))


def test_slices_of_unequal_shapes_can_only_be_gathered():
    for op in OPERATIONS:
        accumulator = Accumulator(op)
        accumulator.add(np.ones(3), 3)
        with pytest.raises(ValueError, match="gather"):
            accumulator.add(np.ones(2), 2)
    accumulator = Accumulator("gather")
    accumulator.add(np.ones(3), 3)
    accumulator.add(np.zeros(2), 2)
    assert accumulator.result(float).tolist() == [1, 1, 1, 0, 0]


def test_operations_refuse_the_dtypes_that_they_are_not_defined_for():
    for op in OPERATIONS:
        for dtype in DTYPES:
            if (op, dtype) in DEFINED:
                OPERATIONS[op].check_dtype(dtype, "it")
            else:
                with pytest.raises(TypeError, match=f"{op}.*it.*{dtype}"):
                    OPERATIONS[op].check_dtype(dtype, "it")


def test_modes_of_outputs_are_an_operation_and_whether_it_runs_over_the_cpu():
    assert parse_output_mode(None) == (None, False)
    for op in [*OPERATIONS, "gather"]:
        assert parse_output_mode(op) == (op, False)
        assert parse_output_mode("c_" + op) == (op, True)
    for wrong in ("", "mean", "c_", "c_c_sum", "SUM"):
        with pytest.raises(ValueError, match="avg"):
            parse_output_mode(wrong)
    for wrong in (1, ["sum"], np.sum):
        with pytest.raises(TypeError):
            parse_output_mode(wrong)


@pytest.mark.parametrize(
    "op, error", [("mean", ValueError), ("gather", ValueError), (None, TypeError), (max, TypeError)]
)
def test_what_is_no_operation_is_refused_with_a_list_of_those_there_are(op, error):
    with pytest.raises(error, match="avg.*max.*min.*prod.*sum"):
        find_operation(op)
