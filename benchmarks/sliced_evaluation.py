"""sliced evaluation: 10 000 rows through Lasagne's MNIST CNN on two ranks, in slices or all at once.

It measures the time, and the additional peak memory of a rank.
"""

import argparse

import common
from common import COLOURS, Contestant, Line

import numpy as np

RANKS = 2
ROWS = 10_000
SLICES = (2, 5, 10, 20)
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}


def main():
    common.main(__doc__, measure, draw)


def evaluation(rows):
    """The evaluation function of the demo on `RANKS` ranks."""
    import synkhronos as synk
    from commands import ForgetPeak, Peak

    common.fork(RANKS)
    demo = common.load_demo("lasagne_mnist", "network")
    model = demo.build_model(argparse.Namespace(seed=1, model="cnn", no_dropout=False))
    evaluate = synk.function([model.x, model.y], [model.valid_loss, model.accuracy])
    synk.distribute()
    random = np.random.RandomState(0)
    images = synk.data(random.rand(rows, 1, 28, 28).astype("float32"))
    labels = synk.data(random.randint(0, 10, rows).astype("int32"))
    world = synk.world.world.current_world()
    expected = [float(value) for value in evaluate(images, labels)]

    def turn(slices):
        """Return the seconds, and the largest growth of a rank's memory."""
        before = world.run(ForgetPeak())
        found = []
        seconds = common.seconds_of(
            lambda: found.extend(evaluate(images, labels, num_slices=slices)), 1, warm_up=0
        )
        grown = np.subtract(world.run(Peak()), before)
        if not np.allclose(found, expected, rtol=1e-4):
            raise RuntimeError(f"{slices} slices: expected {expected}, got {found}")
        return seconds, float(grown.max())

    yield turn
    synk.close()


def measure(options):
    rows = 2000 if options.quick else ROWS
    rounds = 3 if options.quick else 11
    with common.contestants(
        timed=Contestant(evaluation, rows), live=Contestant(evaluation, rows, environment=GIVE_BACK)
    ) as players:
        turns = common.take_turns(
            {slices: lambda slices=slices: players["timed"](slices) for slices in (1, *SLICES)},
            rounds,
            "evaluations",
        )
        live = common.take_turns(
            {slices: lambda slices=slices: players["live"](slices) for slices in (1, *SLICES)},
            3,
            "memory",
        )
    seconds = {slices: np.array([one[0] for one in turn]) for slices, turn in turns.items()}
    kept = {slices: np.median([one[1] for one in turn]) / 1e6 for slices, turn in turns.items()}
    memory = {slices: np.array([one[1] for one in turn]) / 1e6 for slices, turn in live.items()}
    lines = [common.line("time, at once", "ms", seconds[1])]
    for slices in SLICES:
        lines.append(
            common.line(
                f"time, {slices} slices", "ms", seconds[slices], seconds[1], "at once", at_most=1.03
            )
        )
    lines.append(Line("memory, at once", "MB", list(memory[1])))
    for slices in SLICES:
        divided = memory[1] / memory[slices]
        line = Line(f"memory, {slices} slices", "MB", list(memory[slices]), list(divided), "less")
        # What does not depend on the rows, some 100 kB, is not divided.
        line.goal, line.reached = f"≥ {0.95 * slices:g}", bool(np.median(divided) >= 0.95 * slices)
        lines.append(line)
    notes = [
        f"{rows} rows over {RANKS} ranks, {rounds} turns; loss and accuracy are the same, but for "
        "rounding",
        "memory: the most that a rank used more than before; the data themselves are shared and not "
        "counted; goal: divided by the slices, less 5%",
        "memory is measured separately, in ranks whose malloc returns freed memory immediately "
        "(MALLOC_MMAP_THRESHOLD_); by default it keeps some: then "
        + ", ".join(f"{number:.0f} MB" for number in kept.values())
        + " at most",
    ]
    title = f"Lasagne's MNIST CNN, {rows} rows evaluated on 2 ranks"
    return common.Result(title, lines, notes)


def draw(figure, record):
    axes_of = dict(zip(("time", "memory"), figure.subplots(1, 2)))
    for what, unit, goal in (("time", "ms", "goal: 3% more"), ("memory", "MB", "goal: 1 / slices")):
        axes = axes_of[what]
        lines = [one for one in record["lines"] if one["what"].startswith(what)]
        labels = [one["what"].split(", ")[1] for one in lines]
        colours = [COLOURS["other"], *[COLOURS["synk"]] * len(SLICES)]
        common.bars(axes, lines, labels, colours, unit)
        whole = lines[0]["median"]
        for place, slices in zip(range(len(SLICES))[::-1], SLICES):
            value = 1.03 * whole if what == "time" else whole / slices
            common.mark_goal(axes, value, place, goal if slices == SLICES[0] else "")
    axes_of["time"].set_title(record["title"])
    axes_of["memory"].set_title("Most memory of a rank, beyond before")


if __name__ == "__main__":
    main()
