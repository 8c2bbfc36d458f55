"""Tests of random sequences of collectives on 1 to 4 ranks against lists of NumPy arrays."""

import numpy as np
import pytest
from checks.wire_specification import Naive
from compilers import FLOAT16, compiler, tt
from hypothesis import assume, given, strategies as st
from oracle import (
    WORLD_IDS, WORLDS, as_given, assert_same, batches, combine, draw_names, exact, examples, parts,
    selected,
)  # fmt: skip

import synkhronos as synk
from synkhronos.world.world import current_world

OPS = ["avg", "sum", "prod", "min", "max"]
TAILS = {"matrix": (3,), "tensor": (2, 2), "vector": (), "long": (), "half": (), "byte": ()}
STARTS = {
    "matrix": np.zeros((2, 3), "float32"), "tensor": np.zeros((2, 2, 2), "float64"),
    "vector": np.zeros(5, "float64"), "long": np.zeros(4, "int64"), "half": np.zeros(3, FLOAT16),
    "byte": np.zeros(3, "uint8"), "number": np.array(0, "float32"),
    "large": np.zeros((130, 140), "float32"), "count": np.array(0, "int32"),
}  # fmt: skip
WIRES = ["float16", "bfloat16", "int8", synk.TopK(0.25), synk.PowerSGD(2),
         synk.PowerSGD(2, exact_steps=2)]  # fmt: skip
ROWS = list(TAILS)
NAMES = list(STARTS)


class Model:
    """Shared variables, and the expected values of each rank's replicas."""

    def __init__(self, size, master_rank):
        self.size, self.master_rank = size, master_rank
        self.shared = {name: compiler.shared(value, name) for name, value in STARTS.items()}
        sums = [tt.sum(tt.cast(shared, "float64")) for shared in self.shared.values()]
        self.read = synk.function([], [(one, "gather") for one in sums])
        synk.distribute()
        self.values = {}
        self.machines = getattr(current_world().transport, "_machines", [range(size)])
        shapes = [STARTS["large"].shape]
        self.wires = {wire: Naive(wire, len(self.machines), shapes) for wire in WIRES}

    def reset(self, rng):
        for name, start in STARTS.items():
            self.values[name] = [self.random(rng, name, start.shape) for _ in range(self.size)]
        for rank in range(self.size):
            values = [self.values[name][rank] for name in self.shared]
            synk.set_value(rank, list(self.shared.values()), values)

    def random(self, rng, name, shape):
        if STARTS[name].dtype.kind in "iu":
            return np.asarray(rng.integers(0, 4, shape)).astype(STARTS[name].dtype)
        return np.asarray(exact(rng, shape, "float64") / 2).astype(STARTS[name].dtype)

    def check(self, rtol=0):
        variables = list(self.shared.values())
        by_rank = [synk.get_value(rank, variables) for rank in range(self.size)]
        found = {name: list(values) for name, values in zip(NAMES, zip(*by_rank))}
        for name in NAMES:
            for got, expected in zip(found[name], self.values[name]):
                assert_same(got, expected, STARTS[name].dtype)
        for name, sums in zip(NAMES, self.read()):
            for got, value in zip(sums, self.values[name]):
                np.testing.assert_allclose(
                    np.float64(got), np.sum(np.float64(value)), rtol=1e-2, atol=1e-2
                )
        self.values = found  # so that rounding errors do not add up

    def is_large(self):
        return any(
            np.abs(value).max(initial=0) > 30 for values in self.values.values() for value in values
        )


@pytest.fixture(scope="module", params=WORLDS, ids=WORLD_IDS)
def model(request, open_world):
    size, master_rank = request.param
    open_world(size, master_rank=master_rank)
    return Model(size, master_rank)


def do_scatter(model, draw, rng):
    names = draw_names(draw, ROWS)
    length = draw(st.integers(0, 9))
    batch = draw(batches(length))
    arrays = [model.random(rng, name, (length, *TAILS[name])) for name in names]
    synk.scatter(*as_given(draw, [model.shared[name] for name in names], arrays), batch=batch)
    for name, array in zip(names, arrays):
        model.values[name] = parts(selected(batch, array), model.size)


def do_set_value(model, draw, rng):
    rank = draw(st.integers(0, model.size - 1))
    batch = None
    if draw(st.booleans()):
        names, length = draw_names(draw, ROWS), draw(st.integers(0, 9))
        batch = draw(batches(length))
        arrays = [model.random(rng, name, (length, *TAILS[name])) for name in names]
    else:
        names = draw_names(draw, NAMES)
        arrays = [model.random(rng, name, STARTS[name].shape) for name in names]
    variables, values = as_given(draw, [model.shared[name] for name in names], arrays)
    synk.set_value(rank, variables, values, batch=batch)
    for name, array in zip(names, arrays):
        model.values[name] = [
            *model.values[name][:rank],
            selected(batch, array),
            *model.values[name][rank + 1 :],
        ]


def do_broadcast(model, draw, rng):
    names = draw_names(draw, NAMES)
    variables = [model.shared[name] for name in names]
    if draw(st.booleans()):
        shapes = [
            (draw(st.integers(0, 5)), *TAILS[name]) if name in TAILS else STARTS[name].shape
            for name in names
        ]
        arrays = [model.random(rng, name, shape) for name, shape in zip(names, shapes)]
        synk.broadcast(*as_given(draw, variables, arrays))
    else:
        arrays = [model.values[name][model.master_rank] for name in names]
        synk.broadcast(variables)
    for name, array in zip(names, arrays):
        model.values[name] = [array] * model.size


def do_gather(model, draw, rng):
    nd_up = draw(st.sampled_from([0, 1]))
    names = draw_names(draw, NAMES if nd_up else ROWS)
    for name, got in zip(names, synk.gather([model.shared[name] for name in names], nd_up)):
        values = model.values[name]
        if nd_up == 0:
            assert_same(got, np.concatenate(values))
        elif len({value.shape for value in values}) == 1:
            assert_same(got, np.stack(values))
        else:
            assert isinstance(got, list) and len(got) == model.size
            for one, value in zip(got, values):
                assert_same(one, value)


def do_all_gather(model, draw, rng):
    names = draw_names(draw, ROWS)
    synk.all_gather([model.shared[name] for name in names])
    for name in names:
        model.values[name] = [np.concatenate(model.values[name])] * model.size


def draw_reduction(model, draw, rng):
    op = draw(st.sampled_from(OPS))
    names = [name for name in draw_names(draw, NAMES) if op != "avg" or STARTS[name].dtype.kind == "f"]
    assume(names)
    ragged = [name for name in names if len({v.shape for v in model.values[name]}) > 1]
    weights = None
    if op == "avg" and draw(st.booleans()):
        weights = draw(
            st.lists(st.sampled_from([0, 1, 2, 0.25]), min_size=model.size, max_size=model.size).filter(
                any
            )
        )
        for rank, weight in enumerate(weights):
            if not weight and not ragged:  # the values of a rank with weight 0 must not matter
                for name in names:
                    nan = np.full_like(model.values[name][rank], np.nan)
                    synk.set_value(rank, model.shared[name], nan)
                    model.values[name] = [*model.values[name]]
                    model.values[name][rank] = nan
    return op, names, weights, ragged


def do_all_reduce(model, draw, rng):
    op, names, weights, ragged = draw_reduction(model, draw, rng)
    variables = [model.shared[name] for name in names]
    if ragged:
        check_ragged(model, ragged, lambda shared: synk.all_reduce(shared, op, weights=weights))
        return
    synk.all_reduce(variables, op, weights=weights)
    for name in names:
        got = {synk.get_value(rank, model.shared[name]).tobytes() for rank in range(model.size)}
        assert len(got) == 1
        model.values[name] = [reduced(op, model.values[name], weights)] * model.size


def do_all_reduce_in_a_format(model, draw, rng):
    """Reduce small arrays, which travel as they are, and a large one, of numbers without errors."""
    wire, op = draw(st.sampled_from(WIRES)), draw(st.sampled_from(["avg", "sum"]))
    names = [*draw(st.lists(st.sampled_from(["matrix", "number"]), unique=True)), "large"]
    weights = None
    if op == "avg" and draw(st.booleans()):
        weights = draw(
            st.lists(st.sampled_from([0, 1, 2, 4]), min_size=model.size, max_size=model.size).filter(any)
        )
    for name in names:
        values = [model.random(rng, name, STARTS[name].shape) for _ in range(model.size)]
        model.values[name] = values
        for rank, value in enumerate(values):
            value = np.full_like(value, np.nan) if weights and not weights[rank] else value
            synk.set_value(rank, model.shared[name], value)
    synk.all_reduce([model.shared[name] for name in names], op, weights=weights, wire=wire)
    shares, scales = shares_of_machines(model, op, weights or [1] * model.size)
    expected = model.wires[wire].reduce(shares, scales).reshape(STARTS["large"].shape)
    for name in names:
        got = [synk.get_value(rank, model.shared[name]) for rank in range(model.size)]
        assert len({one.tobytes() for one in got}) == 1
        values = model.values[name]
        wanted = expected if name == "large" else reduced(op, values, weights)
        tolerance = 1e-3 if isinstance(wire, synk.PowerSGD) else 1e-6
        np.testing.assert_allclose(got[0], wanted, tolerance, tolerance)
        model.values[name] = got


def shares_of_machines(model, op, weights):
    """Return the machines' own reductions of the large array, and what these are multiplied by."""
    factors = weights if op == "avg" else [1] * model.size
    shares = []
    for ranks in model.machines:
        total = sum(model.values["large"][rank] * np.float32(factors[rank]) for rank in ranks)
        number = sum(factors[rank] for rank in ranks) if op == "avg" else 1
        shares.append(total.reshape(-1) / np.float32(number or 1))
    if op == "sum":
        return shares, None
    return shares, [sum(weights[rank] for rank in ranks) / sum(weights) for ranks in model.machines]


def do_reduce(model, draw, rng):
    op, names, weights, ragged = draw_reduction(model, draw, rng)
    variables = [model.shared[name] for name in names]
    in_place = draw(st.booleans())
    if ragged:
        check_ragged(model, ragged, lambda shared: synk.reduce(shared, op, in_place))
        return
    got = synk.reduce(variables, op, in_place, weights=weights)
    for position, name in enumerate(names):
        wanted = reduced(op, model.values[name], weights)
        if in_place:
            assert got is None
            model.values[name] = [*model.values[name]]
            model.values[name][model.master_rank] = wanted
        else:
            assert_same(got[position], wanted, STARTS[name].dtype)
    if weights is not None:  # replace the NaN that `draw_reduction` has set
        for name in names:
            for rank, weight in enumerate(weights):
                if not weight and (rank != model.master_rank or not in_place):
                    zero = np.zeros_like(model.values[name][rank])
                    synk.set_value(rank, model.shared[name], zero)
                    model.values[name] = [*model.values[name]]
                    model.values[name][rank] = zero


def reduced(op, values, weights):
    if weights is not None:
        kept = [rank for rank, weight in enumerate(weights) if weight]
        values, weights = [values[rank] for rank in kept], [weights[rank] for rank in kept]
    return np.asarray(combine(op, values, weights)).astype(values[0].dtype)


def check_ragged(model, ragged, call):
    shapes = synk.get_shapes(model.shared[ragged[0]])
    with pytest.raises(ValueError) as raised:
        call(model.shared[ragged[0]])
    for rank, shape in enumerate(shapes):
        assert f"rank {rank}: {shape}" in str(raised.value)


def do_get_shapes(model, draw, rng):
    for name, shared in model.shared.items():
        shapes = [value.shape for value in model.values[name]]
        assert synk.get_shapes(shared) == shapes
        if name in TAILS:
            assert synk.get_lengths(shared) == [shape[0] for shape in shapes]
    several = [model.shared[name] for name in ROWS]
    assert synk.get_lengths(several) == [[len(v) for v in model.values[name]] for name in ROWS]


ACTIONS = [
    do_scatter, do_set_value, do_broadcast, do_gather, do_all_gather, do_all_reduce,
    do_all_reduce_in_a_format, do_reduce, do_get_shapes,
]  # fmt: skip


@given(
    data=st.data(),
    seed=st.integers(0, 10**6),
    actions=st.lists(st.sampled_from(ACTIONS), min_size=2, max_size=6),
)
@examples(40)
def test_a_sequence_of_collectives_does_what_numpy_does_with_a_list_of_arrays(
    model, data, seed, actions
):
    rng = np.random.default_rng(seed)
    model.reset(rng)
    for action in actions:
        action(model, data.draw, rng)
        model.check()
        if model.is_large():
            break


def test_values_of_unequal_trailing_extents_are_a_list_and_cannot_be_joined(model):
    matrix = model.shared["matrix"]
    for rank in range(model.size):
        synk.set_value(rank, matrix, np.full((2, rank + 1), rank, "float32"))
    if model.size == 1:
        assert_same(synk.gather(matrix, 0), np.zeros((2, 1)))
        return
    got = synk.gather(matrix)
    assert [one.shape for one in got] == [(2, rank + 1) for rank in range(model.size)]
    for _ in range(20):
        with pytest.raises(ValueError, match="equal except for axis 0"):
            synk.gather(matrix, nd_up=0)
        with pytest.raises(ValueError):
            synk.all_gather(matrix)
        with pytest.raises(ValueError):
            synk.reduce(matrix)
        assert synk.get_shapes(matrix) == [(2, rank + 1) for rank in range(model.size)]


def test_what_is_returned_is_a_copy(model):
    vector = model.shared["vector"]
    synk.broadcast(vector, np.arange(5.0))
    synk.all_reduce(vector, "max")
    for rank in range(model.size):
        synk.get_value(rank, vector)[:] = 9
        synk.gather(vector)[:] = 9
        synk.reduce(vector, "max", in_place=False)[:] = 9
        assert_same(synk.get_value(rank, vector), np.arange(5.0))


def test_values_given_may_be_changed_afterwards(model):
    vector, matrix = model.shared["vector"], model.shared["matrix"]
    for make in (np.array, synk.data):
        value, rows = make(np.arange(5.0)), make(np.ones((model.size, 3), "float32"))
        synk.broadcast(vector, value)
        synk.scatter(matrix, rows)
        value[:] = 9
        rows[:] = 9
        for rank in range(model.size):
            assert_same(synk.get_value(rank, vector), np.arange(5.0))
            assert_same(synk.get_value(rank, matrix), np.ones((1, 3)))


def test_scatter_without_values_takes_the_bound_data(model):
    vector, long = model.shared["vector"], model.shared["long"]
    bound = synk.set_shmems({vector: np.arange(10.0)})
    synk.scatter(vector, batch=[9, 0, -1, 3, 4])
    expected = parts(np.array([9.0, 0, 9, 3, 4]), model.size)
    for rank in range(model.size):
        assert_same(synk.get_value(rank, vector), expected[rank])
    assert synk.get_shmems(vector) is bound[vector]
    with pytest.raises(ValueError, match="set_shmems"):
        synk.scatter([vector, long])
    synk.free_shmems(vector)
    with pytest.raises(ValueError, match="set_shmems"):
        synk.scatter(vector)


def test_numbers_that_python_code_computed_can_be_reduced_and_broadcast(two):
    s = compiler.shared(np.float32(1))
    v = tt.fscalar("v")
    step = synk.function([], [], bcast_inputs=[v], updates=[(s, s + v)], mode="FAST_COMPILE")
    for _ in range(3):
        step(2.0)
        synk.all_reduce(s, "sum")
        step(1.0)
        synk.set_value(0, s, 4.0)
        synk.broadcast(s)
        for rank in range(2):
            assert_same(synk.get_value(rank, s), 4.0, "float32")
