"""Tests of the engine for devices: what stays there, is used in place, or is copied to the host."""

import numpy as np
import pytest
import theano
import theano.tensor as tt
from checks.engines import CHECKS
from oracle import ON_CPU, assert_same, combine, parts
from theano.sandbox.rng_mrg import MRG_RandomStreams

import synkhronos as synk
from synkhronos.world.world import Command

pygpu = pytest.importorskip("pygpu")

FLOATS = ["float16", "float32", "float64"]
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
DTYPES = [*FLOATS, *INTEGERS, "bool"]


class Look(Command):
    def __init__(self, numbers):
        self.numbers = numbers

    def run(self, state):
        storages = [state.engine.storage(state.shareds[number]) for number in self.numbers]
        return [(type(one).__name__, id(one)) for one in storages]


def look(world, *shareds):
    return world.run(Look([world.registry.numbers[shared] for shared in shareds]))


def values_of(world, shared):
    return [synk.get_value(rank, shared) for rank in range(world.size)]


def set_values(world, shared, values):
    for rank, value in enumerate(values):
        synk.set_value(rank, shared, value)


def numbers(shape, dtype="float32", seed=0):
    return np.random.default_rng(seed).integers(0, 5, shape).astype(dtype)


@pytest.fixture(scope="module")
def mixed(world):
    """Function with outputs on the device, and outputs on the host by their type or by request.

    It is returned together with the serial function.
    """
    x, c = tt.fmatrix("x"), tt.cvector("c")
    w = theano.shared(np.arange(6, dtype="float32").reshape(3, 2), "w")
    z = tt.dot(x, w)
    outputs = [
        (z, "gather"), (z.sum(axis=0), "sum"), (z.mean(axis=0), "avg"), (z.sum(axis=0), "c_sum"),
        (z.mean(), "avg"), (2 * c, "gather"), (z.transfer(None), "gather"),
        ((z + 1).transfer("cpu"), "gather"),
    ]  # fmt: skip
    f = synk.function([x, c], outputs, name="mixed")
    serial = theano.function([x, c], [output for output, _ in outputs], mode=ON_CPU)
    synk.distribute()
    return f, serial


def arguments(length):
    return numbers((length, 3)), numbers(length, "complex64") + np.complex64(1j)


class DeviceLab:
    dtype = "float32"
    is_immutable = False
    times_operations = True
    fixable = (1,)
    streams = MRG_RandomStreams
    ops = synk.ops

    def __init__(self, world):
        self.engine = world.rank_state.engine

    def tensor(self, name, ndim):
        return self.fixed(name, (None,) * ndim)

    def fixed(self, name, extents):
        return tt.TensorType(self.dtype, [one == 1 for one in extents])(name)

    shared = staticmethod(theano.shared)

    def uniform(self, streams, size):
        return streams.uniform(size)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__[len("check_") :])
def test_engine(world, check):
    check(DeviceLab(world))


ON_DEVICE = [True, True, True, False, False, False, True, True]


def test_outputs_stay_on_the_device_until_they_are_reduced(world, mixed):
    f, _ = mixed
    computed = world.rank_state.engine.call(f.replica.compiled, arguments(4))
    assert [isinstance(one, pygpu.gpuarray.GpuArray) for one in computed] == ON_DEVICE


@pytest.mark.parametrize("num_slices", [1, 3])
@pytest.mark.parametrize("batch", [None, slice(None, None, 2), slice(10, 2, -3), [7, 0, -1, 7]])
def test_outputs_of_all_kinds_are_the_serial_ones(world, mixed, batch, num_slices):
    f, serial = mixed
    values = arguments(13)
    chosen = [np.ascontiguousarray(one if batch is None else one[batch]) for one in values]
    got = f(*values, batch=batch, num_slices=num_slices)
    for one, expected in zip(got, serial(*chosen)):
        assert type(one) is np.ndarray
        assert_same(one, expected, expected.dtype)


def test_slices_are_accumulated_on_the_device(world, mixed, monkeypatch):
    f, _ = mixed
    engine = type(world.rank_state.engine)
    to_host, copies = engine.to_host, []

    def count(self, array):
        copies.append(isinstance(array, pygpu.gpuarray.GpuArray))
        return to_host(self, array)

    f(*arguments(12 * world.size), num_slices=4)
    f.watch = None  # in the first calls it looks at outputs, too
    monkeypatch.setattr(engine, "to_host", count)
    for num_slices in (1, 4):
        copies.clear()
        f(*arguments(12 * world.size), num_slices=num_slices)
        at_most = sum(ON_DEVICE)  # fewer if the communicator reduces on the device
        assert 0 < sum(copies) <= at_most


def test_every_dtype_goes_to_the_device_and_back(world):
    inputs = [tt.matrix(dtype, dtype=dtype) for dtype in DTYPES]
    shareds = [theano.shared(numbers((2, 3), dtype), dtype) for dtype in DTYPES]
    f = synk.function(
        inputs,
        [(x, "gather") for x in inputs],
        updates=[(shared, x[:1].transfer(None), None) for shared, x in zip(shareds, inputs)],
    )
    arrays = [numbers((2 * world.size + 1, 3), dtype, seed) for seed, dtype in enumerate(DTYPES)]
    for got, array in zip(f(*arrays, batch=slice(None, None, -1)), arrays):
        assert_same(got, array[::-1], array.dtype)
    for shared, array in zip(shareds, arrays):
        assert isinstance(shared.type, theano.gpuarray.type.GpuArrayType)
        for got, own in zip(values_of(world, shared), parts(array[::-1], world.size)):
            assert_same(got, own[:1], array.dtype)
    for op in ("min", "max"):
        for shared in shareds:
            before = values_of(world, shared)
            synk.all_reduce(shared, op)
            for got in values_of(world, shared):
                assert_same(got, combine(op, before, None), before[0].dtype)


@pytest.fixture(scope="module")
def several(world):
    shareds = {
        "w": theano.shared(numbers((3, 2)), "w"),
        "number": theano.shared(np.float32(2), "number"),
        "k": theano.shared(numbers(4, "int64"), "k"),
        "count": theano.shared(np.int64(3), "count"),
        "half": theano.shared(numbers(3, "float16"), "half"),
    }
    x = tt.fvector("x")
    one = shareds["w"] * shareds["number"]
    updates = [(shared, shared + 0) for name, shared in shareds.items() if name != "w"]
    f = synk.function([x], (one, "gather"), updates=[*updates, (shareds["w"], one + x.sum())])
    synk.distribute()
    return shareds, f


def test_storages_are_used_in_place_by_collectives(world, several):
    shareds, _ = several
    on_device = [shareds[name] for name in ("w", "k", "half")]
    set_values(world, shareds["w"], [numbers((3, 2), seed=rank) for rank in range(world.size)])
    before = look(world, *on_device)
    objects = [shared.container.storage[0] for shared in on_device]
    assert {kind for own in before for kind, _ in own} == {"GpuArray"}
    synk.broadcast(on_device)
    synk.all_reduce(on_device, "max")
    synk.reduce(on_device, "sum")
    synk.broadcast(shareds["w"], numbers((3, 2)))
    synk.set_value(world.size - 1, shareds["w"], numbers((3, 2)))
    assert look(world, *on_device) == before
    assert all(a is b for a, b in zip(objects, [one.container.storage[0] for one in on_device]))


@pytest.mark.parametrize("op", ["sum", "prod", "min", "max"])
def test_numbers_on_the_host_and_arrays_on_the_device_travel_in_one_list(world, several, op):
    shareds, _ = several
    kinds = {name: kind for (kind, _), name in zip(look(world, *shareds.values())[0], shareds)}
    assert kinds["number"] == kinds["count"] == "ndarray"
    for shared in shareds.values():
        shape = shared.get_value().shape
        set_values(
            world, shared, [np.asarray(numbers(shape, shared.dtype, rank)) for rank in range(world.size)]
        )
    before = {name: values_of(world, shared) for name, shared in shareds.items()}
    whole = synk.reduce(list(shareds.values()), op, in_place=False)
    synk.all_reduce(list(shareds.values()), op)
    for (name, shared), reduced in zip(shareds.items(), whole):
        expected = combine(op, before[name], None).astype(shared.dtype)
        assert type(reduced) is np.ndarray
        assert_same(reduced, expected, shared.dtype)
        for got in values_of(world, shared):
            assert_same(got, expected, shared.dtype)


def test_sliceable_rows_are_taken_on_the_device(world):
    s = theano.shared(np.zeros((0, 2), "float32"), "s")
    v = theano.shared(np.float32([1, 2]), "v")
    given = tt.fmatrix("given")
    f = synk.function(
        [],
        [(given * v, "gather"), (tt.dot(given, v).sum(), "sum")],
        givens={given: s + 1},
        sliceable_shareds=[s],
    )
    rows = numbers((3 * world.size + 2, 2))
    synk.scatter(s, rows)
    assert {kind for ((kind, _),) in look(world, s)} == {"GpuArray"}
    own = parts(rows, world.size)
    for batch_s in (None, slice(1, 3), slice(None, None, -2), [2, 0, 2], np.array([-1, 1])):
        chosen = [part if batch_s is None else part[batch_s] for part in own]
        expected = (np.concatenate(chosen) + 1) * np.float32([1, 2])
        for num_slices in (1, 2):
            got, total = f(batch_s=batch_s, num_slices=num_slices)
            assert_same(got, expected, "float32")
            assert_same(total, expected.sum())
    by_rank = [[0] * (rank + 1) for rank in range(world.size)]
    got, _ = f(batch_s=by_rank)
    expected = np.concatenate([part[rows] for part, rows in zip(own, by_rank)])
    assert_same(got, (expected + 1) * np.float32([1, 2]))


def test_an_input_variable_of_the_device_is_a_type_error(world):
    x = theano.gpuarray.type.GpuArrayType("float32", (False,))("on_device")
    for kwargs in ({"inputs": [x]}, {"inputs": [], "bcast_inputs": [x]}):
        with pytest.raises(TypeError, match="NumPy arrays.*on_device"):
            synk.function(outputs=(x * 2, "gather"), **kwargs)
