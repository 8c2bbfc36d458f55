"""Checks of arguments: what they accept, what they return, and their errors."""

from fractions import Fraction

import numpy as np
import pytest

from synkhronos import _checks as checks

NAN = float("nan")


@pytest.mark.parametrize(
    "check, value, expected",
    [
        (checks.check_int, np.int8(3), 3),
        (checks.check_number, np.float32(0.5), 0.5),
        (checks.check_number, Fraction(1, 4), 0.25),
        (checks.check_number, 2, 2.0),
        (checks.check_flag, np.bool_(True), True),
        (checks.check_string, "name", "name"),
        (lambda value, label: checks.check_choice(value, label, ("sum", "avg")), "sum", "sum"),
        (lambda values, label: checks.check_list(values, label, "rows"), (1, 2), [1, 2]),
        (lambda values, label: checks.check_list(values, label, "rows"), None, []),
        (lambda value, label: checks.check_in_range(value, label, 0, 1), np.float64(1), 1.0),
    ],
)
def test_a_check_returns_the_plain_form(check, value, expected):
    checked = check(value, "f: x")
    assert checked == expected and type(checked) is type(expected)


@pytest.mark.parametrize(
    "check, value, error, message",
    [
        (checks.check_int, True, TypeError, "f: x: expected an int, got True"),
        (checks.check_int, np.bool_(True), TypeError, "f: x: expected an int, got "),
        (checks.check_int, 2.0, TypeError, "f: x: expected an int, got 2.0"),
        (lambda *given: checks.check_int(*given, 1), 0, ValueError, "f: x: expected at least 1, got 0"),
        (checks.check_number, False, TypeError, "f: x: expected a number, got False"),
        (checks.check_number, np.bool_(True), TypeError, "f: x: expected a number, got "),
        (checks.check_number, 1j, TypeError, "f: x: expected a number, got 1j"),
        (checks.check_number, "1", TypeError, "f: x: expected a number, got '1'"),
        (lambda *given: checks.check_in_range(*given, 0), -1, ValueError, "expected at least 0, got -1"),
        (lambda *given: checks.check_in_range(*given, 0, 1), NAN, ValueError, "a number from 0 to 1"),
        (checks.check_flag, 1, TypeError, "f: x: expected True or False, got 1"),
        (checks.check_flag, None, TypeError, "f: x: expected True or False, got None"),
        (checks.check_string, 1, TypeError, "f: x: expected a string, got 1"),
        (lambda *given: checks.check_choice(*given, "ba"), "c", ValueError, "one of ['a', 'b']"),
        (lambda *given: checks.check_choice(*given, "ba"), 1, TypeError, "expected one of ['a', 'b']"),
        (lambda *given: checks.check_choice(*given, "ba"), [], TypeError, "expected one of ['a', 'b']"),
        (lambda *given: checks.check_list(*given, "rows"), "ab", TypeError, "a list of rows, got 'ab'"),
    ],
)  # fmt: skip
def test_a_check_names_the_argument(check, value, error, message):
    with pytest.raises(error) as caught:
        check(value, "f: x")
    assert message in str(caught.value) and str(caught.value).startswith("f: x: expected ")
