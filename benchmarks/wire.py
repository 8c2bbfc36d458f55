"""wire: the gradient of ResNet-50 between two machines in each wire format, against float32.

The machines are network namespaces (``tests/support/namespaces.py``), which need root's rights, with one
process each, the leader. The formats take turns in one job; float32 is the all-reduce without a format.
All rows are repeated with a limit of 1 Gbit/s.
"""

import ast
import os
import sys
import time
from multiprocessing.connection import Client, Listener
from pathlib import Path

import common
from common import COLOURS

sys.path.insert(0, str(common.ROOT / "tests" / "support"))

import numpy as np

EXACT = "float32"
# The names of the formats, and of a class in `synkhronos.comms.formats` with its arguments
FORMATS = {
    "float16": None,
    "bfloat16": None,
    "int8": None,
    "PowerSGD(4)": ("PowerSGD", {"rank": 4}),
    "PowerSGD(4, min_saving=20)": ("PowerSGD", {"rank": 4, "min_saving": 20}),
    "PowerSGD(8)": ("PowerSGD", {"rank": 8}),
    "PowerSGD(16)": ("PowerSGD", {"rank": 16}),
    "TopK(0.3)": ("TopK", {"fraction": 0.3}),
    "TopK(0.1)": ("TopK", {"fraction": 0.1}),
    "TopK(0.01)": ("TopK", {"fraction": 0.01}),
    "TopK(0.001)": ("TopK", {"fraction": 0.001}),
}
# How many times as fast as float32, with the limit
GOALS = {"float16": 1.9, "PowerSGD(4)": 10, "PowerSGD(4, min_saving=20)": 10}
LIMITED = "1gbit"


def main():
    if sys.argv[1:2] == ["--be"]:
        be(*sys.argv[2:])
    else:
        common.main(__doc__, measure, draw)


def resnet_shapes():
    """Return the shape of each trained variable of ResNet-50."""
    convolutions, channels = [(64, 3, 7, 7)], 64
    for blocks, width in zip((3, 4, 6, 3), (64, 128, 256, 512)):
        for block in range(blocks):
            convolutions += [(width, channels, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            if block == 0:
                convolutions.append((4 * width, channels, 1, 1))
            channels = 4 * width
    each = [(one, one[:1], one[:1]) for one in convolutions]
    return [*sum(each, ()), (1000, 2048), (1000,)]


# The job: a leader on each machine, which do what the first one is asked


def be(address):
    """Be a leader."""
    import synkhronos  # noqa: F401  # keeps MPI from being initialized by an import
    from mpi4py import MPI

    from synkhronos.comms import formats
    from synkhronos.comms.linked import LinkedCommunicator
    from synkhronos.comms.wires import WireReduction
    from synkhronos.machines.leaders import Leaders
    from synkhronos.machines.mpi import MpiLinks, initialize

    initialize()
    comm = MPI.COMM_WORLD
    leaders = Leaders(MpiLinks(comm.Dup()))
    exact = LinkedCommunicator(leaders)
    reduction, shapes = WireReduction(exact), resnet_shapes()
    wires = {}
    for name, made in FORMATS.items():
        wire = name if made is None else getattr(formats, made[0])(**made[1])
        wires[name] = formats.make_wire(wire, shapes)
    rng = np.random.default_rng(comm.rank)
    gradient = rng.standard_normal(sum(map(np.prod, shapes)), np.float32)
    array = gradient.copy()
    connection = Client(address, "AF_UNIX") if comm.rank == 0 else None
    while (asked := together(comm, connection.recv() if connection is not None else None)) is not None:
        leaders.begin(leaders.number + 1)
        array[:] = gradient  # sums of sums would grow
        leaders.barrier()
        start = time.perf_counter()
        if asked == EXACT:
            exact.all_reduce([array], "avg")
        else:
            reduction.all_reduce([array], "avg", 1, [wires[asked]])
        seconds = time.perf_counter() - start
        leaders.barrier()
        if connection is not None:
            connection.send(seconds)
    MPI.Finalize()


def together(comm, asked):
    """Return what the first leader has, on both, which sleep meanwhile."""
    data = np.zeros(64, "uint8")
    if comm.rank == 0:
        text = repr(asked).encode()
        data[: len(text)] = np.frombuffer(text, "uint8")
    request = comm.Ibcast(data, 0)
    while not request.Test():
        time.sleep(2e-3)
    return ast.literal_eval(bytes(data).rstrip(b"\0").decode())


class Job:
    """The leaders; a call returns the seconds of an all-reduce, and the bytes that a machine sent."""

    def __init__(self, machines):
        self._machines, address = machines, str(machines.folder / "wire")
        with Listener(address, "AF_UNIX") as listener:
            paths = os.pathsep.join([str(common.ROOT), str(common.ROOT / "benchmarks")])
            self._job = machines.start(
                Path(__file__).resolve(), "--be", address, plain=True,
                environment={**common.ONE_THREAD, "PYTHONPATH": paths},
            )  # fmt: skip
            self._connection = listener.accept()

    def __call__(self, name):
        before = self._machines.sent_bytes(0)
        self._connection.send(name)
        try:
            seconds = self._connection.recv()
        except EOFError:
            raise RuntimeError(f"the job has ended: {self._job.wait(10).output}") from None
        return seconds, self._machines.sent_bytes(0) - before

    def close(self):
        self._connection.send(None)
        self._job.wait(30).check()
        self._connection.close()


# The row


def measure(options):
    from namespaces import Machines, why_no_mpi, why_no_namespaces

    why_not = why_no_mpi() or why_no_namespaces()
    if why_not:
        raise SystemExit(f"wire: this row needs machines made of namespaces: {why_not}")
    rounds = 3 if options.quick else 11
    with Machines(2) as machines:
        job = Job(machines)
        try:
            turns = {name: lambda name=name: job(name) for name in (EXACT, *FORMATS)}
            for turn in turns.values():
                turn()  # memory, and what the formats keep
            free = common.take_turns(turns, rounds, "wire")
            machines.limit(LIMITED)
            limited = common.take_turns(turns, rounds, "wire, limited")
        finally:
            job.close()
    return common.Result(
        "102 MB between two machines over TCP, by wire format", _lines(free, limited), _notes(rounds)
    )


def _lines(free, limited):
    lines = []
    for name in (EXACT, *FORMATS):
        sent = [nbytes / 1e6 for _, nbytes in limited[name]]
        line = common.Line(f"{name}: sent by a machine", "MB", sent)
        if name != EXACT:
            line.ratios = [own / other for (_, own), (_, other) in zip(limited[name], limited[EXACT])]
            line.of = EXACT
        lines.append(line)
    for limit, times in ((", 1 Gbit/s", limited), (", no limit", free)):
        exact = [seconds for seconds, _ in times[EXACT]]
        lines.append(common.line(f"{EXACT}{limit}", "ms", exact))
        for name in FORMATS:
            goal = GOALS.get(name, 0) if times is limited else 0
            line = common.line(
                f"{name}{limit}", "ms", [seconds for seconds, _ in times[name]], exact, EXACT,
                at_least=goal,
            )  # fmt: skip
            if not goal:
                line.goal, line.reached = "", None
            lines.append(line)
    return lines


def _notes(rounds):
    return [
        f"{rounds} rounds. The limit is tbf's, on what a machine sends.",
        "Ratios of times are speed-ups: the time of float32 divided by the time of the format.",
        "The bytes are counted at the network interface, with all headers.",
        "Normal random numbers in the shapes of ResNet-50's gradients.",
    ]


def draw(figure, result):
    names = (EXACT, *FORMATS)
    for place, limit in enumerate((", 1 Gbit/s", ", no limit")):
        axes = figure.add_subplot(1, 2, place + 1)
        lines = [common.find(result, name + limit) for name in names]
        colours = [COLOURS["other"], *[COLOURS["synk"]] * len(FORMATS)]
        common.bars(axes, lines, names, colours, "ms")
        axes.set_title("102 MB" + limit)


if __name__ == "__main__":
    main()
