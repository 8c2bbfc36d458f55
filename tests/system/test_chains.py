"""Tests of chains that are sampled at the same time, each by some of the ranks."""

import os
import signal
import threading
import time
import warnings

import numpy as np
import psutil
import pytensor.tensor as pt
import pytest

import synkhronos as synk
from synkhronos.extensions.pymc import parallelize, rows_potential, sample
from synkhronos.extensions.pymc.resident import ResidentSum

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pm = pytest.importorskip("pymc", reason="PyMC is not installed: pip install .[pymc]")

pytestmark = pytest.mark.usefixtures("quiet_pymc")

N = 41
random = np.random.default_rng(5)
X, BINARY = random.normal(size=(N, 3)), random.integers(0, 2, N)
SHORT = {"draws": 20, "tune": 30, "progressbar": False, "compute_convergence_checks": False}


def logistic():
    with pm.Model(coords={"column": list("abc")}) as model:
        weights = pm.Normal("weights", dims="column")
        pm.Deterministic("double", 2 * weights, dims="column")
        pm.Bernoulli("y", logit_p=pt.dot(X, weights), observed=BINARY)
    return model


def alone(model, seed):
    with model:
        return pm.sample(chains=1, cores=1, random_seed=[seed], nuts_sampler="pymc", **SHORT)


def assert_same(drawn, expected, chain):
    for name in ("weights", "double"):
        found, wanted = drawn.posterior[name], expected.posterior[name]
        assert found.dims == wanted.dims
        np.testing.assert_allclose(found.sel(chain=chain), wanted.sel(chain=0), rtol=1e-5)


@pytest.mark.parametrize("size, chains, by_chain", [(2, 2, 1), (4, 2, 2), (3, 2, 2), (2, 1, None)])
def test_each_chain_is_that_of_the_model_for_its_seed(world_of, in_python, size, chains, by_chain):
    world_of(size, timeout=120)
    model, seeds = logistic(), [7, 8][:chains]
    drawn = sample(
        parallelize(model), chains=chains, ranks_per_chain=by_chain, random_seed=seeds,
        nuts_sampler="pymc", **SHORT,
    )  # fmt: skip
    assert drawn.posterior.chain.values.tolist() == list(range(chains))
    assert drawn.sample_stats.sizes["draw"] == 20
    for chain, seed in enumerate(seeds):
        assert_same(drawn, alone(model, seed), chain)


def test_each_chain_of_nutpie_is_that_of_the_model_for_its_seed(world_of):
    pytest.importorskip("nutpie")
    world_of(2, timeout=120)
    model, seeds = logistic(), [7, 8]
    options = {"nuts_sampler": "nutpie", **SHORT}
    drawn = sample(parallelize(model), chains=2, ranks_per_chain=1, random_seed=seeds, **options)
    for chain, seed in enumerate(seeds):
        with model:
            expected = pm.sample(chains=1, cores=1, random_seed=[seed], **options)
        assert_same(drawn, expected, chain)


def test_ranks_without_rows_and_potentials_of_ones_own(world_of, in_python):
    world_of(4, timeout=120)
    rows = np.array([1.0, 2.0])
    with pm.Model() as model:
        mean = pm.Normal("mean")
        pm.Potential("rows", rows_potential(lambda mean, row: -pt.sqr(row - mean), [mean], [rows]))
    drawn = sample(model, chains=1, random_seed=3, nuts_sampler="pymc", **SHORT)
    with pm.Model() as plain:
        mean = pm.Normal("mean")
        pm.Potential("rows", -pt.sqr(rows - mean).sum())
    seed = int(np.random.default_rng(3).integers(2**30))
    np.testing.assert_allclose(drawn.posterior["mean"], alone(plain, seed).posterior["mean"], rtol=1e-5)


def test_the_ranks_work_as_before_afterwards(world_of, in_python):
    world_of(2, timeout=120)
    model = logistic()
    parallel = parallelize(model)
    for _ in range(2):
        sample(parallel, chains=2, random_seed=1, nuts_sampler="pymc", **SHORT)
        point = model.initial_point()
        np.testing.assert_allclose(parallel.compile_logp()(point), model.compile_logp()(point))
    assert len(synk.world.world.current_world().rank_state.functions) <= 4


def test_ctrl_c_returns_the_draws_until_then(world_of, in_python):
    world_of(2, timeout=120)
    parallel, script = parallelize(logistic()), os.getpid()

    def interrupt(trace, draw):
        if draw.draw_idx == 12:
            os.kill(script, signal.SIGINT)

    options = {**SHORT, "draws": 10**5, "tune": 4, "random_seed": 1, "nuts_sampler": "pymc"}
    drawn = sample(parallel, chains=2, callback=interrupt, **options)
    assert 0 < drawn.posterior.sizes["draw"] < 10**4
    assert not np.isnan(drawn.posterior["weights"]).any()
    assert sample(parallel, chains=2, **{**options, "draws": 3}).posterior.sizes["draw"] == 3


@pytest.mark.slow
def test_ctrl_c_ends_nutpie_where_a_rank_evaluates_without_python(world_of, monkeypatch):
    pytest.importorskip("nutpie")
    script, begin, interrupted = os.getpid(), ResidentSum.begin_alone, []

    def interrupted_soon(*args):
        begin(*args)
        if os.getpid() == script and not interrupted:
            interrupted.append(time.monotonic() + 2)
            threading.Timer(2.0, os.kill, (script, signal.SIGINT)).start()

    monkeypatch.setattr(ResidentSum, "begin_alone", interrupted_soon)
    world_of(2, timeout=120)
    rows = random.normal(size=20_000)
    with pm.Model() as model:
        pm.Normal("y", pm.Normal("mean"), pm.HalfNormal("sigma"), observed=rows)
    options = {**SHORT, "draws": 10**6, "random_seed": 1, "nuts_sampler": "nutpie"}
    drawn = sample(parallelize(model, mode="NUMBA"), chains=2, **options)
    assert time.monotonic() - interrupted[0] < 20
    assert 0 < drawn.posterior.sizes["draw"] < 10**6
    assert not np.isnan(drawn.posterior["mean"]).any()


def test_deterministics_that_were_left_out_are_added(world_of, in_python):
    world_of(2, timeout=120)
    with pm.Model() as model:
        logits = pm.Deterministic("logits", pt.dot(X, pm.Normal("weights", shape=3)))
        pm.Bernoulli("y", logit_p=logits, observed=BINARY)
    options = {"chains": 2, "random_seed": 1, "nuts_sampler": "pymc", **SHORT}
    drawn = sample(parallelize(model), deterministics=True, **options).posterior
    np.testing.assert_allclose(drawn["logits"], drawn["weights"].values @ X.T)
    with pytest.raises(ValueError, match=r"which are \['logits'\], got \['mu'\]"):
        sample(parallelize(model), deterministics=["mu"], **options)


def test_a_dead_rank_ends_the_chains(world_of, in_python):
    world_of(3, timeout=120)
    parallel = parallelize(logistic())

    def kill():
        while len(psutil.Process().children()) < 2:  # they start with the first evaluation
            time.sleep(0.05)
        time.sleep(2)
        os.kill(psutil.Process().children()[-1].pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(synk.WorldBrokenError):
        sample(parallel, 10**6, chains=1, random_seed=1, nuts_sampler="pymc", progressbar=False)
    killer.join()


def test_an_error_of_a_sampler_ends_the_chains(world_of, in_python):
    world_of(2, timeout=120)
    parallel = parallelize(logistic())
    with pytest.raises((ValueError, synk.WorkerError), match="nowhere"):
        sample(parallel, chains=2, random_seed=1, init="nowhere", nuts_sampler="pymc", **SHORT)
    drawn = sample(parallel, chains=2, random_seed=1, nuts_sampler="pymc", **SHORT)
    assert drawn.posterior.sizes["chain"] == 2


def test_wrong_arguments_are_named(two, in_python):
    parallel = parallelize(logistic())
    for wrong, error, words in (
        ({"chains": 0}, ValueError, "sample: chains"),
        ({"ranks_per_chain": 3}, ValueError, "expected 1 to 2, the number of ranks, got 3"),
        ({"random_seed": [1]}, ValueError, "expected a seed for each of 2 chains, got 1"),
        ({"cores": 2}, TypeError, "expected no cores"),
    ):
        with pytest.raises(error, match=words):
            sample(parallel, **{"chains": 2, **wrong})
    with pytest.raises(ValueError, match="for others, there is pm.sample"):
        sample(logistic())
    with pytest.raises(TypeError, match="expected a model of parallelize"):
        sample(3)
