"""Tests of models of PyMC whose rows are divided over the ranks; against the models themselves."""

import contextlib
import gc
import inspect
import io
import sys
import warnings
import weakref

import numpy as np
import pytensor.tensor as pt
import pytest
from compilers import default_mode, run_examples
from notebooks import code_cells, read
from processes import ROOT, own_process, run_interpreter
from test_docs import test_examples_print_what_is_shown as check_page
from test_pymc_gallery import WithoutGradient

import synkhronos as synk
from synkhronos.extensions.pymc import compute_deterministics, parallelize, rows_potential
from synkhronos.extensions.pymc.serial import PlainSum
from synkhronos.world.rank_state import Command
from synkhronos.world.world import current_world

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # ArviZ announces a new version of itself
    pm = pytest.importorskip("pymc", reason="PyMC is not installed: pip install .[pymc]")

pytestmark = pytest.mark.usefixtures("quiet_pymc", "in_python")

N = 41  # no multiple of the number of ranks
random = np.random.default_rng(5)
X = random.normal(size=(N, 3))
GROUP = random.integers(0, 4, N)
BINARY = random.integers(0, 2, N)
COUNTS = random.poisson(3, N)
NUMBERS = random.normal(size=N)


def normal():
    with pm.Model(coords={"row": range(N)}) as model:
        x = pm.Data("x", X, dims=("row", "column"))
        weights, bias = pm.Normal("weights", shape=3), pm.Normal("bias", sigma=2)
        sigma = pm.HalfNormal("sigma")
        mean = pm.Deterministic("mean", pt.dot(x, weights) + bias, dims="row")
        pm.Normal("y", mean, sigma, observed=NUMBERS, dims="row")
    return model


def logistic():
    with pm.Model() as model:
        weights = pm.Normal("weights", shape=3)
        pm.Bernoulli("y", logit_p=pt.dot(X, weights), observed=BINARY)
    return model


def poisson():
    with pm.Model() as model:
        y = pm.Data("counts", COUNTS)
        rate = pm.Gamma("rate", 2, 1, shape=4)
        pm.Poisson("y", rate[GROUP] * np.exp(NUMBERS), observed=y)
    return model


def hierarchical():
    with pm.Model() as model:
        scale = pm.Data("scale", 2.0)
        center, spread = pm.Normal("center", sigma=scale), pm.HalfNormal("spread", 1)
        bias = pm.Normal("bias", center, spread, shape=4)
        slope = pm.Deterministic("slope", pm.Normal("raw", shape=4) * spread * scale)
        pm.Bernoulli("y", logit_p=bias[GROUP] + slope[GROUP] * X[:, 0], observed=BINARY)
    return model


def several():
    with pm.Model() as model:
        mean, rate = pm.Normal("mean", shape=2), pm.Exponential("rate", 1)
        pm.MvNormal("pairs", mean, cov=np.eye(2), observed=X[:, :2])
        pm.ZeroInflatedPoisson("counts", 0.7, rate, observed=COUNTS)
        pm.Censored("times", pm.Exponential.dist(rate), lower=None, upper=1.0, observed=[0.2, 1.0, 0.5])
        pm.Potential("other", -pt.sqr(mean).sum())
    return model


def value_and_gradient(model, mode=None, seed=3):
    """Return the log-probability and the gradient at a point, by the code that NUTS uses."""
    function = model.logp_dlogp_function(ravel_inputs=True, mode=mode)
    function.set_extra_values({})
    point = pm.blocking.DictToArrayBijection.map(model.initial_point())
    moved = np.random.default_rng(seed).normal(size=point.data.size)
    return function(point._replace(data=moved))


def assert_equal(model, parallel, mode=None):
    (value, gradient), expected = value_and_gradient(parallel, mode), value_and_gradient(model)
    np.testing.assert_allclose(value, expected[0], rtol=1e-12)
    np.testing.assert_allclose(gradient, expected[1], rtol=1e-11, atol=1e-12)


def sample(model, **options):
    settings = {
        "draws": 20, "tune": 20, "chains": 1, "cores": 1, "random_seed": 8, "progressbar": False,
        "compute_convergence_checks": False, "nuts": {"max_treedepth": 3}, "nuts_sampler": "pymc",
    }  # fmt: skip
    return pm.sample(model=model, **{**settings, **options})


class Held(Command):
    """Returns how many functions a rank has, and the bytes of large blocks that it has allocated."""

    def run(self, state):
        memory = state.store.memory
        memory.collect()
        (_, start, stop), free = memory.parts_of_span(state.transport.distance), memory._large.holes()
        return len(state.functions), stop - start - sum(last - first for first, last in free)


@pytest.mark.parametrize("mode", [pytest.param("CVM", marks=pytest.mark.slow), "NUMBA"])
def test_the_sampler_and_the_ranks_may_use_compiled_code(two, mode):
    model = hierarchical()
    assert_equal(model, parallelize(model, mode=mode), mode)


def test_the_rows_stay_on_the_ranks_and_one_command_is_run_for_value_and_gradient(two):
    parallel = parallelize(hierarchical())
    value_and_gradient(parallel)
    with synk.profile() as profile:
        value_and_gradient(parallel)
    assert len(profile.seconds) == 1


def test_a_model_of_few_rows_takes_more_of_them_and_from_data(two, tmp_path):
    def make(rows):
        with pm.Model() as model:
            x, y = pm.Data("x", X[rows]), pm.Data("y_data", BINARY[rows])
            pm.Bernoulli("y", logit_p=pt.dot(x, pm.Normal("weights", shape=3)), observed=y)
        return model

    np.save(tmp_path / "x.npy", X)
    for y in ({"y": BINARY}, {"y_data": synk.data(BINARY)}):
        x = np.load(tmp_path / "x.npy", mmap_mode="r")
        assert_equal(make(slice(None)), parallelize(make(slice(5)), {"x": x, **y}))


def test_an_array_as_long_as_the_rows_may_belong_to_something_else(two):
    def make(means):
        with pm.Model() as model:
            prior = pm.Data("prior", means)
            weights = pm.Normal("weights", shape=3)
            mean = pt.dot(pm.Data("x", X[:3]), weights) + pt.dot(prior, weights)
            pm.Normal("y", mean, observed=NUMBERS[:3])
        return model

    model = make(np.arange(3.0))
    for data in (None, {"x": None}):
        parallel = parallelize(model, data)
        assert_equal(model, parallel)
        with parallel:
            pm.set_data({"prior": np.ones(3)})  # it has no rows, so it can be changed
        assert_equal(make(np.ones(3)), parallel)


def test_observed_variables_that_are_not_chosen_stay(two):
    model = several()
    parallel = parallelize(model, observed=["counts"])
    assert {one.name for one in parallel.observed_RVs} == {"pairs", "times"}
    assert {one.name for one in parallel.potentials} == {"other", "counts_rows"}
    assert_equal(model, parallel)


def test_wrong_parameters_have_the_probability_0_or_are_not_checked(two):
    def make(check_bounds):
        with pm.Model(check_bounds=check_bounds) as model:
            pm.Poisson("y", pm.Normal("rate"), observed=COUNTS)
        return model

    for check_bounds in (True, False):
        model = make(check_bounds)
        parallel = parallelize(model)
        for rate in (1.0, -1.0):
            values = [one.compile_logp()({"rate": np.array(rate)}) for one in (model, parallel)]
            np.testing.assert_allclose(*values)
    assert np.isneginf(parallelize(make(True)).compile_logp()({"rate": np.array(-1.0)}))


@pytest.mark.parametrize("make, draws, rtol", [
    (logistic, 20, 1e-8), (hierarchical, 5, 1e-7), (poisson, 10, 1e-7),
])  # fmt: skip
def test_draws_are_the_same_for_the_same_seed(two, make, draws, rtol):
    model, n = make(), {"draws": draws, "tune": draws}  # in funnels, rounding errors grow with the steps
    drawn, expected = sample(parallelize(model), **n), sample(model, **n)
    assert list(drawn.posterior) == list(expected.posterior)
    for name, values in expected.posterior.items():
        np.testing.assert_allclose(drawn.posterior[name], values, rtol=rtol, atol=rtol)
        assert float(values.std()) > 0


def test_deterministics_and_predictions_are_computed_by_the_model(two):
    model = normal()
    parallel = parallelize(model)
    assert not {"mean", "x", "y"} & set(parallel.named_vars)
    drawn, expected = sample(parallel, draws=4, tune=4), sample(model, draws=4, tune=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        means = pm.compute_deterministics(drawn.posterior, model=model, progressbar=False)["mean"]
        predicted = pm.sample_posterior_predictive(drawn, model=model, random_seed=1, progressbar=False)
    np.testing.assert_allclose(means, expected.posterior["mean"], rtol=1e-7)
    assert predicted.posterior_predictive["y"].shape == (1, 4, N)


@pytest.mark.parametrize("mode", ["FAST_COMPILE", pytest.param("NUMBA", marks=pytest.mark.slow)])
def test_map_and_advi_find_the_same(two, mode):
    model, maxima, fits = logistic(), [], []
    for one, own in ((model, "FAST_COMPILE"), (parallelize(model, mode=mode), mode)):
        with default_mode(own):
            maxima.append(pm.find_MAP(model=one, progressbar=False)["weights"])
            fits.append(pm.fit(30, model=one, random_seed=2, progressbar=False).hist)
    np.testing.assert_allclose(*maxima, rtol=1e-6)
    np.testing.assert_allclose(*fits, rtol=1e-9)


def test_a_log_probability_in_python_needs_no_gradient(two):
    with pm.Model() as model:
        mean = pm.Normal("mean")
        pm.CustomDist(
            "y", mean, logp=lambda y, mean: WithoutGradient()(y, y * 0 + mean), observed=NUMBERS
        )
    parallel = parallelize(model)
    point = {"mean": np.array(0.3)}
    np.testing.assert_allclose(parallel.compile_logp()(point), model.compile_logp()(point))
    with pytest.raises(NotImplementedError, match=r"parallelize\(y\): there is no gradient: .*WithoutG"):
        parallel.compile_dlogp()


def test_without_ranks_and_after_they_are_closed_it_says_so(world_of):
    with pytest.raises((synk.NotForkedError, synk.ClosedError), match="call synk.fork"):
        parallelize(logistic())
    world_of(2)
    parallel = parallelize(logistic())
    compiled = parallel.compile_logp()
    compiled(parallel.initial_point())
    synk.close()
    with pytest.raises(synk.ClosedError, match=r"parallelize\(y\): its processes were closed; .*again"):
        compiled(parallel.initial_point())


def number():
    with pm.Model() as model:
        pm.Normal("y", pm.Normal("mean"), 1, observed=2.0)
    return model


@pytest.mark.parametrize("make, complaint", [
    (number, "expected that 'y' has observed values with rows on axis 0"),
    (pm.Model, "expected a model with observed variables or potentials, .*got one without"),
])  # fmt: skip
def test_models_whose_rows_cannot_be_divided_are_refused(two, make, complaint):
    with pytest.raises(ValueError, match=complaint):
        parallelize(make())


def test_every_rank_computes_what_depends_on_several_rows_unless_the_script_gives_them(two):
    with pm.Model() as model:
        rates = pt.exp(pm.Normal("slope") * pm.Data("x", X[:, 0]))
        pm.Poisson("y", rates / rates.mean(), observed=COUNTS)
    assert_equal(model, parallelize(model))
    with pytest.raises(ValueError, match="rows depend on items of 'x' in other rows; compute what"):
        parallelize(model, {"x": X[:, 0], "y": COUNTS})


def standardized():
    """A model of sorted rows that standardizes them, with the probability 0 at its initial point."""
    draw = np.random.default_rng(0)
    x = np.sort(draw.normal(3, 2, 400))
    y = 1.5 + 0.5 * (x - x.mean()) / x.std() + draw.normal(0, 0.5, 400)
    x, y = x[y > 0.52], y[y > 0.52]
    y[0] = 0.521
    with pm.Model() as model:
        rows, limit = pm.Data("x", x), pm.Uniform("limit", 0, 1)
        mean = pm.Normal("bias") + pm.Normal("slope") * (rows - rows.mean()) / rows.std()
        pm.Truncated("y", pm.Normal.dist(mean, pm.HalfNormal("sigma")), lower=limit, observed=y)
    return model


def test_means_over_data_are_those_of_all_rows_whatever_the_initial_point(two):
    model = standardized()
    parallel, point = parallelize(model), model.initial_point()
    point.update({"slope": np.array(0.5), "bias": np.array(1.5)})
    expected = model.compile_logp()(point)
    assert np.isfinite(expected)
    np.testing.assert_allclose(parallel.compile_logp()(point), expected, rtol=1e-9)


def test_a_point_is_drawn_from_the_prior_if_it_must(two):
    with pm.Model() as model:
        pm.Truncated(
            "y",
            pm.Normal.dist(pm.Normal("mean"), 1),
            upper=pm.Uniform("most", 0, 50),
            observed=[40.0, 45.0],
        )
    assert_equal(model, parallelize(model))


def test_observed_values_that_are_impossible_are_refused(two):
    with pm.Model() as model:
        pm.Poisson("y", pm.Gamma("rate", 2, 1), observed=[-1, 2])
    with pytest.raises(ValueError, match=r"finite at one of 10\d points"):
        parallelize(model)


def test_the_first_evaluations_are_compared_with_the_model(two, monkeypatch):
    serial, asked = PlainSum.of_all, []

    def of_all(self, values):
        asked.append(values)
        return serial(self, values)

    monkeypatch.setattr(PlainSum, "of_all", of_all)
    model = normal()
    compiled = parallelize(model).compile_dlogp()
    for _ in range(5):
        compiled(model.initial_point())
    assert len(asked) == 3
    monkeypatch.setattr(PlainSum, "of_all", lambda *args: of_all(*args) + [0, 0, 0, 1e-3, 0, 0])
    compiled = parallelize(model).compile_dlogp()
    for _ in range(2):
        with pytest.raises(
            synk.MismatchError,
            match="derivative with respect to weights, computed by 2 rank.*of the model without ranks",
        ):
            compiled(model.initial_point())


def test_data_that_are_set_reach_the_ranks(two):
    with pm.Model() as model:
        x, y, scale = pm.Data("x", X[:, 0]), pm.Data("y_data", NUMBERS), pm.Data("scale", 1.0)
        mean = pm.Normal("slope", 0, scale) * (x - x.mean())
        pm.Normal("y", mean, scale, observed=y)
    parallel = parallelize(model)
    for one, data in (
        (model, {"y_data": NUMBERS + 1}),
        (parallel, {"x": X[:20, 1], "y_data": NUMBERS[:20]}),
        (model, {"scale": 2.0}),
        (parallel, {"scale": 0.5}),
    ):
        pm.set_data(data, model=one)
        assert_equal(model, parallel)
    pm.set_data({"x": X[:, 0]}, model=model)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"got y_data: 20, the rows of x: 41"):
            parallel.compile_logp()(model.initial_point())
    given = parallelize(normal(), {"x": X})
    with pytest.raises(ValueError, match=r"rows of 'x' were given to parallelize\(\) by data="):
        pm.set_data({"x": X}, model=given)


def test_data_that_chose_the_rows_cannot_be_set(two):
    with pm.Model() as model:
        pm.Normal("y", pm.Normal("mean"), 1, observed=NUMBERS, total_size=[pm.Data("size", 100)])
    parallel = parallelize(model)
    pm.set_data({"size": 200}, model=model)
    with pytest.raises(ValueError, match="chosen by the values of size, which have changed"):
        parallel.compile_logp()(model.initial_point())


@pytest.mark.parametrize("change", [
    lambda model: model.copy(),
    lambda model: pm.do(model, {"bias": 0.5}),
    lambda model: pm.observe(model, {"bias": 0.5}),
    lambda model: pm.model.fgraph.clone_model(model),
], ids=["copy", "do", "observe", "clone"])  # fmt: skip
def test_copies_refuse_what_the_parallel_model_refuses(two, change):
    copied = change(parallelize(normal()))
    with pytest.raises(ValueError, match=r"^pm.sample: 2 chains .*; sample .*pm.sample\(cores=1\)$"):
        sample(copied, chains=2, cores=2, mp_ctx="fork")
    with pytest.raises(ValueError, match="expected a model whose rows are not divided"):
        parallelize(copied)
    with pytest.raises(KeyError, match=r"'mean': .*compute_deterministics\(drawn, model\)"):
        copied["mean"]
    with pytest.raises(ValueError, match=r"^var_names: 'mean': .*deterministics=True"):
        sample(copied, var_names=["weights", "mean"])


def test_what_needs_the_rows_names_the_model_that_has_them(two):
    model = normal()
    parallel = parallelize(model)
    drawn = sample(parallel, draws=4, tune=4)
    with pytest.raises(ValueError, match=r"pm.compute_log_likelihood\(idata, model=model\)"):
        pm.compute_log_likelihood(drawn, model=parallel, progressbar=False)
    with pytest.raises(ValueError, match=r"pm.sample_posterior_predictive\(idata, model=model\)"):
        with pytest.warns(UserWarning, match="effect of Potentials"):
            pm.sample_posterior_predictive(drawn, model=parallel, progressbar=False)
    pm.compute_log_likelihood(drawn, model=model, progressbar=False)
    assert drawn.log_likelihood["y"].shape == (1, 4, N)


@pytest.mark.filterwarnings("ignore:Passing `log_likelihood` via:FutureWarning")
def test_a_log_likelihood_that_is_asked_for_with_the_draws_does_not_lose_them(two):
    parallel = parallelize(normal())
    with pytest.warns(UserWarning, match="the log-likelihood has no rows that are divided"):
        drawn = sample(parallel, draws=4, tune=4, idata_kwargs={"log_likelihood": True})
    assert drawn.posterior.sizes["draw"] == 4


@pytest.mark.parametrize("sampler", ["blackjax", "numpyro"])
def test_samplers_of_jax_are_refused_in_one_line(two, sampler):
    with pytest.raises(ValueError, match='^JAX cannot use the ranks; with .* use nuts_sampler="nutpie"'):
        sample(parallelize(normal()), nuts_sampler=sampler)


@pytest.mark.parametrize("name, options, complaint", [
    ("fit_pathfinder", {"parallel": True}, r"^fit_pathfinder: the paths .* give it parallel=False$"),
    ("fit_pathfinder", {"concurrent": "process"}, 'give it concurrent="thread"$'),
    ("fit_blackjax_pathfinder", {}, "^JAX cannot use the ranks"),
])  # fmt: skip
def test_pathfinder_in_processes_is_refused_in_one_line(two, name, options, complaint):
    parallel = parallelize(logistic())
    made = {"__name__": "pymc_extras.inference.pathfinder"}  # which reads the model as it does
    exec(f"def {name}(model, {', '.join(options) or '_=None'}): return model.logp()", made)
    with pytest.raises(ValueError, match=complaint):
        made[name](parallel, **options)
    if options:
        made[name](parallel, None)


@pytest.mark.parametrize("data, error, complaint", [
    ({"x": X[:4]}, ValueError, r"equal numbers of rows, got .*x: 4"),
    ({"x": X[:0], "y": NUMBERS[:0]}, ValueError, "with at least one row"),
    ({"z": X}, ValueError, r"names of pm.Data or of observed .* are \['x', 'y'\], got 'z'"),
    ({"x": X.astype(complex)}, TypeError, "complex"),
    ({"y": np.ma.masked_less(NUMBERS, -1)}, ValueError, r"y: \d+ value\(s\) are masked.*PyMC imputes"),
    ({"y": np.where(NUMBERS < -1, np.nan, NUMBERS)}, ValueError, "not a number in y; leave out"),
    ([X], TypeError, "expected a dictionary of arrays by name, got list"),
])  # fmt: skip
def test_data_that_do_not_fit_are_named(two, data, error, complaint):
    with pytest.raises(error, match=complaint):
        parallelize(normal(), data)


def test_arguments_of_the_wrong_kind_are_named(two):
    with pytest.raises(TypeError, match="expected a pymc.Model"):
        parallelize(logistic)
    with pytest.raises(ValueError, match=r"observed: expected a list .*\['y'\], got 'y'"):
        parallelize(logistic(), observed="y")


def test_chains_in_processes_of_their_own_are_refused(two):
    parallel = parallelize(logistic())
    with pytest.raises(ValueError, match=r"^pm.sample: 2 chains .*; sample .*pm.sample\(cores=1\)$"):
        sample(parallel, chains=2, cores=2, mp_ctx="fork")
    given = {"draws": 20, "model": parallel, "random_seed": 1, "progressbar": False}
    with pytest.raises(ValueError, match=r"^pm.sample_smc: 3 chains .*pm.sample_smc\(cores=1\)$"):
        pm.sample_smc(chains=3, cores=2, **given)
    drawn = pm.sample_smc(chains=2, cores=1, compute_convergence_checks=False, **given)
    assert drawn.posterior.sizes["chain"] == 2
    assert_equal(logistic(), parallel)  # the ranks work as before


@pytest.mark.parametrize("start", ["spawn", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_chains_that_would_start_with_a_pickle_are_sampled_one_after_another(two, start, caplog):
    model, settings = logistic(), {"chains": 2, "draws": 3, "tune": 3}
    drawn = sample(parallelize(model), cores=2, mp_ctx=start, **settings)
    assert "Could not pickle model, sampling singlethreaded" in caplog.text
    expected = sample(model, **settings).posterior["weights"]
    np.testing.assert_allclose(drawn.posterior["weights"], expected, rtol=1e-8)


def test_a_dropped_model_frees_its_rows_on_every_rank(two):
    def use():
        with pm.Model() as model:
            pm.Normal("y", pm.Normal("mean"), 1, observed=rows)
        parallel = parallelize(model)
        parallel.compile_dlogp()(model.initial_point())
        parallel.compile_logp()(model.initial_point())

    rows, sizes = np.random.default_rng(0).normal(size=1 << 17), []
    for _ in range(4):
        use()
        gc.collect()
        sizes.append(current_world().run(Held()))
    assert sizes[1:] == [sizes[0]] * 3


def test_numba_keeps_no_data_of_a_dropped_model(two):
    with pm.Model() as model:
        observed = pm.Normal("y", pm.Normal("mean"), 1, observed=np.arange(2000.0))
    data = weakref.ref(model.rvs_to_values[observed].data)
    parallelize(model, mode="NUMBA").compile_logp()(model.initial_point())
    del model, observed
    gc.collect()
    assert data() is None


def test_ranks_of_one_process(world_of):
    world_of(1)
    assert_equal(poisson(), parallelize(poisson()))


def test_the_examples_of_the_page_print_what_is_shown(programs, tmp_path):
    check_page(programs, tmp_path, "pymc.rst")


@pytest.mark.slow
@own_process(timeout=900)
def test_the_cells_of_the_notebook_work_with_fewer_rows():
    cells = ["".join(cell["source"]) for cell in code_cells(read(ROOT / "demos" / "pymc_rows.ipynb"))]
    assert sum("n, shops = 1_000_000, 20" in cell for cell in cells) == 1
    names = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for number, cell in enumerate(cells):
            exec(compile(cell.replace("1_000_000", "3_000"), f"cell {number}", "exec"), names)
    shown = printed.getvalue()
    assert shown.startswith("2 processes\n") and "equal: True True\n" in shown
    assert names["n"] == 3000 and names["drawn"].posterior.sizes["draw"] == 40


@own_process(timeout=120)
@pytest.mark.parametrize("function", [parallelize, rows_potential, compute_deterministics])
def test_the_example_of_a_docstring_prints_what_it_shows(function):
    assert run_examples(inspect.getdoc(function), function.__name__)


@pytest.mark.slow
def test_the_path_of_a_newcomer_is_followed_to_its_end(tmp_path):
    script = ROOT / "tests" / "newcomers" / "pymc_model.py"
    run_interpreter(script, tmp_path, "--python", sys.executable, timeout=600)
