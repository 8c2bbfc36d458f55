"""reduced-output: an output of 1 kB to 100 MB summed over 2 and 4 ranks, against NumPy's sum and copy.

The function multiplies by a number, so that its output dominates. The same output as the master's own
value shows the part of the call that is not the reduction.
"""

import os

import common
from common import COLOURS, Contestant, line

import numpy as np

RANKS = (2, 4)
BYTES = {"1 kB": 1 << 10, "64 kB": 1 << 16, "1 MB": 1 << 20, "10 MB": 10_000_000, "100 MB": 100_000_000}
TIMES = {"1 kB": 300, "64 kB": 300, "1 MB": 60, "10 MB": 10, "100 MB": 3}


def main():
    common.main(__doc__, measure, draw)


def replicated(ranks):
    """The library on this many ranks."""
    import synkhronos as synk
    import theano
    import theano.tensor as tt

    common.fork(ranks)
    x = tt.fvector("x")
    functions = {}
    for size, nbytes in BYTES.items():
        product = theano.shared(np.ones(nbytes // 4, "float32")) * x.sum()
        functions["own", size] = synk.function([x], (product, None))
        functions["reduced", size] = synk.function([x], (product, "sum"))
    synk.distribute()
    common.pin([os.getpid(), *common.worker_ids()])
    rows = synk.data(np.ones(ranks, "float32"))
    for (what, size), function in functions.items():
        if not (function(rows) == (ranks if what == "reduced" else 1)).all():
            raise RuntimeError(f"{what}, {size}: not the sum of ones")

    def turn(what, size):
        return common.seconds_of(lambda: functions[what, size](rows), TIMES[size])

    yield turn
    synk.close()


def alone():
    """NumPy in one process: the sum of as many arrays to a new one, and a copy to an existing one."""

    def add(arrays):
        total = arrays[0] + arrays[1]
        for array in arrays[2:]:
            total += array

    def turn(what, size):
        arrays = [np.ones(BYTES[size] // 4, "float32") for _ in range(max(2, what))]
        call = (lambda: add(arrays)) if what else (lambda: np.copyto(*arrays))
        return common.seconds_of(call, TIMES[size])

    yield turn


def measure(options):
    rounds = 4 if options.quick else 21
    made = {f"synk{ranks}": Contestant(replicated, ranks) for ranks in RANKS}
    with common.contestants(numpy=Contestant(alone, environment=common.ONE_THREAD), **made) as players:
        turns = {}
        for size in BYTES:
            for ranks in RANKS:
                for what in ("own", "reduced"):
                    turns[what, ranks, size] = lambda what=what, ranks=ranks, size=size: players[
                        f"synk{ranks}"
                    ](what, size)
                turns["sum", ranks, size] = lambda ranks=ranks, size=size: players["numpy"](ranks, size)
            turns["copy", size] = lambda size=size: players["numpy"](0, size)
        times = common.take_turns(turns, rounds, "reduced output")
    lines = []
    for size in BYTES:
        for ranks in RANKS:
            own = times["own", ranks, size]
            reduced = times["reduced", ranks, size]
            lines += [
                line(f"{size}, {ranks} ranks: the master's own", "µs", own),
                line(f"{size}, {ranks} ranks: reduced", "µs", reduced, own, "own"),
                line(
                    f"{size}, {ranks} ranks: the reduction",
                    "µs",
                    np.subtract(reduced, own),
                    times["sum", ranks, size],
                    "NumPy's sum",
                ),
                line(f"{size}: NumPy's sum of {ranks}", "µs", times["sum", ranks, size]),
            ]
        lines.append(line(f"{size}: NumPy's copy", "µs", times["copy", size]))
    notes = [
        f"float32, {rounds} turns each; ranks are bound to a core each, as far as there are so many",
        "the reduction: the call with the output reduced, less the call with the master's own; the "
        "workers' values are copied to shared memory, each by its rank, and added up by the master",
    ]
    return common.Result("an output summed over the ranks", lines, notes, {"bytes": BYTES})


def draw(figure, record):
    nbytes = record["extra"]["bytes"]
    for axes, ranks in zip(figure.subplots(1, len(RANKS), sharey=True), RANKS):
        for what, label, style, colour in (
            (f", {ranks} ranks: reduced", "call, output summed", "o-", "synk"),
            (f", {ranks} ranks: the master's own", "call, the master's own", "o--", "synk light"),
            (f": NumPy's sum of {ranks}", f"NumPy's sum of {ranks} arrays", "s-", "other"),
            (": NumPy's copy", "NumPy's copy", ":", "other"),
        ):
            medians = [common.find(record, f"{size}{what}")["median"] for size in nbytes]
            axes.loglog(nbytes.values(), medians, style, color=COLOURS[colour], label=label)
        axes.set_xticks(list(nbytes.values()), [size.replace(" ", "\n") for size in nbytes])
        axes.minorticks_off()
        axes.grid(color="#e3e3e3")
        axes.set_title(f"{ranks} ranks")
    figure.axes[0].set_ylabel("µs, medians")
    figure.axes[0].legend(loc="upper left")


if __name__ == "__main__":
    main()
