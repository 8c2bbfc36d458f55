# ruff: noqa: E501
"""Tests of models of the kinds in PyMC's gallery of examples, in variants of where their rows come from.

A model is a function that adds variables to the model of the context, or returns another model.
"""

import warnings

import numpy as np
import pytensor
import pytensor.sparse
import pytensor.tensor as pt
import pytest
import scipy.sparse
from pytensor.gradient import NullTypeGradError
from pytensor.graph.op import Op
from scipy.interpolate import BSpline

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # ArviZ announces a new version of itself
    pm = pytest.importorskip("pymc", reason="PyMC is not installed: pip install .[pymc]")

from pymc.distributions.distribution import PartialObservedRV

import synkhronos as synk
from synkhronos.extensions.pymc import parallelize

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
BINARY, CHOICE = random.integers(0, 2, N), random.integers(0, 3, N)
POSITIVE, SHARE, ANGLE = random.gamma(2, 1, N) + 0.1, random.beta(2, 2, N), random.vonmises(0, 1, N)
TRIALS = COUNTS + random.integers(1, 5, N)
TABLE = random.multinomial(9, [0.2, 0.3, 0.5], N)
TIME, PERSON, BLOCK = np.linspace(0, 1, N), np.arange(N) % 6, np.arange(N) // 6
NEAR = (abs(np.subtract.outer(np.arange(N), np.arange(N))) == 1).astype("int64")
KNOTS = np.concatenate([[-4] * 3, np.linspace(-4, 4, 6), [4] * 3])
SPLINES = BSpline.design_matrix(X[:, 0], KNOTS, 3).toarray()

VARIANTS = ("constants", "data", "masked", "lagged", "missing", "float32")
MASK = np.arange(N + 6) % 8 != 3
variant = "constants"


def model_of(build, kind="constants"):
    """Return a model in a variant."""
    global variant
    variant = kind
    with pm.Model() as model:
        made = build()
    return made if isinstance(made, pm.Model) else model


def rows(array):
    """Return an array with an item for each row, as constant or data."""
    model = pm.modelcontext(None)
    name = f"rows {len(model.named_vars)}"
    if variant == "masked":  # a mask chooses the rows
        mask = model["mask"] if "mask" in model else pm.Data("mask", MASK)
        longer = np.repeat(array[:1], len(MASK), axis=0)
        longer[MASK] = array
        return pm.Data(name, longer)[mask]
    if variant == "lagged":
        return pm.Data(name, np.concatenate([array[:2], array]))[2:]
    return pm.Data(name, array) if variant in ("data", "missing") else array


def seen(array):
    """Return observed values."""
    if variant == "missing":
        holes = HOLES.reshape(-1, *[1] * (array.ndim - 1))
        return np.ma.masked_array(array, np.broadcast_to(holes, array.shape))
    return rows(array)


def see(kind, array, *parameters, **options):
    """Add the observed variable."""
    return kind("y", *parameters, observed=seen(array), **options)


def slopes(name="slopes", shape=3):
    return pm.Normal(name, shape=shape)


def mean():
    return pm.Normal("bias") + pt.dot(rows(X), slopes())


def log_mean():
    return pt.exp(mean())


def chance():
    return pm.math.sigmoid(mean())


def scores(n=3):
    return rows(X) @ slopes(shape=(3, n))


def shares():
    return pm.math.softmax(scores(), axis=1)


def sigma(name="sigma"):
    return pm.HalfNormal(name)


def level(name="level", n=4):
    return pm.Normal(name, pm.Normal(f"{name} center"), pm.HalfNormal(f"{name} spread"), shape=n)


def by_group(name="level"):
    return level(name)[rows(GROUP)]


def cuts():
    ordered = pm.distributions.transforms.ordered
    return pm.Normal("cuts", 0, 2.0, shape=2, transform=ordered, initval=[-1.0, 1.0])


def factor():
    return pm.LKJCholeskyCov("chol", n=2, eta=2.0, sd_dist=pm.Exponential.dist(1.0))[0]


def centered(name):
    values = pm.Normal(name, shape=4)
    return values - values.mean()


def walk(name, n=7):
    return pm.GaussianRandomWalk(name, sigma=sigma(f"{name} step"), init_dist=pm.Normal.dist(), shape=n)


def steps(*arguments, **options):
    return pytensor.scan(*arguments, return_updates=False, **options)


def weights(n=2):
    return pm.Dirichlet("weights", np.ones(n))


def length():
    return pm.Gamma("length", 2, 1)


def squared(columns=1):
    return pm.gp.cov.ExpQuad(columns, length())


def padded(first, last):
    return pt.concatenate([first, last], axis=1)


def utilities(name="utility"):
    return pt.concatenate([pt.zeros(1), slopes(f"{name} of", 2)]) + pm.Normal(f"{name} price") * rows(X)


def holed(name, column, mean=0.2):
    values = np.where(np.roll(HOLES, column), np.nan, X[:, column])
    return pm.Normal(name, mean, sigma(f"{name} sigma"), observed=values)


class WithoutGradient(Op):
    """A log-probability in Python, as of a program that is called."""

    itypes, otypes = [pt.dvector, pt.dvector], [pt.dvector]

    def perform(self, node, inputs, outputs):
        outputs[0][0] = -abs(inputs[0] - inputs[1])


def extras():
    return pytest.importorskip("pymc_extras", reason="pymc_extras is not installed")


#: In the first tier of the tests.
QUICK = (
    "another order", "data inside of a log-probability", "level of a walk", "missing items of vectors", "parts",
)  # fmt: skip

# fmt: off
MODELS = {
    # Regressions
    "normal": lambda: see(pm.Normal, Y, mean(), sigma()),
    "student": lambda: see(pm.StudentT, Y, pm.Gamma("nu", 2, 0.1), mu=mean(), sigma=sigma()),
    "laplace": lambda: see(pm.Laplace, Y, mean(), sigma()),
    "quantile": lambda: see(pm.AsymmetricLaplace, Y, b=sigma(), mu=mean(), q=0.3),
    "cauchy": lambda: see(pm.Cauchy, Y, mean(), sigma()),
    "logistic outcome": lambda: see(pm.Logistic, Y, mean(), sigma()),
    "gumbel": lambda: see(pm.Gumbel, Y, mean(), sigma()),
    "moyal": lambda: see(pm.Moyal, Y, mean(), sigma()),
    "skew normal": lambda: see(pm.SkewNormal, Y, mu=mean(), sigma=sigma(), alpha=pm.Normal("alpha")),
    "ex-gaussian": lambda: see(pm.ExGaussian, Y, mean(), sigma(), nu=pm.Exponential("nu", 1)),
    "von mises": lambda: see(pm.VonMises, ANGLE, 2 * pt.arctan(mean()), length()),
    "bernoulli": lambda: see(pm.Bernoulli, BINARY, logit_p=mean()),
    "probit": lambda: see(pm.Bernoulli, BINARY, pm.math.invprobit(mean())),
    "complementary log-log": lambda: see(pm.Bernoulli, BINARY, 1 - pt.exp(-log_mean())),
    "binomial": lambda: see(pm.Binomial, COUNTS, rows(TRIALS), logit_p=mean()),
    "beta-binomial": lambda: see(pm.BetaBinomial, COUNTS, log_mean(), 2.0, rows(TRIALS)),
    "poisson": lambda: see(pm.Poisson, COUNTS, log_mean()),
    "exposure": lambda: see(pm.Poisson, COUNTS, rows(POSITIVE) * log_mean()),
    "negative binomial": lambda: see(pm.NegativeBinomial, COUNTS, mu=log_mean(), alpha=length()),
    "negative binomial of n": lambda: see(pm.NegativeBinomial, COUNTS, n=3.0, p=chance()),
    "geometric": lambda: see(pm.Geometric, COUNTS + 1, chance()),
    "zero-inflated poisson": lambda: see(pm.ZeroInflatedPoisson, COUNTS, pm.Beta("psi", 1, 1), log_mean()),
    "zero-inflated binomial": lambda: see(pm.ZeroInflatedBinomial, COUNTS, 0.6, rows(TRIALS), chance()),
    "zero-inflated counts": lambda: see(pm.ZeroInflatedNegativeBinomial, COUNTS, chance(), mu=2.0, alpha=2.0),
    "hurdle poisson": lambda: see(pm.HurdlePoisson, COUNTS, pm.Beta("psi", 1, 1), log_mean()),
    "hurdle counts": lambda: see(pm.HurdleNegativeBinomial, COUNTS, pm.Beta("psi", 1, 1), log_mean(), 2.0),
    "hurdle gamma": lambda: see(pm.HurdleGamma, POSITIVE * BINARY, pm.Beta("psi", 1, 1), 2.0, log_mean()),
    "hurdle log-normal": lambda: see(pm.HurdleLogNormal, POSITIVE * BINARY, chance(), 0.5, sigma()),
    "gamma": lambda: see(pm.Gamma, POSITIVE, 2.0, 2.0 / log_mean()),
    "log-normal": lambda: see(pm.LogNormal, POSITIVE, mean(), sigma()),
    "inverse gaussian": lambda: see(pm.Wald, POSITIVE, log_mean(), 2.0),
    "inverse gamma": lambda: see(pm.InverseGamma, POSITIVE, 3.0, log_mean()),
    "weibull": lambda: see(pm.Weibull, POSITIVE, length(), log_mean()),
    "pareto": lambda: see(pm.Pareto, POSITIVE, log_mean(), 0.05),
    "half-normal": lambda: see(pm.HalfNormal, POSITIVE, log_mean()),
    "half student": lambda: see(pm.HalfStudentT, POSITIVE, 4, sigma=log_mean()),
    "exponential": lambda: see(pm.Exponential, POSITIVE, log_mean()),
    "rice": lambda: see(pm.Rice, POSITIVE, log_mean(), 1.0),
    "beta": lambda: see(pm.Beta, SHARE, mu=chance(), nu=length()),
    "kumaraswamy": lambda: see(pm.Kumaraswamy, SHARE, log_mean(), 2.0),
    "logit-normal": lambda: see(pm.LogitNormal, SHARE, mean(), sigma()),
    "triangular": lambda: see(pm.Triangular, SHARE, lower=-0.1, c=chance(), upper=1.1),
    "uniform": lambda: see(pm.Uniform, SHARE, -log_mean(), pm.Pareto("most", 2, 1.0)),
    "ordinal": lambda: see(pm.OrderedLogistic, CHOICE, mean(), cuts()),
    "ordinal probit": lambda: see(pm.OrderedProbit, CHOICE, mean(), cuts(), sigma=sigma()),
    "ordinal of probabilities": lambda: see(pm.Categorical, CHOICE, pt.diff(padded(pt.zeros((N, 1)), padded(
        pm.math.sigmoid(cuts()[None] - mean()[:, None]), pt.ones((N, 1)))), axis=1)),
    "softmax": lambda: see(pm.Categorical, CHOICE, logit_p=scores()),
    "softmax of probabilities": lambda: see(pm.Categorical, CHOICE, shares()),
    "reference category": lambda: see(pm.Categorical, CHOICE, logit_p=padded(pt.zeros((N, 1)), scores(2))),
    "multinomial": lambda: see(pm.Multinomial, TABLE, 9, shares()),
    "dirichlet-multinomial": lambda: see(pm.DirichletMultinomial, TABLE, 9, pt.exp(scores())),
    "dirichlet": lambda: see(pm.Dirichlet, (TABLE + 1) / 12, pt.exp(scores())),
    "multivariate normal": lambda: see(pm.MvNormal, X[:, :2], scores(2), np.eye(2) + 0.5),
    "multivariate student": lambda: see(pm.MvStudentT, X[:, :2], 5, mu=scores(2), scale=np.eye(2)),
    "correlated outcomes": lambda: see(pm.MvNormal, X[:, :2], scores(2), chol=factor()),
    "instrument": lambda: see(pm.MvNormal, X[:, :2], pt.stack([mean(), pm.Normal("effect") * rows(Y)], 1), chol=factor()),
    "truncated": lambda: see(pm.TruncatedNormal, Y, mean(), sigma(), lower=-9.0, upper=9.0),
    "truncated from below": lambda: see(pm.Truncated, Y, pm.Normal.dist(mean(), sigma()), lower=-9.0),
    "truncated gamma": lambda: see(pm.Truncated, POSITIVE, pm.Gamma.dist(2.0, log_mean()), upper=rows(np.full(N, 99.0))),
    "truncated poisson": lambda: see(pm.Truncated, COUNTS + 1, pm.Poisson.dist(log_mean()), lower=1),
    "censored": lambda: see(pm.Censored, Y.clip(-1, 1), pm.Normal.dist(mean(), sigma()), lower=-1.0, upper=1.0),
    "censored by row": lambda: see(pm.Censored, POSITIVE, pm.Weibull.dist(1.5, log_mean()), lower=None,
                                   upper=rows(np.where(HOLES, POSITIVE, np.inf))),
    "updated prior": lambda: see(pm.Normal, Y, rows(TIME) * pm.Interpolated("slope", np.array([-3.0, 0.1, 3]), np.eye(3)[1]), 1.0),
    "heteroscedastic": lambda: see(pm.Normal, Y, mean(), pt.exp(rows(X) @ slopes("log sigma"))),
    "lasso": lambda: see(pm.Normal, Y, rows(X) @ pm.Laplace("b", 0, 1, shape=3), sigma()),
    "horseshoe": lambda: see(pm.Normal, Y, rows(X) @ (slopes() * pm.HalfCauchy("local", 1, shape=3)), sigma()),
    "polynomials": lambda: see(pm.Normal, Y, pt.stack([rows(TIME) ** n for n in range(3)], 1) @ slopes(), sigma()),
    "standardized": lambda: see(pm.Normal, Y, pm.Normal("b") * ((x := pt.as_tensor(rows(Y))) - x.mean()) / x.std(), 1.0),
    "splines": lambda: see(pm.Normal, Y, rows(SPLINES) @ slopes(shape=8), sigma()),
    "moderation": lambda: see(pm.Normal, Y, mean() + pm.Normal("m") * rows(X[:, 0]) * rows(X[:, 1]), sigma()),
    "discontinuity": lambda: see(pm.Normal, Y, pm.Normal("a") + pm.Normal("d") * pt.ge(rows(X[:, 0]), 0.2), sigma()),
    "two groups": lambda: see(pm.StudentT, Y, 4, mu=slopes(shape=2)[rows(BINARY)], sigma=pm.HalfNormal("s", shape=2)[rows(BINARY)]),
    "two-way table": lambda: see(pm.Normal, Y, slopes(shape=(4, 3))[rows(GROUP), rows(CHOICE)], sigma()),
    "network": lambda: see(pm.Bernoulli, BINARY, pm.math.sigmoid(pt.tanh(scores(5)) @ slopes("out", 5))),
    "deep network": lambda: see(pm.Categorical, CHOICE, pm.math.softmax(
        pt.tanh(pt.tanh(scores(5)) @ slopes("a", (5, 5))) @ slopes("b", (5, 3)), axis=1)),
    "copula": lambda: see(pm.MvNormal, X[:, :2], np.zeros(2), chol=pm.LKJCholeskyCov(
        "chol", n=2, eta=2.0, sd_dist=pm.Exponential.dist(1.0))[0]),
    # Mixtures
    "mixture": lambda: see(pm.NormalMixture, Y, weights(), slopes("means", 2), [1.0, 0.5]),
    "mixture of regressions": lambda: see(pm.NormalMixture, Y, weights(), scores(2), 1.0),
    "weights by row": lambda: see(pm.NormalMixture, Y, shares(), slopes("means"), 1.0),
    "mixture of families": lambda: see(pm.Mixture, Y, [0.3, 0.7], [pm.Normal.dist(mean(), 1), pm.StudentT.dist(3, mu=0, sigma=5)]),
    "zeros and poisson": lambda: see(pm.Mixture, COUNTS, [0.3, 0.7], [pm.DiracDelta.dist(0), pm.Poisson.dist(log_mean())]),
    "stick-breaking": lambda: see(pm.NormalMixture, Y, pm.StickBreakingWeights("w", alpha=1.0, K=4), slopes("means", 5), 1.0),
    "mixture of vectors": lambda: see(pm.Mixture, X[:, :2], [0.4, 0.6], [
        pm.MvNormal.dist(slopes("a", 2), np.eye(2)), pm.MvNormal.dist(slopes("b", 2), np.eye(2))]),
    "mixture of multinomials": lambda: see(pm.Mixture, TABLE, weights(), pm.Multinomial.dist(
        9, pm.Dirichlet("p", np.ones((2, 3))))),
    "marginalized mixture": lambda: (
        see(pm.Normal, Y, slopes("means", 2)[pm.Categorical("group", [0.3, 0.7], shape=N)], sigma()),
        extras().marginalize(pm.modelcontext(None), ["group"]))[1],
    "marginalized occupancy": lambda: (
        pm.Binomial("y", 9, pm.Bernoulli("z", chance(), shape=N) * pm.Beta("p", 1, 1), observed=COUNTS * BINARY),
        extras().marginalize(pm.modelcontext(None), ["z"]))[1],
    "occupancy of visits": lambda: (
        pm.Bernoulli("y", pm.Bernoulli("z", chance(), shape=N)[:, None] * 0.6, observed=(TABLE > 3) * BINARY[:, None]),
        extras().marginalize(pm.modelcontext(None), ["z"]))[1],
    "marginalized switch point": lambda: (
        see(pm.Poisson, COUNTS, pt.switch(pm.DiscreteUniform("when", 0, N) >= np.arange(N), length(), 2.0)),
        extras().marginalize(pm.modelcontext(None), ["when"]))[1],
    # Groups
    "partial pooling": lambda: see(pm.Normal, Y, by_group(), sigma()),
    "varying intercepts": lambda: see(pm.Normal, Y, by_group() + mean(), sigma()),
    "varying slopes": lambda: see(pm.Normal, Y, by_group("a") + by_group("b") * rows(X[:, 0]), sigma()),
    "covarying slopes": lambda: see(pm.Normal, Y, (
        (factor() @ slopes("z", (2, 4))).T[rows(GROUP)] * rows(X[:, :2])).sum(1), sigma()),
    "three levels": lambda: see(pm.Normal, Y, pm.Normal("county", level("state", 2)[np.array([0, 0, 1, 1])])[rows(GROUP)], sigma()),
    "zero-sum effects": lambda: see(pm.Normal, Y, pm.ZeroSumNormal("season", shape=4)[rows(GROUP)] + mean(), sigma()),
    "teams": lambda: see(pm.Poisson, COUNTS, pt.exp(centered("attack")[rows(GROUP)] - centered("defence")[rows(CHOICE)])),
    "ratings": lambda: see(pm.Normal, Y, (slopes("u", (4, 2))[rows(GROUP)] * slopes("v", (3, 2))[rows(CHOICE)]).sum(-1), 1.0),
    "item response": lambda: see(pm.Bernoulli, BINARY, logit_p=pm.HalfNormal("a", shape=4)[rows(GROUP)] * (
        slopes("theta", 6)[rows(PERSON)] - slopes("d", 4)[rows(GROUP)])),
    "guessing": lambda: see(pm.Bernoulli, BINARY, 0.2 + 0.8 * pm.math.sigmoid(slopes("theta", 6)[rows(PERSON)])),
    "alternatives": lambda: see(pm.Categorical, CHOICE, pm.math.softmax(utilities(), axis=1)),
    "panel of choices": lambda: see(pm.Categorical, CHOICE, pm.math.softmax(
        utilities() + slopes("person", (4, 3))[rows(GROUP)], axis=1)),
    "nested choice": lambda: see(pm.Categorical, CHOICE, logit_p=utilities() - pt.logsumexp(
        utilities("nest"), axis=1, keepdims=True)),
    "differences": lambda: see(pm.Normal, Y, mean() + pm.Normal("d") * rows(BINARY) * (rows(TIME) > 0.5), sigma()),
    # An item per row
    "pooling by row": lambda: see(pm.Binomial, COUNTS, rows(TRIALS), pm.Beta("theta", sigma("a") + 1, 2.0, shape=N)),
    "uncertain by row": lambda: see(pm.Normal, Y, level("theta", N), rows(POSITIVE)),
    "non-centered by row": lambda: see(pm.Normal, Y, pm.Normal("mu") + sigma("tau") * slopes("z", N), rows(POSITIVE)),
    "measurement error": lambda: (pm.Normal("x", truth := slopes("truth", N), rows(POSITIVE), observed=rows(X[:, 0])),
                                  see(pm.Normal, Y, pm.Normal("b") * truth, sigma())),
    "random effect by row": lambda: see(pm.Poisson, COUNTS, pt.exp(mean() + sigma() * slopes("e", N))),
    "rates and exposure": lambda: see(pm.Poisson, COUNTS, rows(POSITIVE) * pm.Gamma("frailty", length(), 2.0, shape=N)),
    "matrix factors": lambda: see(pm.Normal, X, slopes("u", (N, 2)) @ slopes("v", (2, 3)), sigma()),
    "principal components": lambda: see(pm.Normal, X, (slopes("w", (3, 2)) @ slopes("f", (2, N))).T, sigma()),
    "confirmatory factors": lambda: see(pm.Normal, X, pm.MvNormal(
        "ksi", np.zeros(2), chol=factor(), shape=(N, 2)) @ slopes("loads", (2, 3)), sigma()),
    "observed ratings": lambda: pm.Normal("y", (slopes("u", (N, 2)) @ slopes("v", (2, 3)))[X < 0.5], 1.0, observed=X[X < 0.5]),
    "missing ratings": lambda: pm.Normal("y", slopes("u", (N, 2)) @ slopes("v", (2, 3)), 1.0,
                                         observed=np.ma.masked_array(X, X > 0.5)),
    "neighbors": lambda: see(pm.Poisson, COUNTS, pt.exp(mean() + pm.CAR("phi", np.zeros(N), NEAR, 0.5, 1.0))),
    "intrinsic neighbors": lambda: see(pm.Poisson, COUNTS, pt.exp(mean() + pm.ICAR("phi", W=NEAR))),
    "prior of all items": lambda: (see(pm.Binomial, COUNTS, rows(TRIALS), theta := pm.Beta("theta", 2, 2, shape=N)),
                                   pm.Potential("prior", -2.5 * pt.log(theta.sum()))),
    # Time
    "seasons": lambda: see(pm.Normal, Y, padded(*[
        f(6.28 * rows(TIME)[:, None] * np.arange(1, 4)) for f in (pt.sin, pt.cos)]) @ slopes(shape=6), sigma()),
    "exponential growth": lambda: see(pm.NegativeBinomial, COUNTS, mu=length() * (1 + sigma()) ** rows(TIME), alpha=2.0),
    "logistic growth": lambda: see(pm.Normal, Y, sigma("most") * pm.math.sigmoid(pm.Normal("r") * rows(TIME)), sigma()),
    "gompertz growth": lambda: see(pm.Normal, Y, sigma("a") * pt.exp(-sigma("b") * pt.exp(-rows(TIME))), sigma()),
    "change point": lambda: see(pm.Poisson, COUNTS, pt.switch(rows(TIME) < pm.Uniform("when", 0, 1), *pm.Exponential("rates", 1, shape=2))),
    "discrete change point": lambda: see(pm.Poisson, COUNTS, pt.switch(
        pm.DiscreteUniform("when", 0, N) >= rows(np.arange(N)), pm.Exponential("early", 1), pm.Exponential("late", 1))),
    "change points of a trend": lambda: see(pm.Normal, Y, (pm.Normal("k") + pt.dot(
        (rows(TIME)[:, None] > [0.2, 0.5, 0.8]) * 1.0, pm.Laplace("d", 0, 0.1, shape=3))) * rows(TIME), sigma()),
    "interrupted": lambda: see(pm.Normal, Y, mean() + pm.Normal("effect") * (rows(TIME) > 0.5), sigma()),
    "rolling regression": lambda: see(pm.Normal, Y, walk("a")[rows(BLOCK)] + walk("b")[rows(BLOCK)] * rows(X[:, 0]), sigma()),
    "repeated levels": lambda: see(pm.Normal, Y, pt.repeat(walk("a"), 6)[:N] * rows(X[:, 0]), sigma()),
    "stochastic volatility": lambda: see(pm.StudentT, Y, 5, mu=0, sigma=pt.exp(walk("v", N))),
    "level of a walk": lambda: see(pm.Normal, Y, slopes("z", N).cumsum() * sigma("step"), sigma()),
    "structural": lambda: see(pm.Normal, Y, walk("w", N) + pm.ZeroSumNormal("season", shape=6)[rows(PERSON)] + mean(), sigma()),
    "latent autoregression": lambda: see(pm.Normal, Y, mean() + pm.AR(
        "ar", slopes("rho", 1), 0.3, init_dist=pm.Normal.dist(0, 1, shape=1), steps=N - 1), sigma()),
    "autoregression": lambda: see(pm.AR, Y, slopes("rho", 1), sigma(), init_dist=pm.Normal.dist(0, 1, shape=1)),
    "random walk": lambda: see(pm.GaussianRandomWalk, Y, 0, sigma(), init_dist=pm.Normal.dist()),
    "garch": lambda: see(pm.GARCH11, Y, omega=sigma(), alpha_1=0.3, beta_1=0.2, initial_vol=1.0),
    "diffusion": lambda: see(pm.EulerMaruyama, Y, 0.1, lambda x, a: (-a * x, 1.0), (sigma(),), init_dist=pm.Normal.dist()),
    "vector autoregression": lambda: pm.MvNormal("y", X[:-1] @ slopes(shape=(3, 3)), np.eye(3), observed=X[1:]),
    "walks": lambda: pm.GaussianRandomWalk("y", pm.Normal("drift"), sigma(), init_dist=pm.Normal.dist(), observed=SERIES),
    "autoregressions": lambda: pm.AR("y", slopes("rho", 1), sigma(), init_dist=pm.Normal.dist(shape=1), observed=SERIES),
    "volatility of series": lambda: pm.GARCH11(
        "y", omega=sigma(), alpha_1=0.3, beta_1=0.2, initial_vol=1.0, observed=SERIES),
    "differential equation": lambda: see(pm.Normal, Y, steps(
        lambda y, k: y * (1 - 0.1 * k), outputs_info=[sigma("start")], non_sequences=[sigma("rate")], n_steps=N), 1.0),
    "moving average": lambda: pm.Potential("y", pm.logp(pm.Normal.dist(), steps(
        lambda y, e, t: y - t * e, [pt.as_tensor(Y)], [pt.zeros(())], [pm.Normal("theta")]))),
    # Survival
    "cox": lambda: see(pm.Poisson, BINARY, rows(POSITIVE) * pm.Gamma("hazard", 1, 1, shape=4)[rows(GROUP)] * log_mean()),
    "discrete time": lambda: see(pm.Bernoulli, BINARY, 1 - pt.exp(-pt.exp(slopes("h", 4)[rows(GROUP)] + mean()))),
    "intervals": lambda: see(pm.Poisson, BINARY[:, None] * np.eye(3, dtype=int)[2], rows(abs(X)) * pt.outer(
        log_mean(), pm.Gamma("hazard", 1, 1, shape=3))),
    "censored rows": lambda: (pm.Normal("y", (m := mean())[~HOLES], 1.0, observed=Y[~HOLES]), pm.Potential(
        "censored", pm.logcdf(pm.Normal.dist(m[HOLES], 1.0), Y[HOLES]))),
    "imputed censored rows": lambda: (pm.Normal("y", (m := mean())[~HOLES], 1.0, observed=Y[~HOLES]), pm.Normal(
        "imputed", m[HOLES], 1.0, initval=np.full(5, 3.0), transform=pm.distributions.transforms.Interval(2.0, None)))[0],
    "accelerated failure": lambda: pm.Potential(
        "y", rows(BINARY) * ((z := (pt.log(rows(POSITIVE)) - mean()) / sigma()) - pt.exp(z)) - (1 - rows(BINARY)) * pt.exp(z)),
    # Functions of the script's
    "own log-probability": lambda: see(pm.CustomDist, Y, mean(), sigma(), logp=lambda y, m, s: -abs(y - m) / s - pt.log(2 * s)),
    "own distribution": lambda: see(pm.CustomDist, Y, mean(), dist=lambda m, size: pm.Normal.dist(m, 1, size=size) * 2 + 1),
    "weighted": lambda: see(pm.CustomDist, Y, mean(), rows(POSITIVE), logp=lambda y, m, w: w * pm.logp(pm.Normal.dist(m, 1), y)),
    "without gradient": lambda: see(pm.CustomDist, Y, pm.Normal("m"), logp=lambda y, m: WithoutGradient()(y, y * 0 + m)),
    "potential of a program": lambda: pm.Potential("y", WithoutGradient()(pt.as_tensor(Y), mean()).sum()),
    "outliers": lambda: pm.Potential("y", (1 - (out := pm.Bernoulli("out", 0.1, shape=N))) * pm.logp(
        pm.Normal.dist(mean(), 1.0), y := pt.as_tensor(rows(Y))) + out * pm.logp(pm.Normal.dist(pm.Normal("m"), 5.0), y)),
    "transformed outcome": lambda: pm.Potential("y", pm.logp(pm.Normal.dist(mean(), 1.0), rows(Y) * pt.exp(pm.Normal("lam")))),
    "mediation": lambda: (m := pm.Normal("m", pm.Normal("a") * rows(X[:, 0]), 1.0, observed=seen(X[:, 1])),
                          see(pm.Normal, Y, pm.Normal("b") * m + mean(), sigma())),
    "longitudinal and survival": lambda: (see(pm.Normal, Y, (a := slopes("a", 4))[rows(GROUP)] * rows(TIME), sigma()),
                                          pm.Weibull("end", 1.5, pt.exp(a), observed=POSITIVE[:4])),
    "rows and their sum": lambda: (see(pm.Normal, Y, m := mean(), 1.0), pm.Normal("total", m.sum(), 1.0, observed=Y.sum())),
    "do": lambda: (see(pm.Normal, Y, mean(), sigma()), pm.do(pm.modelcontext(None), {"bias": 0.5}))[1],
    "observe": lambda: (pm.Normal("y", mean() + pm.Normal("x", pm.Normal("m"), shape=N), shape=N),
                        pm.observe(pm.modelcontext(None), {"x": X[:, 0], "y": Y}))[1],
    "extreme values": lambda: extras().GenExtreme("y", mu=mean(), sigma=sigma(), xi=0.1, observed=seen(Y)),
    "generalized poisson": lambda: extras().GeneralizedPoisson("y", mu=log_mean(), lam=0.1, observed=seen(COUNTS)),
    "trees": lambda: see(pm.Normal, Y, pytest.importorskip("pymc_bart").BART("mu", X, Y, m=5), sigma()),
    # Gaussian processes
    "hilbert space": lambda: see(pm.Normal, Y, pm.gp.HSGP(m=[6], L=[2.5], cov_func=squared()).prior("f", X=rows(X[:, :1])), sigma()),
    "hilbert space of two": lambda: see(pm.Poisson, COUNTS, pt.exp(pm.gp.HSGP(
        m=[3, 3], c=2.0, cov_func=pm.gp.cov.Matern52(2, [1, 2])).prior("f", X=rows(X[:, :2])))),
    "periodic process": lambda: see(pm.Normal, Y, pm.gp.HSGPPeriodic(
        m=5, scale=sigma("scale"), cov_func=pm.gp.cov.Periodic(1, 1, ls=length())).prior("f", X=rows(X[:, :1])), sigma()),
    "latent process": lambda: see(pm.Normal, Y, pm.gp.Latent(cov_func=squared()).prior("f", X=rows(X[:, :1])), sigma()),
    "student process": lambda: see(pm.Normal, Y, pm.gp.TP(scale_func=squared(), nu=4).prior("f", X=rows(X[:, :1])), sigma()),
    "marginal process": lambda: pm.gp.Marginal(cov_func=squared()).marginal_likelihood(
        "y", X=rows(X[:, :1]), y=seen(Y), sigma=sigma()),
    "sparse process": lambda: pm.gp.MarginalApprox(cov_func=squared()).marginal_likelihood(
        "y", X=rows(X[:, :1]), Xu=X[:5, :1], y=seen(Y), sigma=sigma()),
    "kronecker process": lambda: pm.gp.MarginalKron(cov_funcs=[squared(), pm.gp.cov.ExpQuad(1, 1.0)]).marginal_likelihood(
        "y", Xs=[np.arange(8.0)[:, None], np.arange(5.0)[:, None]], y=Y[:40], sigma=sigma()),
    "centered process": lambda: see(pm.Normal, Y, pm.gp.HSGP(
        m=[6], L=[2.5], cov_func=squared(), parametrization="centered", drop_first=True).prior("f", X=X[:, :1]), sigma()),
    "process with a mean": lambda: see(pm.Normal, Y, pm.gp.HSGP(
        m=[6], c=1.5, cov_func=squared(), mean_func=pm.gp.mean.Constant(pm.Normal("m"))).prior("f", X=rows(X[:, :1])), 1.0),
    "latent process of blocks": lambda: see(pm.Normal, Y, pm.gp.Latent(cov_func=squared()).prior(
        "f", X=np.linspace(0, 1, 7)[:, None])[rows(BLOCK)], sigma()),
    # Missing values
    "missing outcomes of one mean": lambda: pm.Normal("y", pm.Normal("m"), sigma(), observed=np.where(HOLES, np.nan, Y)),
    "missing cells": lambda: pm.Normal("y", slopes(), sigma(), observed=np.ma.masked_array(X, X > 1)),
    "missing covariate": lambda: see(pm.Normal, Y, holed("x", 0) * pm.Normal("b"), sigma()),
    "missing covariates": lambda: see(pm.Normal, Y, pm.Normal("x", slopes("m"), 1.0, observed=np.ma.masked_array(
        X, X > 1)) @ slopes("b"), sigma()),
    "covariates of each other": lambda: see(pm.Normal, Y, holed("z", 1, x := holed("x", 0)) + x + mean(), sigma()),
    "missing disasters": lambda: pm.Poisson("y", pt.switch(pm.DiscreteUniform("when", 0, N) >= np.arange(N), *pm.Exponential(
        "rates", 1, shape=2)), observed=np.where(HOLES, np.nan, COUNTS)),
    "missing items of vectors": lambda: pm.MvNormal("y", slopes(), np.eye(3), observed=np.ma.masked_array(X, X > 1)),
    # Where rows are in graphs
    "rows on the last axis": lambda: see(pm.Normal, Y, pt.dot(slopes(), X.T.copy()), sigma()),
    "shapes of rows": lambda: see(pm.Normal, Y, pt.full((N,), pm.Normal("a")) + pt.dot(rows(X), slopes()).reshape((N,))
                                  + pt.alloc(pm.Normal("b"), N) + 0.1 * pt.arange(N), sigma()),
    "a table as long as the rows": lambda: see(pm.Normal, Y, pm.Normal("b") * pt.as_tensor(rows(TIME))[rows(
        np.arange(N)[::-1].copy())], sigma()),
    "constants in joins": lambda: see(pm.Normal, Y, pt.concatenate([[0.0], pm.Dirichlet("steps", np.ones(3))]).cumsum()[
        rows(GROUP)] + padded(np.ones((N, 1)), rows(X) * pm.Normal("b")) @ np.ones(4) + pt.concatenate(
        [[0.5], [1.0], slopes("effects", 2)])[GROUP], sigma()),
    "names of dtypes": lambda: pm.Normal("float", (slopes("1|g_offset", 4) * sigma("1|g_sigma"))[GROUP] + pm.Data(
        "f8", X) @ slopes("bs(x, df=3)") + pm.Normal("object") * pm.Data("O", Y[::-1].copy()), 1.0, observed=Y),
    "masks of two axes": lambda: pm.Normal("y", (X * slopes())[X > 0.2], 1.0, observed=X[X > 0.2]),
    "data inside of a log-probability": lambda: (w := rows(abs(Y)), o := rows(X[:, 2]), see(
        pm.CustomDist, Y, mean(), logp=lambda y, m: w / w.sum() * pm.logp(pm.Normal.dist(m + o, w + 1), y))),
    "lags of data": lambda: pm.Normal("y", pm.Normal("rho") * (y := pm.Data("values", Y))[1:-1] + y[:-2], 1.0, observed=y[2:]),
    "lags in a potential": lambda: pm.Potential("lags", pm.logp(pm.Normal.dist(
        pm.Normal("rho") * (y := pm.Data("values", Y))[:-1], 1.0), y[1:]).sum()),
    "adstock": lambda: see(pm.Normal, Y, sum(pm.Beta(f"w{lag}", 1, 1) * pt.as_tensor(np.r_[np.zeros(3), Y])[
        3 - lag : N + 3 - lag] for lag in range(4)), sigma()),
    "parts": lambda: see(pm.Normal, Y, pt.concatenate([pm.Normal("a") * X[:20, 0], pm.Normal("b") * X[20:, 1]])
                         + pt.repeat(slopes("level", 4), np.bincount(GROUP)), sigma()),
    "another order": lambda: pm.Normal("y", pt.diff(m := mean()) + m[::-1][1:], sigma(), observed=Y[1:]),
    "steps of a map": lambda: see(pm.Normal, Y, steps(
        lambda row, b: pt.dot(row, b), [pt.as_tensor(rows(X))], non_sequences=[slopes()]), sigma()),
    "sparse design": lambda: see(pm.Normal, Y, pytensor.sparse.structured_dot(
        pytensor.sparse.as_sparse_variable(DESIGN), slopes(shape=7)[:, None])[:, 0], sigma()),
    "sparse design by columns": lambda: see(pm.Normal, Y, pytensor.sparse.dot(
        pytensor.sparse.as_sparse_variable(DESIGN.tocsc()), slopes(shape=(7, 1)))[:, 0], sigma()),
    "shared sparse design": lambda: see(pm.Normal, Y, pytensor.sparse.structured_dot(
        pytensor.shared(DESIGN), slopes(shape=(7, 2))).sum(axis=1), sigma()),
    # Others
    "total size of columns": lambda: see(pm.Normal, X, slopes(), 1.0, total_size=[50, None]),
    "total size": lambda: see(pm.Normal, Y, mean(), sigma(), total_size=10 * N),
    "columns of outcomes": lambda: see(pm.Normal, X, mean()[:, None] * slopes("b"), pm.HalfNormal("s", shape=3)),
    "tables of outcomes": lambda: see(pm.Normal, np.stack([X, X * 2], 1), rows(X)[:, None, :] * slopes("b", (2, 3)), sigma()),
    "rows in columns": lambda: pm.Normal("y", slopes("b", (2, 3)) @ X.T, sigma(), observed=np.stack([Y, -Y])),
    "share of all rows": lambda: see(pm.Poisson, COUNTS, 99 * (r := log_mean()) / r.sum()),
    "counts of all rows": lambda: pm.Multinomial("y", COUNTS.sum(), pm.math.softmax(mean()), observed=COUNTS),
    "bins": lambda: pm.Multinomial("y", N, pt.concatenate([c := pt.exp(pm.logcdf(
        pm.Normal.dist(pm.Normal("m"), 1), [0.0])), 1 - c]), observed=[20, 21]),
    "simulator": lambda: pm.Simulator("y", lambda rng, a, size=None: rng.normal(a, 1, size=N), pm.Normal("a"), observed=Y),
    "minibatch": lambda: pm.Normal("y", pm.Normal("m"), 1.0, observed=pm.Minibatch(Y, batch_size=8), total_size=N),
}
# fmt: on
#: The names of what is divided, if not all observed variables are.
DIVIDED = {"censored rows": ["y", "censored"]}

#: What is refused, and why.
SERIES_REASON = r"'y' \(\w+\) has one log-probability for all.*leave it out"
SERIES_NAMES = (
    "autoregression, random walk, diffusion, marginal process, kronecker process, bins, "
    "counts of all rows, marginalized switch point"
)
REFUSED = {
    **dict.fromkeys(SERIES_NAMES.split(", "), SERIES_REASON),
    "missing items of vectors": r"'y_observed' has missing values.*leave out these rows.*rows_potential",
    "moving average": r"parallelize\(y\): a scan computes each step along .*\(series, time\)$",
    "garch": r"parallelize\(y\): a scan computes each step along .*\(series, time\)$",
    "sparse process": "is not a sum over the rows",
    "minibatch": "draws random numbers.*observe all rows",
    "simulator": "draws random numbers.*leave out the variable of the simulator",
}


@pytest.fixture(scope="module")
def world():
    synk.fork(2)
    yield
    synk.close()


def points_of(model):
    """Return points at and near the initial one."""
    generator, initial = np.random.default_rng(1), model.initial_point(0)

    def moved(value, width):
        step = generator.uniform(-width, width, value.shape)
        return (value + step).astype(value.dtype) if value.dtype.kind == "f" else value

    widths = (0.0, 0.2, 0.5, 0.7)
    return [{name: moved(value, width) for name, value in initial.items()} for width in widths]


def evaluated(model, points):
    """Return the log-probability at some points, and its gradient if it has one."""
    try:
        compute = model.compile_fn([model.logp(), model.dlogp()])
    except (NotImplementedError, NullTypeGradError):  # of the simulator
        compute = model.compile_fn([model.logp()])
    return [np.concatenate([np.ravel(item) for item in compute(point)]) for point in points]


@pytest.mark.parametrize("name, kind", [
    pytest.param(name, kind, marks=[pytest.mark.slow] * (name not in QUICK or kind != "constants"))
    for number, name in enumerate(MODELS) for kind in ("constants", VARIANTS[1 + number % 5])
    if (name, kind) != ("latent process", "float32")  # whose gradient needs double precision
])  # fmt: skip
def test_a_model_is_equal_or_refused_in_a_sentence(world, name, kind):
    with pytensor.config.change_flags(floatX="float32" if kind == "float32" else "float64"):
        try:
            model = model_of(MODELS[name], kind)
            points = points_of(model)
            expected = evaluated(model, points)
        except Exception as error:
            if kind == "constants":
                raise
            pytest.skip(f"PyMC has no such variant: {error}")
        reason = REFUSED.get(name)
        owner = getattr(model.named_vars.get("y_observed"), "owner", None)
        if kind == "missing" and owner and isinstance(owner.op, PartialObservedRV):
            reason = "'y_observed' has missing values.*leave out these rows"
        if (name, kind) == ("occupancy of visits", "masked"):
            reason = "selected inside of the marginalized variable 'z'.*select them before"
        if reason is not None:
            with pytest.raises(ValueError, match=reason):
                parallelize(model, observed=DIVIDED.get(name))
            return
        found = evaluated(parallelize(model, observed=DIVIDED.get(name)), points)
    rtol = 1e-4 if kind == "float32" else 1e-9
    for got, wanted in zip(found, expected):
        least = rtol * abs(wanted[np.isfinite(wanted)]).max(initial=1)
        np.testing.assert_allclose(got, wanted, rtol=rtol, atol=least)
