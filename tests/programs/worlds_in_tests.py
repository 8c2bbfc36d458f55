"""Tests that each create a world, to be run under pytest-xdist. One leaves its world open."""

import numpy as np
import pytest
import synkhronos as synk
import theano.tensor as tt


@pytest.mark.parametrize("number", range(6))
def test_world(number):
    synk.fork(2, use_gpu=False)
    x = tt.dvector()
    f = synk.function([x], (x.sum(), "sum"), mode="FAST_COMPILE")
    assert f(np.full(4, number)) == 4 * number
    synk.close()
    if number % 2 == 0:
        with pytest.warns(RuntimeWarning):
            synk.close()


def test_that_leaves_its_world_open():
    synk.fork(3, use_gpu=False)
    synk.distribute()
