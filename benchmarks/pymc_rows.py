"""pymc_rows: models of PyMC on 2 ranks, gradient and NUTS, against plain PyMC.

Plain PyMC computes with one thread, and with as many threads of BLAS as there are cores. All compute the
same: the gradient at the same points, and the same draws. For the gradient there is an ideal as well:
processes of plain PyMC that know nothing of each other, each with its part of the rows, at the same
time. NUTS is also run as PyMC's users run it, who sample several chains: plain PyMC samples each chain
in a process of its own, and the ranks sample the chains one after another.
"""

import functools

import numpy as np

import common
from common import Contestant, line

RANKS, COLUMNS, CHAINS = 2, 10, 2
GOALS = {"normal": 1.7, "logistic": 1.4}
DRAWS = {10**5: 100, 10**6: 20}  # draws for tuning and as many after it, by the number of rows


def main():
    common.main(__doc__, measure, draw)


def make(kind, rows):
    """Return a regression with this number of rows."""
    import pymc as pm

    random = np.random.default_rng(1)
    x = random.normal(size=(rows, COLUMNS))
    prediction = x @ np.linspace(-1, 1, COLUMNS)
    with pm.Model() as model:
        mean = pm.math.dot(x, pm.Normal("weights", shape=COLUMNS)) + pm.Normal("bias")
        if kind == "normal":
            pm.Normal("y", mean, pm.HalfNormal("sigma"), observed=random.normal(prediction))
        else:
            observed = random.uniform(size=rows) < 1 / (1 + np.exp(-prediction))
            pm.Bernoulli("y", logit_p=mean, observed=observed.astype("int64"))
    return model


def inference(kind, rows, ranks):
    """Gradients and runs of NUTS, by ranks or, with None of them, by plain PyMC."""
    import logging
    import warnings

    import pymc as pm

    import synkhronos as synk
    from synkhronos.extensions.pymc import parallelize

    warnings.simplefilter("ignore")
    logging.getLogger("pymc").setLevel(logging.ERROR)
    model = make(kind, rows)
    if ranks:
        synk.fork(ranks)
        model = parallelize(model)
    gradient = model.logp_dlogp_function(ravel_inputs=True)
    gradient.set_extra_values({})
    start = pm.blocking.DictToArrayBijection.map(model.initial_point())

    def turn(what, number):
        if what == "gradient":
            return common.seconds_of(lambda: gradient(start), number)
        chains = CHAINS if what == "chains" else 1
        drawn = pm.sample(
            model=model, chains=chains, cores=1 if ranks else chains, tune=DRAWS[rows],
            draws=DRAWS[rows], random_seed=1, progressbar=False, compute_convergence_checks=False,
            nuts={"max_treedepth": 4},
        )  # fmt: skip
        return drawn.posterior.attrs["sampling_time"]

    turn("gradient", 3)
    yield turn
    if ranks:
        synk.close()


def measure(options):
    sizes = [10**5] if options.quick else [10**5, 10**6]
    rounds, number = (2, 5) if options.quick else (9, 40)
    lines = []
    for kind in GOALS:
        for rows in sizes:
            lines += compare(kind, rows, rounds, number)
    notes = [
        f"regressions on {COLUMNS} columns; gradient: the median of {number} evaluations of value and "
        f"gradient, {rounds} turns each",
        f"NUTS: the sampling time that PyMC reports for one chain, at most 15 gradients a draw, 3 turns "
        f"each; draws, and as many before for tuning: {DRAWS[10**5]} of 1e5 rows, {DRAWS[10**6]} of 1e6",
        f"{CHAINS} chains: plain PyMC with cores={CHAINS}, a process for each, which divide the "
        f"threads of BLAS; on the ranks one chain after another, with cores=1",
    ]
    return common.Result(f"PyMC's models on {RANKS} ranks", lines, notes)


def compare(kind, rows, rounds, number):
    made = {
        "alone": Contestant(inference, kind, rows, None, environment=common.ONE_THREAD),
        "usual": Contestant(inference, kind, rows, None),
        "ranks": Contestant(inference, kind, rows, RANKS),
    }
    apart = [
        Contestant(inference, kind, rows // RANKS, None, environment=common.ONE_THREAD)
        for _ in range(RANKS)
    ]

    def ideal():
        for one in apart:
            one.begin("gradient", number)
        return RANKS / sum(1 / one.result() for one in apart)

    lines = []
    with common.contestants(**made, **{f"ideal {k}": one for k, one in enumerate(apart)}):
        for what, turns in (("gradient", rounds), ("NUTS", min(rounds, 3))):
            called = {name: functools.partial(one, what, number) for name, one in made.items()}
            if what == "gradient":
                called["ideal"] = ideal
            times = common.take_turns(called, turns, f"{kind}, {rows} rows, {what}")
            title, unit = f"{kind}, {rows:.0e} rows, {what}", "ms" if what == "gradient" else "s"
            title = title.replace("e+0", "e")
            lines += [
                line(f"{title}: PyMC, one thread", unit, times["alone"]),
                line(f"{title}: PyMC, all threads", unit, times["usual"], times["alone"], "one thread"),
                line(
                    f"{title}: {RANKS} ranks", unit, times["ranks"], times["alone"], "one thread",
                    at_least=GOALS[kind],
                ),
            ]  # fmt: skip
            if what == "gradient":
                ratios = np.divide(times["ideal"], times["ranks"])
                lines += [
                    line(f"{title}: ideal, {RANKS} × half of the rows", unit, times["ideal"]),
                    common.Line(f"{title}: ideal / {RANKS} ranks", "×", list(ratios)),
                ]
        lines += compare_chains(made, f"{kind}, {rows:.0e} rows".replace("e+0", "e"), min(rounds, 3))
    return lines


def compare_chains(made, model, turns):
    """Compare several chains, as PyMC's users sample them."""
    chosen = {name: functools.partial(made[name], "chains", 1) for name in ("usual", "ranks")}
    title = f"{model}, {CHAINS} chains"
    times = common.take_turns(chosen, turns, title)
    return [
        line(f"{title}: PyMC, {CHAINS} processes", "s", times["usual"]),
        line(f"{title}: {RANKS} ranks", "s", times["ranks"], times["usual"], "PyMC"),
    ]


def draw(figure, record):
    axes = figure.subplots()
    common.bars_and_goals(axes, [one for one in record["lines"] if one["goal"]])
    axes.set_xlabel("times as fast as plain PyMC with one thread; at least the goal")


if __name__ == "__main__":
    main()
