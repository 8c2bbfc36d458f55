"""Tests of models of PyMC that can be divided, against the models themselves, and of those refused."""

import warnings

import numpy as np
import pytensor.sparse
import pytensor.tensor as pt
import pytest
import scipy.sparse
from pytensor.graph.basic import Constant
from pytensor.graph.traversal import ancestors

import synkhronos as synk
from synkhronos.extensions.pymc import compute_deterministics, parallelize

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # ArviZ announces a new version of itself
    pm = pytest.importorskip("pymc", reason="PyMC is not installed: pip install .[pymc]")

from test_pymc import assert_equal

pytestmark = pytest.mark.usefixtures("quiet_pymc", "in_python")

N = 41  # no multiple of the number of ranks
random = np.random.default_rng(11)
X = random.normal(size=(N, 3))
GROUP = random.integers(0, 4, N)
Y = random.normal(X.sum(1))
COUNTS = random.poisson(3, N)
HOLES = np.arange(N) % 9 == 4
SERIES = np.cumsum(random.normal(size=(13, 6)), axis=1)
DESIGN = scipy.sparse.random(N, 7, 0.3, random_state=np.random.RandomState(1), format="csr")


def slopes():
    return pm.Normal("slopes", shape=3)


def normal(name, mean, observed, **options):
    return pm.Normal(name, mean, pm.HalfNormal(f"{name}_sigma"), observed=observed, **options)


def values_as_initial_ones():
    scale = pm.Data("scale", 2.0)
    weights = pm.Dirichlet("weights", np.ones(2), initval=[0.3, 0.7])
    means = pm.Normal("means", 0, 3, shape=2, initval=[-1.0, 1.0])
    sigma = pm.HalfNormal("sigma", scale, initval=scale * 2)
    pm.NormalMixture("y", weights, means, sigma, observed=Y)


def draws_as_initial_ones():
    normal("y", X @ np.ones(3) * pm.Normal("slope", initval="prior"), Y)


def scalar_beside_rows():
    b = slopes()
    pm.Normal("study", b[0], 0.5, observed=0.3)
    pm.Normal("studies", b[1], 0.5, observed=[0.4])
    normal("y", pt.dot(X, b), Y)


def sum_as_potential():
    pm.Potential("rows", pm.logp(pm.Normal.dist(pt.dot(X, slopes()), 1.0), Y).sum())


def rows_as_potential():
    x, y = pm.Data("x", X), pm.Data("y", Y)
    pm.Potential("rows", -pt.abs(y - pt.dot(x, slopes())) * pm.HalfNormal("scale"))


def several_lengths():
    b = slopes()
    normal("y", pt.dot(X, b), Y)
    normal("z", b[GROUP[:7] % 3], Y[:7])
    pm.MvNormal("pairs", b[:2], cov=np.eye(2), observed=X[:11, :2])


def gaussian_process(**options):
    gp = pm.gp.HSGP(m=[6], L=[2.5], cov_func=pm.gp.cov.ExpQuad(1, pm.Gamma("length", 2, 1)), **options)
    normal("y", gp.prior("f", X=X[:, :1]), Y)


def centered_gaussian_process():
    gaussian_process(parametrization="centered", drop_first=True)


def gaussian_process_with_mean():
    gaussian_process(mean_func=pm.gp.mean.Constant(pm.Normal("level")))


def gaussian_process_of_data():
    x = pm.Data("x", X[:, :1])
    gp = pm.gp.HSGP(m=[6], c=1.5, cov_func=pm.gp.cov.ExpQuad(1, pm.Gamma("length", 2, 1)))
    normal("y", gp.prior("f", X=x), Y)


def periodic_gaussian_process():
    covariance = pm.gp.cov.Periodic(1, period=1, ls=pm.Gamma("length", 2, 1))
    gp = pm.gp.HSGPPeriodic(m=5, scale=pm.HalfNormal("scale"), cov_func=covariance)
    normal("y", gp.prior("f", X=X[:, :1]), Y)


def standardized_constants():
    x = pt.as_tensor(X)
    normal("y", pt.dot((x - x.mean(axis=0)) / x.std(axis=0), slopes()) + 0.1 * pt.arange(N), Y)


def parameters_of_the_shape_of_the_rows():
    level = pt.full((N,), pm.Normal("level"))
    normal("y", level + pt.dot(X, slopes()).reshape((N,)) + pt.alloc(pm.Normal("other"), N), Y)


def rows_on_the_last_axis():
    normal("y", pt.dot(slopes(), X.T.copy()), Y)


def a_table_as_long_as_the_rows():
    table, index = np.linspace(0, 1, N), np.arange(N)[::-1].copy()
    normal("y", pm.Normal("slope") * pt.as_tensor(table)[pt.as_tensor(index)], Y)


def a_table_of_data_as_long_as_the_rows():
    table, index = pm.Data("table", np.linspace(0, 1, N)), pm.Data("index", np.arange(N)[::-1].copy())
    normal("y", pm.Normal("slope") * table[index], Y)


def constants_in_joins():
    steps = pt.concatenate([[0.0], pm.Dirichlet("steps", np.ones(3))]).cumsum()
    design = pt.concatenate([np.ones((N, 1)), X * pm.Normal("scale")], axis=1)
    reference = pt.concatenate([[0.5], [1.0], pm.Normal("effects", shape=2)])
    normal("y", steps[GROUP] + reference[GROUP] + pt.dot(design, np.ones(4)), Y)


def names_of_dtypes():
    offsets = pm.Normal("1|g_offset", shape=4) * pm.HalfNormal("1|g_sigma")
    effects = pm.Data("f8", X) @ pm.Normal("bs(x, df=3)", shape=3)
    normal("float", offsets[GROUP] + effects + pm.Normal("object") * pm.Data("O", Y[::-1].copy()), Y)


def truncated_from_one_side():
    slope = pm.Normal("slope")
    for name, limits in (("a", {"lower": -9.0}), ("b", {"upper": pm.Data("most", np.full(N, 9.0))})):
        pm.TruncatedNormal(name, slope * X[:, 0], 1.0, **limits, observed=Y)
    positive = abs(Y) + 0.1
    pm.Truncated("c", pm.Gamma.dist(2.0, pt.exp(slope * X[:, 1])), lower=0.05, observed=positive)
    pm.Truncated("d", pm.Poisson.dist(pt.exp(slope)), lower=1, observed=COUNTS + 1)


def hurdles():
    slope, share = pm.Normal("slope"), pm.Beta("share", 1, 1)
    pm.HurdlePoisson("a", psi=share, mu=pt.exp(slope * X[:, 0]), observed=COUNTS)
    pm.HurdleNegativeBinomial("b", psi=share, mu=pt.exp(slope), alpha=1.0, observed=COUNTS)


def marginalized():
    extras = pytest.importorskip("pymc_extras", reason="pymc_extras is not installed")
    group = pm.Bernoulli("group", pm.Beta("share", 1, 1), shape=N)
    normal("y", pm.Normal("mean", shape=2)[group], Y)
    return extras.marginalize(pm.modelcontext(None), ["group"])


def total_sizes():
    slope = pm.Normal("slope")
    normal("y", slope * X[:, 0], Y, total_size=N)
    pm.Poisson("counts", pt.exp(slope), observed=COUNTS, total_size=10 * N)
    pm.Normal("table", slope, 1.0, observed=X, total_size=[50, None])


def masks_of_one_and_two_axes():
    mean = pt.dot(X, slopes())
    pm.Exponential("ends", pt.exp(mean[~HOLES]), observed=abs(Y[~HOLES]))
    pm.Normal("some", mean[pm.Data("mask", HOLES)], 1.0, observed=pm.Data("all", Y)[HOLES])
    pm.Normal("cells", (X * pm.Normal("other", shape=3))[X > 0.2], 1.0, observed=X[X > 0.2])


def data_inside_of_a_log_probability():
    weights, offset = abs(X[:, 1]), pm.Data("offset", X[:, 2])

    def logp(value, mean):
        return weights / weights.sum() * pm.logp(pm.Normal.dist(mean + offset, weights + 1), value)

    pm.CustomDist("y", pt.dot(X, slopes()), logp=logp, observed=Y)


def rows_that_are_set():
    mean = pt.set_subtensor(pt.zeros(N)[HOLES], pm.Normal("level"))
    slopes = pm.Normal("slopes", shape=3)
    mean = pt.set_subtensor(mean[np.flatnonzero(~HOLES)[:9]], pt.dot(X[~HOLES][:9], slopes))
    mean = pt.set_subtensor(mean[[2, 3]], pt.exp(slopes[1:]))
    normal("y", pt.set_subtensor((mean * X[:, 0])[-3:], 0.5), Y)


def lags_of_data():
    y, x = pm.Data("values", Y), pm.Data("x", X)
    normal("y", pm.Normal("rho") * y[1:-1] + pt.dot(x[:-2], slopes()), y[2:])


def lags_in_a_potential():
    y = pm.Data("values", Y)
    pm.Potential("rows", pm.logp(pm.Normal.dist(pm.Normal("rho") * y[:-1], 1.0), y[1:]).sum())


def mean_over_rows_of_data():
    x = pm.Data("x", X[:, 0])
    normal("y", pm.Normal("slope") * (x - x.mean()) / x.std(), Y)


def items_of_each_row():
    start = pm.Normal.dist()
    theta, walk = (
        pm.Normal("theta", shape=N),
        pm.GaussianRandomWalk("walk", 0.1, init_dist=start, shape=N),
    )
    loads = pm.Normal("loads", shape=(3, 2)) @ pm.Normal("factors", shape=(2, N))
    normal("y", theta * X[:, 0] + walk, Y)
    pm.Normal("items", loads.T, 1.0, observed=X)
    pm.Normal("some", theta, 1.0, observed=np.ma.masked_array(X[:, 1], HOLES))


def items_of_the_rows_before():
    normal("y", pm.Normal("latent", shape=N).cumsum(), Y)


def rows_of_parts():
    counts = np.bincount(np.sort(GROUP))
    first, second = pm.Normal("first"), pm.Normal("second")
    parts = pt.concatenate([first * X[:20, 0], second * X[20:, 1]])
    normal("y", parts + pt.repeat(pm.Normal("level", shape=4), counts), Y)


def rows_in_another_order():
    mean = pt.dot(X, slopes())
    normal("y", pt.diff(mean) + mean[::-1][1:], Y[1:])


def steps_of_a_map():
    made = pytensor.map(lambda row, slopes: pt.dot(row, slopes), [pt.as_tensor(X)], [slopes()])
    normal("y", made[0] if isinstance(made, tuple) else made, Y)


def missing_covariates_with_dims():
    pm.modelcontext(None).add_coords({"row": range(N), "column": list("abc")})
    holes = np.arange(3 * N).reshape(N, 3) % 7 == 3
    first = normal("x", 0.2, np.where(HOLES, np.nan, X[:, 0]), dims="row")
    second = normal("z", first * pm.Normal("slope"), np.where(HOLES[::-1], np.nan, X[:, 1]), dims="row")
    masked = np.ma.masked_array(X, holes)
    table = pm.Normal(
        "table", pm.Normal("center", dims="column"), observed=masked, dims=("row", "column")
    )
    normal("y", second + first + pt.dot(table, slopes()), Y, dims="row")


def missing_outcomes():
    normal("y", pt.dot(X, slopes()), np.where(HOLES, np.nan, Y))


def masked_outcomes_of_data():
    x, group = pm.Data("x", X), pm.Data("group", GROUP)
    bias = pm.Normal("bias", shape=4)
    mean = pm.Deterministic("mean", pt.dot(x, slopes()) + bias[group])
    normal("y", mean, np.ma.masked_array(Y, HOLES))


def missing_outcomes_of_one_mean():
    normal("y", pm.Normal("mean"), np.where(HOLES, np.nan, Y))


def missing_covariates():
    seen = normal("x", 0.2, np.where(HOLES, np.nan, X[:, 0]))
    normal("y", seen * pm.Normal("slope"), Y)


def missing_covariates_of_several_columns():
    holes = random.random(X.shape) < 0.1
    seen = pm.Normal("x", pm.Normal("center", shape=3), 1.0, observed=np.ma.masked_array(X, holes))
    normal("y", pt.dot(seen, slopes()), Y)


def missing_values_on_both_sides():
    seen = normal("x", 0.2, np.where(HOLES, np.nan, X[:, 0]))
    normal("y", seen * pm.Normal("slope") + pt.dot(X, slopes()), np.where(np.roll(HOLES, 2), np.nan, Y))


def random_walks():
    start = pm.Normal.dist(0, 1)
    sigma = pm.HalfNormal("sigma")
    pm.GaussianRandomWalk("y", pm.Normal("drift"), sigma, init_dist=start, observed=SERIES)


def autoregressions():
    start = pm.Normal.dist(0, 1, shape=1)
    pm.AR("y", pm.Normal("rho", shape=1), pm.HalfNormal("sigma"), init_dist=start, observed=SERIES)


def sparse_design():
    design = pytensor.sparse.as_sparse_variable(DESIGN)
    effects = pm.Normal("effects", shape=7)
    normal("y", pytensor.sparse.structured_dot(design, effects[:, None])[:, 0], Y)


def sparse_design_by_columns():
    design = pytensor.sparse.as_sparse_variable(DESIGN.tocsc())
    normal("y", pytensor.sparse.dot(design, pm.Normal("effects", shape=(7, 1)))[:, 0], Y)


def shared_sparse_design_of_two_effects():
    design = pytensor.shared(DESIGN)
    effects = pytensor.sparse.structured_dot(design, pm.Normal("effects", shape=(7, 2)))
    normal("y", effects[:, 0] * X[:, 0] + effects[:, 1], Y)


def named_dims():
    pmd = pytest.importorskip("pymc.dims")
    model = pm.modelcontext(None)
    model.add_coords({"row": range(N), "column": list("abc"), "group": range(4)})
    x, center = pmd.Data("x", X, dims=("row", "column")), pmd.Data("center", np.ones(3), dims="column")
    group = pmd.as_xtensor(GROUP, dims=("row",))
    b, bias = pmd.Normal("b", dims="column"), pmd.Normal("bias", 0, 2, dims="group")
    mean = pmd.Deterministic("mean", (x - center).dot(b) + bias.isel(group=group))
    sigma = pmd.as_xtensor(pm.HalfNormal("sigma"), dims=())
    pmd.Normal("y", mean, sigma, observed=pmd.as_xtensor(Y, dims=("row",)))


def named_dims_in_another_order():
    pmd = pytest.importorskip("pymc.dims")
    model = pm.modelcontext(None)
    model.add_coords({"row": range(N), "column": list("abc")})
    x = pmd.as_xtensor(X.T.copy(), dims=("column", "row"))
    mean = x.dot(pmd.Normal("b", dims="column"))
    pmd.Normal("y", mean, 1.0, observed=pmd.as_xtensor(Y, dims=("row",)))


def named_dims_and_a_transformation():
    pmd = pytest.importorskip("pymc.dims")
    pm.modelcontext(None).add_coords({"row": range(N), "column": list("abc")})
    x, b = pmd.Data("x", X, dims=("row", "column")), pmd.Normal("b", dims="column")
    pmd.Normal("y", x.dot(b), pmd.HalfNormal("sigma"), observed=pmd.as_xtensor(Y, dims=("row",)))
    pm.Normal("z", x.dot(b).values, 1.0, observed=Y)


MODELS = [
    values_as_initial_ones, draws_as_initial_ones, scalar_beside_rows, sum_as_potential,
    rows_as_potential, several_lengths, gaussian_process, centered_gaussian_process,
    gaussian_process_with_mean, gaussian_process_of_data, periodic_gaussian_process,
    standardized_constants, rows_on_the_last_axis, parameters_of_the_shape_of_the_rows,
    a_table_as_long_as_the_rows,
    a_table_of_data_as_long_as_the_rows, constants_in_joins, names_of_dtypes,
    truncated_from_one_side, hurdles, marginalized, total_sizes,
    masks_of_one_and_two_axes, rows_that_are_set, data_inside_of_a_log_probability,
    items_of_the_rows_before, rows_of_parts,
    rows_in_another_order, lags_of_data,
    lags_in_a_potential, mean_over_rows_of_data, items_of_each_row, steps_of_a_map,
    missing_covariates_with_dims,
    missing_outcomes, masked_outcomes_of_data,
    missing_outcomes_of_one_mean, missing_covariates, missing_covariates_of_several_columns,
    missing_values_on_both_sides, random_walks, autoregressions, sparse_design,
    sparse_design_by_columns, shared_sparse_design_of_two_effects, named_dims,
    named_dims_in_another_order, named_dims_and_a_transformation,
]  # fmt: skip


def model_of(build):
    with pm.Model() as model:
        made = build()
    return made if isinstance(made, pm.Model) else model


@pytest.mark.parametrize("build", MODELS)
def test_value_and_gradient_are_those_of_the_model(two, build):
    model = model_of(build)
    parallel = parallelize(model)
    assert [one.name for one in parallel.free_RVs] == [one.name for one in model.free_RVs]
    assert_equal(model, parallel)


def test_initial_values_are_those_of_the_model(two):
    for build in (values_as_initial_ones, draws_as_initial_ones):
        model = model_of(build)
        given, expected = parallelize(model).initial_point(1), model.initial_point(1)
        assert list(given) == list(expected)
        for name, value in expected.items():
            np.testing.assert_allclose(given[name], value)
    with model_of(values_as_initial_ones) as model:
        parallel = parallelize(model)
    with parallel:
        pm.set_data({"scale": 3.0})
    assert parallel.initial_point()["sigma_log__"] == np.log(6)


def test_a_variable_without_rows_stays_as_it_is(two):
    model = model_of(scalar_beside_rows)
    parallel = parallelize(model)
    assert {one.name for one in parallel.observed_RVs} == {"study", "studies"}
    assert [one.name for one in parallel.potentials] == ["y_rows"]


def test_potentials_are_divided_if_they_are_named_or_there_is_nothing_else(two):
    model = model_of(lambda: (sum_as_potential(), normal("z", pm.Normal("mean"), Y)))
    assert {one.name for one in parallelize(model).potentials} == {"rows", "z_rows"}
    parallel = parallelize(model, observed=["rows"])
    assert [one.name for one in parallel.potentials] == ["rows_rows"]
    assert [one.name for one in parallel.observed_RVs] == ["z"]
    assert_equal(model, parallel)


def test_what_depends_on_an_observed_variable_depends_on_its_values(two):
    def build():
        first = normal("first", pm.Normal("mean"), Y)
        latent = pm.Normal("latent", first[:3].sum(), 1)
        normal("second", first[:N] * latent, X[:, 0])

    model = model_of(build)
    for names in (["first"], ["second"], None):
        assert_equal(model, parallelize(model, observed=names))


def test_missing_counts_are_free_variables(two):
    def build():
        rate = pt.exp(pt.dot(X, slopes()))
        pm.Poisson("y", rate, observed=np.ma.masked_array(COUNTS, HOLES))

    model = model_of(build)
    parallel = parallelize(model, observed=["y"])
    assert [one.name for one in parallel.free_RVs] == ["slopes", "y_unobserved"]
    assert not {"y", "y_observed"} & {*parallel.named_vars}
    missing = ancestors([parallel["y_unobserved"]])
    assert N not in [one.data.shape[0] for one in missing if isinstance(one, Constant) and one.type.ndim]
    point = {"slopes": np.array([0.1, -0.2, 0.3]), "y_unobserved": np.arange(HOLES.sum())}
    np.testing.assert_allclose(parallel.compile_logp()(point), model.compile_logp()(point))


def one_of_several_terms():
    b = slopes()
    pm.Potential("rows", pm.logp(pm.Normal.dist(pt.dot(X, b), 1.0), Y).sum() - (b**2).sum())


def correlated_rows():
    pm.MvNormal("y", pm.Normal("mean") * np.ones(5), np.eye(5) + 0.5, observed=np.arange(5.0))


def one_random_walk():
    pm.GaussianRandomWalk("y", 0, pm.HalfNormal("sigma"), init_dist=pm.Normal.dist(), observed=Y)


def steps_from_earlier_ones():
    pm.GARCH11("y", omega=pm.HalfNormal("o"), alpha_1=0.3, beta_1=0.2, initial_vol=1.0, observed=Y)


def long_rows_of_a_sparse_matrix():
    design = scipy.sparse.eye(N, 30).tolil()
    design[3] = 1.0
    design = pytensor.sparse.as_sparse_variable(design.tocsr())
    normal("y", pytensor.sparse.dot(design, pm.Normal("effects", shape=30)), Y)


def sparse_matrix_as_the_right_factor():
    design = pytensor.sparse.as_sparse_variable(scipy.sparse.eye(N, format="csr"))
    normal("y", pytensor.sparse.dot(pm.Normal("effects", shape=(1, N)), design)[0], Y)


def missing_items_of_a_vector():
    pairs = np.ma.masked_array(X[:, :2], np.arange(2 * N).reshape(N, 2) % 7 == 0)
    pm.MvNormal("y", pm.Normal("mean", shape=2), np.eye(2), observed=pairs)


@pytest.mark.parametrize("build, complaint", [
    (one_of_several_terms, r"parallelize\(rows\): .*is not a sum over the rows"),
    (correlated_rows, r"'y' \(M\w+\) has one log-probability for all of its 5 rows.*leave it out"),
    (one_random_walk, r"'y' \(RandomWalk\) has one log-probability for all of its 41 rows"),
    (steps_from_earlier_ones, r"parallelize\(y\): a scan computes each step along .*\(series, time\)$"),
    (long_rows_of_a_sparse_matrix, r"sparse matrix of shape \(41, 30\) have .* up to 30.*by columns"),
    (sparse_matrix_as_the_right_factor, r"sparse matrix of data is the left factor.*toarray"),
    (missing_items_of_a_vector, "'y_observed' has missing values within rows.*rows_potential"),
])  # fmt: skip
def test_refusals_name_the_variable_and_what_to_do(two, build, complaint):
    with pytest.raises(ValueError, match=complaint):
        parallelize(model_of(build))


def with_deterministics():
    with pm.Model(coords={"row": range(100, 100 + N), "column": list("abc")}) as model:
        x = pm.Data("x", X, dims=("row", "column"))
        b = pm.Normal("b", dims="column")
        pm.Deterministic("twice", 2 * b, dims="column")
        mean = pm.Deterministic("mean", pt.dot(x, b), dims="row")
        pm.Deterministic("parts", x * b, dims=("row", "column"))
        pm.Deterministic("share", pt.exp(mean) / pt.exp(mean).sum())
        pm.Deterministic("design", pt.dot(pt.as_tensor(X), b) + GROUP)
        pm.Deterministic("total", b.sum())
        normal("y", mean, Y, dims="row")
    return model


def draws_of(model):
    """Return three draws of two chains, as a data set."""
    import xarray

    generator = np.random.default_rng(1)
    found = {}
    for one in model.free_RVs:
        values = generator.uniform(0, 1, (2, 3, *one.eval().shape))
        found[one.name] = ["chain", "draw", *"ab"][: values.ndim], values
    return xarray.Dataset(found, coords={"chain": [0, 1], "draw": [0, 1, 2]})


def test_deterministics_are_those_of_pymc(two):
    import xarray

    model = with_deterministics()
    draws = draws_of(model)
    expected = pm.compute_deterministics(draws, model=model, progressbar=False)
    computed = compute_deterministics(draws, model)
    xarray.testing.assert_allclose(computed, expected, rtol=1e-12)
    assert computed["mean"].dims == ("chain", "draw", "row")
    part = compute_deterministics(draws, model, var_names=["mean", "share"], rows=slice(-5, None))
    xarray.testing.assert_allclose(part["mean"], expected["mean"][..., -5:], rtol=1e-12)
    xarray.testing.assert_allclose(part["share"], expected["share"], rtol=1e-12)
    with synk.profile() as profile:
        compute_deterministics(draws, model, var_names=["mean"])
    assert len(profile.seconds) >= 6


def test_deterministics_of_observed_values_are_computed_from_the_data(two):
    with with_deterministics() as model:
        pm.Deterministic("residual", model["y"] - model["mean"])
    draws = draws_of(model)
    computed = compute_deterministics(draws, model, var_names=["residual"])["residual"]
    expected = Y - draws["b"].values @ X.T  # PyMC draws new values
    np.testing.assert_allclose(computed, expected, rtol=1e-12)


def test_deterministics_name_what_is_missing(two):
    model = with_deterministics()
    with pytest.raises(ValueError, match=r"expected names of deterministic .*'twice'.* got \['mu'\]"):
        compute_deterministics({}, model, var_names=["mu"])
    with pytest.raises(ValueError, match="draws of the free variables of the model, got none of b"):
        compute_deterministics({}, model)
