"""Digests, samples, differences and tolerances of arrays."""

import numpy as np
import pytest

from synkhronos.arithmetic.comparison import agree, difference, digest, sample, tolerance


def test_digests_tell_arrays_apart_by_values_shape_and_dtype():
    base = np.arange(6.0)
    assert digest(base) == digest(base.copy()) == digest(np.arange(12.0)[::2] / 2)
    others = [base + 1, base.reshape(2, 3), base.astype("float32"), base[:5], base.view("int64")]
    assert len({digest(one) for one in [base, *others]}) == 6
    assert digest(np.asfortranarray(base.reshape(2, 3))) == digest(base.reshape(2, 3))
    assert digest(np.array(1.0)) != digest(np.array([1.0])) and digest(np.zeros((0, 2)))


@pytest.mark.parametrize(
    "shape", [(), (0,), (5,), (1000,), (3, 1000), (1000, 3), (40, 50, 60), (7, 1, 999)]
)
@pytest.mark.parametrize("limit", [1, 10, 100, 10**6])
def test_a_sample_is_a_view_of_at_most_so_many_elements(shape, limit):
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    part = sample(array, limit)
    assert part.ndim == array.ndim and part.size <= max(limit, 0 if array.size == 0 else 1)
    assert np.shares_memory(part, array) or not part.size
    assert set(part.ravel()) <= set(array.ravel())
    if array.size <= limit:
        assert part is array
    else:
        assert part.size >= limit / 4  # evenly spaced, not a corner
        assert array.size < 4 or part.max() >= array.size / 4 or limit < 4


def test_a_difference_is_absolute_and_relative_to_the_largest_value():
    assert difference(np.array([1.0, 2.0]), np.array([1.0, 4.0])) == (2.0, 0.5)
    assert difference(np.zeros(0), np.zeros(0)) == (0, 0)
    assert difference(np.array([0.0]), np.array([0.0])) == (0, 0)
    assert difference(np.array([1.0]), np.array([0.0])) == (1, np.inf)
    assert difference(np.array([np.nan, np.inf]), np.array([np.nan, np.inf])) == (0, 0)
    assert difference(np.array([np.nan, 1.0]), np.array([1.0, 1.0])).absolute == np.inf
    assert difference(np.array([True]), np.array([False])) == (1, np.inf)
    assert difference(np.array([200], "uint8"), np.array([100], "uint8")) == (100, 1)
    assert difference(np.array([3 + 4j]), np.array([0j])).absolute == 5
    big = np.array([3e38], "float32")
    assert np.isfinite(difference(big, -big).absolute)
    assert "by up to 2 (0.5 of" in str(difference(np.array([2.0]), np.array([4.0])))


def test_agreement_is_within_what_is_allowed_and_else_exact():
    assert agree(np.array([1.0, np.nan]), np.array([1.001, np.nan]), 1e-2)
    assert not agree(np.array([1.0]), np.array([1.001]), 1e-4)
    assert not agree(np.array([np.nan]), np.array([1.0]), 1e9)
    assert not agree(np.array([np.inf]), np.array([1.0]), 1e9)
    big = np.array([2**53], "int64")
    assert agree(big, big, 0) and not agree(big, big + 1, 0)
    assert not agree(np.array([np.nan]), np.array([1.0]), 0)


def test_single_precision_of_the_operands_limits_the_precision():
    assert tolerance("float64") == 1e-7 == tolerance("complex128")
    assert tolerance("float32") == 1e-4 == tolerance("float64", ["float32", "int32"])
    assert tolerance("float64", ["float16", "int8"]) == 1e-7
    assert tolerance("float16") == 1e-2
    assert tolerance("int64", ["float32"]) == 0 == tolerance("bool")
