"""Tests of calls of functions on 1 to 4 ranks, against serial Theano functions."""

import contextlib

import numpy as np
import pytest
from compilers import NAME, compiler, default_mode, relu, tt
from hypothesis import assume, given, strategies as st
from oracle import (
    WORLD_IDS, WORLDS, assert_same, batches, build, collectives, combine, exact, examples,
    of_master, parts, reductions, selected, slice_batches, sliceable, training,
)  # fmt: skip


import synkhronos as synk

GRAPHS = {
    "reductions32": (reductions, "float32"),
    "reductions64": (reductions, "float64"),
    "training": (training, "float32"),
    "sliceable": (sliceable, "float64"),
}
#: Graphs with collectives, which functions of Numba cannot have
JOINT = {"collectives": (collectives, "float64"), "of_master": (of_master, "float32")}

seeds = st.integers(0, 10**6)
lengths = st.integers(0, 13)


class Pool:
    """Pairs of parallel and serial functions in one world."""

    def __init__(self, size, master_rank, is_numba):
        self.size, self.master_rank, self.is_numba = size, master_rank, is_numba
        self.ranks = range(size)
        graphs = GRAPHS if is_numba else {**GRAPHS, **JOINT}
        self.pairs = {name: build(*graph) for name, graph in graphs.items()}
        y = tt.ivector("y")
        self.table = compiler.shared(np.arange(8.0))
        self.hits = compiler.shared(np.zeros(2))
        looked_up = self.table[y].sum()
        self.look_up = synk.function([y], (looked_up, "sum"), updates=[(self.hits, self.hits + 1)])
        x, v = tt.fmatrix("x"), tt.fvector("v")
        self.row = compiler.shared(np.zeros((2, 3), "float32"))
        self.vector = compiler.shared(np.zeros(3, "float32"))
        self.keep = synk.function([x], [], bcast_inputs=[v], updates=[(self.row, x), (self.vector, v)])
        self.identity = synk.function([x], [(x, "gather")])
        self.in_place = compiler.shared(np.zeros(5, "float32"))
        self.swapped = compiler.shared(np.zeros(5, "float32"))
        self.step = synk.function(
            [],
            [],
            bcast_inputs=[v],
            updates=[
                (self.in_place, self.in_place - v[0] * tt.arange(5, dtype="float32")),
                (self.swapped, relu(tt.dot(tt.eye(5), self.swapped + v[0]).astype("float32"))),
            ],
        )
        synk.distribute()


NUMBA = [pytest.param((2, 1, "NUMBA"), marks=pytest.mark.slow, id="2-ranks-numba")]
POOLS = [pytest.param((*world, None), id=name) for world, name in zip(WORLDS, WORLD_IDS)]


@pytest.fixture(scope="module", params=[*POOLS, *(NUMBA if NAME == "pytensor" else [])])
def pool(request, open_world):
    size, master_rank, mode = request.param
    open_world(size, master_rank=master_rank)
    with default_mode(mode) if mode else contextlib.nullcontext():
        return Pool(size, master_rank, mode == "NUMBA")


def draw_arguments(draw, inputs, arrays, batch):
    """Return positional and named arguments, each in a form drawn at random. Some are bound data."""
    args, named, positional = [], {}, True
    any_whole = False
    for number, (variable, (array, scattered)) in enumerate(zip(inputs, arrays)):
        forms = ["data", "array", "bound", "bound array", "memory with room", "strided"]
        last_scattered = number + 1 == len(arrays) or not arrays[number + 1][1]
        if scattered and (batch is None or any_whole or not last_scattered):
            forms.append("minibatch")
        form = draw(st.sampled_from(forms))
        any_whole |= scattered and form != "minibatch"
        if scattered and last_scattered and not any_whole and batch is not None:
            form, any_whole = "data", True
        value = array
        if form == "data":
            value = synk.data(array, var=variable)
        elif form == "memory with room":
            value = synk.data(var=variable)
            value.set_value(array, oversize=1.7)
        elif form == "strided" and array.ndim:
            value = np.repeat(array, 2, axis=0)[::2]
        elif form == "minibatch":
            chosen = selected(batch, array)
            junk = np.full((draw(st.sampled_from([0, 2])) if any_whole else 0, *array.shape[1:]), 99)
            rows = np.concatenate([chosen, junk.astype(array.dtype)])
            value = synk.data(rows, var=variable, minibatch=True)
        elif form.startswith("bound"):
            bound = synk.data(array, var=variable) if form == "bound" else array
            synk.set_shmems({variable: bound})
            positional = False
            continue
        positional = positional and draw(st.booleans())
        if positional:
            args.append(value)
        else:
            named[variable.name] = value
    return args, named


@given(
    data=st.data(),
    seed=seeds,
    n_rows=lengths,
    num_slices=st.integers(1, 9),
    dtype=st.sampled_from([32, 64]),
)
@examples(70)
def test_reduced_outputs_equal_the_serial_ones(pool, data, seed, n_rows, num_slices, dtype):
    pair = pool.pairs[f"reductions{dtype}"]
    rng = np.random.default_rng(seed)
    x = exact(rng, (n_rows, 3), f"float{dtype}")
    y = rng.integers(-99, 100, n_rows).astype("int32")
    scale = np.array(rng.integers(1, 9) / 4, f"float{dtype}")
    batch = data.draw(batches(n_rows), "batch")
    subset = data.draw(st.none() | st.lists(st.integers(0, 9), max_size=6), "output_subset")
    variables = [*pair.graph.inputs, *pair.graph.bcast]
    arrays = [(x, True), (y, True), (scale, False)]
    args, named = draw_arguments(data.draw, variables, arrays, batch)
    chosen = selected(batch, x), selected(batch, y)
    options = dict(output_subset=subset, batch=batch, num_slices=num_slices, **named)
    if not len(chosen[0]):
        with pytest.raises(ValueError, match="no rows"):
            pair.parallel(*args, **options)
        return
    expected = pair.serial(*map(np.ascontiguousarray, chosen), scale)
    if subset is not None:
        expected = [expected[index] for index in subset]
    got = pair.parallel(*args, **options)
    assert len(got) == len(expected)
    for one, other in zip(got, expected):
        assert_same(one, other, other.dtype)


def one_rank(pair, old, arguments, num_slices):
    """Return the values after one rank's updates, computed slice by slice with the serial function."""
    columns = [parts(array, num_slices) for array in arguments[:-1]]
    names = list(pair.graph.shared)
    ops = {s.name: (update[2:] or ("avg",))[0] for update in pair.graph.updates for s in update[:1]}
    values, weights = [], []
    for rows in zip(*columns):
        if len(rows[0]):
            for name, value in zip(names, old):
                pair.serial_graph.shared[name].set_value(value)
            pair.serial(*rows, arguments[-1])
            values.append([pair.serial_graph.shared[name].get_value() for name in names])
            weights.append(len(rows[0]))
    if not values:
        return old
    return [combine(ops[name], [value[k] for value in values], weights) for k, name in enumerate(names)]


@given(data=st.data(), seed=seeds, n_rows=st.integers(1, 11), num_slices=st.integers(1, 7))
@examples(40)
def test_updates_of_slices_see_old_values_and_accumulate_once(pool, data, seed, n_rows, num_slices):
    pair = pool.pairs["training"]
    rng = np.random.default_rng(seed)
    x, t = exact(rng, (n_rows, 3), "float32"), exact(rng, n_rows, "float32")
    batch = data.draw(batches(n_rows))
    chosen = selected(batch, x), selected(batch, t)
    assume(len(chosen[0]))
    shareds = list(pair.graph.shared.values())
    if data.draw(st.booleans()):
        for rank in pool.ranks:
            synk.set_value(rank, pair.graph.shared["w"], exact(rng, 3, "float32"))
    old = [synk.get_value(rank, shareds) for rank in pool.ranks]
    rate = np.float32(0.125)
    same_everywhere = all(np.array_equal(o[0], old[0][0]) for o in old)
    for name, value in zip(pair.graph.shared, old[0]):
        pair.serial_graph.shared[name].set_value(value)
    serial_loss = pair.serial(*chosen, rate)[0]
    (loss,) = pair.parallel(x, t, rate, batch=batch, num_slices=num_slices)
    if same_everywhere:
        assert_same(loss, serial_loss, "float32")
    for rank in pool.ranks:
        own = [parts(array, pool.size)[rank] for array in chosen]
        expected = one_rank(pair, old[rank], [*own, rate], num_slices)
        for name, got, value in zip(pair.graph.shared, synk.get_value(rank, shareds), expected):
            assert_same(got, value, pair.graph.shared[name].dtype)
    # Reset the values, so that they stay small in the next example.
    synk.broadcast(shareds, [np.ones_like(s.get_value()) for s in shareds])


@given(data=st.data(), seed=seeds, n_rows=st.integers(0, 14), num_slices=st.integers(1, 6))
@examples(50)
def test_sliceable_shared_rows_equal_the_serial_function_on_these_rows(
    pool, data, seed, n_rows, num_slices
):
    pair = pool.pairs["sliceable"]
    rng = np.random.default_rng(seed)
    rows = {name: exact(rng, (n_rows, 2)[: 1 if name == "b" else 2], "float64") for name in "abc"}
    shared = pair.graph.shared
    synk.scatter([shared[name] for name in "abc"], [rows[name] for name in "abc"])
    if data.draw(st.booleans(), "other lengths") and n_rows:
        extra = data.draw(st.integers(0, pool.size - 1))
        for name in "abc":
            synk.set_value(extra, shared[name], np.tile(rows[name], (2, 1)[: rows[name].ndim]))
    by_rank = synk.get_lengths(shared["a"])
    batch_s, each = data.draw(slice_batches(by_rank), "batch_s")
    chosen = {
        name: [
            selected(batch, synk.get_value(rank, shared[name])) for rank, batch in zip(pool.ranks, each)
        ]
        for name in "abc"
    }
    used = [len(one) for one in chosen["a"]]
    seen = [synk.get_value(rank, shared["seen"]) for rank in pool.ranks]
    if not sum(used):
        with pytest.raises(ValueError, match="rows"):
            pair.parallel(batch_s=batch_s, num_slices=num_slices)
        return
    for name in "abc":
        pair.serial_graph.shared[name].set_value(np.concatenate(chosen[name]))
    expected = pair.serial()
    got = pair.parallel(batch_s=batch_s, num_slices=num_slices)
    for one, other in zip(got, expected):
        assert_same(one, other, other.dtype)
    for rank in pool.ranks:
        computed = min(num_slices, used[rank])
        assert synk.get_value(rank, shared["seen"]) == (
            seen[rank] * computed + used[rank] if computed else seen[rank]
        )
    synk.broadcast(shared["seen"], 0)


def serial_slices(pair, slices, scale, first):
    """Return the serial outputs and new values of each slice, whose rows are listed by rank.

    The rows of the rank `first` come first. Outputs with a row for each row are lists by rank, too.
    """
    values = [shared.get_value() for shared in pair.graph.shared.values()]
    found = []
    for by_rank in slices:
        for shared, value in zip(pair.serial_graph.shared.values(), values):
            shared.set_value(value)
        order = [first, *range(first), *range(first + 1, len(by_rank))]
        outputs = pair.serial(np.concatenate([by_rank[rank] for rank in order]), scale)
        ends = np.cumsum([len(by_rank[rank]) for rank in order])[:-1]
        for index, op in enumerate(pair.graph.ops):
            if op == "gather":
                rows = np.split(outputs[index], ends)
                outputs[index] = [rows[order.index(rank)] for rank in range(len(by_rank))]
        found.append((outputs, [one.get_value() for one in pair.serial_graph.shared.values()]))
    return zip(*found)


# A statistic in the graph is that of a slice: one rank, too, differs from one process without slices.
@pytest.mark.filterwarnings("ignore:.* slices, the call differs")
@given(
    data=st.data(),
    seed=seeds,
    n_rows=st.integers(1, 13),
    num_slices=st.integers(1, 5),
    name=st.sampled_from(["collectives", "collectives", "of_master"]),
)
@examples(50)
def test_graphs_with_collectives_combine_the_same_slice_of_all_ranks(
    pool, data, seed, n_rows, num_slices, name
):
    if pool.is_numba:
        pytest.skip("functions of Numba have no collectives in their graphs")
    pair, rng, dtype = pool.pairs[name], np.random.default_rng(seed), JOINT[name][1]
    x, scale = exact(rng, (n_rows, 3), dtype), np.array(rng.integers(1, 9) / 4, dtype)
    batch = data.draw(batches(n_rows), "batch")
    chosen = selected(batch, x)
    assume(len(chosen))
    arrays = [(x, True), (scale, False)]
    args, named = draw_arguments(data.draw, [*pair.graph.inputs, *pair.graph.bcast], arrays, batch)
    options = dict(batch=batch, num_slices=num_slices, **named)
    own = parts(chosen, pool.size)
    number = min(num_slices, len(own[0]))
    if name == "of_master" and len(own[pool.master_rank]) < number:
        with pytest.raises(ValueError, match="the master's value"):
            pair.parallel(*args, **options)
        return
    slices = list(zip(*(parts(rows, number) for rows in own)))
    outputs, news = serial_slices(pair, slices, scale, pool.master_rank)
    weights = [sum(map(len, by_rank)) for by_rank in slices]
    got = pair.parallel(*args, **options)
    for result, op, values in zip(got, pair.graph.ops, zip(*outputs)):
        if op == "gather":  # the ranks' rows in the order of the ranks
            values = [rows for by_slice in zip(*values) for rows in by_slice]
        assert_same(result, combine(op, values, weights), dtype)
    ops = {update[0].name: (update[2:] or ("avg",))[0] for update in pair.graph.updates}
    shareds = list(pair.graph.shared.values())
    for shared, values in zip(shareds, zip(*news)):
        for rank in pool.ranks:
            new = combine(ops.get(shared.name, "max"), values, weights)
            assert_same(synk.get_value(rank, shared), new, shared.dtype)
    # Reset the values, so that they stay small in the next example.
    synk.broadcast(shareds, [np.ones_like(shared.get_value()) for shared in shareds])


@given(data=st.data(), n_rows=st.integers(1, 12), num_slices=st.integers(1, 4))
@examples(15)
def test_an_error_on_a_rank_names_it_and_the_next_call_is_right(pool, data, n_rows, num_slices):
    rank = data.draw(st.integers(0, min(n_rows, pool.size) - 1), "rank")
    y = np.arange(n_rows, dtype="int32") % 8
    good = y.copy()
    parts(y, pool.size)[rank][-1] = 99  # changes `y`, as array_split returns views
    assert 99 in y
    synk.broadcast(pool.hits, np.zeros(2))
    if rank == pool.master_rank:
        with pytest.raises(IndexError):
            pool.look_up(y, num_slices=num_slices)
    else:
        with pytest.raises(synk.WorkerError) as raised:
            pool.look_up(y, num_slices=num_slices)
        assert raised.value.rank == rank
        assert raised.value.type_name == "IndexError"
        assert "Traceback" in raised.value.traceback
        assert raised.value.traceback in str(raised.value)
    if not pool.is_numba:  # whose plain functions, too, update in place before they raise the error
        assert_same(synk.get_value(rank, pool.hits), [0, 0])
    assert_same(pool.look_up(good, num_slices=num_slices), good.sum() * 1.0)


def test_a_fused_call_uses_the_rows_that_the_calls_before_it_scatter(pool):
    pair = pool.pairs["sliceable"]
    shared = [pair.graph.shared[name] for name in "abc"]
    synk.scatter(shared, [np.zeros((0, 2)), np.zeros(0), np.zeros((0, 2))])
    n_rows = 3 * pool.size
    values = [np.arange(2.0 * n_rows).reshape(-1, 2), np.ones(n_rows), np.ones((n_rows, 2))]
    with synk.fuse():
        synk.scatter(shared, values)
        pending = pair.parallel(batch_s=[2], output_subset=[1])
    assert_same(pending.result()[0], values[0][2::3])
    with pytest.raises((IndexError, synk.WorkerError), match="out of range"), synk.fuse():
        synk.scatter(shared, values)
        pair.parallel(batch_s=[3])
    synk.broadcast(pair.graph.shared["seen"], 0)


def test_a_fused_get_value_is_the_value_before_the_calls_that_follow(pool):
    synk.broadcast(pool.hits, np.array([1.0, 2.0]))
    synk.all_reduce(pool.hits, "max")  # moves the replicas to shared memory
    with synk.fuse():
        values = [synk.get_value(rank, pool.hits) for rank in pool.ranks]
        pool.look_up(np.zeros(pool.size, "int32"))
        later = [synk.get_value(rank, pool.hits) for rank in pool.ranks]
        synk.broadcast(pool.hits, np.zeros(2))
    for one, other in zip(values, later):
        assert_same(one.result(), [1.0, 2.0])
        assert_same(other.result(), [2.0, 3.0])


@pytest.mark.parametrize("change", ["grow", "free", "forget"])
def test_fused_calls_keep_the_memory_of_data_that_change_before_they_run(pool, change):
    ones = np.ones((5000, 3), "float32")
    data, rows = synk.data(ones), synk.data(ones[: pool.size])
    with synk.fuse():
        pending = pool.identity(data)
        synk.scatter(pool.row, rows)
        for one in (data, rows):
            if change == "grow":
                one.set_length(20000)
            elif change == "free":
                one.free_memory()
        del data, rows, one
        others = [synk.data(7 * ones[:length]) for length in (5000, pool.size) * 2]
    assert (pending.result()[0] == 1).all()
    assert_same(synk.get_value(0, pool.row), ones[:1])
    assert len(others) == 4


def test_an_error_inside_a_fuse_block_runs_nothing_and_leaves_the_world_usable(pool):
    synk.broadcast(pool.hits, np.zeros(2))
    with pytest.raises(ZeroDivisionError), synk.fuse():
        pending = pool.look_up([1, 2, 3, 4])
        raise ZeroDivisionError
    with pytest.raises(RuntimeError):
        pending.result()
    assert_same(synk.get_value(pool.size - 1, pool.hits), [0, 0])
    with pytest.raises(TypeError), synk.fuse():
        pool.look_up("rows")
    assert_same(pool.look_up([1, 2, 3, 4]), 10.0)


def test_what_an_update_took_from_an_input_does_not_change_with_the_data(pool):
    x = synk.data(np.arange(3.0 * pool.size, dtype="float32").reshape(-1, 3))
    v = synk.data(np.array([1, 2, 3], "float32"))
    pool.keep(x, v)
    (gathered,) = pool.identity(x)
    before = [synk.get_value(rank, [pool.row, pool.vector]) for rank in pool.ranks]
    original = x.data.copy()
    x[:] = 77
    v[:] = 77
    for rank in pool.ranks:
        row, vector = synk.get_value(rank, [pool.row, pool.vector])
        assert_same(row, before[rank][0])
        assert_same(row, original[rank : rank + 1])
        assert_same(vector, [1, 2, 3])
    assert_same(gathered, original)


def test_outputs_of_earlier_calls_do_not_change_with_later_ones(pool):
    arrays = [np.full((2000, 3), value, "float32") for value in range(4)]
    for options in ({}, {"num_slices": 3}, {"batch": np.arange(1500)}):
        results = [pool.identity(array, **options)[0] for array in arrays]
        for value, result in enumerate(results):
            assert (result == value).all()


def test_updates_in_place_and_updates_that_swap_storage_work_after_all_reduce(pool):
    in_place, swapped = np.zeros(5, "float32"), np.zeros(5, "float32")
    synk.broadcast([pool.in_place, pool.swapped], [in_place, swapped])
    for _ in range(4):
        for rank in pool.ranks:
            synk.set_value(rank, pool.in_place, in_place + rank)
            synk.set_value(rank, pool.swapped, swapped + 2 * rank)
        pool.step(np.ones(3, "float32"))
        synk.all_reduce([pool.in_place, pool.swapped], "max")
        in_place = in_place - np.arange(5, dtype="float32") + np.float32(pool.size - 1)
        swapped = swapped + np.float32(1 + 2 * (pool.size - 1))
        for rank in pool.ranks:
            got = synk.get_value(rank, [pool.in_place, pool.swapped])
            assert_same(got[0], in_place)
            assert_same(got[1], swapped)


def test_as_theano_is_the_serial_function(pool):
    pair = pool.pairs["reductions32"]
    x, y = np.ones((7, 3), "float32"), np.arange(7, dtype="int32")
    got = pair.parallel.as_theano(synk.data(x), y, scale=2.0)
    for one, other in zip(got, pair.serial(x, y, 2.0)):
        assert_same(one, other, other.dtype)
    (alone,) = pair.parallel.as_theano(x, y, 2.0, output_subset=[3])
    assert_same(alone, 21)
