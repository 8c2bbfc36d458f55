"""in_sync: which replicas of shared variables differ from the master's."""

import numpy as np
import pytest
from compilers import RandomStreams, Streams, compiler, tt

import synkhronos as synk
from synkhronos.world.world import current_world

pytestmark = pytest.mark.usefixtures("in_python")


def mismatch(*args):
    with pytest.raises(synk.MismatchError) as caught:
        synk.in_sync(*args)
    return caught.value


@pytest.fixture
def variables(world_of):
    """Two variables with the same name, and others, on three ranks; rank 1 is the master."""
    world_of(3, master_rank=1)
    first, second = (compiler.shared(np.array([1.0, 2.0]), "w") for _ in range(2))
    count = compiler.shared(np.int64(3), "count")
    synk.function([], [first.sum() + second.sum(), (count, "sum")])
    synk.distribute()
    return first, second, count


def test_equal_replicas_are_in_sync(variables):
    assert synk.in_sync() is True
    assert synk.in_sync(variables[0]) and synk.in_sync(list(variables))
    synk.broadcast(variables[0], np.array([np.nan, -0.0]))
    assert synk.in_sync()


def test_replicas_that_differ_are_named_with_the_ranks_and_by_how_much(variables):
    first, second, count = variables
    synk.set_value(2, second, [1.0, 6.0])
    synk.set_value(0, count, 4)
    synk.set_value(2, count, 5)
    error = mismatch()
    assert error.names == ["w #2", "count"]
    lines = str(error).splitlines()
    assert "synk.broadcast() or synk.all_reduce()" in lines[0]
    assert lines[1:] == [
        "- w #2: rank 2, by up to 4 (2 of the largest value)",
        "- count: rank 0, 2, by up to 2 (0.667 of the largest value)",
    ]
    assert mismatch([first, count]).names == ["count"]
    assert synk.in_sync(first)
    synk.broadcast([second, count])
    assert synk.in_sync()


def test_bits_count_and_so_do_shapes(variables):
    first, second, _ = variables
    synk.broadcast(first, [0.0, 1.0])
    synk.set_value(0, first, [-0.0, 1.0])
    synk.set_value(0, second, [1.0, 2.0, 3.0])
    text = str(mismatch())
    assert "w #1: rank 0, by up to 0" in text
    assert "w #2: rank 0, in their shapes: [(3,), (2,), (2,)] by rank" in text


@pytest.mark.parametrize("make_streams", [Streams, RandomStreams])
def test_streams_and_each_ranks_own_rows_are_left_out(two, make_streams):
    scattered, sliceable = (compiler.shared(np.zeros((1, 2)), name) for name in ("rows", "sliceable"))
    outputs = [scattered.sum(), sliceable.sum(), make_streams(1).uniform(size=(2,))]
    synk.function([], [(one, "gather" if one.ndim else "sum") for one in outputs],
                  sliceable_shareds=[sliceable])()  # fmt: skip
    synk.scatter(scattered, np.arange(4.0).reshape(2, 2))
    synk.set_value(1, sliceable, np.ones((2, 2)))
    assert synk.in_sync()
    assert mismatch(scattered).names == ["rows"]
    assert mismatch([sliceable]).names == ["sliceable"]
    synk.all_gather(scattered)  # no more rows of its own
    assert synk.in_sync(scattered)
    synk.set_value(1, scattered, np.ones((2, 2)))
    assert mismatch().names == ["rows"]


def test_updates_and_set_value_on_the_master_are_found(two):
    x, w, v = tt.dvector("x"), compiler.shared(np.zeros(2), "w"), compiler.shared(1.0, "v")
    f = synk.function([x], x.mean() + v, updates=[(w, w + x.mean())])
    f(np.ones(4))
    assert synk.in_sync()
    f(np.arange(4.0))
    assert mismatch().names == ["w"]
    synk.all_reduce(w)
    assert synk.in_sync()
    v.set_value(2.0)
    assert mismatch().names == ["v"]


def test_without_replicas_nothing_differs_and_no_worker_is_started(world_of):
    world_of(2)
    w = compiler.shared(np.zeros(2), "w")
    assert synk.in_sync()
    synk.function([], w.sum())
    assert synk.in_sync() and synk.in_sync(w) and not current_world().started
    synk.distribute()
    late = compiler.shared(np.zeros(2), "late")
    synk.function([], late.sum())
    assert synk.in_sync() and synk.in_sync([w, late])
    world_of(1)
    synk.function([], w.sum())()
    w.set_value(np.ones(2))
    assert synk.in_sync()


def test_wrong_arguments_and_places_are_refused(two):
    w, other = compiler.shared(np.zeros(2), "w"), compiler.shared(np.zeros(2), "other")
    synk.function([], w.sum())
    with pytest.raises(TypeError, match="shared variables of tensors"):
        synk.in_sync(tt.dvector())
    with pytest.raises(ValueError, match="other is not used by any function.*synk.broadcast"):
        synk.in_sync(other)
    with pytest.raises(ValueError, match="more than once"):
        synk.in_sync([w, w])
    with pytest.raises(ValueError, match="empty list"):
        synk.in_sync([])
    synk.close()
    with pytest.raises(synk.ClosedError):
        synk.in_sync()


@pytest.mark.parametrize("size, master_rank", [(1, 0), (2, 1), (3, 0)])
def test_any_variable_can_be_broadcast_at_any_time(world_of, size, master_rank):
    world_of(size, master_rank=master_rank)
    names = ("before", "after", "unused")
    before, after, unused = (compiler.shared(np.zeros(2), name) for name in names)
    synk.broadcast(before, [1.0, 2.0])
    assert before.get_value().tolist() == [1, 2] and not current_world().started
    f = synk.function([], (before.sum(), "sum"))
    assert f() == 3 * size
    synk.broadcast([after, unused], [[3.0, 4.0], synk.data([5.0, 6.0])])
    for rank in range(size):
        assert synk.get_value(rank, unused).tolist() == [5, 6]
    g = synk.function([], (after.sum() + before.sum(), "sum"))
    assert g() == 10 * size
    unused.set_value(np.zeros(2))
    synk.broadcast(unused)
    synk.all_reduce(unused, "sum")
    assert synk.gather(unused).tolist() == [[0, 0]] * size
    assert synk.in_sync([before, after, unused])
