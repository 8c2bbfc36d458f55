"""Conformance checks for engines.

Each check takes a `lab`, which has an `engine` and creates the variables of its graphs:
``tensor(name, ndim)`` returns an input of dtype ``lab.dtype``, and ``fixed(name, extents)`` one whose
type fixes extents that are not None, from those in ``lab.fixable``. There are also ``shared(value,
name)``, ``streams(seed)`` and ``uniform(streams, size)``. Variables support ``+``, ``-``, ``*``,
``mean(axis)`` and ``sum(axis)``. ``is_immutable`` says that the engine's arrays cannot be changed, and
``times_operations`` that the functions compute one operation after another.
"""

import gc
import sys
from unittest import mock

import numpy as np
import pytest

from synkhronos.arithmetic.operations import OPERATIONS, Accumulator
from synkhronos.engines.base import Definition
from synkhronos.functions.signature import parse_inputs


def build(lab, inputs, outputs, updates=(), givens=None, sliceable=(), **kwargs):
    on_host = [True] * len(outputs)
    definition = Definition(inputs, outputs, on_host, list(updates), givens, list(sliceable))
    return lab.engine.build(definition, **kwargs)


def numbers(lab, *shape):
    return np.arange(1, 1 + np.prod(shape, dtype=int)).reshape(shape).astype(lab.dtype)


def value_of(lab, shared):
    return np.array(lab.engine.to_host(lab.engine.storage(shared)))


def check_types_are_known_and_other_objects_refused(lab):
    x, w = lab.tensor("x", 2), lab.shared(numbers(lab, 3), "w")
    assert lab.engine.type_of(x)[:2] == (np.dtype(lab.dtype), 2)
    assert lab.engine.type_of(w)[:2] == (np.dtype(lab.dtype), 1)
    assert lab.engine.type_of(x).extents == (None, None)
    assert [lab.engine.is_shared(one) for one in (x, w, 3, None)] == [False, True, False, False]
    assert [lab.engine.is_tensor(one) for one in (x, w, 3, None)] == [True, True, False, False]
    for other in (3, "x", None, np.ones(3)):
        with pytest.raises(TypeError, match="expected a"):
            lab.engine.type_of(other)


def check_inputs_of_a_fixed_number_of_rows_are_known_and_not_scattered(lab):
    for extent in lab.fixable:
        rows, columns = lab.fixed("rows", (extent, None)), lab.fixed("columns", (None, extent))
        assert lab.engine.type_of(rows).extents == (extent, None)
        assert lab.engine.type_of(columns).extents == (None, extent)
        with pytest.raises(ValueError, match="rows .*cannot be split along axis 0"):
            parse_inputs(lab.engine, [rows], None)
        parsed = parse_inputs(lab.engine, [columns], [rows])
        assert [one.axis for one in parsed] == [0, None]
        assert [one.fixed for one in parsed] == [{1: extent}, {0: extent}]
        compiled = build(lab, [columns, rows], [columns.sum(axis=0) + rows.sum(axis=1)])
        a, b = numbers(lab, 3, extent), numbers(lab, extent, 2)
        [got] = lab.engine.call(compiled, [a, b])
        np.testing.assert_allclose(got, a.sum(axis=0) + b.sum(axis=1))


def check_a_function_computes_its_outputs_or_a_subset_of_them(lab):
    x, y = lab.tensor("x", 2), lab.tensor("y", 2)
    compiled = build(lab, [x, y], [x + y, (x * y).sum(axis=0), x.mean()], name="three")
    assert compiled.name == "three"
    a, b = numbers(lab, 3, 2), numbers(lab, 3, 2) * 2
    wanted = [a + b, (a * b).sum(axis=0), a.mean()]
    for subset in (None, [0], [2, 1], []):
        got = lab.engine.call(compiled, [a, b], subset)
        chosen = wanted if subset is None else [wanted[index] for index in subset]
        assert len(got) == len(chosen)
        for one, other in zip(got, chosen):
            assert isinstance(one, np.ndarray) and one.dtype == lab.dtype and one.shape == other.shape
            np.testing.assert_allclose(one, other, rtol=1e-6)


def check_arguments_may_be_views_with_any_steps_but_zero(lab):
    x, y = lab.tensor("x", 2), lab.tensor("y", 1)
    compiled = build(lab, [x, y], [x * y, x.sum(axis=0), (x * y).sum(axis=1), x + x])
    whole, row = numbers(lab, 6, 8), numbers(lab, 8)
    views = [whole[::-1], whole[:, ::-1], whole[1::2], whole[:3, 4:], whole[:1], whole[:, :1], whole[:0]]
    for view in [*views, numbers(lab, 8, 6).T]:
        for own in (row[: view.shape[1]], row[::-1][: view.shape[1]]):
            got = lab.engine.call(compiled, [view, own])
            for one, other in zip(got, (view * own, view.sum(0), (view * own).sum(1), 2 * view)):
                np.testing.assert_array_equal(one, other)


def check_updates_read_the_old_values(lab):
    v, w = lab.shared(numbers(lab, 2), "v"), lab.shared(numbers(lab, 2) * 10, "w")
    swap = build(lab, [], [v + w], [(v, w), (w, v)])
    assert {one.name for one in lab.engine.updated(swap)} == {"v", "w"}
    [total] = lab.engine.call(swap, [])
    np.testing.assert_array_equal(total, [11, 22])
    assert value_of(lab, v).tolist() == [10, 20] and value_of(lab, w).tolist() == [1, 2]


def check_what_a_function_reads_and_updates_is_known(lab):
    read, written, both = (lab.shared(numbers(lab, 2), name) for name in ("read", "written", "both"))
    x = lab.tensor("x", 1)
    compiled = build(lab, [x], [read.sum()], [(written, x * 2), (both, both + x)])
    assert {one.name for one in lab.engine.shareds(compiled)} == {"read", "written", "both"}
    assert lab.engine.shareds(compiled) == lab.engine.shareds(compiled)
    assert {one.name for one in lab.engine.updated(compiled)} == {"written", "both"}
    assert lab.engine.reads(compiled, both) and not lab.engine.reads(compiled, written)


def check_givens_replace_variables(lab):
    x, y, w = lab.tensor("x", 1), lab.tensor("y", 1), lab.shared(numbers(lab, 3), "w")
    for givens in ({y: w * 2}, [(y, w * 2)]):
        compiled = build(lab, [x], [x + y], givens=givens)
        [got] = lab.engine.call(compiled, [numbers(lab, 3)])
        np.testing.assert_array_equal(got, 3 * numbers(lab, 3))


def check_sliceable_variables_are_arguments_wherever_they_are_used(lab):
    x, given = lab.tensor("x", 1), lab.tensor("given", 1)
    rows, w = lab.shared(numbers(lab, 5), "rows"), lab.shared(numbers(lab, 1), "w")
    compiled = build(lab, [x], [x + rows, given.sum()], [(w, rows.sum() + w)], {given: rows * 2}, [rows])
    storage = lab.engine.storage(rows)
    chosen = lab.engine.take(storage, range(1, 3))
    sums, total = lab.engine.call(compiled, [numbers(lab, 2) * 10, chosen])
    np.testing.assert_array_equal(sums, [12, 23])
    np.testing.assert_array_equal(total, 10)
    np.testing.assert_array_equal(value_of(lab, w), [6])
    np.testing.assert_array_equal(value_of(lab, rows), numbers(lab, 5))


def check_a_sliceable_variable_must_be_used_and_not_be_given(lab):
    x, unused = lab.tensor("x", 1), lab.shared(numbers(lab, 2), "unused")
    with pytest.raises(ValueError, match="sliceable_shareds: unused"):
        build(lab, [x], [x * 2], sliceable=[unused])
    with pytest.raises(ValueError, match="sliceable_shareds: unused"):
        build(lab, [x], [x + unused], givens={unused: x}, sliceable=[unused])


def check_the_very_array_that_is_stored_is_the_storage(lab):
    w = lab.shared(numbers(lab, 4), "w")
    array = lab.engine.to_device(numbers(lab, 4) * 2)
    lab.engine.store(w, array)
    assert lab.engine.storage(w) is array
    compiled = build(lab, [], [w.sum()])
    assert lab.engine.call(compiled, [])[0] == 20


def check_writing_is_in_place_where_the_shape_is_the_same(lab):
    w = lab.shared(numbers(lab, 4), "w")
    storage = lab.engine.storage(w)
    lab.engine.write(w, numbers(lab, 4) * 3)
    if not lab.is_immutable:
        assert lab.engine.storage(w) is storage
    np.testing.assert_array_equal(value_of(lab, w), numbers(lab, 4) * 3)
    lab.engine.write(w, numbers(lab, 2))
    np.testing.assert_array_equal(value_of(lab, w), numbers(lab, 2))


def check_an_array_that_is_overwritten_has_the_values_of_the_other(lab):
    for value in (numbers(lab, 3) * 2, lab.engine.to_device(numbers(lab, 3) * 2), numbers(lab, 5)):
        array = lab.engine.to_device(numbers(lab, 3))
        result = lab.engine.overwrite(array, value)
        assert (result is array) == (value.shape == (3,) and not lab.is_immutable)
        assert type(result) is type(array) and result is not value or lab.is_immutable
        np.testing.assert_array_equal(np.array(lab.engine.to_host(result)), np.asarray(value))


def check_arithmetic_returns_its_result(lab):
    arithmetic, up = lab.engine.arithmetic, lab.engine.to_device
    results = {
        "multiply": arithmetic.multiply(up(numbers(lab, 3)), 2),
        "divide": arithmetic.divide(up(numbers(lab, 3)), 2),
        "add": arithmetic.combine(OPERATIONS["sum"], up(numbers(lab, 3)), up(numbers(lab, 3) * 3)),
        "minimum": arithmetic.combine(OPERATIONS["min"], up(numbers(lab, 3)), up(numbers(lab, 3)[::-1])),
    }
    for name, wanted in (
        ("multiply", [2, 4, 6]), ("divide", [0.5, 1, 1.5]), ("add", [4, 8, 12]), ("minimum", [1, 2, 1]),
    ):  # fmt: skip
        np.testing.assert_array_equal(np.array(lab.engine.to_host(results[name])), wanted)
        assert results[name].dtype == lab.dtype
    joined = arithmetic.concatenate([up(numbers(lab, 2)), up(numbers(lab, 1))])
    np.testing.assert_array_equal(np.array(lab.engine.to_host(joined)), [1, 2, 1])


def check_averages_over_slices_of_finite_numbers_are_finite(lab):
    numbers_near = 0.99 * np.array([1, -1, 1e-300], lab.dtype) * np.finfo(lab.dtype).max
    for weights in ([1], [1, 1], [3, 2, 2], [2, 2, 1, 1, 1, 1]):
        accumulator = Accumulator("avg", lab.engine.arithmetic, most=len(weights))
        for weight in weights:
            accumulator.add(lab.engine.to_device(numbers_near), weight)
        got = np.array(lab.engine.to_host(accumulator.result(np.dtype(lab.dtype))))
        np.testing.assert_allclose(got, numbers_near, rtol=1e-6)


def check_rows_are_taken_as_by_numpy(lab):
    array = lab.engine.to_device(numbers(lab, 6, 2))
    for rows in (range(1, 4), range(0, 6, 2), range(0), np.array([5, 0, 0]), np.array([2])):
        got = np.array(lab.engine.to_host(lab.engine.take(array, rows)))
        np.testing.assert_array_equal(got, numbers(lab, 6, 2)[np.array(list(rows), int)])
    out = np.zeros((2, 2), lab.dtype)
    assert lab.engine.take(numbers(lab, 6, 2), np.array([4, 1]), out) is out
    np.testing.assert_array_equal(out, numbers(lab, 6, 2)[[4, 1]])


def check_arrays_go_to_the_device_and_back(lab):
    value = numbers(lab, 3, 2)
    array = lab.engine.to_device(value)
    value[:] = 0
    np.testing.assert_array_equal(np.array(lab.engine.to_host(array)), numbers(lab, 3, 2))
    out = np.zeros((3, 2), lab.dtype)
    lab.engine.read(array, out)
    np.testing.assert_array_equal(out, numbers(lab, 3, 2))


def check_a_pickle_refers_to_known_variables_and_contains_the_others(lab):
    known, new = lab.shared(np.zeros(100_000, lab.dtype), "known"), lab.shared(numbers(lab, 2), "new")
    x = lab.tensor("x", 1)
    compiled = build(lab, [x], [x + known.sum() + new.sum()], [(known, known + 1), (new, new * 2)])
    lab.engine.dumps([], {})  # contains the code that this process has compiled so far
    lab.engine.after_replication()
    payload = lab.engine.dumps((["some", compiled], [new]), {known: 0})
    assert len(bytes(payload)) < 100_000
    lab.engine.after_replication()
    rank_state = lab.shared(numbers(lab, 3), "here")
    [some, loaded], [arrived] = lab.engine.loads(payload, [rank_state])
    assert some == "some" and arrived.name == "new" and arrived is not new
    assert {id(one) for one in lab.engine.shareds(loaded)} == {id(rank_state), id(arrived)}
    for _ in range(2):
        [got] = lab.engine.call(loaded, [numbers(lab, 2)])
    np.testing.assert_array_equal(got, numbers(lab, 2) + 9 + 6)
    np.testing.assert_array_equal(value_of(lab, rank_state), numbers(lab, 3) + 2)
    np.testing.assert_array_equal(value_of(lab, arrived), numbers(lab, 2) * 4)
    np.testing.assert_array_equal(value_of(lab, new), numbers(lab, 2))


def check_garbage_with_a_pickle_is_collected_in_silence(lab):
    """Since Python 3.13, a file in garbage that cannot be closed is reported."""
    garbage, reported = [lab.engine.dumps([], {})], []
    garbage.append(garbage)
    del garbage
    with mock.patch.object(sys, "unraisablehook", reported.append):
        gc.collect()
    assert not reported


def check_values_are_exported_and_restored(lab):
    w = lab.shared(numbers(lab, 2, 3), "w")
    saved = lab.engine.export(w).copy()
    np.testing.assert_array_equal(saved, numbers(lab, 2, 3))
    lab.engine.write(w, numbers(lab, 2, 3) * 0)
    lab.engine.restore(w, saved)
    np.testing.assert_array_equal(value_of(lab, w), numbers(lab, 2, 3))
    saved[:] = 7
    np.testing.assert_array_equal(value_of(lab, w), numbers(lab, 2, 3))


def draws(lab, compiled, number=3):
    return np.concatenate([np.array(lab.engine.call(compiled, [])[0]) for _ in range(number)])


def check_streams_continue_and_are_seeded_exported_and_restored(lab):
    streams = lab.streams(5)
    compiled = build(lab, [], [lab.uniform(streams, (4,)), lab.uniform(streams, (4,))])
    states = lab.engine.random_streams(compiled)
    assert len(states) == 2 and all(lab.engine.is_shared(one) for one in states)
    assert set(states) <= set(lab.engine.updated(compiled))
    first = draws(lab, compiled)
    assert len(set(first.tolist())) == 12
    assert set(lab.engine.seed(streams, 5)) >= set(states)
    np.testing.assert_array_equal(draws(lab, compiled), first)
    lab.engine.seed(streams, 6)
    assert not set(draws(lab, compiled).tolist()) & set(first.tolist())
    saved = [lab.engine.export(one).copy() for one in states]
    following = draws(lab, compiled)
    for one, array in zip(states, saved):
        lab.engine.restore(one, array)
    np.testing.assert_array_equal(draws(lab, compiled), following)
    with pytest.raises(TypeError, match="expected"):
        lab.engine.seed("streams", 1)


def check_only_states_of_streams_are_accepted_from_files(lab):
    streams = lab.streams(5)
    [state] = lab.engine.random_streams(build(lab, [], [lab.uniform(streams, (2,))]))
    saved = lab.engine.export(state)
    if lab.engine.is_tensor(state):
        return  # any numbers of its dtype and shape are a state
    lab.engine.check_state(saved)
    for wrong in (saved[:-1], saved[None], saved.astype("float64"), np.append(saved, saved[-1:])):
        with pytest.raises(ValueError, match="expected .*got other numbers"):
            lab.engine.check_state(wrong)


def check_jumps_lead_to_streams_of_their_own(lab):
    streams = lab.streams(5)
    compiled = build(lab, [], [lab.uniform(streams, (50,))])
    [state] = lab.engine.random_streams(compiled)
    seen = []
    for index in (0, 1, 2, 1):
        lab.engine.seed(streams, 5)
        lab.engine.jump(state, index)
        seen.append(draws(lab, compiled).tolist())
    assert seen[1] == seen[3]
    assert len(set(seen[0]) | set(seen[1]) | set(seen[2])) == 450


class Peers:
    """The first of two ranks with the same values; it records its calls."""

    is_master = True

    def __init__(self, lab):
        self._lab, self.calls = lab, []

    def all_reduce(self, array, op, number):
        self.calls.append((number, "all_reduce", op))
        return self._new(array, np.asarray(array) * 2)

    def all_gather(self, array, number):
        self.calls.append((number, "all_gather"))
        return self._new(array, np.concatenate([np.asarray(array)] * 2))

    def broadcast(self, array, number):
        self.calls.append((number, "broadcast"))
        return self._new(array, np.array(array))

    def _new(self, like, value):
        return value if isinstance(like, np.ndarray) else self._lab.engine.to_device(value)


def check_collectives_meet_the_peers_in_one_order_or_return_what_they_get(lab):
    x, w = lab.tensor("x", 1), lab.shared(numbers(lab, 3), "w")
    total = lab.ops.all_reduce(x * w, "sum")
    gathered, own = lab.ops.all_gather(x + w), lab.ops.broadcast(x - total)
    updates = [(w, lab.ops.all_reduce(w, "max") - w)]
    compiled = build(lab, [x], [total, gathered, own + own], updates)
    assert lab.engine.has_collectives(compiled) and lab.engine.uses_master(compiled)
    assert not lab.engine.has_collectives(build(lab, [x], [x + w]))
    a, orders = numbers(lab, 3) * 3, []
    for peers, factor in ((Peers(lab), 2), (Peers(lab), 2), (None, 1)):
        b = np.array([1, 2, 3], lab.dtype)
        lab.engine.write(w, b)
        got = lab.engine.call(compiled, [a, peers])
        wanted = [factor * a * b, np.tile(a + b, factor), 2 * (a - factor * a * b)]
        for one, other in zip(got, wanted):
            np.testing.assert_array_equal(np.asarray(one), other)
        np.testing.assert_array_equal(value_of(lab, w), (factor - 1) * b)
        orders.append([] if peers is None else peers.calls)
    assert orders[0] == orders[1] and [number for number, *_ in orders[0]] == [0, 1, 2, 3]
    assert sorted(one[1] for one in orders[0]) == ["all_gather", "all_reduce", "all_reduce", "broadcast"]
    analysis = lab.engine.analyze(compiled, [0])
    for dependence in analysis.outputs:
        assert not dependence.has_own_rows and not dependence.own_shareds
    [new] = analysis.updates.values()
    assert not new.has_own_rows and new.own_shareds == {w}


def check_operations_are_timed_and_results_are_the_same(lab):
    lab.engine.use_kernels(False)
    x, w = lab.tensor("x", 2), lab.shared(numbers(lab, 3), "w")
    outputs = [(x * x).sum(axis=0), x.sum()]
    compiled = build(lab, [x], outputs, [(w, w + x.sum(axis=0))], name="timed")
    a = numbers(lab, 4, 3)
    if not lab.times_operations:
        with pytest.raises(ValueError, match="timed: expected a function that computes one operation"):
            with lab.engine.time_operations(compiled):
                pass
        return
    readings = []
    with lab.engine.time_operations(compiled) as times:
        for _ in range(2):
            first, second = lab.engine.call(compiled, [a])
            np.testing.assert_allclose(first, (a * a).sum(axis=0))
            np.testing.assert_allclose(second, a.sum())
            readings.append(sum(times.read()))
        assert not times and len(times.read()) == len(times.nodes)
    assert readings == sorted(readings) and readings[-1] == pytest.approx(sum(t.seconds for t in times))
    np.testing.assert_allclose(value_of(lab, w), numbers(lab, 3) + 2 * a.sum(axis=0))
    names = [one.name.lower() for one in times]
    assert [name for name in names if name.startswith("sum") or "reduce" in name]
    assert len({(one.name, one.kind) for one in times}) == len(times)
    assert all(one.kind and one.kernel.endswith("'s own") for one in times)
    assert all(one.seconds >= 0 for one in times)
    nodes = sum(one.nodes for one in times)
    lab.engine.call(compiled, [a])  # is not timed
    with lab.engine.time_operations(compiled) as again:
        lab.engine.call(compiled, [a])
    assert sum(one.nodes for one in again) == nodes
    with lab.engine.time_operations(compiled) as none:
        pass
    assert none == []


def check_a_copy_uses_other_shared_variables(lab):
    x = lab.tensor("x", 1)
    v, w, other = [lab.shared(numbers(lab, 2) * scale, name) for name, scale in zip("vwo", (1, 10, 100))]
    compiled = build(lab, [x], [x + v, w.sum()], [(v, v + w)], name="f")
    ones = numbers(lab, 2) * 0 + 1
    for swap, added, total, changed in (
        ({}, v, 30, (v, [11, 22])), ({w: other}, v, 300, (v, [101, 202])),
        ({v: other}, other, 30, (other, [110, 220])), ({v: w, w: v}, w, 3, (w, [11, 22])),
    ):  # fmt: skip
        before = [lab.engine.storage(one) for one in (v, w, other)]
        for one in (v, w, other):
            lab.engine.store(one, lab.engine.to_device(value_of(lab, one)))
        copied = lab.engine.copy(compiled, swap, name="g")
        assert copied.name == "g" and compiled.name == "f"
        expected = value_of(lab, added) + 1
        sums, of_other = lab.engine.call(copied, [ones])
        np.testing.assert_array_equal(sums, expected)
        assert of_other == total and value_of(lab, changed[0]).tolist() == changed[1]
        for one, array in zip((v, w, other), before):
            lab.engine.store(one, array)
    without = lab.engine.copy(compiled, {w: other}, delete_updates=True)
    assert lab.engine.updated(without) == [] and lab.engine.call(without, [ones])[1] == 300
    assert value_of(lab, v).tolist() == [1, 2] and set(lab.engine.shareds(without)) == {v, other}


def check_a_copy_may_leave_streams_as_they_are(lab):
    streams = lab.streams(5)
    compiled = build(lab, [], [lab.uniform(streams, (4,))])
    without = lab.engine.copy(compiled, {}, delete_updates=True)
    drawn = [np.array(lab.engine.call(each, [])[0]) for each in (without, without, compiled, compiled)]
    assert drawn[0].tolist() == drawn[1].tolist() == drawn[2].tolist() != drawn[3].tolist()


def check_a_deep_copy_has_copies_of_the_shared_variables(lab):
    x, w = lab.tensor("x", 1), lab.shared(numbers(lab, 2), "w")
    compiled = build(lab, [x], [x + w], [(w, w * 2)])
    parts, copy_of_w = lab.engine.deepcopy((lab.engine.to_parts(compiled), w), {})
    copied = lab.engine.from_parts(parts)
    assert lab.engine.shareds(copied) == lab.engine.updated(copied) == [copy_of_w] != [w]
    ones = numbers(lab, 2) * 0 + 1
    assert lab.engine.call(copied, [ones])[0].tolist() == [2, 3]
    assert lab.engine.call(copied, [ones])[0].tolist() == [3, 5]
    assert lab.engine.call(compiled, [ones])[0].tolist() == [2, 3]
    assert value_of(lab, copy_of_w).tolist() == [4, 8] and value_of(lab, w).tolist() == [2, 4]
    analysis = lab.engine.analyze(copied, [0])
    assert analysis.outputs[0].shareds == {copy_of_w} and set(analysis.updates) == {copy_of_w}


def check_a_duplicate_has_a_value_of_its_own(lab):
    w = lab.shared(numbers(lab, 2), "w")
    made = lab.engine.duplicate(w)
    assert made is not w and lab.engine.type_of(made) == lab.engine.type_of(w)
    lab.engine.write(w, numbers(lab, 2) * 5)
    assert value_of(lab, made).tolist() == [1, 2] and value_of(lab, w).tolist() == [5, 10]


CHECKS = [item for name, item in sorted(globals().items()) if name.startswith("check_")]
