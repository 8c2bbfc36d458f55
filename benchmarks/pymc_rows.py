"""pymc_rows: models of PyMC on 2 ranks, gradients and effective draws, against plain PyMC and nutpie.

The gradient is what nutpie evaluates, on one thread, for numbers of rows from 1e3 on, and for one of
them also what PyMC's own NUTS evaluates. It is compared with the plain model in one process with one
thread, and with an ideal: processes of the plain model that know nothing of each other, each with its
part of the rows, at the same time.

Sampling the logistic model is compared as users run it, with as many chains as there are cores: PyMC
samples each chain in a process of its own, nutpie in a thread. On the ranks, nutpie's threads take
turns, or each chain has a rank of its own. What counts is the time per effective draw, of the
parameter that has the fewest.
"""

import contextlib
import functools
import subprocess
import sys

import common
import numpy as np
from common import Contestant, line

RANKS, COLUMNS, CHAINS, GROUPS = 2, 10, 2, 50
#: How many times as fast the gradient of 2 ranks is, by kind of model
GOALS = {"normal": 1.8, "logistic": 1.85, "hierarchical": 1.85}
SMALL = {("logistic", 10**4): 1.7}  # goals for fewer rows; of the smallest models, LEAST
LEAST, BUSY = 0.95, 0.8  # with few rows, and beside two programs that keep both cores busy
APART = 0.95  # of the speed of the ideal
BEYOND = 15e-6  # seconds that an evaluation may take beyond those of half of the rows
SIZES = [10**3, 10**4, 10**5, 10**6]
USUAL = 10**5  # the number of rows for which more than nutpie's gradient is measured
DRAWS = 200  # of each chain, and as many before them for tuning
FLOAT32 = {**common.ONE_THREAD, "PYTENSOR_FLAGS": "floatX=float32"}
COLOURS = {"normal": "tab:blue", "logistic": "tab:orange", "hierarchical": "tab:green"}


def main():
    common.main(__doc__, measure, draw, add_options)


def add_options(parser):
    parser.add_argument("--gradients", action="store_true", help="only gradients, no sampling")


def make(kind, rows):
    """Return a regression with this number of rows, of PyTensor's ``floatX``."""
    import pymc as pm
    import pytensor

    random = np.random.default_rng(1)
    x = random.normal(size=(rows, COLUMNS)).astype(pytensor.config.floatX)
    groups = random.integers(GROUPS, size=rows)
    prediction = x @ np.linspace(-1, 1, COLUMNS) + random.normal(size=GROUPS)[groups]
    with pm.Model() as model:
        mean = pm.math.dot(x, pm.Normal("weights", shape=COLUMNS)) + pm.Normal("bias")
        if kind == "hierarchical":
            mean = mean + (pm.HalfNormal("spread") * pm.Normal("offsets", shape=GROUPS))[groups]
        if kind == "normal":
            observed = random.normal(prediction).astype(pytensor.config.floatX)
            pm.Normal("y", mean, pm.HalfNormal("sigma"), observed=observed)
        else:
            observed = random.uniform(size=rows) < 1 / (1 + np.exp(-prediction))
            pm.Bernoulli("y", logit_p=mean, observed=observed.astype("int64"))
    return model


def inference(kind, rows, ranks):
    """Evaluate and sample a model, by ranks or, with None of them, by itself."""
    import logging
    import warnings

    warnings.simplefilter("ignore")
    import nutpie
    import pymc as pm
    import synkhronos as synk
    from synkhronos.extensions.pymc import parallelize, sample

    logging.getLogger("pymc").setLevel(logging.ERROR)
    model = make(kind, rows)
    if ranks:
        synk.fork(ranks)
        model = parallelize(model)
    compiled = nutpie.compile_pymc_model(model)
    gradient = model.logp_dlogp_function(ravel_inputs=True)
    gradient.set_extra_values({})
    start = pm.blocking.DictToArrayBijection.map(model.initial_point())
    options = {"tune": DRAWS, "draws": DRAWS, "chains": CHAINS, "random_seed": 1, "progressbar": False}

    evaluate = gradient_of(compiled, start.data)

    def turn(what, number):
        if what == "gradient":
            return common.seconds_of(lambda: gradient(start), number)
        if what == "nutpie gradient":
            return common.seconds_of(evaluate, number)
        return seconds_per_effective_draw(
            {
                "PyMC": lambda: pm.sample(model=model, cores=CHAINS, nuts_sampler="pymc", **options),
                "nutpie": functools.partial(by_nutpie, compiled, CHAINS),
                "one chain": functools.partial(by_nutpie, compiled, 1),
                "chains": lambda: sample(model, nuts_sampler="nutpie", **options),
            }[what]
        )

    turn("gradient", 10)  # the first are compared, and then the ranks compile
    turn("nutpie gradient", 200 if rows < USUAL else 30)  # until the ranks and one process are compared
    yield turn
    if ranks:
        synk.close()


def by_nutpie(compiled, chains):
    """Sample with a thread for each chain."""
    import nutpie

    many = {"draws": DRAWS, "tune": DRAWS, "chains": chains, "cores": chains}
    return nutpie.sample(compiled, seed=1, progress_bar=False, **many)


def gradient_of(compiled, point):
    """Return a function that evaluates what nutpie has compiled, as its threads do."""
    import ctypes

    function = compiled.compiled_logp_func.ctypes
    point = np.array(point, float)
    arrays = point, np.zeros(compiled.n_dim), np.zeros(1)
    pointers = [one.ctypes.data_as(ctypes.POINTER(ctypes.c_double)) for one in arrays]
    constants = compiled.user_data.ctypes.data

    def evaluate():
        if function(compiled.n_dim, *pointers, constants) or not np.isfinite(arrays[2][0]):
            raise RuntimeError(f"nutpie's gradient failed at {point}")

    return evaluate


def seconds_per_effective_draw(draw_all):
    """Return the seconds that sampling takes, by the smallest number of effective draws."""
    import time

    import arviz

    started = time.perf_counter()
    drawn = draw_all()
    seconds = time.perf_counter() - started
    return seconds / min(float(arviz.ess(values).to_array().min()) for values in [drawn.posterior])


def measure(options):
    sizes = [10**3, USUAL] if options.quick else SIZES
    rounds, number = (2, 20) if options.quick else (7, 100)
    lines, curves = [], {}
    for kind, goal in GOALS.items():
        curves[kind] = []
        for rows in sizes:
            found = compare(kind, rows, rounds, number, goal, not options.gradients)
            curves[kind].append((rows, found["gain"].ratio))
            lines += found["lines"]
    lines += compare_setting("float32", FLOAT32, rounds, number)
    with busy_cores():
        title = "beside two busy programs"
        lines += compare_setting(title, common.ONE_THREAD, rounds, number, goal=BUSY)
    notes = [
        f"regressions on {COLUMNS} columns, the hierarchical one logistic with {GROUPS} groups; "
        f"nutpie's gradient: the median of {number} evaluations, {rounds} turns each",
        f"effective draws: {CHAINS} chains of {DRAWS} draws after {DRAWS} for tuning, with the time for "
        f"tuning and, but for nutpie, compiling; plain PyMC in a process for each chain, which divide "
        f"the threads of BLAS, nutpie in a thread for each",
    ]
    return common.Result(f"PyMC's models on {RANKS} ranks", lines, notes, {"curves": curves})


def compare(kind, rows, rounds, number, goal, samples):
    """Return the lines of a model, and the line of nutpie's gradient on the ranks."""
    one = common.ONE_THREAD
    made = {
        "alone": Contestant(inference, kind, rows, None, environment=one),
        "ranks": Contestant(inference, kind, rows, RANKS, environment=one),
    }
    apart = [Contestant(inference, kind, rows // RANKS, None, environment=one) for _ in range(RANKS)]

    def ideal(what, number):
        for contestant in apart:
            contestant.begin(what, number)
        return RANKS / sum(1 / contestant.result() for contestant in apart)

    title = f"{kind}, {rows:.0e} rows".replace("e+0", "e")
    number = max(5, number * USUAL // max(rows, USUAL))
    lines = []
    with common.contestants(**made, **{f"ideal {k}": each for k, each in enumerate(apart)}):
        for what in ["nutpie gradient", *["gradient"] * (rows == USUAL)]:
            called = {**made, "ideal": ideal}
            called = {name: functools.partial(each, what, number) for name, each in called.items()}
            times = common.take_turns(called, rounds, f"{title}, {what}")
            name = f"{title}, {what}"
            wanted = goal if rows >= USUAL else SMALL.get((kind, rows), LEAST)
            gain = speed_up(name, times, wanted if what == "nutpie gradient" else None)
            ratios = list(np.divide(times["ideal"], times["ranks"]))
            lines += [
                line(f"{name}: one thread", "ms", times["alone"]),
                gain,
                line(f"{name}: ideal, {RANKS} × half of the rows", "ms", times["ideal"]),
                common.Line(f"{name}: ideal / {RANKS} ranks", "×", ratios),
            ]
            if what == "nutpie gradient":
                found = gain
                if rows >= USUAL:
                    lines[-1].goal = f"≥ {APART}"
                    lines[-1].reached = lines[-1].median >= APART
                beyond = line(
                    f"{name}: beyond the ideal", "µs", np.subtract(times["ranks"], times["ideal"])
                )
                beyond.goal, beyond.reached = f"≤ {BEYOND * 1e6:g}", beyond.median <= BEYOND * 1e6
                lines.append(beyond)
        if samples and rows == USUAL and kind == "logistic":
            lines += compare_samplers(made, title, min(rounds, 3))
    return {"lines": lines, "gain": found}


def compare_samplers(made, title, turns):
    """Compare several chains, and one, as users sample them."""
    ways = {
        f"PyMC, {CHAINS} processes": ("alone", "PyMC"),
        f"nutpie, {CHAINS} threads": ("alone", "nutpie"),
        f"nutpie on {RANKS} ranks": ("ranks", "nutpie"),
        "sample(), a rank for each chain": ("ranks", "chains"),
        "one chain, nutpie in a thread": ("alone", "one chain"),
        f"one chain, nutpie on {RANKS} ranks": ("ranks", "one chain"),
    }
    called = {name: functools.partial(made[who], what, 1) for name, (who, what) in ways.items()}
    title = f"{title}, per effective draw"
    times = common.take_turns(called, turns, title)
    lines = []
    for name, taken in times.items():
        of = "one chain, nutpie in a thread" if name in list(ways)[4:] else f"nutpie, {CHAINS} threads"
        lines.append(line(f"{title}: {name}", "ms", taken, times[of], "nutpie"))
    return lines


@contextlib.contextmanager
def busy_cores():
    """Keep a core busy for each rank."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(RANKS)]
    try:
        yield
    finally:
        for one in others:
            one.kill()
            one.wait()


def compare_setting(title, environment, rounds, number, goal=None):
    """Compare nutpie's gradient of the logistic model in another setting."""
    made = {
        "alone": Contestant(inference, "logistic", USUAL, None, environment=environment),
        "ranks": Contestant(inference, "logistic", USUAL, RANKS, environment=environment),
    }
    title = f"logistic, 1e5 rows, {title}, nutpie gradient"
    with common.contestants(**made):
        called = {
            name: functools.partial(each, "nutpie gradient", number) for name, each in made.items()
        }
        times = common.take_turns(called, rounds, title)
    return [
        line(f"{title}: one thread", "ms", times["alone"]),
        speed_up(title, times, goal),
    ]


def speed_up(title, times, goal=None):
    """Return the line of the ranks, with how many times as fast they are as one thread."""
    made = line(f"{title}: {RANKS} ranks", "ms", times["ranks"])
    made.ratios, made.of = list(np.divide(times["alone"], times["ranks"])), "one thread"
    if goal is not None:
        made.goal, made.reached = f"≥ {goal:g}", made.ratio >= goal
    return made


def draw(figure, record):
    by_rows, by_cores = figure.subplots(1, 2)
    cores = np.arange(RANKS, 17)
    for kind, curve in record["extra"]["curves"].items():
        style = {"color": COLOURS[kind], "label": kind}
        by_rows.plot(*zip(*curve), "o-", **style)
        title = f"{kind}, {USUAL:.0e} rows, nutpie gradient".replace("e+0", "e")
        alone, ranks, ideal = (
            common.find(record, f"{title}: {name}")["median"]
            for name in ("one thread", f"{RANKS} ranks", f"ideal, {RANKS} × half of the rows")
        )
        by_cores.plot(RANKS, alone / ranks, "o", **style)
        beyond = max(0, ranks - ideal)
        by_cores.plot(cores, alone / (alone / cores + beyond), "--", color=COLOURS[kind])
    by_rows.set_xscale("log")
    by_rows.set_xlabel("rows")
    by_rows.set_ylabel("gain: time of one thread / time of the ranks")
    by_rows.set_title(f"{RANKS} cores, measured")
    by_cores.set_xlabel("cores")
    by_cores.set_title(f"{USUAL:,} rows, measured (points) and estimated (lines)")
    for axes in (by_rows, by_cores):
        axes.axhline(1, color="grey", linewidth=0.8)
        axes.set_ylim(bottom=0)
        axes.legend()


if __name__ == "__main__":
    main()
