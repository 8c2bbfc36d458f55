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
from test_pymc_gallery import COUNTS, GROUP, HOLES, N, X, Y, model_of, slopes

pytestmark = pytest.mark.usefixtures("quiet_pymc", "in_python")


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


def rows_that_are_set():
    mean = pt.set_subtensor(pt.zeros(N)[HOLES], pm.Normal("level"))
    slopes = pm.Normal("slopes", shape=3)
    mean = pt.set_subtensor(mean[np.flatnonzero(~HOLES)[:9]], pt.dot(X[~HOLES][:9], slopes))
    mean = pt.set_subtensor(mean[[2, 3]], pt.exp(slopes[1:]))
    normal("y", pt.set_subtensor((mean * X[:, 0])[-3:], 0.5), Y)


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


@pytest.mark.parametrize("build", [
    values_as_initial_ones, draws_as_initial_ones, scalar_beside_rows, sum_as_potential,
    rows_that_are_set, missing_covariates_with_dims, named_dims, named_dims_in_another_order,
    named_dims_and_a_transformation,
])  # fmt: skip
def test_value_and_gradient_are_those_of_the_model(two, build):
    model = model_of(build)
    parallel = parallelize(model)
    assert [one.name for one in parallel.free_RVs] == [one.name for one in model.free_RVs]
    assert_equal(model, parallel)


def test_data_of_named_dims_that_are_set_reach_the_ranks(two):
    model = model_of(named_dims)
    parallel = parallelize(model)
    for changed, data in (
        (model, {"x": X[::-1].copy()}),
        (parallel, {"x": 2 * X}),
        (parallel, {"center": np.arange(3.0)}),
    ):
        pm.set_data(data, model=changed)
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


def long_rows_of_a_sparse_matrix():
    design = scipy.sparse.eye(N, 30).tolil()
    design[3] = 1.0
    design = pytensor.sparse.as_sparse_variable(design.tocsr())
    normal("y", pytensor.sparse.dot(design, pm.Normal("effects", shape=30)), Y)


def sparse_matrix_as_the_right_factor():
    design = pytensor.sparse.as_sparse_variable(scipy.sparse.eye(N, format="csr"))
    normal("y", pytensor.sparse.dot(pm.Normal("effects", shape=(1, N)), design)[0], Y)


@pytest.mark.parametrize("build, complaint", [
    (one_of_several_terms, r"parallelize\(rows\): .*is not a sum over the rows"),
    (long_rows_of_a_sparse_matrix, r"sparse matrix of shape \(41, 30\) have .* up to 30.*by columns"),
    (sparse_matrix_as_the_right_factor, r"sparse matrix of data is the left factor.*toarray"),
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
