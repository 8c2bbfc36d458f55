"""memory: the memory of shared data and replicated functions, over all ranks.

Proportional set sizes (PSS) are summed over all processes: a page that four share counts once.
"""

import common
from common import COLOURS, Contestant, Line

import numpy as np

RANKS = 4
ROW = 37_500  # numbers in a row of 150 kB
PARAMETERS = 25_600_000  # as many as ResNet-50 has
LAYERS = 50


def main():
    common.main(__doc__, measure, draw, add_options)


def add_options(parser):
    parser.add_argument("--gigabytes", type=float, help="size of the Data; default: 2, with --quick 0.5")


# Contestants


def shared_data(nbytes):
    """A `Data` that every rank reads to its end."""
    import synkhronos as synk
    import theano.tensor as tt

    common.fork(RANKS)
    x, y = tt.fmatrix("x"), tt.fmatrix("y")
    read_own = synk.function([x], (x.max(), "max"))
    read_all = synk.function([], (y.max(), "max"), bcast_inputs=[y])
    synk.distribute()
    small = synk.data(np.ones((RANKS, ROW), "float32"))
    read_own(small), read_all(small)

    def turn():
        """Return the PSS before, with the data, after it was read, and after it was freed."""
        sizes = [_sizes()]
        data = synk.data(shape=(nbytes // (4 * ROW), ROW), dtype="float32")
        for start in range(0, len(data), 64):
            data[start : start + 64] = 1  # written in place: there is no second array
        held = data.data.nbytes
        sizes.append(_sizes())
        read_own(data)
        read_all(data)
        sizes.append(_sizes())
        data.free_memory()
        sizes.append(_sizes())
        return held, sizes

    yield turn
    synk.close()


def replicated_function(late):
    """A function with large shared variables, built after the workers were started, or before."""
    import synkhronos as synk
    import theano
    import theano.tensor as tt

    def growth(parameters):
        """Return the bytes of the parameters, and by how much their replication makes PSS grow."""
        common.fork(RANKS)
        x = tt.fvector("x")
        small = synk.function([x], (x.sum(), "sum"))
        data = synk.data(np.ones(RANKS, "float32"))
        if late:
            synk.distribute()
            small(data)
        layers = [theano.shared(np.ones(parameters // LAYERS, "float32")) for _ in range(LAYERS)]
        function = synk.function([x], (sum(x.sum() * layer[0] for layer in layers), "sum"))
        before, _ = _sizes()
        synk.distribute()
        function(data)
        small(data)
        after, _ = _sizes()
        synk.close()
        return sum(layer.get_value(borrow=True).nbytes for layer in layers), after - before

    def turn():
        """Return the number of added copies of the parameters, without the constant overhead."""
        (many, grown), (few, base) = growth(PARAMETERS), growth(PARAMETERS // 100)
        return (grown - base) / (many - few)

    yield turn


def _sizes():
    """Return the sums over this process and its workers of PSS and of page tables, in bytes."""
    import gc

    import psutil

    gc.collect()
    own = psutil.Process()
    processes = [own, *own.children()]
    pss = sum(process.memory_full_info().pss for process in processes)
    tables = 0
    for process in processes:
        with open(f"/proc/{process.pid}/status") as file:
            tables += sum(int(text.split()[1]) for text in file if text.startswith("VmPTE"))
    return pss, 1024 * tables


# The row


def measure(options):
    gigabytes = options.gigabytes or (0.5 if options.quick else 2)
    rounds = 2 if options.quick else 5
    with common.contestants(
        data=Contestant(shared_data, int(gigabytes * 1e9)),
        late=Contestant(replicated_function, True),
        early=Contestant(replicated_function, False),
    ) as players:
        turns = common.take_turns(players, rounds, "memory")
    held = turns["data"][0][0]
    sizes = np.array([sizes for _, sizes in turns["data"]], float)
    growth = 100 * (sizes[:, 1:, 0] - sizes[:, :1, 0]) / held
    tables = 100 * (sizes[:, 2, 1] - sizes[:, 0, 1]) / held
    early, late = turns["early"], turns["late"]
    extra_copies = np.array(late) - (RANKS - 1)
    lines = [
        Line("data written", "% of it", list(growth[:, 0])),
        Line(
            "data read by all ranks",
            "% of it",
            list(growth[:, 1]),
            goal="≤ 101",
            reached=np.median(growth[:, 1]) <= 101,
        ),
        Line("page tables to read it with", "% of it", list(tables)),
        Line(
            "left after free_memory()",
            "% of it",
            list(growth[:, 2]),
            goal="≤ 1",
            reached=np.median(growth[:, 2]) <= 1,
        ),
        Line("replicas, built before the workers", "copies", early),
        Line("replicas, built later", "copies", late),
        Line(
            "beyond one per worker",
            "copies",
            list(extra_copies),
            goal="≤ 0.1",
            reached=np.median(extra_copies) <= 0.1,
        ),
    ]
    notes = [
        f"data: {held / 1e9:.2f} GB; each rank read its share and then all of it",
        f"replicas: {LAYERS} shared variables, 102 MB in all, as many numbers as in ResNet-50; the "
        f"growth of PSS by distribute() and a call, minus the growth for a hundredth of them; a pickle "
        f"that is kept would be one more copy",
        f"PSS summed over {RANKS} processes, {rounds} rounds",
    ]
    title = f"a Data of {gigabytes:g} GB, and functions with large shared variables, on 4 ranks"
    extra = {
        "held": held,
        "steps": [float(one) for one in np.median(sizes[:, :, 0], axis=0)],
        "copies": [float(np.median(early)), float(np.median(late))],
    }
    return common.Result(title, lines, notes, extra)


def draw(figure, record):
    left, right = figure.subplots(1, 2, width_ratios=(1.5, 1))
    gigabytes = np.array(record["extra"]["steps"]) / 1e9
    held = record["extra"]["held"] / 1e9
    labels = ["before", "written by\nthe master", f"read by\n{RANKS} ranks", "freed"]
    colours = [COLOURS[name] for name in ("other light", "synk", "synk", "other light")]
    left.bar(labels, gigabytes, 0.6, color=colours)
    for place, size in enumerate(gigabytes):
        inside = size > 0.5 * max(gigabytes)
        shift, colour = ((0, -14), "white") if inside else ((0, 4), "black")
        style = {"ha": "center", "fontweight": "bold", "color": colour}
        common.write(left, f"{size:.2f} GB", (place, size), shift, **style)
    goal = gigabytes[0] + 1.01 * held
    _mark_goal(left, goal, "goal: counted once, + 1%")
    left.set(ylabel="PSS of all processes, GB", ylim=(0, 1.25 * goal))
    left.tick_params(axis="x", length=0)
    left.set_title(f"A Data of {held:.2f} GB on {RANKS} ranks")
    copies = record["extra"]["copies"]
    right.bar(
        ["built before the\nworkers started", "built later"],
        copies,
        0.5,
        color=[COLOURS["synk light"], COLOURS["synk"]],
    )
    for place, size in enumerate(copies):
        place = place, max(0, size)
        common.write(right, f"{abs(size):.2f}", place, ha="center", fontweight="bold")
    _mark_goal(right, RANKS - 1, "goal: one per worker")
    right.set(ylabel="copies added by distribute()", ylim=(0, 1.3 * max(RANKS - 1, *copies)))
    right.tick_params(axis="x", length=0)
    right.set_title("Functions with 102 MB of shared variables")


def _mark_goal(axes, value, text):
    axes.axhline(value, color=COLOURS["goal"], linestyle="--", linewidth=1.5)
    common.write(axes, text, (-0.3, value), (0, 5), color=COLOURS["goal"], fontsize=9)


if __name__ == "__main__":
    main()
