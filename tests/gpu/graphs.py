"""Checks of collectives in graphs on devices, against NumPy and against finite differences.

Each check takes a world that is open already, with any number of ranks. ``check(devices)`` opens one
and runs all of them.
"""

import numpy as np
import pytest
import synkhronos as synk
import theano
import theano.tensor as tt
from synkhronos.arithmetic.operations import OPERATIONS
from theano.gpuarray.type import GpuArrayType

ops = synk.ops
DTYPES = "int32", "int64", "float32", "float64"
WIDTHS = 3, 5000  # items; the larger ones are not sent along with the exchange
STEP = 1e-5


def shared(value, dtype="float32"):
    return theano.shared(np.asarray(value, dtype), "w")


def on_all_ranks(variable):
    return variable.dimshuffle("x", *range(variable.ndim)), "gather"


def is_on_device(shared):
    return isinstance(shared.type, GpuArrayType)


def collectives_of(f):
    """Return the collectives of a function. Fail unless their arrays are on the device."""
    nodes = [node for node in f.maker.fgraph.toposort() if hasattr(node.op, "is_same_everywhere")]
    assert all(isinstance(node.inputs[1].type, GpuArrayType) for node in nodes), nodes
    return nodes


def shares_of(rows):
    return np.array_split(rows, synk.size())


def master_rank():
    return synk.world.world.current_world().master_rank


def rows_of(count, *shape, dtype="float64", seed=0):
    return (np.random.RandomState(seed).normal(size=(count, *shape)) * 3).astype(dtype)


def check_reductions_of_every_operation_and_dtype():
    """The last rows of the ranks are reduced, of unequal numbers of rows."""
    for dtype in DTYPES:
        x = tt.matrix("x", dtype=dtype)
        chosen = [op for op, one in OPERATIONS.items() if one.is_defined_for(dtype)]
        f = synk.function([x], [on_all_ranks(ops.all_reduce(x[-1], op)) for op in chosen])
        assert len(collectives_of(f)) == len(chosen) == (5 if dtype.startswith("float") else 4)
        for width in WIDTHS:
            rows = rows_of(3 * synk.size() - 1, width, dtype=dtype)
            lasts, weights = zip(*[(share[-1], len(share)) for share in shares_of(rows)])
            for op, results in zip(chosen, f(rows)):
                expected = OPERATIONS[op].reduce(lasts, weights)
                assert results.dtype == expected.dtype and len(results) == synk.size()
                for one in results:
                    np.testing.assert_allclose(one, expected, rtol=1e-5, atol=1e-5, err_msg=op)


def check_rows_are_gathered_and_broadcast():
    for dtype in DTYPES:
        x = tt.matrix("x", dtype=dtype)
        outputs = ops.all_gather(x), ops.broadcast(x[:1])
        f = synk.function([x], [on_all_ranks(one) for one in outputs])
        assert len(collectives_of(f)) == 2
        for width in WIDTHS:
            rows = rows_of(3 * synk.size() - 1, width, dtype=dtype)
            gathered, of_master = f(rows)
            np.testing.assert_array_equal(gathered, [rows] * synk.size())
            first = shares_of(rows)[master_rank()][:1]
            np.testing.assert_array_equal(of_master, [first] * synk.size())


def loss_of(v, x, loss_op):
    """Return a loss in which the result of each collective is multiplied by numbers of this rank."""
    results = [
        ops.all_reduce(v, loss_op=loss_op), ops.all_reduce(v, "avg", loss_op=loss_op),
        ops.all_reduce(v, "min", loss_op=loss_op), ops.all_reduce(v, "max", loss_op=loss_op),
        ops.broadcast(v, loss_op=loss_op), ops.all_gather(v, loss_op=loss_op),
    ]  # fmt: skip
    return (tt.concatenate(results) * x[0]).sum()


def gradients_of(values, rows, loss_op):
    """Return the gradient of each rank, from the definition of each collective."""
    counts, width = [len(share) for share in shares_of(rows)], values[0].size
    factors = [share[0] for share in shares_of(rows)]
    found = []
    for rank, value in enumerate(values):
        weights = [one / counts[rank] if loss_op == "avg" else 1 for one in counts]
        parts = sum(weight * factor for weight, factor in zip(weights, factors)).reshape(-1, width)
        total, average, least, largest, of_master, *of_each = parts
        gradient = total + average * counts[rank] / len(rows) + of_each[rank]
        gradient += least * (value == np.min(values, axis=0))
        gradient += largest * (value == np.max(values, axis=0))
        found.append(gradient + of_master * (rank == master_rank()))
    return found


def slopes_of(f, rows, v, values):
    """Return, for each rank, the differences of the loss by the items of its own replica."""
    found = []
    for rank, value in enumerate(values):
        slopes = np.empty_like(value)
        for index in np.ndindex(value.shape):
            losses = []
            for step in (STEP, -STEP):
                changed = value.copy()
                changed[index] += step
                synk.set_value(rank, v, changed)
                losses.append(f(rows, output_subset=[0])[0])
            slopes[index] = (losses[0] - losses[1]) / (2 * STEP)
        synk.set_value(rank, v, value)
        found.append(slopes)
    return found


def check_gradients():
    """Each rank has its own values, and its own rows of the input, of unequal numbers."""
    x, v = tt.dmatrix("x"), shared(np.zeros(2), "float64")
    for loss_op in ("avg", "sum"):
        loss = loss_of(v, x, loss_op)
        f = synk.function([x], [(loss, loss_op), (tt.grad(loss, v), "gather")])
        assert len(collectives_of(f)) == 12
        for width in WIDTHS:
            values = [rows_of(width, seed=rank) for rank in range(synk.size())]
            for rank, value in enumerate(values):
                synk.set_value(rank, v, value)
            rows = rows_of(2 * synk.size() + 1, (5 + synk.size()) * width, seed=7)
            expected = gradients_of(values, rows, loss_op)
            np.testing.assert_allclose(f(rows)[1], np.concatenate(expected), rtol=1e-9, atol=1e-9)
            if width == WIDTHS[0]:
                slopes = slopes_of(f, rows, v, values)
                if loss_op == "avg":
                    counts = [len(share) for share in shares_of(rows)]
                    slopes = [each * len(rows) / count for each, count in zip(slopes, counts)]
                np.testing.assert_allclose(slopes, expected, rtol=1e-6, atol=1e-7)


def check_a_rank_that_fails_on_its_device_leaves_nobody_waiting():
    """One rank reads beyond the end of an array on its device, between two collectives."""
    x, table = tt.fmatrix("x"), shared(np.arange(4))
    for width in WIDTHS:
        w, count = shared(np.ones(width)), shared(np.zeros(width))
        before = ops.all_reduce(w * x.sum())
        after = ops.all_reduce(before * table[tt.cast(x[0, 0], "int64")])
        f = synk.function([x], (after, None), updates=[(count, count + 1)])
        collectives_of(f)
        good = np.ones((synk.size(), 1), "float32")
        for rank in range(synk.size()):
            bad = good.copy()
            bad[rank] = 1000
            error = IndexError if rank == master_rank() else synk.WorkerError
            with pytest.raises(error) as caught:
                f(bad)
            assert rank == master_rank() or caught.value.rank == rank
            np.testing.assert_array_equal(f(good), np.full(width, synk.size() ** 2))
            np.testing.assert_array_equal(synk.gather(count).ravel(), rank + 1)


def in_any_order(x, w):
    """Return independent collectives of several shapes, which an optimizer could put in any order."""
    return [
        ops.all_reduce(x.sum(0)) * 2,
        ops.all_reduce(tt.tile(x.sum(0), WIDTHS[-1])),
        ops.all_reduce(x.max(1).max(), "max"),
        ops.all_gather(x[:, 0]),
        ops.all_reduce(x.sum(0)) * 3,
        ops.broadcast(w.sum()),
        ops.all_gather(x),
    ]


MODES = {
    "few optimizations": theano.Mode("cvm", "fast_compile"),
    "FAST_RUN": "FAST_RUN",
    "C and Python": theano.Mode("c|py", "fast_run"),
    "no optimization": theano.Mode("vm", None),
    "partly on the CPU": theano.Mode("vm", "fast_run").excluding("local_gpua_careduce"),
}


def check_one_order_in_every_mode(modes=MODES):
    x, w = tt.fmatrix("x"), shared(np.arange(1.0, 4.0))
    rows = rows_of(2 * synk.size() + 1, 3, dtype="float32")
    total = rows.sum(0)
    expected = [2 * total, np.tile(total, WIDTHS[-1]), rows.max(), rows[:, 0], 3 * total, 6, rows]
    for mode in modes.values():
        f = synk.function([x], [on_all_ranks(one) for one in in_any_order(x, w)], mode=mode)
        for results, one in zip(f(rows), expected):
            for result in results:
                np.testing.assert_allclose(result, one, rtol=1e-4, atol=1e-4)


CHECKS = [item for name, item in sorted(globals().items()) if name.startswith("check_")]


def main(*devices):
    """Run all checks on these devices, and then on the master's; print the name of each that passed."""
    master = len(devices) // 2
    for chosen, rank in ((devices, master), (devices[master : master + 1], 0)):
        synk.fork(devices=list(chosen), master_rank=rank)
        for one in CHECKS:
            one()
            print("passed", one.__name__, "on", len(chosen), flush=True)
        synk.close()
