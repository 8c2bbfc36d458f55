"""shuffled batch: rows in random order from a large `Data`, extracted by two ranks in parallel.

It is compared with one process that extracts the same rows with NumPy into shared memory, where each
rank then uses its slice. The function itself reads very little, so that extracting the rows dominates.
The ranks count the bytes that a batch copies.
"""

import os

import common
from common import COLOURS, Contestant, Line

import numpy as np

RANKS = 2
ROWS = 512
ROW = 37_500  # numbers in a row of 150 kB


def main():
    common.main(__doc__, measure, draw, add_options)


def add_options(parser):
    parser.add_argument("--gigabytes", type=float, help="size of the Data; default: 2, with --quick 0.5")


def batches(nbytes):
    """A `Data` of this size, and the ways to get a batch from it."""
    import synkhronos as synk
    import theano.tensor as tt
    from commands import Excerpt

    common.fork(RANKS)
    copied = _count_copies(synk.world.world.current_world().rank_state)
    x, y = tt.fmatrix("x"), tt.fmatrix("y")
    function = synk.function([x], (x[:, 0].sum(), "sum"))
    read_all = synk.function([], (y.max(), "max"), bcast_inputs=[y])
    synk.distribute()
    common.pin([os.getpid(), *common.worker_ids()])
    data = synk.data(shape=(nbytes // (4 * ROW), ROW), dtype="float32", name="all rows")
    for start in range(0, len(data), 64):
        data[start : start + 64] = np.arange(start, min(start + 64, len(data)))[:, None]
    excerpt = synk.data(shape=(ROWS, ROW), dtype="float32", minibatch=True, name="a batch")
    random = np.random.RandomState(0)

    def by_one_process(rows):
        np.take(data.data, rows, axis=0, out=excerpt.data, mode="clip")
        return function(excerpt)

    ways = {
        "index": lambda rows: function(data, batch=rows),
        "sorted": lambda rows: function(data, batch=np.sort(rows)),
        "serial": by_one_process,
        "array": lambda rows: function(data.data[rows]),
        "slice": lambda rows: function(data, batch=slice(int(rows[0]), int(rows[0]) + ROWS)),
    }

    def turn(way, times):
        """Return the seconds of a batch, and the bytes that the ranks copied for it."""
        drawn = [random.permutation(len(data) - ROWS)[:ROWS] for _ in range(times + 1)]
        drawn_again = iter(drawn)
        if way == "ideal":
            world = synk.world.world.current_world()
            return max(world.run(Excerpt(data.handle(), drawn))), 0.0
        before = copied.sum()
        seconds = common.seconds_of(lambda: ways[way](next(drawn_again)), times, warm_up=1)
        return seconds, float(copied.sum() - before) / (times + 1)

    rows = random.permutation(len(data) - ROWS)[:ROWS]
    for way in ("index", "sorted", "serial", "array"):
        if ways[way](rows) != rows.sum(dtype="float32"):
            raise RuntimeError(f"{way}: expected {rows.sum()}, got {ways[way](rows)}")
    # The first time that a rank reads a page it has to be entered into the rank's page table.
    first = [turn("index", 1)[0] for _ in range(3)]
    read_all(data)
    yield lambda way, times: first if way == "first" else turn(way, times)
    synk.close()


def _count_copies(state):
    """Let every rank count the bytes of rows that are not views of the whole data."""
    copied = state.store.empty((RANKS,), "int64")
    copied[...] = 0
    take = type(state).take

    def counted(self, key, handle, rows):
        taken = take(self, key, handle, rows)
        if not np.shares_memory(taken, self.store.get(handle)):
            copied[self.rank] += taken.nbytes
        return taken

    type(state).take = counted
    return copied


def measure(options):
    gigabytes = options.gigabytes or (0.5 if options.quick else 2)
    rounds, times = (5, 3) if options.quick else (21, 5)
    made = Contestant(batches, int(gigabytes * 1e9), environment=common.ONE_THREAD)
    with common.contestants(batches=made) as players:
        turns = common.take_turns(
            {
                way: lambda way=way: players["batches"](way, times)
                for way in ("serial", "index", "ideal", "array", "sorted", "slice")
            },
            rounds,
            "batches",
        )
        first = players["batches"]("first", 1)
    seconds = {way: [one[0] for one in of_way] for way, of_way in turns.items()}
    copied = {way: [one[1] for one in of_way] for way, of_way in turns.items()}
    serial = seconds["serial"]
    wanted = ROWS * ROW * 4
    one_process = "one process excerpts, then slices"
    lines = [
        common.line(one_process, "ms", serial),
        common.line("array given: excerpt, copy, slices", "ms", seconds["array"]),
        common.line("index batch", "ms", seconds["index"], serial, "speed-up", at_least=1.8),
        common.line("index batch, rows in order", "ms", seconds["sorted"]),
        common.line("excerpts alone, both ranks at once", "ms", seconds["ideal"]),
        common.line("slice batch", "ms", seconds["slice"]),
        Line("copied for an index batch", "MB", [number / 1e6 for number in copied["index"]]),
        Line(
            "copied for a slice batch",
            "MB",
            [number / 1e6 for number in copied["slice"]],
            goal="0",
            reached=not any(copied["slice"]),
        ),
    ]
    # All say how many times as fast as one process.
    for one in (lines[1], *lines[3:5]):
        one.ratios, one.of = list(1e3 * np.array(serial) / one.samples), "speed-up"
    notes = [
        f"{ROWS} rows of {4 * ROW / 1e3:g} kB, {wanted / 1e6:.1f} MB, at random from "
        f"{gigabytes:g} GB; {rounds} turns of {times} batches each, each of other rows; {RANKS} ranks, "
        f"bound to a core each",
        "speed-ups over one process that excerpts into shared memory (numpy.take with out), the "
        "fastest way that one process has",
        "excerpts alone: the ranks do nothing else, so that the machine's memory is the limit; a call "
        f"reaches {np.median(np.divide(seconds['ideal'], seconds['index'])):.0%} of that",
        "the first index batches, whose pages the second rank has not read before, took "
        + ", ".join(f"{1e3 * one:.1f}" for one in first)
        + " ms",
        "copied: over all ranks, the bytes of rows that are not in the data's own memory "
        "(numpy.shares_memory)",
    ]
    title = f"a batch of {ROWS} rows of 150 kB out of {gigabytes:g} GB, 2 ranks"
    return common.Result(title, lines, notes)


def draw(figure, record):
    axes = figure.subplots()
    labels = [
        "one process excerpts,\nthe ranks take slices",
        "function(data[rows]):\nexcerpted, copied",
        "function(data, batch=rows):\nthe ranks excerpt",
        "the same, rows in order",
        "excerpts alone,\nno calls",
        "function(data, batch=slice):\nviews",
    ]
    names = ("other", "other light", "synk", "synk light", "other light", "good")
    common.bars(axes, record["lines"][:6], labels, [COLOURS[name] for name in names], "ms")
    serial, index = record["lines"][0], record["lines"][2]
    common.mark_goal(axes, serial["median"] / 1.8, 3, "goal 1.8 × as fast")
    axes.set_title(f"{record['title']}: {index['ratio']:.2f} × as fast as one process")


if __name__ == "__main__":
    main()
