"""start: the time to import the package, to start four ranks and end them, and of the first step.

The first step of ResNet-50 on two ranks, which is verified, is compared with later ones in the same
process. Compiling and the start of the workers are over by then. The first step of plain Theano, which
is the first to use its memory as well, is compared with its later ones.
"""

import functools
import os
import subprocess
import sys
import tempfile
import time

import common
import step_large
from common import COLOURS, Contestant, Line

import numpy as np
from synkhronos.host import imports

RANKS = 4
FIRST = 1.6  # how long the first step may take, in later ones
LATER = 5
GOALS = {"import": 50, "fork": 100, "close": 100}  # milliseconds

_IMPORT = """
import time
start = time.perf_counter()
import {modules}
print(time.perf_counter() - start)
"""
_FLAGS = "import os, synkhronos; print(os.environ['THEANO_FLAGS'])"


def main():
    common.main(__doc__, measure, draw)


def import_seconds(modules, environment):
    """Return how long a fresh process takes to import them."""
    return float(_python(_IMPORT.format(modules=modules), environment))


def _python(code, environment=None):
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()[-1]


def ranks():
    """Starts and ends `RANKS` ranks, in a new process like that of a script."""
    import synkhronos as synk

    def turn():
        times = [time.perf_counter()]
        common.fork(RANKS)
        times.append(time.perf_counter())
        synk.distribute()  # there are no functions: it starts the workers, and waits for them
        times.append(time.perf_counter())
        synk.close()
        times.append(time.perf_counter())
        return np.diff(times).tolist()

    yield turn


def first_ranks():
    """Return the times of the first start in a process."""
    contestant = Contestant(ranks)
    try:
        contestant.start()
        return [contestant(), contestant()]
    finally:
        contestant.close()


def steps(pixels, verify):
    """Takes the first steps of ResNet-50 on two ranks."""
    import synkhronos as synk
    from synkhronos.extensions.train import make_train_function

    synk.fork(step_large.RANKS, use_gpu=False, verify=verify)
    # With the statistics of all ranks, the step is that of one process.
    step = make_train_function(*step_large.network(pixels, sync_batch_norm=True))
    synk.distribute()
    yield functools.partial(_time_steps, step, step_large.images(pixels))
    synk.close()


def plain_steps(pixels):
    """Takes the first steps of the same network with plain Theano, on the images of one rank."""
    import theano

    inputs, loss, new = step_large.plain_network(pixels)
    step = theano.function(inputs, loss, updates=new)
    data = [each[: step_large.EACH] for each in step_large.images(pixels)]

    yield functools.partial(_time_steps, step, data)


def _time_steps(step, data):
    times = [time.perf_counter()]
    for _ in range(1 + LATER):
        step(*data)
        times.append(time.perf_counter())
    return np.diff(times).tolist()


def first_step(*contestant):
    """Return the time of the first step, in seconds, and the median of later ones."""
    contestant = Contestant(*contestant)
    try:
        contestant.start()
        first, *later = contestant()
        return first, float(np.median(later))
    finally:
        contestant.close()


def measure(options):
    rounds = 4 if options.quick else 15
    with tempfile.TemporaryDirectory() as bytecode:
        # As on any machine from the second time on: Python finds its bytecode.
        cached = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode}
        cached.pop("PYTHONDONTWRITEBYTECODE", None)
        cached["THEANORC"] = os.devnull  # settings there may spare the package its search for BLAS
        # Without flags, or with the wrong ones, Theano alone fails or looks for BLAS on and on; so it
        # gets told what the package finds, and the package has to find it.
        with_flags = {**cached, "THEANO_FLAGS": _python(_FLAGS, cached)}
        with_flags.update(imports.variables(cached))  # Theano alone needs the repairs, too
        turns = common.take_turns(
            {
                "theano": lambda: import_seconds("theano", with_flags),
                "both": lambda: import_seconds("synkhronos, theano", cached),
                "ranks": first_ranks,
            },
            rounds,
            "start",
        )
    theano, both = 1e3 * np.array(turns["theano"]), 1e3 * np.array(turns["both"])
    first, again = 1e3 * np.moveaxis(np.array(turns["ranks"]), 1, 0)
    started = first[:, 0] + first[:, 1]
    lines = [
        Line("import theano", "ms", list(theano)),
        Line("import synkhronos, theano", "ms", list(both)),
        _with_goal("the difference", both - theano, "import"),
        Line("fork(4)", "ms", list(first[:, 0])),
        Line("distribute(), no functions", "ms", list(first[:, 1])),
        _with_goal("fork(4) and distribute()", started, "fork"),
        _with_goal("close()", first[:, 2], "close"),
        Line("fork(4) and distribute(), again", "ms", list(again[:, 0] + again[:, 1])),
        Line("close(), again", "ms", list(again[:, 2])),
    ]
    pixels = 64 if options.quick else 224
    for what, goal, *contestant in (
        ('a first step, verify="first"', FIRST, steps, pixels, "first"),
        ('a first step, verify="off"', None, steps, pixels, "off"),
        ("a first step, plain Theano", None, plain_steps, pixels),
    ):
        times = np.array([first_step(*contestant) for _ in range(1 if options.quick else 3)])
        one, later = 1e3 * times.T
        lines.append(Line("a later step", "ms", list(later)))
        ratios = list(one / later)
        line = Line(what, "ms", list(one), ratios, of="a later step")
        if goal is not None:
            line.goal, line.reached = f"≤ {goal} ×", float(np.median(ratios)) <= goal
        lines.append(line)
    notes = [
        f"each in {rounds} fresh processes, in turns; “again”: the second time in a process",
        f"steps of ResNet-50, {pixels} x {pixels} pixels, on two ranks, {step_large.EACH} images each",
        "the first distribute() starts the workers; fork() alone only prepares them",
    ]
    return common.Result("import, the start of 4 ranks and their end", lines, notes)


def _with_goal(what, samples, goal):
    limit = GOALS[goal]
    return Line(what, "ms", list(samples), goal=f"≤ {limit} ms", reached=np.median(samples) <= limit)


def draw(figure, record):
    axes = figure.subplots()
    names = ["the difference", "fork(4) and distribute()", "close()"]
    lines = [common.find(record, name) for name in names]
    labels = ["import synkhronos,\nbeyond import theano", "fork(4) and\ndistribute()", "close()"]
    common.bars(axes, lines, labels, [COLOURS["synk"]] * 3, "ms")
    axes.set_xlim(0, max(axes.get_xlim()[1], 1.12 * max(GOALS.values())))
    for place, goal in zip((2, 1, 0), GOALS.values()):
        common.mark_goal(axes, goal, place, f"goal {goal}")
    theano = common.find(record, "import theano")["median"]
    axes.set_title(f"Beginning and end, once a script (import theano alone: {theano:.0f} ms)")


if __name__ == "__main__":
    main()
