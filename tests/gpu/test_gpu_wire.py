"""Steps in wire formats and with overlap, on this run's devices.

On one machine both have no effect. Only the last tests have two machines.
"""

from pathlib import Path

import numpy as np
import pytest
import theano
import theano.tensor as tt
from namespaces import Machines, why_no_mpi

import synkhronos as synk
from synkhronos.extensions import train, updates

from .graphs import is_on_device

PROGRAMS = Path(__file__).with_name("programs")
WIRES = ["float16", "bfloat16", "int8", synk.TopK(0.5), synk.PowerSGD(2)]
RNG = np.random.RandomState(0)
Y = RNG.normal(size=(7, 20_000)).astype("float32")  # a row is more than what travels as it is
W = Y[:2].mean(axis=0)


@pytest.fixture(autouse=True)
def unverified(world, monkeypatch):
    monkeypatch.setattr(world, "options", world.options._replace(verify="off"))


def network():
    y, w = tt.fmatrix("y"), theano.shared(W, "w")
    assert is_on_device(w)
    # Without a sum over the rows: PoCL takes a millisecond for each number of it. So the loss is not
    # the mean over the rows, and a call would say so.
    return tt.sqr(w - y[0]).mean(), w, y


def by_rule(loss, w, y, **kwargs):
    return train.make_train_function(loss, [w], y, None, updates.sgd, 1000.0, **kwargs)


def by_updates(loss, w, y, **kwargs):
    new = w - np.float32(1000) * tt.grad(loss, w)
    return train.parallel_function([y], loss, updates=[(w, new)], **kwargs)


@pytest.mark.parametrize("make", [by_rule, pytest.param(by_updates, marks=pytest.mark.slow)])
def test_a_step_is_the_one_without_to_the_last_bit(make):
    found = []
    for kwargs in ({}, {"wire": "float16"}, {"overlap": True}, {"wire": "int8", "overlap": True}):
        loss, w, y = network()
        step = make(loss, w, y, **kwargs)
        losses = [float(step(Y, batch=batch)) for batch in (None, None, 6, 1)]
        assert synk.in_sync(w) and len({*losses}) == 4
        found.append((losses, w.get_value().tobytes()))
    assert found == found[:1] * 4


def reduce_in_program(rank, w, wire):
    rank.all_reduce(w, weight=rank.rank + 1.0, wire=wire)
    return is_on_device(w)


def test_a_reduction_is_the_one_without_to_the_last_bit():
    w, n = theano.shared(Y[0].reshape(200, 100), "w"), synk.size()
    synk.function([], (w.sum(), "gather"))
    synk.distribute()
    values = [Y[rank].reshape(200, 100) for rank in range(n)]
    weights = list(range(1, n + 1))
    found = []
    for wire in (None, *WIRES):
        for reduce in (
            lambda wire: synk.all_reduce(w, weights=weights, wire=wire),
            lambda wire: synk.spmd(reduce_in_program, w, wire),
        ):
            for rank, value in enumerate(values):
                synk.set_value(rank, w, value)
            assert set(reduce(wire) or [True]) == {True}
            assert synk.in_sync(w) and is_on_device(w)
            found.append(w.get_value())
    np.testing.assert_allclose(found[0], np.average(values, axis=0, weights=weights), rtol=1e-5)
    for one in found[1:]:
        np.testing.assert_array_equal(one, found[0])


def test_a_vector_that_is_filled_in_buckets_is_reduced_as_always():
    loss, w, y = network()
    vector = theano.shared(np.zeros(2 * W.size, "float32"), "vector")
    new = synk.ops.in_buckets(vector, [tt.grad(loss, w), y[-1]], [W.shape] * 2, wire="float16")
    f = synk.function([y], updates=[(vector, new, "avg")])
    with synk.fuse():
        f(Y)
        synk.all_reduce(vector, weights=f, wire="float16")
    assert synk.in_sync(vector) and is_on_device(vector)
    shares = np.array_split(Y, synk.size())
    weights = [len(share) for share in shares]
    firsts, lasts = (np.average([share[at] for share in shares], 0, weights) for at in (0, -1))
    expected = np.concatenate([2 * (W - firsts) / W.size, lasts])
    np.testing.assert_allclose(vector.get_value(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(bool(why_no_mpi()), reason=why_no_mpi())
def test_between_machines_arrays_of_devices_travel_in_formats(devices, tmp_path):
    if devices[0].startswith("cuda"):
        pytest.skip("NCCL would need a GPU for each machine")
    with Machines(2) as machines:
        done = machines.run(
            PROGRAMS / "steps_in_formats.py", devices[0], devices[0], cwd=tmp_path, timeout=200,
            environment={"POCL_CACHE_DIR": str(tmp_path / "pocl")},
        )  # fmt: skip
        assert done.check().output.splitlines()[-1] == "compared on machines", done.output
        assert not machines.left()
