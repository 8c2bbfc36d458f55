"""soak: leaks of memory, files, threads, mappings and /dev/shm in a long run.

A world of three ranks makes calls, then collectives, then `Data`, then calls of changing shape; then
functions are built, called and dropped, and worlds are opened and closed.
Samples are taken regularly, the first one after a fiftieth of the work, because the start has its own
costs. ``--scale 0.01`` does a hundredth of the work.
"""

import common
from common import COLOURS, Contestant, Line

import numpy as np

RANKS = 3
SAMPLES = 50
WORK = {
    "calls": 1_000_000,
    "collectives": 100_000,
    "Data": 10_000,
    "calls of changing shape": 100_000,
    "functions": 1_000,
    "fork() and close()": 1_000,
}
QUANTITIES = {
    "master": ("resident memory, master", "MB"),
    "workers": ("resident memory, workers", "MB"),
    "files": ("open files", ""),
    "threads": ("threads", ""),
    "mappings": ("mappings", ""),
    "shm": ("mappings of /dev/shm", ""),
}
EXACT = {"files", "threads", "shm"}  # none more at the end
MOST = 1.02  # of the others at the end, times those at the start


def main():
    common.main(__doc__, measure, draw, add_options)


def add_options(parser):
    parser.add_argument("--scale", type=float, help="share of the work; default: 1, with --quick 0.01")


# The contestant


class World:
    """Three ranks, and the kinds of work. Created again for each round of ``fork()`` and ``close()``."""

    def __init__(self):
        import synkhronos as synk
        import theano
        import theano.tensor as tt

        synk.fork(RANKS)
        self.synk = synk
        x, v = tt.fmatrix("x"), tt.fvector("v")
        self.w = theano.shared(np.zeros(50, "float32"), "w")
        self.rows = theano.shared(np.ones((20, 50), "float32"), "rows")
        new = self.w * np.float32(0.5) + x.mean(axis=0) * v[0]
        self.train = synk.function(
            [x], [(x.sum(), "sum"), (x, "gather")], bcast_inputs=[v], updates=[(self.w, new)]
        )
        self.read = synk.function([], (self.rows.sum(), "sum"), sliceable_shareds=[self.rows])
        self.total = synk.function([x], [(x.sum(), "sum"), (x * 2, "gather")])
        self.x = synk.data(np.ones((64, 50), "float32"))
        self.v = synk.data(np.ones(3, "float32"))
        synk.distribute()
        self.rng = np.random.default_rng(0)
        self.values = np.ones((60_000, 3), "float32")
        self.all_values = synk.data(self.values)
        self.kept = []

    def calls(self, number):
        """Calls of all kinds: repeated, of other rows, in slices, of arrays, fused, failing."""
        synk, x, v = self.synk, self.x, self.v
        for index in range(number):
            kind = index % 10
            if kind < 5:
                self.train(x, v, output_subset=None if kind else [0])
            elif kind == 5:
                self.train(x, v, batch=self.rng.integers(0, 64, 30))
            elif kind == 6:
                self.train(x, v, batch=slice(index % 40, None), num_slices=3)
            elif kind == 7:
                self.train(np.ones((9, 50), "float32"), [1.0])
            elif kind == 8:
                self.read(batch_s=[index % 20], num_slices=2)
            elif index % 100 == 9:
                self._fail()
            else:
                with synk.fuse():
                    self.train(x, v)
                    synk.all_reduce(self.w)

    def _fail(self):
        """A call that is refused, and one that fails on every rank.

        Python 3.11 loses some 60 bytes whenever a traceback is formatted (``traceback`` matches a
        pattern of ``ast``), so workers, which format theirs, grow by 0.7 MB in 10 000 failures.
        """
        for wrong in (self.x[:, :3], np.zeros((5, 3), "float32")):
            try:
                self.train(wrong, self.v, batch=3 if len(wrong) > 5 else [9])
            except (IndexError, ValueError):
                continue
            raise AssertionError("a wrong call was not refused")

    def collectives(self, number):
        synk, w, rows = self.synk, self.w, self.rows
        some = np.ones((7, 50), "float32")
        kinds = (
            lambda: synk.all_reduce(w),
            lambda: synk.all_reduce([w, rows], "max"),
            lambda: synk.reduce(w, "sum", in_place=False),
            lambda: synk.broadcast(w),
            lambda: synk.broadcast(w, some[0]),
            lambda: synk.gather([w, rows]),
            lambda: synk.scatter(rows, some),
            lambda: synk.all_gather(rows),
            lambda: synk.set_value(1, w, some[1]),
            lambda: synk.broadcast(rows, np.ones((20, 50), "float32")),
        )
        for index in range(number):
            kinds[index % len(kinds)]()

    def make_data(self, number):
        """`Data` of 200 bytes to 2 MB: made, read by all ranks, grown, freed or forgotten."""
        synk = self.synk
        for index in range(number):
            length = 1 + (index * 97) % (10_000 if index % 20 == 0 else 200)
            data = synk.data(shape=(length, 50), dtype="float32", oversize=1 + index % 2)
            view = data.data
            self.train(data, self.v, output_subset=[0])
            data.set_length(length + 50)
            view[...] = 1
            self.train(data, self.v, batch=[0, -1])
            if index % 3:
                data.free_memory()

    def change_shapes(self, number):
        """Calls with arrays of 2 to 60 000 rows, some of them `Data` that are kept for a while."""
        for _ in range(number):
            rows = self.values[: int(self.rng.integers(2, len(self.values)))]
            if self.rng.random() < 0.3:
                self.kept.append(self.synk.data(rows))
                if len(self.kept) > 50:
                    del self.kept[self.rng.integers(50)]
            self.total(rows)

    def make_functions(self, number):
        """Functions with a variable of their own: built, called with listed rows, and dropped."""
        import theano
        import theano.tensor as tt

        listed = [*range(0, len(self.values), 2), 1]
        for index in range(number):
            x, own = tt.fmatrix("x"), theano.shared(np.ones(3, "float32"), "own")
            updates = [(own, own + x.mean(axis=0)), (self.w, self.w + 0 * own.sum())]
            outputs = [(x.sum() + np.float32(index), "sum")]
            function = self.synk.function([x], outputs, updates=updates, mode="FAST_COMPILE")
            function(self.all_values, batch=listed)
            self.synk.all_reduce(own)

    def pids(self):
        return common.worker_ids()


def soaking():
    """A function that does a part of the work, and returns the resources in use after it."""
    import gc

    world = World()

    def rounds(number):
        nonlocal world
        for _ in range(number):
            world.synk.close()
            world = World()
            world.calls(10)

    def turn(kind, number):
        work = {
            "calls": world.calls,
            "collectives": world.collectives,
            "Data": world.make_data,
            "calls of changing shape": world.change_shapes,
            "functions": world.make_functions,
        }
        work.get(kind, rounds)(number)
        gc.collect()
        return sample(world.pids())

    yield turn
    world.synk.close()


def sample(workers):
    """Return the resources of this process and its workers, by quantity.

    For ``/dev/shm`` only files that these processes have mapped or open count: others may use it, too.
    """
    import psutil

    own = psutil.Process()
    others = [psutil.Process(pid) for pid in workers]
    everyone = [own, *others]
    return {
        "master": own.memory_info().rss / 1e6,
        "workers": sum(process.memory_info().rss for process in others) / 1e6,
        "files": sum(process.num_fds() for process in everyone),
        "threads": sum(process.num_threads() for process in everyone),
        "mappings": sum(len(_mappings(process)) for process in everyone),
        "shm": sum("/dev/shm/" in line for process in everyone for line in _mappings(process)),
    }


def _mappings(process):
    with open(f"/proc/{process.pid}/maps") as file:
        return file.readlines()


# The row


def measure(options):
    scale = options.scale or (0.01 if options.quick else 1)
    samples = run(scale)
    lines, notes = [], []
    for kind, of_kind in samples.items():
        number = f"{max(SAMPLES, round(WORK[kind] * scale)):,}".replace(",", " ")
        said = []
        for name, (what, unit) in QUANTITIES.items():
            one = Line(f"{number} {kind}: {what}", unit, [sample[name] for sample in of_kind])
            start, end, slope = trend(one.samples)
            one.reached = bool(end <= start if name in EXACT else end <= MOST * start)
            one.goal = "no more" if name in EXACT else f"≤ {MOST}"
            if start:
                one.ratios, one.of = [end / start], "the start"
            lines.append(one)
            moved = f"{what} {start:.4g} to {end:.4g} {unit}".rstrip()
            said.append(f"{moved} ({round(slope, 3) + 0.0:+g})")
        notes.append(f"{number} {kind}, start to end (slope over the whole): " + ", ".join(said))
    notes.append(
        "start and end are medians of the first and the last tenth of the samples; the slope, of a "
        "straight line through the second half of them, is what all of the work would add"
    )
    extra = {"scale": scale, "samples": samples}
    return common.Result("resources over a long life, 3 ranks", lines, notes, extra)


def run(scale):
    """Do the work; return, by its kind, the list of samples."""
    with common.contestants(soaking=Contestant(soaking)) as players:
        samples = {}
        for kind, number in WORK.items():
            each = max(1, round(number * scale / SAMPLES))
            turns = {kind: lambda kind=kind, each=each: players["soaking"](kind, each)}
            samples[kind] = common.take_turns(turns, SAMPLES, kind)[kind]
    return samples


def trend(samples):
    """Return the start, the end, and the slope of the second half, times all of the work."""
    tenth, half = max(1, len(samples) // 10), len(samples) // 2
    late = np.arange(half, len(samples))
    slope = np.polyfit(late, samples[half:], 1)[0] * len(samples)
    return float(np.median(samples[:tenth])), float(np.median(samples[-tenth:])), float(slope)


def draw(figure, record):
    colours = [COLOURS[name] for name in ("synk", "good", "synk light", "goal", "bad", "other")]
    samples = record["extra"]["samples"]
    panels = figure.subplots(1, len(samples), sharey=True)
    widest = 0
    for axes, (kind, of_kind) in zip(panels, samples.items()):
        number = max(SAMPLES, round(WORK[kind] * record["extra"]["scale"]))
        done = np.linspace(0, number, len(of_kind) + 1)[1:]
        for (name, (what, _)), colour in zip(QUANTITIES.items(), colours):
            values = np.array([sample[name] for sample in of_kind], float)
            start = trend(values)[0]
            change = 100 * (values - start) / (start or 1)
            widest = max(widest, abs(change).max())
            axes.plot(done, change, color=colour, linewidth=1.6, label=what, alpha=0.8)
        axes.set_title(f"{number:,} {kind}".replace(",", " "))
        axes.set_xticks([0, number], ["0", f"{number:,}".replace(",", " ")])
        axes.grid(axis="y", color="#e3e3e3")
    panels[0].set_ylabel("change from the start, %")
    panels[0].set_ylim(-max(5, 1.1 * widest), max(5, 1.1 * widest))
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=6, fontsize=8.5)


if __name__ == "__main__":
    main()
