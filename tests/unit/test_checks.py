"""Checks of arguments: what they accept, what they return, and their errors; and lists in messages."""

from fractions import Fraction

import numpy as np
import pytest

from synkhronos import _checks as checks
import theano
import theano.tensor as tt
import synkhronos as synk
from synkhronos.extensions import train

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


def test_refusals_of_many_variables_without_names_are_short(two):
    x, scale = tt.dmatrix("x"), tt.dvector("scale")
    shareds = [theano.shared(np.ones(3)) for _ in range(30)]
    others = [theano.shared(np.ones((3, 4))) for _ in range(30)]
    total = sum((shared * x).mean() for shared in shareds)
    own = [(shared, x.mean(axis=0), None) for shared in shareds]
    wrong = (others[0], tt.sqr(others[0] + (sum(shareds) * scale).sum()))
    with pytest.raises(ValueError, match=r"of the shape \(3, 4\) .*\(30 times\)") as refused:
        train.parallel_function([x, scale], total, updates=[*own, wrong])
    assert len(str(refused.value)) < 1000
    many = [tt.dvector() for _ in range(30)]
    for call in (
        lambda: synk.function([x], total, sliceable_shareds=others[:1]),
        lambda: synk.function([x], total, updates=[(one, one, one, one) for one in shareds]),
        lambda: synk.function([*shareds], total),
        lambda: synk.function([x, *many], total, on_unused_input="ignore")(),
        lambda: synk.function([x], total)(y=3),
        lambda: synk.scatter(shareds),
    ):
        with pytest.raises((TypeError, ValueError)) as refused:
            call()
        assert len(str(refused.value)) < 500, refused.value


def test_an_output_is_named_as_the_script_gave_it(two):
    x, w = tt.dmatrix("x"), theano.shared(np.ones(3), "w")
    loss = (x * w).mean()
    mixed = tt.grad(loss, w).sum() + x.max()
    updates = [(w, w - tt.grad(loss, w))]
    for outputs, name in (([mixed], r"outputs\[0\]"), ([x.mean(), mixed], r"outputs\[1\]")):
        with pytest.raises(ValueError, match=f"^{name}: it uses a gradient"):
            train.make_train_function(loss, [w], x, None, updates, outputs=outputs)
    with pytest.raises(ValueError, match=r"^outputs\['b'\]: it uses a gradient"):
        train.parallel_function([x], {"a": loss, "b": mixed}, updates=updates)
