"""Computes what must not depend on the machines on which four ranks are; writes it to a file as pickle.

The first argument is the folder to write to, the second one a checkpoint that this script has written
elsewhere, if any; with a third one, this checkpoint is all that is tried. The same script runs on one
machine and on several.
"""

import os
import pickle
import socket
import sys
import time
from pathlib import Path

import synkhronos as synk
import numpy as np
import scipy.sparse
from compilers import RandomStreams, Streams, compiler, sparse, tt
from synkhronos.extensions import train, updates

RANKS, MASTER = 4, 1


def resumed(folder, *others):
    """Write a checkpoint of variables of every kind.

    Return what both kinds of random streams have drawn until then, and what is computed after the
    checkpoint was loaded, and after each of the others.
    """
    one, other = Streams(3).uniform(size=(2,)), RandomStreams(4).normal(size=(2,))
    w, own = compiler.shared(np.arange(3.0), "w"), compiler.shared(np.array(0.0), "own")
    rows = compiler.shared(np.zeros(3), "rows")
    f = synk.function(
        [], [(one, "gather"), (other, "gather"), own, (w, "gather"), (rows, "gather")],
        updates=[(w, 1.5 * w + 1)], sliceable_shareds=[rows],
    )  # fmt: skip
    synk.distribute()
    synk.scatter(rows, np.arange(10.0))
    for rank in range(RANKS):
        synk.set_value(rank, own, np.array(rank + 2.0))
    drawn, found = [f(), f()], []
    synk.save(folder / "resumed", {"step": 1})
    for path in (folder / "resumed", *others):
        f()
        found.append([synk.load(path), f(), f(), synk.gather([w, own, rows])])
    return drawn, found


def inputs_of_every_kind(folder):
    """Return outputs for sparse inputs, files, minibatches, other axes and late functions."""
    x, s = tt.dmatrix("x"), sparse.csr_matrix("s")
    w = compiler.shared(np.arange(3.0), "w")
    f = synk.function([x], [(x * w, "gather"), (x.sum(axis=0), "sum"), x.mean(), (x.shape[0], None)])
    dense = synk.function([s], (sparse.dense_from_sparse(s) * 2, "gather"))
    synk.distribute()
    rows = np.arange(33.0).reshape(11, 3)
    np.save(folder / "rows.npy", rows)
    mapped = synk.data(np.load(folder / "rows.npy", mmap_mode="r"))
    data, part = synk.data(rows), synk.data(rows[2:8], minibatch=True)
    late = synk.function([x], (tt.tanh(x.dot(w)) * 3 - x.min(axis=1) / 7, "gather"))  # new C code
    batches = (None, 7, slice(9, 1, -2), [4, 0, 0, 10], np.arange(11) % 2 == 0)
    return [
        *[f(given, batch=batch, num_slices=slices) for given in (rows, data, mapped)
          for batch in batches for slices in (1, 3)],
        f(part), dense(scipy.sparse.csr_matrix(rows)), late(data), late(mapped, batch=[3, 3, 9]),
    ]  # fmt: skip


def rows_of_variables():
    """Return outputs for rows of sliceable variables, and the variables after collectives."""
    rows, w = compiler.shared(np.zeros(3)), compiler.shared(np.array(2.0))
    f = synk.function([], [(rows * w, "gather"), rows.mean()], sliceable_shareds=[rows])
    synk.distribute()
    synk.scatter(rows, np.arange(10.0))
    found = [f(), f(batch_s=[0]), f(batch_s=[[2, 0], [1], [0], [1, 1]], num_slices=2)]
    for rank in range(RANKS):
        synk.set_value(rank, w, np.array(3.0**rank))
    found += [synk.gather(w), synk.reduce(w, "prod", in_place=False), synk.get_lengths(rows)]
    synk.all_gather(rows)
    synk.all_reduce(w, "max")
    with synk.fuse():
        late = [f(), synk.gather(w)]
    found += [one.result() for one in late]
    return [*found, [synk.get_value(rank, [rows, w]) for rank in range(RANKS)]]


def training():
    """Return the losses and parameters of a few steps, and the same for serial steps."""
    rng = np.random.RandomState(0)
    images, labels = synk.data(rng.randn(50, 6)), synk.data(rng.randn(50))
    results = []
    for make in (train.make_train_function, train.make_train_function_theano):
        x, y = tt.dmatrix("x"), tt.dvector("y")
        w = compiler.shared(np.random.RandomState(1).randn(6), "w")
        loss = tt.sqr(tt.tanh(x.dot(w)) - y).mean()
        step = make(loss, [w], x, y, updates.adam, 0.05)
        batches = [np.random.RandomState(turn).permutation(50)[: 20 + turn] for turn in range(6)]
        batches += [slice(0, 8)] * 66 + [slice(0, 16, 2), slice(30, 3, -3)]  # rows of a schedule
        results.append([*[step(images, labels, batch=batch) for batch in batches], w.get_value()])
    return results


WIRES = [None, "float16", "int8", synk.TopK(0.1), synk.PowerSGD(4)]


def network():
    """Return a loss with its inputs and parameters, whose gradients are larger than 64 kB."""
    rng = np.random.RandomState(0)
    x, y = tt.fmatrix("x"), tt.fmatrix("y")
    first = compiler.shared(rng.randn(120, 160).astype("float32") / 11, "first")
    bias = compiler.shared(np.zeros(160, "float32"), "bias")
    last = compiler.shared(rng.randn(160, 8).astype("float32") / 13, "last")
    loss = tt.sqr(tt.tanh(x.dot(first) + bias).dot(last) - y).mean()
    return loss, [first, bias, last], x, y


def wires():
    """Return the losses of training in each wire format."""
    rng = np.random.RandomState(1)
    given = rng.randn(200, 120).astype("float32")
    wanted = np.tanh(given[:, :8] + given[:, 8:16])
    losses = {}
    for wire in WIRES:
        loss, params, x, y = network()
        step = train.make_train_function(loss, params, x, y, updates.momentum, 0.2, wire=wire)
        losses[None if wire is None else str(wire)] = [float(step(given, wanted)) for _ in range(20)]
    return losses


def wires_in_a_program():
    """Return an average of gradients in each format, over the ranks of a program."""
    loss, params, x, y = network()
    grad_updates, _, gradient = updates.sgd(loss, params, 0.1)
    compute = synk.function([x, y], loss, updates=grad_updates)
    given = np.random.RandomState(2).randn(6, 120).astype("float32")
    data = synk.data(given), synk.data(given[:, :8].copy())

    def average(rank, wire):
        rank.call(compute, *data, batch=rank.rows(len(data[0])))
        rank.all_reduce(gradient, "avg", weight=1.0, wire=wire)
        return gradient.get_value()

    # The rank of the gradient is at most the rank of the rows.
    return [synk.spmd(average, wire)[3] for wire in (*WIRES[:3], synk.PowerSGD(8), synk.TopK(1.0))]


def graphs_that_meet():
    """Return what functions with collectives compute, also on ranks and machines without rows."""
    x, w = tt.dmatrix("x"), compiler.shared(np.arange(1.0, 4.0), "w")
    average = compiler.shared(np.zeros(3), "average")
    mean = synk.ops.all_reduce((x * w).mean(axis=0), "avg")
    loss = tt.sqr(x - mean).mean() + synk.ops.all_gather(tt.tanh(x * w)).max()
    outputs = [loss, tt.grad(loss, w), (synk.ops.all_reduce(x.min(axis=0), "min"), None)]
    f = synk.function([x], outputs, updates=[(average, 0.5 * average + mean)])
    rows = np.random.RandomState(2).randn(11, 3)
    data, found = synk.data(rows), []
    for given, batch, slices in (
        (rows, None, 1), (data, [9, 3], 1), (data, 2, 1), (data, 3, 3), (rows, slice(0, 9, 2), 2),
    ):  # fmt: skip
        found += [f(given, batch=batch, num_slices=slices), synk.gather(average)]
    return found


def hosts():
    """Return the hosts of the ranks, and a sum over all ranks from inside a program."""
    return synk.spmd(lambda rank: (socket.gethostname(), rank.exchange(rank.rank)))


def main(folder, other=None, only=None):
    found = {}
    synk.fork(RANKS, use_gpu=False, master_rank=MASTER)
    found["resumed"] = resumed(folder, *([other] if other else []))
    if only is None:
        compute(folder, found)
    (folder / "found.pickle").write_bytes(pickle.dumps(found))
    print(os.uname().nodename, compiler.config.compiledir, flush=True)


def compute(folder, found):
    """Compute all but what `resumed` does, in two worlds."""
    found["hosts"] = hosts()
    found["inputs"] = inputs_of_every_kind(folder)
    found["variables"] = rows_of_variables()
    found["training"] = training()
    found["wires"] = wires()
    found["wires in a program"] = wires_in_a_program()
    found["graphs"] = graphs_that_meet()
    with synk.profile() as profile:
        found["again"] = rows_of_variables()
    for category in ("compute", "reduce"):
        seconds = profile.seconds[:, :, profile.categories.index(category)].sum(axis=0)
        found[f"ranks that {category}"] = np.flatnonzero(seconds).tolist()
    found["commands"] = [
        [(one.step, one.start, one.start + one.seconds) for one in events if one.category == "command"]
        for events in profile.events
    ]
    found["clock error"], found["profiled hosts"] = profile.clock_error, profile.hosts
    found["clocks"] = synk.spmd(lambda rank: time.perf_counter())
    synk.close()
    synk.fork(3, use_gpu=False, check=True)
    found["size of the next world"] = len(hosts())
    found["checked training"] = training()
    synk.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
