"""Tests of the arithmetic of wire formats: codes of numbers, the largest ones, and low rank."""

import numpy as np
import pytest
from hypothesis import given, strategies as st
from oracle import examples

from synkhronos.comms import coded, low_rank, sparse

CODES = coded.CODES
#: The largest error, relative to a number, and relative to the largest number of a block.
BOUNDS = {"float16": (2**-11, 2**-29), "bfloat16": (2**-8, 0), "int8": (0, 0.501 / 127)}
LENGTHS = [1, 2, 255, 256, 257, 32_767, 32_768, 32_769, 70_001]


def decoded(name, values):
    code = CODES[name]
    data = np.full(code.nbytes(len(values)), 0xA5, "uint8")
    code.encode(values, data)
    out = np.full(len(values), -7, "float32")
    code.decode(data, out)
    return out


def numbers(seed, length, exponent=0, spread=0):
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(length) * 2.0 ** (exponent + rng.integers(0, spread + 1, length))
    return values.astype("float32")


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("length", LENGTHS)
def test_codes_are_as_exact_as_they_say(name, length):
    own, of_block = BOUNDS[name]
    for exponent in (-120, -100, -20, 0, 17, 40, 110):
        if name == "int8" and exponent < -110:
            continue  # numbers below 1e-36 are sent as zeros
        values = numbers(length, length, exponent, 12)
        size = 256 if name == "int8" else 32_768
        out = decoded(name, values)
        for start in range(0, length, size):
            block, got = values[start : start + size], out[start : start + size]
            bound = own * np.abs(block) + of_block * np.abs(block).max()
            assert (np.abs(block - got) <= bound + 1e-40).all(), (exponent, start)


@given(st.data())
@examples(100)
def test_codes_take_all_floats(data):
    bits = data.draw(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20))
    values = np.array(bits, "uint32").view("float32")
    for name in CODES:
        out = decoded(name, values)
        if name == "int8" and not np.isfinite(values).all():
            assert np.isnan(out).all()
            continue
        np.testing.assert_array_equal(np.isnan(out), np.isnan(values))
        finite = np.isfinite(values)
        if name == "float16":  # has a scale, so none becomes infinite
            np.testing.assert_array_equal(np.isfinite(out), finite)
        assert (np.sign(out[finite]) * np.sign(values[finite]) >= 0).all()


def test_bfloat16_rounds_to_nearest_even():
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF, 0x80000001], "uint32")
    wanted = np.array([0x3F800000, 0x3F820000, 0x3F810000, 0x3F800000, 0x7F800000, 0x80000000], "uint32")
    out = decoded("bfloat16", bits.view("float32"))
    np.testing.assert_array_equal(out.view("uint32"), wanted)
    # NaN whose mantissa would be rounded up
    out = decoded("bfloat16", np.array([0x7FFFFFFF, 0xFFFFFFFF], "uint32").view("float32"))
    assert np.isnan(out).all()


def test_float16_is_that_of_numpy_for_scaled_numbers():
    values = numbers(3, 32_768, 0, 8)
    scale = np.float32(2.0 ** (14 - (int(np.abs(values).max().view("uint32")) >> 23) + 127))
    halves = (values * scale).astype("float16").astype("float32") / scale
    np.testing.assert_array_equal(decoded("float16", values), halves)
    with_inf = values.copy()
    with_inf[5] = np.inf  # goes another way, with the same result
    halves[5] = np.inf
    np.testing.assert_array_equal(decoded("float16", with_inf), halves)


@pytest.mark.parametrize("length", [1, 2, 100, 16_385, 65_536, 65_537, 200_000])
@pytest.mark.parametrize("kind", ["normal", "few values", "zeros", "sorted", "one block", "sampled"])
def test_the_largest_are_those_of_a_sort(length, kind):
    values = numbers(length, length)
    if kind == "few values":
        values = np.rint(values)
    elif kind == "zeros":
        values[:] = 0
    elif kind == "sorted":
        values = np.sort(values)
    elif kind == "one block":
        values[100:] *= np.float32(1e-6)
    elif kind == "sampled":  # what the sample contains is larger than all other numbers
        values[:: max(length // (1 << 14), 1)] += 100
    for count in {1, max(length // 1000, 1), length // 2 + 1, length}:
        wanted = np.sort(np.argsort(-np.abs(values), kind="stable")[:count])
        np.testing.assert_array_equal(sparse.largest(values, count), wanted)


def test_nan_and_infinity_are_the_largest():
    values = numbers(0, 1000)
    values[[3, 500, 999]] = np.nan, -np.inf, np.inf
    assert list(sparse.largest(values, 1)) == [3]
    assert list(sparse.largest(values, 3)) == [3, 500, 999]


@pytest.mark.parametrize("size, count", [(1, 1), (65_536, 10), (65_537, 65_537), (300_000, 7)])
def test_what_is_packed_is_unpacked(size, count):
    rng = np.random.default_rng(0)
    indices = np.sort(rng.choice(size, count, replace=False))
    values = numbers(1, count)
    data = np.empty(sparse.nbytes_of(count, size), "uint8")
    sparse.pack(indices, values, size, data)
    for got, wanted in zip(sparse.unpack(data, count, size), (indices, values)):
        np.testing.assert_array_equal(got, wanted)


def test_rows_become_orthonormal_and_dependent_ones_zero():
    rng = np.random.default_rng(0)
    factor = rng.standard_normal((4, 1001)).astype("float32")
    factor[1] += 1000 * factor[0]  # almost dependent
    factor[3] = factor[0] - 2 * factor[2]
    before = factor.copy()
    low_rank.orthonormalize(factor)
    np.testing.assert_allclose(factor @ factor.T, np.diag([1, 1, 1, 0]), atol=1e-6)
    left = before[:3] - before[:3] @ factor.T @ factor  # nothing is left of what they span
    np.testing.assert_allclose(left, 0, atol=1e-2)
    zeros = np.zeros((2, 5), "float32")
    low_rank.orthonormalize(zeros)
    assert not zeros.any()


@pytest.mark.parametrize("shape", [(40, 30), (3, 70_000), (3000, 50), (1, 9)])
@pytest.mark.parametrize("are_alike", [True, False])
def test_a_step_takes_a_matrix_apart(shape, are_alike):
    matrix, rest = numbers(1, np.prod(shape)).reshape(shape), numbers(2, np.prod(shape)).reshape(shape)
    whole = matrix / 2 + rest
    right = low_rank.first_factor(shape[1], 2, 0)
    left, own = np.empty((2, shape[0]), "float32"), np.empty((2, shape[1]), "float32")
    low_rank.add_and_multiply(matrix, 0.5, rest, right, left)
    np.testing.assert_allclose(left.T, whole @ right.T, rtol=1e-3, atol=1e-3)
    low_rank.orthonormalize(left)
    low_rank.transposed_times(matrix, left, own)
    low_rank.finish(matrix, left, own, own, rest, are_alike)
    np.testing.assert_allclose(matrix, left.T @ (left @ whole), atol=1e-4)
    np.testing.assert_allclose(matrix + rest, whole, atol=1e-5)


def test_the_power_iteration_finds_the_best_approximation():
    rng = np.random.default_rng(0)
    ends = [np.linalg.qr(rng.standard_normal((n, 6)))[0] for n in (90, 70)]
    matrix = (ends[0] * [64, 32, 16, 8, 4, 2] @ ends[1].T).astype("float32")
    right, rest = low_rank.first_factor(70, 3, 0), np.zeros_like(matrix)
    for _ in range(8):
        given, left, own = matrix.copy(), np.empty((3, 90), "float32"), np.empty_like(right)
        rest[:] = 0
        low_rank.add_and_multiply(given, 1, rest, right, left)
        low_rank.orthonormalize(left)
        low_rank.transposed_times(given, left, own)
        low_rank.finish(given, left, own, own, rest, False)
        right = own
    np.testing.assert_allclose(np.linalg.norm(rest), np.sqrt(64 + 16 + 4), rtol=1e-3)


def test_the_signature_tells_products_apart(monkeypatch):
    shapes = [(300, 500), (64, 7), (300, 500)]
    assert low_rank.signature(shapes, 4) == low_rank.signature(shapes, 4)
    assert low_rank.signature(shapes, 4) != low_rank.signature(shapes[:1], 4)
    matmul, same = np.matmul, low_rank.signature(shapes, 4)
    monkeypatch.setattr(low_rank.np, "matmul", lambda a, b: np.nextafter(matmul(a, b), np.float32(9)))
    assert low_rank.signature(shapes, 4) != same
