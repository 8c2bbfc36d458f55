"""Tests of reductions of shared variables: when they are compiled again, and with other weights."""

import numpy as np
import pytest
import theano

import synkhronos as synk
from synkhronos.arrays.data import Data

from synkhronos.variables.collectives import Reduce, plan_reduction
from synkhronos.variables.replicas import conditioned
from synkhronos.world.world import current_world

pytestmark = pytest.mark.usefixtures("in_python", "in_threads")


@pytest.fixture
def variable(world_of):
    world_of(2)
    made = theano.shared(np.zeros(3), "w")
    f = synk.function([], made.sum())
    yield made
    del f


def test_equal_reductions_are_one_schedule(variable):
    def schedule(*options):
        return plan_reduction(variable, *options)[3].schedule

    first = schedule("avg", "all", None, False)
    assert schedule("avg", "all", None, False) is first
    others = [schedule("sum", "all", None, False), schedule("avg", "new", None, False)]
    assert first not in others and schedule("sum", "all", None, False) is others[0]


def test_a_reduction_with_other_weights_is_otherwise_the_same():
    reduction = Reduce([4, 7], "avg", "all", None, True, None, {4: 1})
    changed = reduction.changed([1.0, 3.0])
    assert changed.weights == [1.0, 3.0] and reduction.weights is None
    same = {name: value for name, value in vars(changed).items() if name != "weights"}
    assert same == {name: value for name, value in vars(reduction).items() if name != "weights"}
    assert changed.changed(None) is changed


def test_data_are_used_as_they_are_only_if_they_have_the_dtype_of_the_variable(variable):
    engine = current_world().rank_state.engine
    fitting, integers = synk.data(np.arange(3.0)), synk.data(np.arange(3))
    [taken] = conditioned(engine, [variable], [fitting])
    [converted] = conditioned(engine, [variable], [integers])
    assert taken is fitting and not isinstance(converted, Data)
    assert converted.dtype == "float64" and converted.tolist() == [0, 1, 2]
