"""Lists of names, and values, in messages."""

import numpy as np
import pytest
import theano
import theano.tensor as tt

import synkhronos as synk
from synkhronos.extensions import train


@pytest.fixture
def two(world_of):
    world_of(2)


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
