"""Tests of models whose rows are divided over the ranks with nutpie, whose threads evaluate them."""

import gc
import os
import signal
import warnings
import weakref

import numpy as np
import psutil
import pytensor.tensor as pt
import pytest
from processes import own_process
from pytensor.graph.traversal import ancestors
from test_pymc import Held

import synkhronos as synk
from synkhronos.extensions.pymc import parallelize
from synkhronos.extensions.pymc.potential import RowsSum
from synkhronos.extensions.pymc.rows import Rows
from synkhronos.world.world import current_world

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # ArviZ announces a new version of itself
    pm = pytest.importorskip("pymc", reason="PyMC is not installed")
    nutpie = pytest.importorskip("nutpie", reason="nutpie is not installed")

pytestmark = pytest.mark.usefixtures("quiet_pymc", "in_python")


def normal(n=500):
    random = np.random.default_rng(3)
    x = random.normal(size=(n, 3))
    with pm.Model() as model:
        weights, sigma = pm.Normal("weights", shape=3), pm.HalfNormal("sigma")
        pm.Normal("y", pt.dot(x, weights), sigma, observed=random.normal(x @ [0.5, -0.3, 0.2], 0.7))
    return model


def rows_of(model):
    nodes = {one.owner for one in ancestors(model.potentials) if one.owner}
    (rows,) = (node.op.rows for node in nodes if isinstance(node.op, RowsSum))
    return rows


def compiled(model):
    return nutpie.compile_pymc_model(model)


def sample(model, cores, **options):
    settings = {"draws": 100, "tune": 200, "seed": 1, "progress_bar": False}
    return nutpie.sample(model, chains=cores, cores=cores, **{**settings, **options})


def assert_same_posterior(drawn, expected):
    """Fail unless means differ by less than 6 standard errors, with a tenth of the draws independent."""
    for name, values in expected.posterior.items():
        one, other = (
            np.asarray(each).reshape(-1, *values.shape[2:]) for each in (drawn.posterior[name], values)
        )
        error = other.std(axis=0) * np.sqrt(2 / (len(other) / 10))
        assert (abs(one.mean(axis=0) - other.mean(axis=0)) < 6 * error).all(), name
        assert (abs(np.log(one.std(axis=0) / other.std(axis=0))) < 0.5).all(), name
    still, as_expected = (
        (np.diff(each.posterior["sigma"], axis=1) == 0).mean() for each in (drawn, expected)
    )
    assert still < as_expected + 0.05
    assert int(drawn.sample_stats.diverging.sum()) == int(expected.sample_stats.diverging.sum())


def test_threads_draw_from_the_posterior_of_the_model(two):
    model = normal()
    plain, parallel = compiled(model), compiled(parallelize(model))
    for cores in (2, 4):
        assert_same_posterior(sample(parallel, cores), sample(plain, cores))


def test_pymc_samples_by_nutpie(two):
    model = normal()
    given = {
        "draws": 100, "tune": 200, "chains": 2, "random_seed": 1, "progressbar": False,
        "nuts_sampler": "nutpie",
    }  # fmt: skip
    assert_same_posterior(pm.sample(model=parallelize(model), **given), pm.sample(model=model, **given))


def test_rows_are_freed_with_the_last_compiled_model(two):
    def use():
        parallel = parallelize(normal(1 << 16))
        found, once = weakref.ref(rows_of(parallel)), compiled(parallel)
        del parallel
        gc.collect()
        sample(once, 1, draws=5, tune=5)
        return found, current_world().run(Held())

    found, held = zip(*(use() for _ in range(3)))
    gc.collect()
    assert [rows() for rows in found] == [None] * 3
    assert current_world().run(Held()) < held[0] == held[1] == held[2]


@own_process(timeout=180)
@pytest.mark.parametrize("by_pymc", [False, True])
def test_the_death_of_a_rank_is_raised_where_the_script_waits(by_pymc):
    synk.fork(2)
    parallel = parallelize(normal())
    once = compiled(parallel)
    send, sent = Rows._send, []

    def send_and_kill(self, values):
        sent.append(values)
        if len(sent) == 500:
            os.kill(psutil.Process().children()[0].pid, signal.SIGKILL)
        send(self, values)

    Rows._send = send_and_kill
    with pytest.raises(synk.WorldBrokenError, match="ended") as caught:
        if by_pymc:
            pm.sample(100_000, chains=2, model=parallel, nuts_sampler="nutpie", progressbar=False)
        else:
            sample(once, 2, draws=100_000)
    assert not isinstance(caught.value, KeyboardInterrupt) and len(sent) < 10_000
    with pytest.raises(synk.SynkhronosError):
        parallel.compile_logp()(parallel.initial_point())


@own_process(timeout=180)
def test_what_was_interrupted_can_be_sampled_again():
    synk.fork(2)
    model = normal()
    once, expected = compiled(parallelize(model)), compiled(model)
    evaluate = Rows._evaluate_here

    def fail(self, values, with_gradient):
        raise IndexError("a made-up error")

    for _ in range(2):
        Rows._evaluate_here = fail
        with pytest.raises(IndexError, match="made-up"):
            sample(once, 2)
        Rows._evaluate_here = evaluate
        assert_same_posterior(sample(once, 2), sample(expected, 2))
    synk.close()
