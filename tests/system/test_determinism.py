"""Tests that the same seed and number of ranks give bit-identical results in different processes."""

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

BUSY = "import time\nend = time.time() + 60\nwhile time.time() < end: pass"
WORLDS = [(1, 0), (2, 0), (3, 1)]


@pytest.fixture
def busy_machine():
    """Background processes that keep all cores busy, for up to 60 seconds of the test."""
    started = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(cores())]
    yield
    for process in started:
        process.kill()
        process.wait()


def digests_of(run_python, worlds, hash_seed, *options):
    named = [f"{size}:{master_rank}" for size, master_rank in worlds]
    done = run_python(
        "digests.py", *named, *options, timeout=200, environment={"PYTHONHASHSEED": hash_seed}
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_run_has_the_same_bits_in_every_new_process(run_python):
    worlds = [(2, 0), (3, 1)]  # what one rank computes, two ranks compute too
    # With one hash seed, so that the second finds the modules of the first; the next test has others.
    first = digests_of(run_python, worlds, "0")
    second = digests_of(run_python, worlds, "0", "--late")
    assert set(first) == set(second) == {"2:0", "3:1"}
    for world in first:
        assert len(first[world]) == 20
        assert [name for name in first[world] if first[world][name] != second[world][name]] == []


@pytest.mark.slow
@pytest.mark.usefixtures("busy_machine")
def test_ten_runs_have_the_same_bits_and_another_number_of_ranks_has_others(run_python):
    runs = [digests_of(run_python, [(3, 0)], str(seed))["3:0"] for seed in range(10)]
    assert all(run == runs[0] for run in runs)
    other = digests_of(run_python, [(2, 0)], "0")["2:0"]
    same = {name for name in other if other[name] == runs[0][name]}
    assert {"outputs min", "outputs max"} <= same
    assert not [name for name in same if "Streams" in name or name.startswith("all_reduce")]


@pytest.mark.skipif(affinity() < 2, reason="OpenBLAS has one thread on one core")
@pytest.mark.parametrize(
    "variables, threads",
    [
        ({"OMP_NUM_THREADS": "1"}, 1),
        pytest.param({"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}, 1, marks=pytest.mark.slow),
        pytest.param({"OMP_NUM_THREADS": "2"}, 2, marks=pytest.mark.slow),
        ({"OMP_NUM_THREADS": "3", "OPENBLAS_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}, 2),
    ],
)
def test_every_rank_has_the_threads_that_the_environment_asks_for(run_python, variables, threads):
    unset = {name: "" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
    done = run_python("blas_threads.py", environment={**unset, **variables})
    found = json.loads(done.stdout)
    assert found and set(found) == {threads}


MAKERS = [MRG_RandomStreams, RandomStreams]


@pytest.fixture(params=MAKERS, ids=lambda make: make.__name__)
def streams(request):
    return request.param(7)


def drawing(streams):
    """Return a function that draws 20 numbers per rank, at two places in the graph."""
    drawn = streams.uniform((10,)), streams.normal((10,))
    return synk.function([], (tt.concatenate(drawn), "gather"), mode="FAST_COMPILE")


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
    assert len(np.unique(after)) == np.size(after)  # no two ranks draw the same number


def test_streams_can_be_seeded_before_and_between_distributes(two, streams):
    early = drawing(streams)
    synk.reseed(streams, 3)  # before the workers start
    first = early()
    late = drawing(streams)
    synk.reseed(streams, 3)  # before `late` is replicated
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
    np.testing.assert_array_equal(f()[20:], theano.function([], drawn, mode="FAST_COMPILE")())


def test_what_cannot_be_reseeded_is_refused_and_nothing_is_seeded(two, streams):
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
