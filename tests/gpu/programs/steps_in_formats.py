"""Take steps in wire formats, on one machine or on two, and compare them with steps without.

The arguments are the devices. On emulated GPUs, the NCCL calls of each step are checked, too.
"""

import os
import sys

import numpy as np
import synkhronos as synk
from nccl_calls import calls_of

# The loss is that of the first row, which the call of each rank takes from its own rows.
n = synk.fork(devices=sys.argv[1:], verify="off")
import theano
import theano.tensor as tt
from synkhronos.extensions import train, updates

ITEMS = 20_000  # more than what travels as it is
Y = np.random.RandomState(0).normal(size=(2 * n + 1, ITEMS)).astype("float32")

comm = synk.world.world.current_world().rank_state.comm
with_nccl = type(comm).__name__ == "NcclCommunicator"
assert with_nccl == ("EMULATED_CALLS" in os.environ)
on_machines = comm.over_cpu.has_wires


def by_nccl(work):
    """Return what rank 0 reduces, broadcasts and gathers with NCCL in ``work()``."""
    if with_nccl:
        return [(name, int(items)) for name, items in calls_of(work)]
    return work()


def check_steps():
    """In a format, what travels between machines is rounded, and does not go through NCCL."""
    found = {}
    for wire, overlap in ((None, False), (None, True), ("float16", False), ("int8", True)):
        y, w = tt.fmatrix("y"), theano.shared(Y[0], "w")
        loss = tt.sqr(w - y[0]).mean()
        step = train.make_train_function(
            loss, [w], y, None, updates.sgd, 1000.0, wire=wire, overlap=overlap
        )
        made = by_nccl(lambda step=step: [step(Y) for _ in range(3)])
        if with_nccl:
            reduced = [items for name, items in made if name == "all_reduce" and items >= ITEMS]
            assert len(reduced) == (0 if on_machines and wire else 3), (wire, overlap, made)
        assert synk.in_sync(w)
        found[wire, overlap] = w.get_value()
    firsts = [share[0] for share in np.array_split(Y, n)]
    mean = np.average(firsts, axis=0, weights=[len(share) for share in np.array_split(Y, n)])
    expected = Y[0]
    for _ in range(3):
        expected = expected - 2000 / ITEMS * (expected - mean)
    exact = found[None, False]
    np.testing.assert_allclose(exact, expected, rtol=1e-4, atol=1e-5)
    for (wire, overlap), value in found.items():
        assert np.array_equal(value, exact) == (not on_machines or wire is None), (wire, overlap)
        np.testing.assert_allclose(value, exact, atol=0.05, err_msg=wire)


def check_reductions():
    """The calls of NCCL are the same with and without a format on one machine, and none on two."""
    w = theano.shared(Y[0], "w")
    synk.function([], (w.sum(), "gather"))
    synk.distribute()
    values = Y[:n]
    for wire in (None, "float16", "bfloat16", "int8", synk.TopK(1.0), synk.PowerSGD(90, [(200, 100)])):
        for rank in range(n):
            synk.set_value(rank, w, values[rank])
        made = by_nccl(lambda wire=wire: synk.all_reduce(w, "sum", wire=wire))
        if with_nccl:
            assert made == ([] if on_machines and wire else [("all_reduce", ITEMS)]), (wire, made)
        assert synk.in_sync(w)
        exact = wire is None or not on_machines
        np.testing.assert_allclose(w.get_value(), values.sum(0), atol=1e-5 if exact else 0.05)


def check_other_collectives():
    w = theano.shared(Y[0], "w")
    synk.function([], (w.sum(), "gather"))
    synk.distribute()
    synk.set_value(0, w, Y[1])
    made = by_nccl(lambda: synk.broadcast(w))
    assert synk.in_sync(w) and (w.get_value() == Y[1]).all()
    assert not with_nccl or made == [("broadcast", ITEMS)], made
    for rank in range(n):
        synk.set_value(rank, w, Y[rank])
    made = by_nccl(lambda: synk.all_gather(w))
    assert (w.get_value() == Y[:n].ravel()).all() and synk.in_sync(w)
    assert not with_nccl or made == [("all_gather", ITEMS)], made


check_steps()
check_reductions()
check_other_collectives()
synk.close()
print("compared on machines" if on_machines else "compared on one machine")
