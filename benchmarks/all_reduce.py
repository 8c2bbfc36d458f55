"""all-reduce: sums over two ranks, of 4 bytes to a gradient of ResNet-50, against OpenMPI and Gloo.

It measures the communicator alone, called repeatedly inside one command, and complete calls of
``synk.all_reduce``. The extra ``bench`` installs the peers; those that are not installed are omitted.
"""

import importlib.metadata
import importlib.util
import os
import select
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import common
from common import COLOURS, Contestant, Line

import numpy as np

RANKS = 2
# For each size: calls per turn, and calls timed together.
TIMES = {"4 B": (1000, 10), "1 kB": (1000, 10), "64 kB": (300, 10)}
TIMES.update({"1 MB": (40, 4), "5.1 MB": (12, 2), "102 MB": (3, 1)})
LARGE = 1 << 16  # bytes; from this size on, the goal is to be no slower than OpenMPI
PEERS = {"mpi": "OpenMPI", "gloo": "Gloo"}
ENVIRONMENT = {**common.ONE_THREAD, "GLOO_SOCKET_IFNAME": "lo"}


def main():
    common.main(__doc__, measure, draw)


def resnet_sizes():
    """Return the number of elements of each trained variable of ResNet-50."""
    convolutions = [(3 * 64 * 49, 64)]  # weights and, for batch norm, channels
    channels = 64
    for blocks, width in zip((3, 4, 6, 3), (64, 128, 256, 512)):
        for block in range(blocks):
            convolutions += [(channels * width, width), (9 * width**2, width)]
            convolutions += [(4 * width**2, 4 * width)]
            if block == 0:
                convolutions += [(channels * 4 * width, 4 * width)]
            channels = 4 * width
    each = [(weights, scale, scale) for weights, scale in convolutions]
    return [*sum(each, ()), 2048 * 1000, 1000]


BYTES = {"4 B": 4, "1 kB": 1 << 10, "64 kB": 1 << 16, "1 MB": 1 << 20, "5.1 MB": 5_100_000}
BYTES["102 MB"] = 4 * sum(resnet_sizes())


# Contestants


def replicated():
    """The library on `RANKS` ranks. It also measures a trivial call."""
    import synkhronos as synk
    import theano.tensor as tt
    from commands import RepeatAllReduce

    common.fork(RANKS)
    single = {size: _variable(BYTES[size] // 4) for size in BYTES}
    many = [_variable(length) for length in resnet_sizes()]
    variables = [*single.values(), *many]
    for start in range(0, len(variables), 16):  # ranks have what is used by a function
        synk.function([], (sum(one[0] for one in variables[start : start + 16]), "sum"))
    x = tt.dvector("x")
    function = synk.function([x], (x.sum(), "sum"))
    synk.distribute()
    rows = synk.data(np.ones(RANKS))
    common.pin([os.getpid(), *common.worker_ids()])
    for variable in variables:
        synk.all_reduce(variable, "sum")
        if not (variable.get_value(borrow=True) == RANKS).all():
            raise RuntimeError(f"expected ones to become {RANKS} each")
        synk.broadcast(variable, np.zeros(len(variable.get_value(borrow=True)), "float32"))
    world = synk.world.world.current_world()

    def turn(what, size="102 MB"):
        times, group = TIMES[size]
        if what == "communicator":
            command = RepeatAllReduce(world.registry.numbers[single[size]], times, group)
            return world.run(command)[world.master_rank][0]

        def all_reduce(variables, last):
            synk.all_reduce(variables, "sum")
            # A device may still be computing it. A script's own access to it would be followed by a
            # comparison of its contents.
            getattr(world.rank_state.engine.storage(last), "sync", int)()

        calls = {
            "call": lambda: function(rows),
            "whole": lambda: all_reduce(single[size], single[size]),
            "packed": lambda: all_reduce(many, many[-1]),
        }
        return common.seconds_of(calls[what], times, group)

    yield turn
    synk.close()


def _variable(length):
    import theano

    return theano.shared(np.ones(length, "float32"))


def copied():
    """NumPy's copy of the same bytes in one process."""
    arrays = {
        size: (np.ones(nbytes, "uint8"), np.zeros(nbytes, "uint8")) for size, nbytes in BYTES.items()
    }

    def turn(size):
        source, target = arrays[size]
        return common.seconds_of(lambda: np.copyto(target, source), *TIMES[size])

    yield turn


def peer(kind):
    """Ranks of another library. Between the turns, each sleeps at a pipe."""
    with tempfile.TemporaryDirectory() as folder:
        names = [f"to{rank}" for rank in range(RANKS)] + ["answers"]
        for name in names:
            os.mkfifo(Path(folder) / name)
        # Opened at both ends, so that neither side waits for the other.
        *orders, answers = (os.open(Path(folder) / name, os.O_RDWR) for name in names)
        processes = [
            subprocess.Popen(command, env=_peer_environment())
            for command in _peer_commands(kind, folder)
        ]

        def turn(size):
            for order in orders:
                os.write(order, f"{size}\n".encode())
            while not select.select([answers], [], [], 0.5)[0]:
                if any(process.poll() is not None for process in processes):
                    raise RuntimeError(f"a rank of {PEERS[kind]} has ended; see above")
            return float(os.read(answers, 100))

        turn("4 B")  # when all are ready
        yield turn
        for order in orders:
            os.write(order, b"end\n")
        for process in processes:
            process.wait(20)


def _peer_environment():
    state = str(Path(__file__).resolve().parent)
    paths = filter(None, [state, os.environ.get("PYTHONPATH", "")])
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}


def _peer_commands(kind, folder):
    code = "import sys, all_reduce; all_reduce.serve_peer(*sys.argv[1:])"
    command = [sys.executable, "-c", code, kind, folder]
    if kind == "gloo":
        return [[*command, str(rank)] for rank in range(RANKS)]
    start = "mpirun --allow-run-as-root --oversubscribe --bind-to none -n".split()
    return [[*start, str(RANKS), *command]]


def serve_peer(kind, folder, rank=None):
    """Run as a rank of another library: all-reduce as often as requested, and report the time."""
    rank, prepare = {"mpi": _serve_mpi, "gloo": _serve_gloo}[kind](folder, rank)
    reduces = {}
    with open(Path(folder) / f"to{rank}") as orders, open(Path(folder) / "answers", "w") as answers:
        for order in orders:
            size = order.strip()
            if size == "end":
                break
            if size not in reduces:
                array = np.ones(BYTES[size] // 4, "float32")
                reduces[size] = prepare(array)
                reduces[size]()
                if not (array == RANKS).all():
                    raise RuntimeError(f"expected ones to become {RANKS} each")
                array[...] = 0
            seconds = common.seconds_of(reduces[size], *TIMES[size])
            if rank == 0:
                print(seconds, file=answers, flush=True)


def _serve_mpi(folder, rank):
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    _pin_rank(world.rank)
    return world.rank, lambda array: lambda: world.Allreduce(MPI.IN_PLACE, array, MPI.SUM)


def _pin_rank(rank):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


def _serve_gloo(folder, rank):
    import torch
    import torch.distributed

    rank = int(rank)
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS
    )

    def prepare(array):
        tensor = torch.from_numpy(array)
        return lambda: torch.distributed.all_reduce(tensor)

    return rank, prepare


def missing_peers():
    """Return what is missing for each peer that cannot run."""
    missing = {}
    if shutil.which("mpirun") is None:
        missing["mpi"] = "mpirun"
    for kind, module in (("mpi", "mpi4py"), ("gloo", "torch")):
        if importlib.util.find_spec(module) is None:
            missing[kind] = module
    return missing


# The row


def measure(options):
    rounds = 4 if options.quick else 15
    missing = missing_peers()
    made = {kind: Contestant(peer, kind) for kind in PEERS if kind not in missing}
    with common.contestants(
        synk=Contestant(replicated), copy=Contestant(copied, environment=common.ONE_THREAD), **made
    ) as players:
        turns = {("call",): lambda: players["synk"]("call", "1 kB")}
        for size in BYTES:
            for what in ("communicator", "whole"):
                turns[what, size] = lambda what=what, size=size: players["synk"](what, size)
            if size == "102 MB":  # right after the one vector that it is compared with
                turns["packed",] = lambda: players["synk"]("packed")
            for name in players:
                if name != "synk":
                    turns[name, size] = lambda name=name, size=size: players[name](size)
        times = common.take_turns(turns, rounds, "all-reduce")
    return common.Result(
        "float32, 2 ranks",
        [*_lines_by_size(times, made), *_summary(times, made)],
        _notes(rounds, missing),
        {"bytes": BYTES},
    )


def _lines_by_size(times, made):
    lines = []
    for size, nbytes in BYTES.items():
        own = times["communicator", size]
        against = times.get(("mpi", size))
        goal = None
        if nbytes >= LARGE and against is not None:
            goal = 1.8 if size == "102 MB" else 1
        if against is None:
            lines.append(common.line(f"{size}: communicator", "µs", own))
        elif goal is None:
            speed_up = common.line(f"{size}: communicator", "µs", own, against, "OpenMPI", at_least=0)
            speed_up.goal, speed_up.reached = "", None
            lines.append(speed_up)
        else:
            lines.append(
                common.line(f"{size}: communicator", "µs", own, against, "OpenMPI", at_least=goal)
            )
        lines.append(common.line(f"{size}: synk.all_reduce", "µs", times["whole", size]))
        for kind, name in PEERS.items():
            lines.append(common.line(f"{size}: {name}", "µs", times.get((kind, size), [])))
        lines.append(common.line(f"{size}: NumPy's copy", "µs", times["copy", size]))
    return lines


def _summary(times, made):
    large = [size for size, nbytes in BYTES.items() if nbytes >= LARGE]
    lines = []
    for kind, name, goal in (("mpi", "OpenMPI", 1.3), ("gloo", "Gloo", 8)):
        if kind in made:
            ratios = [np.divide(times[kind, size], times["communicator", size]) for size in large]
            means = list(np.exp(np.mean(np.log(ratios), axis=0)))
            reached = np.median(means) >= goal
            what = f"communicator against {name}, geometric mean from 64 kB on"
            lines.append(Line(what, "×", means, goal=f"≥ {goal:g}", reached=reached))
    call = times["call",]
    small = ["4 B", "1 kB", "64 kB"]
    beyond = np.mean(
        [np.subtract(times["whole", size], times["communicator", size]) for size in small], axis=0
    )
    lines.append(common.line("a trivial call", "µs", call))
    lines.append(
        common.line("synk.all_reduce beyond the communicator", "µs", beyond, call, "call", at_most=1)
    )
    flat, packed = times["whole", "102 MB"], times["packed",]
    many = len(resnet_sizes())
    lines.append(
        common.line(f"102 MB in {many} variables", "µs", packed, flat, "one vector", at_most=1.1)
    )
    return lines


def _notes(rounds, missing):
    notes = [
        f"{rounds} turns each; the ratio of a communicator is its speed-up over OpenMPI; beyond the "
        "communicator: the mean of 4 B, 1 kB and 64 kB",
        "each rank of Synkhronos and OpenMPI is bound to a core; the ranks of Gloo, which has its own "
        "threads, are not; sums, in place",
        f"{len(resnet_sizes())} variables: the variables of ResNet-50, in one synk.all_reduce(list)",
    ]
    if "mpi" not in missing:
        notes.append(_version_of_mpi())
    if "gloo" not in missing:
        notes.append(f"Gloo: of PyTorch {importlib.metadata.version('torch')}, TCP on localhost")
    notes.extend(f"{PEERS[kind]}: omitted, because {what} is missing" for kind, what in missing.items())
    return notes


def _version_of_mpi():
    told = subprocess.run(["mpirun", "--version"], stdout=subprocess.PIPE, text=True).stdout
    return f"{told.splitlines()[0]}, mpi4py {importlib.metadata.version('mpi4py')}"


def draw(figure, record):
    left, right = figure.subplots(1, 2, width_ratios=(1.35, 1))
    nbytes = record["extra"]["bytes"]
    styles = {
        "communicator": ("Synkhronos, communicator", "o-", COLOURS["synk"]),
        "synk.all_reduce": ("Synkhronos, whole call", "o--", COLOURS["synk light"]),
        "OpenMPI": ("OpenMPI", "s-", COLOURS["bad"]),
        "Gloo": ("Gloo", "^-", COLOURS["goal"]),
        "NumPy's copy": ("NumPy's copy of the bytes", ":", COLOURS["other"]),
    }
    medians = {
        what: [common.find(record, f"{size}: {what}")["median"] for size in nbytes] for what in styles
    }
    for what, (label, style, colour) in styles.items():
        if None not in medians[what]:
            left.loglog(nbytes.values(), medians[what], style, color=colour, label=label, markersize=5)
    left.set(ylabel="µs, medians", title="An all-reduce on 2 ranks")
    left.legend(loc="upper left")
    names = [what for what in ("synk.all_reduce", "OpenMPI", "Gloo") if None not in medians[what]]
    for what in names:
        label, style, colour = styles[what]
        ratios = np.divide(medians[what], medians["communicator"])
        right.loglog(nbytes.values(), ratios, style, color=colour, label=label, markersize=5)
    right.axhline(1, color=COLOURS["synk"])
    right.set_title("In times of the communicator")
    for axes in (left, right):
        axes.set_xticks(list(nbytes.values()), [size.replace(" ", "\n") for size in nbytes])
        axes.minorticks_off()
        axes.grid(color="#e3e3e3")
    lowest, highest = right.get_ylim()
    right.set_ylim(lowest / 1.5, 1.5 * highest)
    ticks = [float(2**power) for power in range(-8, 12, 2) if lowest <= 2**power <= 1.5 * highest]
    right.set_yticks(ticks, [f"{tick:g} ×" if tick >= 1 else f"1/{1 / tick:g} ×" for tick in ticks])


if __name__ == "__main__":
    main()
