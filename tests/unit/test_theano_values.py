"""Theano computes what it computed on Python 3.9 and NumPy 1.19, on all versions."""

from pathlib import Path

import pytest

from synkhronos.engines.theano.kernels import registration
from theano_values import FAMILIES, differences, read

RECORDED = Path(__file__).with_name("recorded") / "theano_values.json.gz"
WAYS = [(name, way) for name, (_, ways) in FAMILIES.items() for way in ways]
OPTIMIZED = [name for name, way in WAYS if way == "optimized"]


@pytest.fixture(scope="module")
def recorded():
    """The recorded results."""
    return read(RECORDED)


def is_slow(name, way):
    """Tell whether the values take long: compiled code, and constants in what is optimized anyway."""
    return way == "compiled" or (way == "constant" and name in OPTIMIZED)


#: Optimizing takes long: usually one case in so many.
SAMPLED = 6
EVERY = [SAMPLED, pytest.param(1, marks=pytest.mark.slow)]


@pytest.mark.parametrize(
    "name, way",
    [
        pytest.param(*one, marks=[pytest.mark.slow] * is_slow(*one))
        for one in WAYS
        if one[1] != "optimized"
    ],
)
def test_values_are_the_recorded_ones(recorded, name, way):
    registration.use(False)
    lines = differences(recorded, name, way)
    assert not lines, f"{len(lines)} results differ:\n" + "\n".join(lines)


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("name", OPTIMIZED)
def test_optimized_values_are_the_recorded_ones(recorded, name, every):
    registration.use(False)
    lines = differences(recorded, name, "optimized", every=every)
    assert not lines, f"{len(lines)} results differ:\n" + "\n".join(lines)


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("name", OPTIMIZED)
def test_values_of_the_operations_that_replace_theanos(recorded, name, every):
    registration.use(True)
    lines = differences(recorded, name, "optimized", roundings=2, every=every)
    assert not lines, f"{len(lines)} results differ:\n" + "\n".join(lines)


def test_every_family_is_recorded(recorded):
    assert list(recorded) == [f"{name} {way}" for name, way in WAYS]
    assert all(
        any(not text.startswith("error") for text in cases.values()) for cases in recorded.values()
    )


def test_a_draw_without_an_update_leaves_the_state_of_the_stream():
    """A shallow copy of a generator shares its state since NumPy 2."""
    import theano
    from theano.tensor.shared_randomstreams import RandomStreams

    draw = RandomStreams(1).uniform(())
    f = theano.function([], draw, no_default_updates=True)
    assert f() == f()
