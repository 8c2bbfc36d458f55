"""A fixed set of graphs, each as a parallel and a serial function, and strategies for their data.

The serial oracle is the compiler's plain function on a second copy of the graph, with its own shared
variables. The expected results are derived from the documentation, using only the public names of the
library.
"""

import os
from collections import namedtuple

import numpy as np
from compilers import ON_CPU, compiler, tt
from hypothesis import HealthCheck, settings, strategies as st

import synkhronos as synk

WORLDS = [(1, 0), (2, 0), (3, 2), (4, 1)]
WORLD_IDS = [f"{size}-ranks-master-{master}" for size, master in WORLDS]


# The environment variable EXAMPLES scales the number of examples: 20 runs twenty times as many, 0.2 a
# fifth. Above 1, each run draws new examples.
FACTOR = float(os.environ.get("EXAMPLES", 1))


def examples(number):
    """Return Hypothesis settings for a number of examples, the same in each run by default."""
    return settings(
        max_examples=max(1, round(number * FACTOR)), derandomize=FACTOR <= 1, deadline=None,
        database=None, suppress_health_check=list(HealthCheck),
    )  # fmt: skip


Graph = namedtuple("Graph", "inputs bcast outputs ops updates shared sliceable givens")
Pair = namedtuple("Pair", "parallel serial graph serial_graph")


def reductions(dtype):
    """Return a graph with every operation on outputs, two inputs and a broadcast input."""
    x, y = tt.matrix("x", dtype=dtype), tt.ivector("y")
    scale = tt.scalar("scale", dtype=dtype)
    outputs = [
        (x * scale).mean(), (x * scale).mean(axis=0), x.sum(axis=0), y.sum(),
        tt.prod(1 + abs(x) / 64, axis=0), x.min(axis=0), y.max(), x * y.dimshuffle(0, "x") + scale,
        y - 1, tt.sqr(x).sum(),
    ]  # fmt: skip
    ops = ["avg", "avg", "sum", "sum", "prod", "min", "max", "gather", "c_gather", "c_sum"]
    return Graph([x, y], [scale], outputs, ops, [], {}, [], {})


def training(dtype):
    """Return a graph with updates of every operation, an integer counter and an in-place update."""
    x, t = tt.matrix("x", dtype=dtype), tt.vector("t", dtype=dtype)
    rate = tt.scalar("rate", dtype=dtype)
    shared = {
        "w": compiler.shared(np.array([0.5, -0.25, 1.0], dtype), "w"),
        "rows": compiler.shared(np.int64(3), "rows"),
        "calls": compiler.shared(np.int64(5), "calls"),
        "largest": compiler.shared(np.full(3, 0.5, dtype), "largest"),
        "smallest": compiler.shared(np.full(3, -0.5, dtype), "smallest"),
        "product": compiler.shared(np.array(2.0, dtype), "product"),
        "last": compiler.shared(np.zeros(3, dtype), "last"),
        "table": compiler.shared(np.zeros((4, 3), dtype), "table"),
    }
    one = {name: shared[name] for name in shared}
    error = tt.dot(x, one["w"]) - t
    loss = tt.sqr(error).mean()
    updates = [
        (one["w"], one["w"] - rate * tt.grad(loss, one["w"])),
        (one["rows"], one["rows"] + x.shape[0], "sum"),
        (one["calls"], one["calls"] + 1, "max"),
        (one["largest"], tt.maximum(one["largest"], x.max(axis=0)), "max"),
        (one["smallest"], tt.minimum(one["smallest"], x.min(axis=0)), "min"),
        (one["product"], one["product"] * (1 + tt.sqr(t).mean() / 64), "prod"),
        (one["last"], x[-1], None),
        (one["table"], tt.inc_subtensor(one["table"][1], x.mean(axis=0))),
    ]
    return Graph([x, t], [rate], [loss], ["avg"], updates, shared, [], {})


def sliceable(dtype):
    """Return a graph with rows of shared data: used directly, deep in the graph, and as givens."""
    shared = {
        "a": compiler.shared(np.zeros((0, 2), dtype), "a"),
        "b": compiler.shared(np.zeros(0, dtype), "b"),
        "c": compiler.shared(np.zeros((0, 2), dtype), "c"),
        "w": compiler.shared(np.array([1.0, 2.0], dtype), "w"),
        "seen": compiler.shared(np.int64(0), "seen"),
    }
    a, b, c, w = (shared[name] for name in "abcw")
    given = tt.matrix("given", dtype=dtype)
    deep = tt.tanh(tt.dot(given, w) + tt.exp(-tt.sqr(b / 4)))
    outputs = [deep.mean(), a, (deep * b + a.sum(axis=1)).sum(), a.max()]
    ops = ["avg", "gather", "sum", "max"]
    updates = [(shared["seen"], shared["seen"] + b.shape[0], "sum")]
    return Graph([], [], outputs, ops, updates, shared, [a, b, c], {given: c * 2})


def collectives(dtype):
    """Return a graph in which the ranks combine values while they compute, with a gradient."""
    x, scale = tt.matrix("x", dtype=dtype), tt.scalar("scale", dtype=dtype)
    shared = {
        "w": compiler.shared(np.array([0.5, -0.25, 1.0], dtype), "w"),
        "average": compiler.shared(np.zeros(3, dtype), "average"),
        "rows": compiler.shared(np.int64(0), "rows"),
    }
    y = x * shared["w"] * scale
    everyone, mean = synk.ops.all_gather(y), synk.ops.all_reduce(y.mean(axis=0), "avg")
    largest = synk.ops.all_reduce(abs(y).max(axis=0), "max")
    loss = (tt.sqr(y - mean) / (1 + largest)).mean() + tt.tanh(tt.dot(y, everyone.T)).mean()
    number = synk.ops.all_reduce(x.shape[0])
    outputs = [
        loss, tt.grad(loss, shared["w"]), y - mean,
        (x - synk.ops.all_reduce(x.min(axis=0), "min")).sum(axis=0), tt.tanh(everyone).sum(axis=0),
        synk.ops.all_reduce(tt.prod(1 + abs(x) / 64, axis=0), "prod"),
    ]  # fmt: skip
    ops = ["avg", "avg", "gather", "sum", "max", "min"]
    updates = [
        (shared["average"], shared["average"] / 2 + mean),
        (shared["rows"], shared["rows"] + number, "max"),
    ]
    return Graph([x], [scale], outputs, ops, updates, shared, [], {})


def of_master(dtype):
    """Return a graph that uses the first row of the master, with a gradient."""
    x, scale = tt.matrix("x", dtype=dtype), tt.scalar("scale", dtype=dtype)
    shared = {"w": compiler.shared(np.array([0.5, -0.25, 1.0], dtype), "w")}
    y = x * shared["w"] * scale
    loss = tt.tanh(y - synk.ops.broadcast(y[0])).mean()
    outputs = [loss, tt.grad(loss, shared["w"]), (x - synk.ops.broadcast(x[:1])[0]).sum(axis=0)]
    return Graph([x], [scale], outputs, ["avg", "avg", "sum"], [], shared, [], {})


def build(make, *args):
    """Return a graph's parallel function, and the serial function of its copy."""
    graph, copy = make(*args), make(*args)
    parallel = synk.function(
        graph.inputs, list(zip(graph.outputs, graph.ops)), bcast_inputs=graph.bcast,
        updates=graph.updates, givens=graph.givens, sliceable_shareds=graph.sliceable,
    )  # fmt: skip
    serial = compiler.function(
        [*copy.inputs, *copy.bcast], copy.outputs, updates=[update[:2] for update in copy.updates],
        givens=copy.givens, mode=ON_CPU,
    )  # fmt: skip
    return Pair(parallel, serial, graph, copy)


def exact(rng, shape, dtype):
    """Return random multiples of 1/8. Their sums have no rounding errors."""
    return (rng.integers(-32, 33, shape) / 8).astype(dtype)


@st.composite
def batches(draw, length):
    """Draw a batch of any kind for a number of rows. It may be empty."""
    bound = st.integers(-length - 3, length + 3)
    maybe = st.none() | bound
    kind = draw(st.sampled_from(["none", "int", "slice", "list", "array", "mask", "mask list"]))
    if kind == "none":
        return None
    if kind == "int":
        return draw(st.sampled_from([int, np.int64, np.int16]))(draw(bound))
    if kind == "slice":
        step = draw(st.none() | st.integers(1, 3) | st.integers(-3, -1))
        return slice(draw(maybe), draw(maybe), step)
    if kind in ("mask", "mask list"):
        mask = draw(st.lists(st.booleans(), min_size=length, max_size=length))
        return mask if kind == "mask list" and length else np.array(mask, bool)
    rows = draw(
        st.lists(st.integers(-length, length - 1), max_size=2 * length) if length else st.just([])
    )
    if kind == "list":
        return draw(st.sampled_from([list, tuple]))(rows)
    rows = np.array(rows, np.int64)
    dtype = draw(st.sampled_from(["int8", "int32", "int64", "uint8", "uint64", "strided"]))
    if dtype == "strided":
        return np.repeat(rows, 2)[::2]
    return rows.astype(dtype) if dtype[0] == "i" else (rows % max(length, 1)).astype(dtype)


@st.composite
def slice_batches(draw, by_rank):
    """Draw a ``batch_s``, and return it and the equivalent list by rank.

    `by_rank` are the ranks' numbers of rows.
    """
    kind = draw(st.sampled_from(["none", "slice", "list", "array", "by rank"]))
    if kind == "none":
        return None, [None] * len(by_rank)
    if kind == "by rank":
        listed = [draw(batches(length).filter(is_listed)) for length in by_rank]
        container = draw(st.sampled_from([list, tuple]))
        return container(listed), listed
    shortest = min(by_rank)
    if kind == "slice":
        one = draw(batches(shortest).filter(lambda batch: isinstance(batch, slice)))
    else:
        row = st.integers(-shortest, shortest - 1)
        one = draw(st.lists(row, max_size=6)) if shortest else []
        one = one if kind == "list" else np.array(one, int)
    return one, [one] * len(by_rank)


def is_listed(batch):
    # A list of batches by rank may not contain tuples of ints or bools.
    return batch is None or isinstance(batch, (slice, list, np.ndarray))


def as_given(draw, variables, values):
    """Return variables and values in a form that callers may use.

    A single one may be passed bare; several are passed as lists or tuples. Values may be arrays, lists,
    or `Data`.
    """
    form = draw(st.sampled_from(["array", "data", "minibatch", "list", "strided"]))
    given_values = []
    for value in values:
        if form == "data" or form == "minibatch":
            value = synk.data(value, oversize=1.5, minibatch=form == "minibatch")
        elif form == "list" and value.size and value.dtype in ("float32", "float64", "int64"):
            value = value.tolist()
        elif form == "strided" and value.ndim:
            value = np.repeat(value, 2, axis=0)[1::2]
        given_values.append(value)
    if len(variables) == 1 and draw(st.booleans()):
        return variables[0], given_values[0]
    container = draw(st.sampled_from([list, tuple]))
    return container(variables), container(given_values)


def draw_names(draw, names):
    return draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))


def selected(batch, array):
    """Return the rows that a batch selects, computed with NumPy."""
    if batch is None:
        return array
    if isinstance(batch, (int, np.integer)):
        return array[:batch]
    if isinstance(batch, slice):
        return array[batch]
    if len(batch) == 0:
        return array[:0]
    return array[np.array(batch)]


def parts(array, number):
    """Split rows as evenly as possible, the longer parts first."""
    return np.array_split(array, number)


def combine(op, values, weights):
    """Return the reduction of values. The weights are their numbers of rows."""
    values = [np.asarray(value) for value in values]
    op = op[2:] if op is not None and op.startswith("c_") else op
    if op is None:
        return values[-1]
    if op == "gather":
        return np.concatenate([np.atleast_1d(value) for value in values])
    stack = np.array(values)
    if op == "avg":
        stack = stack.astype(np.promote_types(stack.dtype, float))
        weights = np.ones(len(stack)) if weights is None else np.array(weights, float)
        return np.tensordot(weights, stack, 1) / weights.sum()
    return {"sum": np.sum, "prod": np.prod, "min": np.min, "max": np.max}[op](stack, axis=0)


def assert_same(got, expected, dtype=None):
    """Check that arrays are equal up to rounding. Shapes and integers must be equal exactly."""
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape
    if dtype is not None:
        assert got.dtype == dtype
    if got.dtype.kind in "biu":
        np.testing.assert_array_equal(got, expected)
    else:
        rtol = {2: 4e-3, 4: 2e-5}.get(got.dtype.itemsize, 1e-10)
        np.testing.assert_allclose(got, expected, rtol=rtol, atol=rtol)
