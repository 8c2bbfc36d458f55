"""Tests of None as a value: of an input of any type, and of an operation that returns no array."""

import numpy as np
import pytest
from checks.machines import ThreadedMachines, start_world
from compilers import NAME, Apply, Op, as_op, compiler, generic, tt

import synkhronos as synk
from specifications import engine as naive
from specifications.engine import NaiveEngine
from synkhronos.extensions import train

ROWS = np.arange(1.0, 8.0)


class Scale(Op):
    """A vector times 2, or times 3 if the other input is anything but None."""

    __props__ = ()

    def make_node(self, x, thing):
        return Apply(self, [x, thing], [x.type()])

    def perform(self, node, inputs, outputs):
        outputs[0][0] = inputs[0] * (2.0 if inputs[1] is None else 3.0)


@pytest.fixture
def world(world_of):
    world_of(3, master_rank=1)


def scaled(thing=None):
    """Return a function of a vector and an object, and the compiler's own."""
    x, given = tt.dvector("x"), generic("thing")
    made = synk.function([x], (Scale()(x, given), "gather"), bcast_inputs=[thing or given])
    return made, compiler.function([x, given], Scale()(x, given))


def test_none_is_a_value_by_position_and_by_name(world):
    f, serial = scaled()
    calls = [((ROWS, None), {}), ((ROWS,), {"thing": None}), ((), {"thing": None, "x": ROWS})]
    for args, named in calls:
        expected = serial(*args, **named)
        np.testing.assert_array_equal(expected, 2 * ROWS)
        np.testing.assert_array_equal(f(*args, **named), expected)
        np.testing.assert_array_equal(f(*args, **named, num_slices=2), expected)
        np.testing.assert_array_equal(f.as_theano(*args, **named), expected)
        assert f.check(*args, **named).differences == {"output 0": 0.0}
        with synk.fuse():
            pending = f(*args, **named)
        np.testing.assert_array_equal(pending.result(), expected)
    np.testing.assert_array_equal(f(ROWS, thing=0), 3 * ROWS)


# PyTensor's class takes no default values.
@pytest.mark.parametrize("kind", [synk.In] if NAME == "pytensor" else [synk.In, compiler.In])
def test_none_is_not_replaced_by_the_default_value(world, kind):
    x, thing = tt.dvector("x"), generic("thing")
    f = synk.function([x, kind(thing, value="a")], (Scale()(x, thing), "gather"))
    np.testing.assert_array_equal(f(ROWS), 3 * ROWS)
    np.testing.assert_array_equal(f(ROWS, None), 2 * ROWS)
    np.testing.assert_array_equal(f(ROWS, thing=None), 2 * ROWS)


def in_program(rank, f, rows):
    calls = [((rows, None), {}), ((rows,), {"thing": None}), ((), {"x": rows, "thing": None}),
             ((rows,), {"thing": "a"})]  # fmt: skip
    return [rank.call(f, *args, **named) for args, named in calls]


def test_none_is_a_value_in_a_program(world):
    f, _ = scaled()
    for results in synk.spmd(in_program, f, ROWS):
        for got, factor in zip(results, (2, 2, 2, 3)):
            np.testing.assert_array_equal(got, factor * ROWS)
    with pytest.raises((TypeError, synk.WorkerError), match="no value for input 'thing'"):
        synk.spmd(lambda rank: rank.call(f, ROWS))


def test_none_is_a_value_in_a_training_step(world):
    x, thing, w = tt.dvector("x"), generic("thing"), compiler.shared(1.0, "w")
    error = (Scale()(x, thing) - w) ** 2
    loss, gradient = error.mean(), 2 * (w - Scale()(x, thing)).mean()
    step = train.parallel_function(
        [x, thing], loss, updates=[(w, w - 0.1 * gradient)], params=[w], gradients=[gradient], loss=loss
    )
    serial = compiler.function([x, thing], loss)
    calls = [((ROWS, None), {}, 2), ((ROWS,), {"thing": None}, 2), ((ROWS, "a"), {}, 3)]
    for args, named, factor in calls:
        synk.broadcast(w, 1.0)
        expected = serial(*args, **named)
        np.testing.assert_allclose(step(*args, **named), expected)
        np.testing.assert_allclose(synk.gather(w), 1 - 0.2 * (1 - factor * ROWS.mean()))


def test_none_is_no_array(world):
    x, y = tt.dvector("x"), tt.dvector("y")
    f = synk.function([x, y], (x + y).mean())
    f.set_input_shmems(ROWS, ROWS)
    assert f() == f(ROWS) == f(y=ROWS) == 8
    for args, named in (((None, ROWS), {}), ((None,), {}), ((ROWS,), {"y": None}), ((), {"x": None})):
        for call in (f, f.as_theano, f.check):
            with pytest.raises(TypeError, match="input '[xy]': expected numbers, got .*None"):
                call(*args, **named)
    with pytest.raises(TypeError, match="expected numbers, got .*None"):
        f.set_input_shmems(x=None)
    step = train.parallel_function([x, y], (x + y).mean())
    for args, named in (((None, ROWS), {}), ((ROWS,), {"y": None})):
        with pytest.raises(TypeError, match="input '[xy]': expected numbers, got .*None"):
            step(*args, **named)


# Rows of which the operations below return an array, or None; or None on some ranks
FINE, NONE = np.arange(6.0) / 2, np.arange(6.0, 12.0)
MIXED = np.array([
    [1, 2, 3, 9, 3, 2], [9, 9, 2, 2, 2, 2], [1, 1, 9, 9, 1, 1], [1, 1, 1, 1, 9, 9],
], float)  # fmt: skip
OPS = ["gather", "sum", "avg", "prod", "min", "max"]


def forgetful(convert, kind=None):
    """Return an operation on a vector that returns no array if there are large numbers in it."""

    @as_op([tt.dvector], [kind or tt.dvector])
    def apply(v):
        if v.max() < 5:
            return convert(v)

    return apply


KINDS = {
    "vector": forgetful(np.array),
    "number": forgetful(lambda v: np.array(v.sum()), tt.dscalar),
    "long vector": forgetful(lambda v: np.full(1000, v.sum())),
    "very long vector": forgetful(lambda v: np.full(70_001, v.sum())),
}


@pytest.fixture(params=[1, 3], ids="{} rank(s)".format)
def size(world_of, request):
    world_of(request.param, master_rank=request.param // 2)
    return request.param


@pytest.fixture(autouse=True)
def interpreted(in_python):
    """No operation is compiled."""


def without(rows, parts):
    """Return the numbers of the parts for which there is no array."""
    return [part for part, own in enumerate(np.array_split(rows, parts)) if own.max() >= 5]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_output_is_none_if_it_is_none_on_all_ranks_and_an_error_if_on_some(size, kind, op):
    x = tt.dvector("x")
    f, serial = synk.function([x], (KINDS[kind](x), op)), compiler.function([x], KINDS[kind](x))
    assert serial(NONE) is f.as_theano(NONE) is None
    assert f(NONE) is f(NONE, num_slices=2) is None
    assert f(FINE).dtype == f(FINE, num_slices=2).dtype == float
    for rows in MIXED:
        ranks = without(rows, size)
        if len(ranks) == size:
            assert f(rows) is None
        else:
            on_ranks = rf"output 0 .*None on rank\(s\) {', '.join(map(str, ranks))}, but"
            with pytest.raises(ValueError, match=on_ranks):
                f(rows)
        if len(without(rows, 2 * size)) == 2 * size:
            assert f(rows, num_slices=2) is None
        else:
            in_slices = "output 0 is None in 1 of 2 slices"
            with pytest.raises((ValueError, synk.WorkerError), match=f"output 0 .*None on|{in_slices}"):
                f(rows, num_slices=2)


@as_op([tt.dvector], [tt.dvector])
def none_if_long(v):
    return None if len(v) > 2 else np.full(3, np.nan)


@as_op([tt.dvector], [tt.dvector])
def none_if_short(v):
    return np.full(3, np.nan) if len(v) > 2 else None


def test_check_compares_none_with_none_alone(world):
    x = tt.dvector("x")
    f = synk.function([x], (KINDS["vector"](x), "gather"))
    assert f.check(FINE).differences == f.check(NONE).differences == {"output 0": 0.0}
    with pytest.raises(ValueError, match=r"output 0 .*None on rank\(s\) \d.*not on rank\(s\) \d"):
        f.check(np.array([1.0, 1, 9]))
    for made, text in (
        (none_if_long, "output 0 is not None, but the serial output is$"),
        (none_if_short, "output 0 is None, but the serial output is not$"),
    ):
        with pytest.raises(synk.MismatchError, match=text):
            synk.function([x], (made(x), "avg")).check(FINE)


def none_after_a_call(rows=(1, 1, 9)):
    """Return a variable that is None on the last of three ranks, and the function that updates it."""
    x, w = tt.dvector("x"), compiler.shared(np.ones(1), "w")
    f = synk.function([x], updates=[(w, KINDS["vector"](x))])
    f(np.array(rows, float))
    return w, f


USES = {
    "all_reduce": synk.all_reduce, "reduce": synk.reduce, "gather": synk.gather,
    "all_gather": synk.all_gather, "broadcast": synk.broadcast, "get_lengths": synk.get_lengths,
    "get_value": lambda w: synk.get_value(2, w), "in_sync": synk.in_sync,
}  # fmt: skip


@pytest.mark.parametrize("use", USES)
def test_a_variable_that_an_update_has_set_to_none_is_refused_by_name(world, use):
    w, _ = none_after_a_call()
    with pytest.raises((ValueError, synk.WorkerError), match="w has no value.* returned None for"):
        USES[use](w)
    synk.broadcast(w, [5.0])
    assert [synk.get_value(rank, w).tolist() for rank in range(3)] == [[5.0]] * 3


def test_an_update_that_is_none_in_some_slices_is_an_error(world):
    _, f = none_after_a_call()
    f(np.arange(6.0, 12), num_slices=2)
    with pytest.raises(synk.WorkerError, match="the update of w is None in 1 of 2 slices"):
        f(np.array([1.0, 1, 1, 1, 1, 9]), num_slices=2)


def outputs_in_program(rank, f):
    return [rank.call(f, rows) for rows in (NONE, FINE)]


def test_an_output_in_a_program_is_none_as_in_the_compiler(world):
    x = tt.dvector("x")
    f = synk.function([x], (KINDS["vector"](x), "gather"))
    for none, fine in synk.spmd(outputs_in_program, f):
        assert none is None
        np.testing.assert_array_equal(fine, FINE)


def long_or_none(v):
    return np.full(1000, v.sum()) if v.max() < 5 else None


@pytest.fixture
def machines():
    """A world of two machines with two ranks each, which are threads."""
    start_world(ThreadedMachines((2, 2), 0, 30), NaiveEngine())
    yield
    synk.close()


@pytest.mark.parametrize("rank", range(4))
def test_none_on_one_rank_is_an_error_that_names_it_on_several_machines(machines, rank):
    x = naive.Tensor("x", "float64", 1)
    f = synk.function([x], [(naive.apply(long_or_none, x), "sum"), (x.sum(), "sum")])
    rows = np.ones(4)
    for _ in range(2):
        assert f(rows)[0].tolist() == [4.0] * 1000
        error = ValueError if rank == 0 else synk.WorkerError
        with pytest.raises(error, match=f"output 0 is None on rank {rank}, and cannot be reduced"):
            f(np.where(np.arange(4) == rank, 9, rows))


def of_two_sizes(v):
    return np.ones(400 if v.max() < 5 else 600)


@pytest.mark.parametrize("ranks", [[3], [0], [2, 3], [0, 1], [0, 3], [1, 2, 3]])
def test_a_shape_that_differs_between_ranks_is_an_error_on_several_machines(machines, ranks):
    """Also if it is reduced by some machines only: outputs of 600 numbers are, and those of 400 not."""
    x = naive.Tensor("x", "float64", 1)
    f = synk.function([x], (naive.apply(of_two_sizes, x), "sum"))
    rows = np.ones(4)
    for _ in range(2):
        assert f(rows).tolist() == [4.0] * 400
        with pytest.raises((ValueError, synk.WorkerError), match="shapes differ between the ranks"):
            f(np.where(np.isin(np.arange(4), ranks), 9, rows))
    assert f(np.full(4, 9.0)).tolist() == [4.0] * 600


def test_none_can_be_gathered_from_several_machines(machines):
    x = naive.Tensor("x", "float64", 1)
    f = synk.function([x], (naive.apply(long_or_none, x), "gather"))
    assert f(np.ones(4)).shape == (4000,) and f(np.full(4, 9.0)) is None
    with pytest.raises(ValueError, match=r"output 0 is None on rank\(s\) 1, 2, but not on .* 0, 3:"):
        f(np.array([1.0, 9, 9, 1]))
