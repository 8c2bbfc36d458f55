"""Tests of invalid calls of the whole public interface, in one table.

Each row is an invalid call in a small world of two ranks. It must raise exactly the documented exception
in the master, immediately and before any worker is involved. The message must say what was expected and
what was given. The call must not change anything, and the world must remain usable.
"""

import importlib.util
import inspect
import time
from types import SimpleNamespace
from typing import Callable, NamedTuple, Tuple

import numpy as np
import pytest

import synkhronos as synk
from synkhronos.arrays.binding import _Bindings
from synkhronos.host.compiler import TITLE

from compilers import NAME, MissingInputError, UnusedInputError, compiler, generic, shared, tt

QUICK = 1.0  # the most seconds that an invalid call may take
X = np.arange(12, dtype="float32").reshape(4, 3)
Y = np.arange(4, dtype="int32")
W = np.array([1, 2, 3], "float32")


class Row(NamedTuple):
    name: str
    error: type
    words: Tuple[str, ...]
    call: Callable
    state: str = "open"  # the apparent state of the world: "open", "unforked" or "closed"
    asks_ranks: bool = False  # whether the master has to ask the ranks to detect the error


ROWS = []


def wrong(name, error, words, call, **kwargs):
    ROWS.append(Row(name, error, (words,) if isinstance(words, str) else words, call, **kwargs))


def compile_functions(e):
    def function(*args, **kwargs):
        return synk.function(*args, mode="FAST_COMPILE", **kwargs)

    e.x, e.y, e.b = tt.fmatrix("x"), tt.ivector("y"), tt.fscalar("b")
    e.row = tt.frow("row")
    e.w = compiler.shared(W, name="w")
    e.counts = compiler.shared(np.arange(3), name="counts")
    e.table = compiler.shared(X, name="table")
    e.number = compiler.shared(np.float32(2), name="number")
    e.single = shared(np.ones((1, 2), "float32"), "single", (True, False))
    e.lone = compiler.shared(W, name="lone")
    e.total = tt.dot(e.x, e.w).sum()
    e.used = e.total * e.number + e.single.sum() + e.counts.sum()
    e.f = function([e.x, e.y], [(e.total, "sum"), (e.y, "gather")], [e.b], on_unused_input="ignore")
    e.other = function([e.x], [(e.used, "sum"), (e.x, "gather")], name="other")
    e.plain = function([], (e.w.sum(), None))
    e.own = function([e.x], [(e.total, None), (e.total, "sum")], name="own")
    e.slicer = function([e.x], (e.table.sum() + e.x.sum(), "sum"), sliceable_shareds=[e.table])
    e.sliced = function([], (e.table.sum(), "sum"), sliceable_shareds=[e.table])
    e.counter = function([e.x], (e.x.sum(), "sum"), updates=[(e.counts, e.counts + 1)])
    e.rowed = function([e.x], (e.x.sum() + e.row.sum(), "sum"), [e.row])


@pytest.fixture(scope="module")
def env(open_world):
    """Namespace of a world of two ranks, with its functions and data and a closed world's."""
    open_world(2)
    closed = SimpleNamespace(world=synk.world.world.current_world())
    compile_functions(closed)
    closed.data = synk.data(X)
    synk.set_shmems({closed.x: X})
    synk.distribute()
    synk.close()

    open_world(2, master_rank=1)
    e = SimpleNamespace(world=synk.world.world.current_world(), closed=closed)
    compile_functions(e)
    e.function = lambda *args, **kwargs: synk.function(*args, mode="FAST_COMPILE", **kwargs)
    e.data = synk.data(X, name="dx")
    e.ints = synk.data(Y)
    e.doubles = synk.data(X.astype("float64"))
    e.zero_d = synk.data(np.float32(1))
    e.minibatch = synk.data(X[:2], minibatch=True)
    e.freed = synk.data(X, name="gone")
    e.freed.free_memory()
    synk.distribute()
    assert_computes(e)
    return e


def restore(e):
    """Undo the effects of an invalid call that was accepted, so that only its own test fails."""
    world = e.world
    if synk.world.world._current not in (world, e.closed.world, None):
        synk.close()
    world._recorder = None
    world.part(_Bindings).clear()
    e.data.set_value(X)
    synk.world.world.enter_world(world)
    synk.broadcast([e.w, e.table], [W, X])


def assert_computes(e):
    total, y = e.f(X, Y, 1)
    assert total == X.dot(W).sum()
    assert y.tolist() == Y.tolist()
    synk.all_reduce(e.w, op="sum")
    assert synk.get_value(0, e.w).tolist() == synk.get_value(1, e.w).tolist() == (2 * W).tolist()
    synk.broadcast(e.w, W)
    assert e.data.data.tolist() == X.tolist()


def state_of(e):
    """Return the state that an invalid call must not change."""
    w = e.world
    return (
        len(w.rank_state.functions), list(w.registry.numbers), dict(w.part(_Bindings)), w.is_recording,
        w.closed, w.broken,
        w.started, synk.world.world._current,
    )  # fmt: skip


for value, error, words in [
    (0, ValueError, "expected 1 or more, got 0"),
    (-1, ValueError, "expected 1 or more, got -1"),
    (1.5, TypeError, "expected an int, got 1.5"),
    ("2", TypeError, "expected an int, got '2'"),
    (True, TypeError, "expected an int, got True"),
]:
    wrong(f"fork: n_parallel={value!r}", error, ("n_parallel", words),
          lambda e, v=value: synk.fork(v, use_gpu=False), state="unforked")  # fmt: skip

for name, value, error, words in [
    ("master_rank", 2, ValueError, "expected 0 to 1, got 2"),
    ("master_rank", 0.0, TypeError, "expected an int, got 0.0"),
    ("timeout", 0, ValueError, "expected more than 0 seconds, got 0"),
    ("timeout", float("nan"), ValueError, "expected more than 0 seconds, got nan"),
    ("timeout", "1", TypeError, "expected seconds or None, got '1'"),
    ("use_gpu", "yes", TypeError, "expected True or False, got 'yes'"),
    ("profile_workers", None, TypeError, "expected True or False, got None"),
    ("check", 1, TypeError, "expected True or False, got 1"),
    ("restart", None, TypeError, "expected True or False, got None"),
    ("max_n_var", "many", TypeError, "expected an int, got 'many'"),
    ("threads", "queue", ValueError, "expected one of 'refuse', 'wait', got 'queue'"),
    ("threads", None, ValueError, "expected one of 'refuse', 'wait', got None"),
    ("verify", "never", ValueError, "expected one of 'first', 'always', 'off'"),
    ("verify", 1, ValueError, "expected one of 'first', 'always', 'off'"),
    ("max_dim", 2.5, TypeError, "expected an int, got 2.5"),
    ("devices", "cpu", TypeError, "expected a list of device names, got 'cpu'"),
    ("devices", [], ValueError, "expected at least one device name, got an empty list"),
    ("devices", ["cpu"], ValueError, "n_parallel is 2, but 1 devices are named: ['cpu']"),
    ("devices", ["cpu", "abacus"], ValueError, "['abacus']"),
]:
    wrong(f"fork: {name}={value!r}", error, ("fork", name, words),
          lambda e, n=name, v=value: synk.fork(2, **{"use_gpu": False, n: v}),
          state="unforked")  # fmt: skip
wrong("fork: an argument that there is not", TypeError, "n_gpus",
      lambda e: synk.fork(n_gpus=2), state="unforked")  # fmt: skip
wrong("fork: twice", synk.AlreadyForkedError, ("fork()", "synk.close() first"),
      lambda e: synk.fork(2, use_gpu=False))  # fmt: skip
if NAME == "theano":
    wrong("fork: devices of JAX", ValueError, ("devices", "need PyTensor", "this process uses Theano"),
          lambda e: synk.fork(devices=["jax:cpu"] * 2), state="unforked")  # fmt: skip
if NAME == "theano" and importlib.util.find_spec("pygpu") is None:
    wrong("fork: use_gpu without pygpu", ValueError, ("use_gpu=True", "pygpu"),
          lambda e: synk.fork(2, use_gpu=True), state="unforked")  # fmt: skip
    wrong("fork: use_gpu with devices of the CPU", ValueError, ("use_gpu", "devices", "'cpu'"),
          lambda e: synk.fork(use_gpu=True, devices=["cpu"] * 2), state="unforked")  # fmt: skip

PUBLIC_CALLS = {
    "all_gather": lambda e: synk.all_gather(e.w), "all_reduce": lambda e: synk.all_reduce(e.w),
    "broadcast": lambda e: synk.broadcast(e.w), "data": lambda e: synk.data(X),
    "distribute": lambda e: synk.distribute(), "free_shmems": lambda e: synk.free_shmems(e.x),
    "function": lambda e: synk.function([e.x], e.x.sum()), "fuse": lambda e: synk.fuse().__enter__(),
    "on_step": lambda e: synk.on_step(print), "profile": lambda e: synk.profile().__enter__(),
    "gather": lambda e: synk.gather(e.w), "get_lengths": lambda e: synk.get_lengths(e.w),
    "get_shapes": lambda e: synk.get_shapes(e.w), "get_shmems": lambda e: synk.get_shmems(e.x),
    "get_value": lambda e: synk.get_value(0, e.w), "in_sync": lambda e: synk.in_sync(),
    "load": lambda e: synk.load("nowhere.npz"), "reduce": lambda e: synk.reduce(e.w),
    "reseed": lambda e: synk.reseed(None), "restart": lambda e: synk.restart(),
    "save": lambda e: synk.save("nowhere.npz"), "spmd": lambda e: synk.spmd(print),
    "scatter": lambda e: synk.scatter(e.w, W), "size": lambda e: synk.size(),
    "set_shmems": lambda e: synk.set_shmems({e.x: X}), "set_value": lambda e: synk.set_value(0, e.w, W),
}  # fmt: skip
NEEDS_NO_WORLD = {"attach", "fork", "close", "get_n_gpu", "is_forked", "make_slices"}
for name, call in PUBLIC_CALLS.items():
    wrong(f"{name}: before fork", synk.NotForkedError, "call synk.fork() first", call,
          state="unforked")  # fmt: skip
    wrong(f"{name}: after close", synk.ClosedError, ("closed", "synk.fork()"), call,
          state="closed")  # fmt: skip

for name, call in {
    "call": lambda e: e.closed.f(X, Y, 1),
    "call with data of the open world": lambda e: e.closed.other(e.data),
    "as_theano": lambda e: e.closed.other.as_theano(X),
    "check": lambda e: e.closed.other.check(X),
    "build_inputs": lambda e: e.closed.other.build_inputs(X),
    "set_input_shmems": lambda e: e.closed.other.set_input_shmems(X),
    "get_input_shmems": lambda e: e.closed.other.get_input_shmems(),
}.items():
    wrong(f"function of a closed world: {name}", synk.ClosedError, ("closed", "synk.fork()"), call)
    wrong(f"function after close: {name}", synk.ClosedError, ("closed", "synk.fork()"), call,
          state="closed")  # fmt: skip
for name, call in {
    "data": lambda d: d.data,
    "shape": lambda d: d.shape,
    "size": lambda d: d.size,
    "alloc_size": lambda d: d.alloc_size,
    "len": len,
    "reading": lambda d: d[0],
    "writing": lambda d: d.__setitem__(0, 1),
    "as an array": np.asarray,
    "set_value": lambda d: d.set_value(X),
    "set_length": lambda d: d.set_length(2),
    "set_shape": lambda d: d.set_shape((2, 2)),
}.items():
    if not name.startswith("set_"):  # these allocate new memory
        wrong(f"freed Data: {name}", ValueError, ("'gone'", "free_memory()"),
              lambda e, c=call: c(e.freed))  # fmt: skip
    wrong(f"Data of a closed world: {name}", synk.ClosedError, ("Data", "closed"),
          lambda e, c=call: c(e.closed.data))  # fmt: skip
for kind, error, words in [
    ("freed", ValueError, ("'gone'", "freed")),
    ("closed", synk.ClosedError, ("Data", "closed")),
]:
    for name, call in {
        "call": lambda e, d: e.other(d),
        "call by name": lambda e, d: e.other(x=d),
        "as_theano": lambda e, d: e.other.as_theano(d),
        "check": lambda e, d: e.other.check(d),
        "set_shmems": lambda e, d: synk.set_shmems({e.x: d}),
        "set_input_shmems": lambda e, d: e.other.set_input_shmems(d),
        "scatter": lambda e, d: synk.scatter(e.table, d),
        "broadcast": lambda e, d: synk.broadcast(e.table, d),
        "set_value": lambda e, d: synk.set_value(0, e.table, d),
        "data": lambda e, d: synk.data(d),
        "build_inputs": lambda e, d: e.other.build_inputs(d),
        "Data.set_value": lambda e, d: e.data.set_value(d),
    }.items():
        wrong(f"{kind} Data given to {name}", error, words,
              lambda e, c=call, k=kind: c(e, e.freed if k == "freed" else e.closed.data)
              )  # fmt: skip

for value, got in [("x", "'x'"), (5, "5"), ({}, "{}")]:
    wrong(f"function: inputs={value!r}", TypeError, ("inputs: expected a list", f"got {got}"),
          lambda e, v=value: e.function(v, e.x.sum()))  # fmt: skip
wrong("function: inputs a bare variable", TypeError, ("inputs: expected a list", "got x"),
      lambda e: e.function(e.x, e.x.sum()))  # fmt: skip
wrong("function: bcast_inputs a bare variable", TypeError, "bcast_inputs: expected a list",
      lambda e: e.function([e.x], e.x.sum() + e.b, e.b))  # fmt: skip
for name, make in {
    "a string": lambda e: "x",
    "an array": lambda e: X,
    "a generic variable": lambda e: generic("any"),
    "None": lambda e: None,
    "a list": lambda e: [e.x],
    "a type": lambda e: tt.fmatrix,
}.items():
    for where in () if "generic" in name else ("inputs", "bcast_inputs"):
        wrong(f"function: {name} in {where}", TypeError,
              (f"{where}: expected a {TITLE} tensor variable", "got"),
              lambda e, m=make, w=where: e.function(
                  **{"inputs": [], w: [m(e)], "outputs": e.x.sum()}))  # fmt: skip
    wrong(f"function: {name} as output", TypeError,
          (f"outputs[1]: expected a {TITLE} tensor variable", "got"),
          lambda e, m=make: e.function([e.x], [e.x.sum(), m(e)]))  # fmt: skip
wrong("function: input with one row by its type", ValueError, ("row", "bcast_inputs"),
      lambda e: e.function([e.row], e.row.sum()))  # fmt: skip
wrong("function: shared variable in inputs", TypeError, ("w", "shared variable"),
      lambda e: e.function([e.w], e.w.sum()))  # fmt: skip
wrong("function: input twice", ValueError, ("x", "more than once"),
      lambda e: e.function([e.x, e.x], e.x.sum()))  # fmt: skip
for op, error in [("mean", ValueError), ("c_", ValueError), ("SUM", ValueError), (1, TypeError)]:
    wrong(f"function: output op {op!r}", error, ("output", "'avg'", "'gather'", "None", repr(op)),
          lambda e, o=op: e.function([e.x], [(e.x.sum(), o)]))  # fmt: skip
wrong("function: average of an integer output", TypeError, ("outputs[0]", "'avg'", "int64", "float"),
      lambda e: e.function([e.y], e.y.sum()))  # fmt: skip
wrong("function: product of booleans", TypeError, ("outputs[0]", "'prod'", "bool"),
      lambda e: e.function([e.x], [(tt.gt(e.x, 0).all(), "prod")]))  # fmt: skip
wrong("function: output with three items", ValueError, ("outputs[0]", "(variable, op)", "3"),
      lambda e: e.function([e.x], [(e.x.sum(), "sum", "c")]))  # fmt: skip
wrong("function: tuple of outputs", TypeError, ("outputs[0]", "as a list", "Sum"),
      lambda e: e.function([e.x], (e.x.sum(), e.x.sum())))  # fmt: skip
for value in ["w", 5, {1, 2}]:
    wrong(f"function: updates={value!r}", TypeError,
          ("updates: expected a list of pairs", f"got {value!r}"),
          lambda e, v=value: e.function([], updates=v))  # fmt: skip
wrong("function: update of no pair", TypeError, ("updates[0]", "(shared, new)", "w"),
      lambda e: e.function([], updates=[e.w]))  # fmt: skip
wrong("function: update of an input", TypeError, ("updates[0]", "shared variable", "got x"),
      lambda e: e.function([e.x], updates=[(e.x, e.x + 1)]))  # fmt: skip
wrong("function: update of another dtype", TypeError, ("counts", "int64", "float"),
      lambda e: e.function([], updates=[(e.counts, e.counts * 1.5)]))  # fmt: skip
wrong("function: update twice", ValueError, ("updates[1]", "w", "more than once"),
      lambda e: e.function([], updates=[(e.w, e.w), (e.w, e.w)]))  # fmt: skip
wrong("function: update op 'gather'", ValueError, ("updates[0]", "'gather' cannot accumulate"),
      lambda e: e.function([], updates=[(e.w, e.w, "gather")]))  # fmt: skip
wrong("function: givens a number", TypeError, ("givens", "expected", "5"),
      lambda e: e.function([e.x], e.x.sum(), givens=5))  # fmt: skip
for name, error, words, make in [
    ("a bare variable", TypeError, "expected a list of shared variables, got table",
     lambda e: e.table),
    ("an input", TypeError, "sliceable_shareds[0]: expected a shared variable, got x",
     lambda e: [e.x]),
    ("a scalar", ValueError, "number cannot be sliced on axis 0", lambda e: [e.number]),
    ("one row by its type", ValueError, "single cannot be sliced on axis 0", lambda e: [e.single]),
    ("not in the graph", ValueError, "lone is not used", lambda e: [e.lone]),
    ("the same twice", ValueError, "table is given more than once", lambda e: [e.table, e.table]),
    ("an updated variable", ValueError, "w is updated by this function", lambda e: [e.w]),
]:  # fmt: skip
    wrong(f"function: sliceable {name}", error, ("sliceable_shareds", words),
          lambda e, m=make: e.function(
              [], [(e.table.sum() + e.single.sum() + e.number + e.w.sum(), "sum")],
              updates=[(e.w, e.w + 1)], sliceable_shareds=m(e)))  # fmt: skip

wrong("function: sliceable replaced by givens", ValueError, ("sliceable_shareds", "table is replaced"),
      lambda e: e.function([], e.table.sum(), givens={e.table: e.table * 2},
                           sliceable_shareds=[e.table]))  # fmt: skip

wrong("call: too many inputs", TypeError, ("test_bad_input.py", "at most 3", "got 4"),
      lambda e: e.f(X, Y, 1, 2))  # fmt: skip
wrong("call: an input missing", TypeError, ("no value for input 'b'", "set_shmems"),
      lambda e: e.f(X, Y))  # fmt: skip
wrong("call: input None", TypeError, ("input 'x'", "numbers", "None"), lambda e: e.f(None, Y, 1))
wrong("call: unknown name", TypeError, ("no input is named 'z'", "inputs: x, y, b"),
      lambda e: e.f(X, Y, z=1))  # fmt: skip
wrong("call: input given twice", TypeError, "input 'x' is given twice",
      lambda e: e.f(X, Y, 1, x=X))  # fmt: skip

INPUT_VALUES = [
    ("float64", TypeError, ("float32", "float64", "cast"), lambda e: X.astype("float64")),
    ("int64", TypeError, ("float32", "int64", "cast"), lambda e: X.astype("int64")),
    ("1-d", TypeError, ("2 dimensions", "1"), lambda e: X[0]),
    ("a number", TypeError, ("2 dimensions", "0"), lambda e: 1.5),
    ("a string", TypeError, ("numbers", "str"), lambda e: "rows"),
    ("ragged", TypeError, "not an array", lambda e: [[1, 2], [3]]),
    ("an object", TypeError, ("numbers", "object"), lambda e: object()),
    ("Data of another dtype", TypeError, ("float32", "float64"), lambda e: e.doubles),
    ("Data of another ndim", TypeError, ("2 dimensions", "0"), lambda e: e.zero_d),
    ("a variable", TypeError, "numbers", lambda e: e.x),
]
for name, error, words, make in INPUT_VALUES:
    words = (words,) if isinstance(words, str) else words
    for how, call in {
        "call": lambda e, v: e.other(v),
        "call by name": lambda e, v: e.other(x=v),
        "as_theano": lambda e, v: e.other.as_theano(v),
        "set_shmems": lambda e, v: synk.set_shmems({e.x: v}),
        "set_input_shmems": lambda e, v: e.other.set_input_shmems(v),
        "build_inputs": lambda e, v: e.other.build_inputs(v),
        "broadcast": lambda e, v: synk.broadcast(e.table, v),
        "scatter": lambda e, v: synk.scatter([e.table], [v]),
        "set_value": lambda e, v: synk.set_value(0, e.table, v),
        "Data.set_value": lambda e, v: e.data.set_value(v),
        "Data.condition_data": lambda e, v: e.data.condition_data(v),
    }.items():
        wrong(f"{how}: {name} for a float32 matrix", error, words,
              lambda e, m=make, c=call: c(e, m(e)))  # fmt: skip
wrong("call: floats for ints", TypeError, ("input 'y'", "int32", "float64"),
      lambda e: e.f(X, [0.5] * 4, 1))  # fmt: skip
wrong("call: two rows where the type has one", TypeError, ("input 'row'", "extent 1", "(4, 3)"),
      lambda e: e.rowed(X, X))  # fmt: skip
wrong("call: unequal lengths", ValueError, ("input 'x': 4", "input 'y': 3", "same number of rows"),
      lambda e: e.f(X, Y[:3], 1))  # fmt: skip
wrong("call: no rows at all", ValueError, "no rows", lambda e: e.other(X[:0]))
wrong("call: minibatch too short", ValueError, ("input 'x'", "4 rows", "got 2"),
      lambda e: e.f(e.minibatch, Y, 1))  # fmt: skip
wrong("call: master's own value, but no row for it", ValueError, ("output 0", "1 rows", "rank 1"),
      lambda e: e.own(X[:1]))  # fmt: skip

BATCHES = [
    (1.5, TypeError, ("expected an int, a slice, a list", "1.5")),
    ("12", TypeError, ("expected an int, a slice, a list", "str")),
    (True, TypeError, ("expected an int, a slice, a list", "True")),
    ({0: 1}, TypeError, ("expected an int, a slice, a list", "dict")),
    ([0.0, 1.0], TypeError, ("integers or booleans", "float64")),
    ([[0, 1]], TypeError, ("1-d", "2 dimensions")),
    (np.zeros((2, 2), bool), TypeError, ("1-d", "2 dimensions")),
    ((slice(2), slice(2)), TypeError, ("integers or booleans", "object")),
    (slice(0.5, None), TypeError, ("slice of integers", "0.5")),
    (slice(None, None, 0), ValueError, ("step", "slice(None, None, 0)")),
    ([4], IndexError, ("row 4", "4 rows")),
    ([0, -5], IndexError, ("row -5", "4 rows")),
    ([2**70], TypeError, ("integers or booleans", "object")),
    ([True] * 3, IndexError, ("mask", "expected 4", "got 3")),
    (np.ones(5, bool), IndexError, ("mask", "expected 4", "got 5")),
]
for batch, error, words in BATCHES:
    shown = "object()" if type(batch) is object else batch
    wrong(f"call: batch={shown!r}", error, ("batch", *words),
          lambda e, b=batch: e.other(e.data, batch=b))  # fmt: skip
    wrong(f"scatter: batch={shown!r}", error, ("batch", *words),
          lambda e, b=batch: synk.scatter(e.table, X, batch=b))  # fmt: skip
    wrong(f"set_value: batch={shown!r}", error, ("batch", *words),
          lambda e, b=batch: synk.set_value(0, e.table, X, batch=b))  # fmt: skip
    if not isinstance(batch, (list, tuple)) or isinstance(batch[0], (int, float, str)):
        wrong(f"call: batch_s={shown!r}", error, ("batch_s", *words),
              lambda e, b=batch: e.slicer(X, batch_s=b), asks_ranks=True)  # fmt: skip
    wrong(f"call: batch_s={shown!r} for rank 1", error, ("batch_s", *words),
          lambda e, b=batch: e.slicer(X, batch_s=[slice(2), b]), asks_ranks=True)  # fmt: skip
for batch in [0, [], slice(2, 2), slice(9, None), [False] * 4, np.array([], int)]:
    wrong(f"call: batch={batch!r} has no rows", ValueError, ("no rows", "batch"),
          lambda e, b=batch: e.other(e.data, batch=b))  # fmt: skip
wrong("call: batch without scattered inputs", ValueError, ("batch", "no input is scattered"),
      lambda e: e.plain(batch=2))  # fmt: skip
wrong("call: batch_s without sliceable shareds", ValueError, ("batch_s", "sliceable_shareds"),
      lambda e: e.other(X, batch_s=slice(2)))  # fmt: skip
wrong("call: batch_s for three of two ranks", ValueError, ("batch_s", "one batch per rank, 2", "3"),
      lambda e: e.slicer(X, batch_s=[slice(2)] * 3))  # fmt: skip
for batch in ([None], [[0, 1]]):
    wrong(f"call: batch_s={batch} for one of two ranks", ValueError,
          ("batch_s", "one batch per rank, 2", "got 1"),
          lambda e, b=batch: e.slicer(X, batch_s=b))  # fmt: skip
for value, error, words in [
    (0, ValueError, "expected at least 1, got 0"),
    (1.5, TypeError, "expected an int, got 1.5"),
    ("2", TypeError, "expected an int, got '2'"),
    (True, TypeError, "expected an int, got True"),
]:
    wrong(f"call: num_slices={value!r}", error, ("num_slices", words),
          lambda e, v=value: e.other(X, num_slices=v))  # fmt: skip
wrong("call: num_slices with nothing to slice", ValueError, ("num_slices", "no input can be sliced"),
      lambda e: e.plain(num_slices=2))  # fmt: skip
wrong("call: average of an integer update over slices", TypeError,
      ("'avg'", "counts", "int64", "slices"), lambda e: e.counter(X, num_slices=2))  # fmt: skip
for value, error, words in [
    (0, TypeError, ("expected a list of ints", "got 0")),
    ([0.0], TypeError, ("expected a list of ints", "0.0")),
    ([True], TypeError, ("expected a list of ints", "True")),
    ([2], IndexError, ("below 2", "got 2")),
    ([0, -1], IndexError, ("below 2", "got -1")),
]:
    wrong(f"call: output_subset={value!r}", error, ("output_subset", *words),
          lambda e, v=value: e.other(X, output_subset=v))  # fmt: skip
    wrong(f"as_theano: output_subset={value!r}", error, ("output_subset", *words),
          lambda e, v=value: e.other.as_theano(X, output_subset=v))  # fmt: skip
wrong("build_inputs: too many", TypeError, ("1 to 1", "got 2"), lambda e: e.other.build_inputs(X, X))
wrong("build_inputs: a function of no inputs", TypeError, ("build_inputs", "no inputs"),
      lambda e: e.plain.build_inputs(X))  # fmt: skip

for value, error, words in [
    (0.5, ValueError, "got 0.5"), (2.5, ValueError, "got 2.5"), (-1, ValueError, "got -1"),
    (float("nan"), ValueError, "got nan"), ("1", TypeError, "got '1'"), (True, TypeError, "got True"),
    ([1], TypeError, "got [1]"),
]:  # fmt: skip
    for name, call in {
        "data": lambda e, o: synk.data(X, oversize=o),
        "Data.set_value": lambda e, o: e.data.set_value(X, oversize=o),
        "Data.set_length": lambda e, o: e.data.set_length(4, oversize=o),
        "Data.set_shape": lambda e, o: e.data.set_shape((4, 3), oversize=o),
        "set_shmems": lambda e, o: synk.set_shmems({e.x: X}, oversize=o),
        "set_shmems of Data": lambda e, o: synk.set_shmems({e.x: e.data}, oversize=o),
        "build_inputs": lambda e, o: e.other.build_inputs(X, oversize=o),
    }.items():
        wrong(f"{name}: oversize={value!r}", error, ("oversize", "[1, 2]", words),
              lambda e, v=value, c=call: c(e, v))  # fmt: skip

for name, error, words, call in [
    ("nothing", ValueError, ("a value", "a var", "dtype and ndim"), lambda e: synk.data()),
    ("value and shape", ValueError, ("value or shape", "not both"),
     lambda e: synk.data(X, shape=(4, 3))),
    ("var and dtype", ValueError, ("var", "dtype", "not both"),
     lambda e: synk.data(X, e.x, dtype="float32")),
    ("var a string", TypeError, ("data", "var", f"{TITLE} tensor variable", "'x'"),
     lambda e: synk.data(X, "x")),
    ("unknown dtype", TypeError, ("dtype", "'float33'"), lambda e: synk.data(X, dtype="float33")),
    ("dtype object", TypeError, ("dtype", "numbers", "object"),
     lambda e: synk.data(X, dtype=object)),
    ("ndim -1", ValueError, ("ndim", "got -1"), lambda e: synk.data(dtype="int8", ndim=-1)),
    ("ndim 1.5", TypeError, ("ndim", "an int", "1.5"), lambda e: synk.data(dtype="int8", ndim=1.5)),
    ("ndim too large", ValueError, ("dimension", "65"), lambda e: synk.data(dtype="i4", ndim=65)),
    ("ndim unlike the value's", TypeError, ("3 dimensions", "got 2"), lambda e: synk.data(X, ndim=3)),
    ("ndim unlike the shape's", ValueError, ("ndim is 1", "2 extents"),
     lambda e: synk.data(dtype="int8", ndim=1, shape=(2, 3))),
    ("shape an int", TypeError, ("shape", "tuple of ints", "5"),
     lambda e: synk.data(dtype="int8", shape=5)),
    ("shape of floats", TypeError, ("shape", "an int", "2.0"),
     lambda e: synk.data(dtype="int8", shape=(2.0,))),
    ("negative shape", ValueError, ("shape", "zero or more", "-2"),
     lambda e: synk.data(dtype="int8", shape=(-2, 3))),
    ("name 3", TypeError, ("name", "string", "3"), lambda e: synk.data(X, name=3)),
    ("a string", TypeError, ("data", "numbers", "str"), lambda e: synk.data("rows")),
    ("no safe cast", TypeError, ("float32", "float64", "force_cast"),
     lambda e: synk.data(X.astype("float64"), e.x)),
    ("no safe cast of Data", TypeError, ("float32", "float64", "force_cast"),
     lambda e: synk.data(e.doubles, dtype="float32")),
    ("force_cast of the ndim", TypeError, ("2 dimensions", "got 1"),
     lambda e: synk.data(X[0], e.x, force_cast=True)),
]:  # fmt: skip
    wrong(f"data: {name}", error, words, call)
for name, error, words, call in [
    ("set_value: no safe cast", TypeError, ("'dx'", "float32", "float64", "force_cast"),
     lambda e: e.data.set_value(X.astype("float64"))),
    ("set_length: -1", ValueError, ("length", "got -1"), lambda e: e.data.set_length(-1)),
    ("set_length: 1.5", TypeError, ("length", "an int", "1.5"), lambda e: e.data.set_length(1.5)),
    ("set_length: of a number", ValueError, ("set_length", "axis 0"),
     lambda e: e.zero_d.set_length(1)),
    ("set_shape: an extent too few", ValueError, ("set_shape", "2 extents", "(4,)"),
     lambda e: e.data.set_shape((4,))),
    ("set_shape: negative", ValueError, ("shape", "zero or more", "-1"),
     lambda e: e.data.set_shape((4, -1))),
    ("len of a number", TypeError, ("len()", "0-dimensional"), lambda e: len(e.zero_d)),
    ("reading a row that is not there", IndexError, ("4", "size 4"), lambda e: e.data[4]),
    ("writing a wrong shape", ValueError, "broadcast", lambda e: e.data.__setitem__(0, [1, 2])),
]:  # fmt: skip
    wrong(f"Data: {name}", error, words, call)

for name, error, words, call in [
    ("an int", TypeError, ("dict or a list of pairs", "5"), lambda e: synk.set_shmems(5)),
    ("a variable", TypeError, ("dict or a list of pairs", "x"), lambda e: synk.set_shmems(e.x)),
    ("no pairs", TypeError, ("pairs (variable, data)", "x"), lambda e: synk.set_shmems([e.x])),
    ("name for variable", TypeError, ("set_shmems", f"{TITLE} tensor variable", "'x'"),
     lambda e: synk.set_shmems({"x": X})),
    ("one of two wrong", TypeError, ("y", "int32", "float32"),
     lambda e: synk.set_shmems({e.x: X, e.y: X[:, 0]})),
]:  # fmt: skip
    wrong(f"set_shmems: {name}", error, words, call)
for name in ("get_shmems", "free_shmems"):
    for what, error, words, make in [
        ("nothing", TypeError, "at least one variable", lambda e: []),
        ("unbound", ValueError, ("no data is bound to x", "set_shmems()"), lambda e: [e.x]),
        ("a string", ValueError, "no data is bound to x", lambda e: ["x"]),
        ("a list", ValueError, ("no data is bound to [x]",), lambda e: [[e.x]]),
    ]:
        wrong(f"{name}: {what}", error, (name, words) if isinstance(words, str) else words,
              lambda e, n=name, m=make: getattr(synk, n)(*m(e)))  # fmt: skip
wrong("set_input_shmems: unknown name", TypeError, "no input is named 'z'",
      lambda e: e.other.set_input_shmems(z=X))  # fmt: skip
wrong("set_input_shmems: too many", TypeError, "at most 1 inputs, got 2",
      lambda e: e.other.set_input_shmems(X, X))  # fmt: skip
wrong("set_input_shmems: given twice", TypeError, "'x' is given twice",
      lambda e: e.other.set_input_shmems(X, x=X))  # fmt: skip

COLLECTIVES = {
    "broadcast": synk.broadcast, "scatter": lambda v: synk.scatter(v, W), "gather": synk.gather,
    "all_gather": synk.all_gather, "reduce": synk.reduce, "all_reduce": synk.all_reduce,
    "set_value": lambda v: synk.set_value(0, v, W), "get_value": lambda v: synk.get_value(0, v),
    "get_lengths": synk.get_lengths, "get_shapes": synk.get_shapes, "in_sync": synk.in_sync,
}  # fmt: skip
for name, call in COLLECTIVES.items():
    for what, error, words, make in [
        ("None", TypeError, ("expected shared variables", "None"), lambda e: None),
        ("a string", TypeError, ("expected shared variables", "'w'"), lambda e: "w"),
        ("an array", TypeError, "expected shared variables", lambda e: W),
        ("an input", TypeError, ("expected shared variables", "got x"), lambda e: e.x),
        ("a list with a number", TypeError, ("expected shared variables", "3"), lambda e: [e.w, 3]),
        ("an empty list", ValueError, "an empty list", lambda e: []),
        ("an unknown variable", ValueError, ("lone", "synk.function()", "synk.broadcast()"),
         lambda e: e.lone),
        ("one of a closed world", ValueError, ("lone", "synk.function()"),
         lambda e: [e.w, e.closed.lone]),
    ]:  # fmt: skip
        if (name == "broadcast" and "lone" in words) or (name, what) == ("in_sync", "None"):
            continue  # the one takes any shared variable, the other None for all
        words = (words,) if isinstance(words, str) else words
        wrong(f"{name}: {what}", error, ("shared_vars", *words),
              lambda e, c=call, m=make: c(m(e)))  # fmt: skip
for name in ("reduce", "all_reduce"):
    collective = getattr(synk, name)
    for op, error in [
        ("mean", ValueError), ("gather", ValueError), ("", ValueError), (None, TypeError),
        (3, TypeError), (np.add, TypeError), (["sum"], TypeError),
    ]:  # fmt: skip
        wrong(f"{name}: op={op!r}", error, ("op", "'avg'", "'sum'", "got", repr(op)),
              lambda e, c=collective, o=op: c(e.w, op=o))  # fmt: skip
    wrong(f"{name}: average of integers", TypeError, ("'avg'", "counts", "int64", "float"),
          lambda e, c=collective: c([e.w, e.counts]))  # fmt: skip
    for weights, error, words in [
        ([1], ValueError, ("2 numbers", "[1")),
        ([1, -1], ValueError, ("none negative", "-1")),
        ([0, 0], ValueError, ("not all zero", "[0")),
        ([float("nan"), 1], ValueError, ("2 numbers", "nan")),
        (["a", "b"], TypeError, ("numbers", "<U1")),
    ]:
        wrong(f"{name}: weights={weights!r}", error, ("weights", *words),
              lambda e, c=collective, w=weights: c(e.w, weights=w))  # fmt: skip
    for op in ("sum", "prod", "min", "max"):
        for weights in ([1, 1], [0, 0], "f"):
            wrong(f"{name}: weights={weights!r} for {op!r}", ValueError, ("weights", repr(op), "'avg'"),
                  lambda e, c=collective, o=op, w=weights: c(
                      e.w, o, weights=e.f if w == "f" else w))  # fmt: skip
    wrong(f"{name}: weights of a function that was not called", ValueError, ("weights", "zero"),
          lambda e, c=collective: c(e.w, weights=e.slicer), asks_ranks=True)  # fmt: skip
    wrong(f"{name}: weights of a closed world's function", ValueError, ("weights", "this world"),
          lambda e, c=collective: c(e.w, weights=e.closed.f))  # fmt: skip
    wrong(f"{name}: weights of a copy of a function", ValueError, ("weights", "this world"),
          lambda e, c=collective: c(e.w, weights=e.f.copy_of(e.f.specification)))  # fmt: skip
for name in ("get_value", "set_value"):
    for rank, error, words in [
        (2, IndexError, ("0 to 1", "2")), (-1, IndexError, ("0 to 1", "-1")),
        ("0", TypeError, ("an int", "'0'")), (0.0, TypeError, ("an int", "0.0")),
        (True, TypeError, ("an int", "True")), (None, TypeError, ("an int", "None")),
    ]:  # fmt: skip
        wrong(f"{name}: rank={rank!r}", error, ("rank", *words),
              lambda e, n=name, r=rank: getattr(synk, n)(r, e.w, *([W] * (n[0] == "s")))
              )  # fmt: skip
for name, call in {
    "broadcast": synk.broadcast,
    "scatter": synk.scatter,
    "set_value": lambda v, a: synk.set_value(1, v, a),
}.items():
    wrong(f"{name}: too few values", ValueError, ("values", "one for each variable, 2", "got 1"),
          lambda e, c=call: c([e.w, e.table], [W]))  # fmt: skip
    wrong(f"{name}: one value for two variables", ValueError, ("one for each variable, 2", "ndarray"),
          lambda e, c=call: c([e.w, e.table], W))  # fmt: skip
    wrong(f"{name}: a list of values for one variable", TypeError, ("w", "1 dimensions", "got 2"),
          lambda e, c=call: c(e.w, [W]))  # fmt: skip
    wrong(f"{name}: floats for integers", TypeError, ("counts", "int64", "float"),
          lambda e, c=call: c(e.counts, W))  # fmt: skip
    wrong(f"{name}: the second value wrong", TypeError, ("table", "2 dimensions", "got 1"),
          lambda e, c=call: c([e.w, e.table], [2 * W, W]))  # fmt: skip
wrong("broadcast: two rows where the type has one", TypeError, ("single", "extent 1", "(2, 2)"),
      lambda e: synk.broadcast(e.single, np.ones((2, 2), "float32")))  # fmt: skip
wrong("set_value: batch of a number", ValueError, ("number", "no rows"),
      lambda e: synk.set_value(0, e.number, 1, batch=1))  # fmt: skip
wrong("scatter: no values and none bound", ValueError, ("no values", "w", "set_shmems()"),
      lambda e: synk.scatter(e.w))  # fmt: skip
wrong("scatter: a number", ValueError, ("number", "rows"), lambda e: synk.scatter(e.number, 1))
for value, error in [(2, ValueError), (-1, ValueError), ("1", ValueError), (True, ValueError),
                     (None, ValueError)]:  # fmt: skip
    wrong(f"gather: nd_up={value!r}", error, ("nd_up", "0 or 1", repr(value)),
          lambda e, v=value: synk.gather(e.w, nd_up=v))  # fmt: skip
wrong("gather: a number without a new axis", ValueError, ("nd_up=0", "number", "axis 0"),
      lambda e: synk.gather([e.w, e.number], nd_up=0))  # fmt: skip
wrong("all_gather: one row by its type", ValueError, ("all_gather", "single", "1"),
      lambda e: synk.all_gather(e.single))  # fmt: skip
wrong("get_lengths: a number", ValueError, ("get_lengths", "number", "axis 0"),
      lambda e: synk.get_lengths(e.number))  # fmt: skip

for value, words in [
    (5, "got int"), (None, "got NoneType"), ("ab", "got str"), ({}, "got dict"),
    ([3], "array 0"), ([X, np.float32(1)], "array 1"), ([X, None], "array 1"),
]:  # fmt: skip
    wrong(f"make_slices: {value!r}", TypeError, ("make_slices", words),
          lambda e, v=value: synk.make_slices(v))  # fmt: skip


def inside_fuse(call):
    with synk.fuse():
        call()


for name, error, call in [
    ("save", RuntimeError, lambda: synk.save("nowhere.npz")),
    ("load", RuntimeError, lambda: synk.load("nowhere.npz")),
    ("in_sync", RuntimeError, synk.in_sync),
    ("spmd", synk.FuseError, lambda: synk.spmd(print)),
]:
    wrong(f"{name}: inside fuse", error, (name, "not inside a fuse() block"),
          lambda e, c=call: inside_fuse(c))  # fmt: skip


def nested_fuse(e):
    with synk.fuse():
        synk.broadcast(e.w, 5 * W)
        with synk.fuse():
            pass


def wrong_call_inside_fuse(e):
    with synk.fuse():
        synk.broadcast(e.w, 5 * W)  # must not be executed
        synk.get_value(7, e.w)


def result_inside_fuse(e):
    with synk.fuse():
        e.other(X).result()


def pending_result_as_value(e):
    with synk.fuse():
        synk.broadcast(e.table, e.other(X))


wrong("fuse: a block in a block", synk.FuseError, ("fuse()", "cannot be nested"), nested_fuse)
wrong("fuse: a wrong call inside", IndexError, ("rank", "0 to 1", "7"), wrong_call_inside_fuse)
wrong("fuse: result() inside", synk.FuseError, ("result()", "not ended"), result_inside_fuse)
wrong("fuse: pending result as value", synk.FuseError, ("fuse()", "result()"), pending_result_as_value)


@pytest.fixture
def posted(monkeypatch, env):
    transport, payloads = type(env.world.transport), []
    post = transport.post

    def recorded(self, payload, *args):
        payloads.append(payload)
        return post(self, payload, *args)

    monkeypatch.setattr(transport, "post", recorded)
    return payloads


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_wrong_call_is_answered_at_once_in_words_and_changes_nothing(env, posted, row, monkeypatch):
    present = {"open": env.world, "unforked": None, "closed": env.closed.world}[row.state]
    monkeypatch.setattr(synk.world.world, "_current", present)
    before, began, raised = state_of(env), time.monotonic(), None
    try:
        row.call(env)
    except Exception as error:
        raised = error
    took, after, asked = time.monotonic() - began, state_of(env), len(posted)
    restore(env)
    assert raised is not None, "accepted"
    assert type(raised) is row.error, repr(raised)
    missing = [word for word in row.words if word not in str(raised)]
    assert not missing, f"{missing} not in {raised}"
    assert took < QUICK
    assert row.asks_ranks or not asked, "workers were asked"
    assert after == before
    assert_computes(env)


def test_every_public_function_is_called_before_fork_and_after_close():
    functions = {name for name in synk.__all__ if inspect.isfunction(getattr(synk, name))}
    assert functions == set(PUBLIC_CALLS) | NEEDS_NO_WORLD


def test_what_needs_no_world_works_without_one(env, monkeypatch):
    monkeypatch.setattr(synk.world.world, "_current", None)
    assert synk.make_slices([X, Y]) == (slice(0, 4), slice(4, 8))
    assert synk.get_n_gpu() >= 0
    with pytest.warns(RuntimeWarning, match="no processes"):
        synk.close()


def test_what_theano_finds_in_a_graph_is_theanos_exception(env):
    functions = len(env.world.rank_state.functions)
    with pytest.raises(UnusedInputError, match="not part of"):
        synk.function([env.x, env.y], env.x.sum())
    with pytest.raises(MissingInputError):
        synk.function([], (env.x.sum(), "sum"))
    assert len(env.world.rank_state.functions) == functions
    assert_computes(env)


def test_the_same_variable_twice_is_freed_once(env):
    synk.set_shmems({env.x: X})
    synk.free_shmems(env.x, env.x)
    with pytest.raises(ValueError, match="no data is bound"):
        synk.get_shmems(env.x)
