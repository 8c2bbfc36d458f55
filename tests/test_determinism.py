"""The same seed and the same number of ranks give the same bits, from one process to the next."""

import json
import subprocess
import sys

import numpy as np
import pytest
import theano
import theano.tensor as tt
from theano.sandbox.rng_mrg import MRG_RandomStreams
from theano.tensor.shared_randomstreams import RandomStreams

import synkhronos as synk
from synkhronos.host.machine import affinity, cores

# Prints a digest of each thing that it computes, so that a difference shows where it begins.
SCRIPT = """
import hashlib, json, sys
from collections import OrderedDict
import synkhronos as synk
import numpy as np
import theano
import theano.tensor as tt
from synkhronos.extensions import train, updates
from theano.sandbox.rng_mrg import MRG_RandomStreams
from theano.tensor.shared_randomstreams import RandomStreams

digests = OrderedDict()

def note(name, *arrays):
    for array in arrays:
        contents = np.ascontiguousarray(array)
        told = f"{contents.dtype} {contents.shape}".encode() + contents.tobytes()
        digests.setdefault(name, hashlib.sha256()).update(told)

size, master_rank = int(sys.argv[1]), int(sys.argv[2])
synk.fork(size, use_gpu=False, master_rank=master_rank)
rng = np.random.RandomState(1)
x_data = synk.data(rng.randn(203, 30).astype("float32"))
y_data = synk.data(rng.randn(203, 4).astype("float32"))

def network(streams, hidden=40):
    x, y = tt.fmatrices("x", "y")
    shapes = [(30, hidden), (hidden,), (hidden, hidden), (hidden,), (hidden, 4), (4,)]
    params = [
        theano.shared((rng.randn(*shape) / 5).astype("float32"), f"p{position}")
        for position, shape in enumerate(shapes)
    ]
    layer = x * streams.binomial(x.shape, p=0.8, dtype="float32") / np.float32(0.8)
    for w, b in zip(params[:-2:2], params[1:-2:2]):
        layer = tt.nnet.relu(tt.dot(layer, w) + b)
        layer = layer * streams.uniform(layer.shape, dtype="float32")
    loss = tt.sqr(tt.tanh(tt.dot(layer, params[-2]) + params[-1]) - y).mean()
    return x, y, params, loss

for make, rule in (
    (MRG_RandomStreams, updates.adam), (MRG_RandomStreams, updates.sgd_nonflat),
    (RandomStreams, updates.nesterov_momentum), (RandomStreams, updates.sgd_nonflat),
):
    x, y, params, loss = network(make(234))
    step = train.make_train_function(loss, params, x, y, rule, learning_rate=0.02)
    name = f"{make.__name__} {rule.__name__}"
    order = np.random.RandomState(2).permutation(203)
    for start, stop in ((0, 64), (64, 101), (101, 102), (102, 104), (104, 203)):
        note(name, step(x_data, y_data, batch=order[start:stop], num_slices=1 + start % 2))
    note(name, *synk.gather(params))

values = theano.shared(rng.randn(50021).astype("float32"), "values")
s = synk.function([], (values.sum(), "avg"), updates=[(values, values * tt.cos(values))])
draw = RandomStreams(5).normal((50021,), dtype="float32")
fill = synk.function([], updates=[(values, draw)])
for op in ("sum", "avg", "prod", "min", "max"):
    fill()
    note(f"reduce {op}", synk.reduce(values, op, in_place=False))
    with synk.fuse():
        total = s()
        synk.all_reduce(values, op, weights=None if op != "avg" else list(range(1, size + 1)))
    note(f"all_reduce {op}", total.result(), synk.gather(values))
fill()
synk.all_gather(values)
note("all_gather", synk.gather(values))
x = tt.fmatrix("x")
ops = {"sum": x.sum(), "avg": x.mean(), "prod": x.prod(), "min": x.min(), "max": x.max()}
f = synk.function([x], [(expression, op) for op, expression in ops.items()])
for keywords in ({}, {"num_slices": 3, "batch": 101}, {"batch": 1}):
    for op, value in zip(ops, f(x_data, **keywords)):
        note(f"outputs {op}", value)
synk.close()
print(json.dumps({name: digest.hexdigest() for name, digest in digests.items()}))
"""

BUSY = "import time\nend = time.time() + 60\nwhile time.time() < end: pass"
WORLDS = [(1, 0), (2, 0), (3, 1)]


@pytest.fixture
def busy_machine():
    """A function that keeps the cores busy with other work until the test ends."""
    started = []

    def begin(number):
        started.extend(subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(number))

    yield begin
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def digests_of(run_python):
    """A function that returns what the script prints, in a new process."""

    def run(world, hash_seed):
        done = run_python(SCRIPT, *world, timeout=200, environment={"PYTHONHASHSEED": hash_seed})
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: f"{world[0]}-ranks-master-{world[1]}")
def test_a_run_has_the_same_bits_in_every_new_process(digests_of, busy_machine, world):
    first = digests_of(world, "1")
    busy_machine(cores() + 1)  # so that the ranks come to the barriers in another order
    second = digests_of(world, "2")
    assert len(first) == 20
    assert [name for name in first if first[name] != second[name]] == []


@pytest.mark.slow
def test_ten_runs_have_the_same_bits_and_another_number_of_ranks_has_others(digests_of, busy_machine):
    busy_machine(cores())
    runs = [digests_of((3, 0), str(hash_seed)) for hash_seed in range(10)]
    assert all(run == runs[0] for run in runs)
    other = digests_of((2, 0), "0")
    same = {name for name in other if other[name] == runs[0][name]}
    assert {"outputs min", "outputs max"} <= same
    assert not [name for name in same if "Streams" in name or name.startswith("all_reduce")]


# Threads of BLAS: other numbers of them add in another order


@pytest.mark.skipif(affinity() < 2, reason="OpenBLAS has one thread on one core")
@pytest.mark.parametrize(
    "variables, threads",
    [
        ({"OMP_NUM_THREADS": "1"}, 1),
        ({"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}, 1),
        ({"OMP_NUM_THREADS": "2"}, 2),
        ({"OMP_NUM_THREADS": "3", "OPENBLAS_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}, 2),
    ],
)
def test_every_rank_has_the_threads_that_the_environment_asks_for(
    run_python, variables, threads
):
    unset = {name: "" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
    done = run_python(
        """
        import synkhronos as synk
        from synkhronos.world import threads
        from synkhronos.world.world import Command
        import numpy as np
        import theano.tensor as tt
        from threadpoolctl import threadpool_info

        class Threads(Command):
            def run(self, here):
                found = [one for one in threadpool_info() if one["user_api"] == "blas"]
                return sorted((one["filepath"], one["num_threads"]) for one in found)

        threads.cores = lambda: 8
        synk.fork(2, use_gpu=False)
        x = tt.dmatrix("x")
        f = synk.function([x], tt.dot(x, x.T).sum())  # has Theano load its BLAS, after fork()
        f(np.ones((4, 4)))
        master, worker = synk.world.world.current_world().run(Threads())
        assert master == worker, (master, worker)
        print([threads for _, threads in master])
        synk.close()
        """,
        environment={**unset, **variables},
    )
    found = json.loads(done.stdout)
    assert found and set(found) == {threads}


# Seeding again


MAKERS = [MRG_RandomStreams, RandomStreams]


@pytest.fixture(params=MAKERS, ids=lambda make: make.__name__)
def streams(request):
    return request.param(7)


def drawing(streams):
    """A function that draws 20 numbers a rank, from two places of the graph."""
    drawn = streams.uniform((10,)), streams.normal((10,))
    return synk.function([], (tt.concatenate(drawn), "gather"))


@pytest.mark.parametrize("size, master_rank", WORLDS)
@pytest.mark.parametrize("seed", [7, 8, None])
def test_reseeded_streams_draw_what_new_ones_would(world_of, streams, size, master_rank, seed):
    world_of(size, master_rank=master_rank)
    f = drawing(streams)
    before = [f() for _ in range(3)]
    synk.reseed(streams, seed)
    after = [f() for _ in range(3)]
    fresh = drawing(type(streams)(7 if seed is None else seed))
    np.testing.assert_array_equal(after, [fresh() for _ in range(3)])
    assert np.array_equal(before, after) == (seed != 8)
    assert len(np.unique(after)) == np.size(after)  # no two ranks draw the same


def test_streams_can_be_seeded_before_and_between_distributes(world_of, streams):
    world_of(2)
    early = drawing(streams)
    synk.reseed(streams, 3)  # no workers yet
    first = early()
    late = drawing(streams)
    synk.reseed(streams, 3)  # `late` is not replicated yet
    again, second = early(), late()
    np.testing.assert_array_equal(first, again)
    synk.reseed(streams, 3)
    np.testing.assert_array_equal(first, early())
    np.testing.assert_array_equal(second, late())
    assert len(np.unique([first, second])) == 80


def test_the_masters_draws_after_reseeding_are_those_of_theano(world_of, streams):
    world_of(2, master_rank=1)
    f = drawing(streams)
    f()
    synk.reseed(streams, 11)
    twin = type(streams)(11)
    drawn = tt.concatenate([twin.uniform((10,)), twin.normal((10,))])
    np.testing.assert_array_equal(f()[20:], theano.function([], drawn)())


def test_what_cannot_be_reseeded_is_refused_and_nothing_is_seeded(world_of, streams):
    world_of(2)
    f = drawing(streams)
    f()
    with pytest.raises(TypeError, match="expected MRG_RandomStreams or RandomStreams, got 5"):
        synk.reseed(5)
    for seed in (1.5, "1", True):
        with pytest.raises(TypeError, match="seed: expected an int"):
            synk.reseed(streams, seed)
    with pytest.raises(RuntimeError, match="before or after the fuse"):
        with synk.fuse():
            synk.reseed(streams, 7)
    second = f()
    fresh = drawing(type(streams)(7))
    fresh()
    np.testing.assert_array_equal(second, fresh())
    synk.close()
    with pytest.raises(synk.ClosedError):
        synk.reseed(streams)
