"""Tests of direct calls: they do what the method of a Theano function does with checked arguments."""

import numpy as np
import pytest
import theano
import theano.tensor as tt
from theano.ifelse import ifelse

from synkhronos.engines.theano.engine import TheanoCpuEngine
from synkhronos.engines.theano.engine import DirectCall


def compiled_of(inputs, outputs, **kwargs):
    compiled = theano.function(inputs, outputs, **kwargs)
    compiled.trust_input = True
    return compiled


def of_updates():
    x, total, count = tt.dvector(), theano.shared(np.zeros(2)), theano.shared(0)
    updates = [(total, total + x), (count, count + 1)]
    return compiled_of([x], [total.sum(), x * 2], updates=updates), [total, count]


def of_no_outputs():
    x, total = tt.dvector(), theano.shared(np.zeros(2))
    return compiled_of([x], [], updates=[(total, total + x)]), [total]


def of_the_input_itself():
    x, total = tt.dvector(), theano.shared(np.zeros(2))
    return compiled_of([x], [x, total], updates=[(total, x)]), [total]


def of_a_condition():
    x = tt.dvector()
    return compiled_of([x], [ifelse(tt.gt(x[0], 1), x.sum(), x.prod())]), []


def of_no_garbage_collection():
    x = tt.dvector()
    mode = theano.Mode(linker=theano.gof.vm.VM_Linker(allow_gc=False, use_cloop=True))
    return compiled_of([x], [tt.exp(x).sum()], mode=mode), []


def held(compiled):
    """Return which inputs that are passed, and which outputs, a function still refers to."""
    inputs = [one.storage[0] is not None for one in compiled.input_storage if one.required]
    return inputs, [one.storage[0] is not None for one in compiled.output_storage]


@pytest.mark.parametrize(
    "make",
    [of_updates, of_no_outputs, of_the_input_itself, of_a_condition, of_no_garbage_collection],
    ids=lambda make: make.__name__,
)
def test_a_direct_call_returns_updates_and_frees_what_theano_does(make):
    (compiled, shareds), (other, others) = make(), make()
    assert DirectCall.is_possible(compiled)
    direct = DirectCall(compiled)
    for values in ([1.0, 2.0], [3.0, 4.0], [0.5, 0.5]):
        got, expected = direct([np.array(values)]), other(np.array(values))
        assert type(got) is list and len(got) == len(expected)
        for one, another in zip(got, expected):
            np.testing.assert_array_equal(one, another)
            assert type(one) is type(another) and one.dtype == another.dtype
        for one, another in zip(shareds, others):
            np.testing.assert_array_equal(one.get_value(), another.get_value())
        assert held(compiled) == held(other)


def test_an_error_names_the_node_as_in_theano():
    x, y = tt.dvector(), tt.dvector()
    compiled = compiled_of([x, y], [tt.log(x) + y])
    arguments = [np.ones(2), np.ones(3)]
    errors = []
    for call in (lambda: DirectCall(compiled)(arguments), lambda: compiled(*arguments)):
        with pytest.raises(ValueError, match="Input dimension mis-match") as raised:
            call()
        errors.append(raised.value)
    direct, own = errors
    assert str(direct) == str(own) and "Apply node that caused the error" in str(own)
    assert DirectCall(compiled)([np.ones(2), np.ones(2)])[0].tolist() == [1, 1]


def with_a_profile(x):
    return compiled_of([x], [x.sum()], profile=True)


def with_a_default_value(x):
    return compiled_of([theano.In(x, value=np.array([2.0, 3.0]))], [x.sum()])


def with_one_output(x):
    return compiled_of([x], x.sum())


def with_named_outputs(x):
    return compiled_of([x], {"sum": x.sum()})


def with_python_code(x):
    return compiled_of([x], [x.sum()], mode=theano.Mode(linker="py"))


def with_checked_arguments(x):
    return theano.function([x], [x.sum()])


OTHERS = [
    with_a_profile, with_a_default_value, with_one_output, with_named_outputs, with_python_code,
    with_checked_arguments,
]  # fmt: skip


@pytest.mark.parametrize("make", OTHERS, ids=lambda make: make.__name__)
def test_a_function_that_needs_more_is_called_by_theano(make):
    compiled = make(tt.dvector())
    assert not DirectCall.is_possible(compiled)
    engine = TheanoCpuEngine()
    for _ in range(2):
        got = engine.call(compiled, [np.array([1.0, 2.0])])
        [value] = np.atleast_1d(got["sum"] if isinstance(got, dict) else got)
        assert value == 3
    if compiled.profile:
        assert compiled.profile.fct_callcount == 2


def test_a_call_of_a_subset_computes_the_subset_only():
    x = tt.dvector()
    compiled = compiled_of([x], [x.sum(), theano.tensor.slinalg.cholesky(tt.outer(x, x))])
    engine = TheanoCpuEngine()
    arguments = [np.zeros(2)]  # whose product has no Cholesky factor
    assert engine.call(compiled, arguments, [0])[0] == 0
    with pytest.raises(Exception, match="Apply node that caused the error"):
        engine.call(compiled, arguments)
