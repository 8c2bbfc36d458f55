"""overlap: training steps on two machines, with and without the exchange while the ranks compute.

The machines are network namespaces (``tests/support/namespaces.py``), which need root's rights, with one
rank each and a second process that communicates. They are on one host, so these processes use the same
cores as the ranks. "Asleep" is a gradient in the shapes of ResNet-50 whose arrays take 5 ms each, in
which the ranks sleep: as on machines with a core to spare. The steps take turns in one job: ordinary
ones, overlapped ones, and steps without any exchange, which is the least that is possible. All is
repeated with a limit of 1 Gbit/s, and once more with a delay in addition. The delay is netem's, or that
of a process on the same cores, where the kernel has no netem.
"""

import os
import sys
import time
from multiprocessing.connection import Client, Listener
from pathlib import Path

import common
from common import COLOURS

import synkhronos as synk
import numpy as np
import theano
import theano.tensor as tt

LIMITED = "1gbit"
KINDS = ("ordinary", "overlap", "no exchange")
ASLEEP, RESNET, CNN = "asleep", "ResNet-50", "MNIST CNN"
STEPS = {ASLEEP: 1, RESNET: 1, CNN: 5}  # in a turn
FORWARD, BACKWARD = 0.4, 0.005  # seconds asleep: at first, and for each array


def main():
    if sys.argv[1:2] == ["--be"]:
        be(*sys.argv[2:])
    else:
        common.main(__doc__, measure, draw, add_options)


def add_options(parser):
    parser.add_argument("--pixels", type=int, help="of an image's side; default: 224, with --quick 64")
    parser.add_argument("--ranks", type=int, default=1, help="on each machine; default: 1")
    parser.add_argument("--wire", help="the format in which gradients travel; default: none")
    parser.add_argument("--network", choices=[*STEPS], help="one of them; default: all")
    parser.add_argument(
        "--delay", type=float, default=100, help="µs from machine to machine; 0 for none; default: 100"
    )


# The job: the script on the first machine, which does what it is asked


def be(address, pixels, wire, names):
    """Run steps, as often as the other process asks for them."""
    connection = Client(address, "AF_UNIX")
    ranks = synk.fork(use_gpu=False)
    steps = {}
    for name in names.split(","):
        if name == ASLEEP:
            data = [synk.data(np.zeros(ranks, "float32"), constant=True)]
            steps.update({(name, kind): (_asleep(kind), data) for kind in KINDS})
            continue
        network, data = _network(name, int(pixels), ranks)
        for kind in ("ordinary", "overlap"):
            steps[name, kind] = _step(network(), kind == "overlap", wire or None), data
        steps[name, "no exchange"] = _without_exchange(steps[name, "ordinary"][0]), data
    synk.distribute()
    connection.send(ranks)
    while (asked := connection.recv()) is not None:
        *which, count = asked
        step, data = steps[tuple(which)]
        step(*data)
        start = time.perf_counter()
        for _ in range(count):
            step(*data)
        connection.send((time.perf_counter() - start) / count)
    synk.close()


def _network(name, pixels, ranks):
    if name == RESNET:
        import step_large

        pictures, labels = step_large.images(pixels)
        rows = [np.resize(one, (step_large.EACH * ranks, *one.shape[1:])) for one in (pictures, labels)]
        return lambda: step_large.network(pixels), [synk.data(one, constant=True) for one in rows]
    import step_small

    each = step_small.BATCH // 2 * ranks
    return step_small.network, [synk.data(one[:each], constant=True) for one in step_small.digits()]


def _step(arguments, overlap, wire):
    from synkhronos.extensions import train

    return train.make_train_function(*arguments, overlap=overlap, wire=wire)


class Sleep(theano.Op):
    """Returns its input after some time."""

    __props__ = ("seconds",)

    def __init__(self, seconds):
        self.seconds = seconds

    def make_node(self, x):
        return theano.Apply(self, [x], [x.type()])

    def perform(self, node, inputs, outputs):
        time.sleep(self.seconds)
        outputs[0][0] = inputs[0].copy()


def _asleep(kind):
    """Return a step that computes a gradient without using a core, and reduces it."""
    import wire

    shapes = [tuple(map(int, shape)) for shape in wire.resnet_shapes()]
    sizes = [int(np.prod(shape)) for shape in shapes]
    x = tt.fvector("x")
    value, arrays = Sleep(FORWARD)(x[0]), []
    for shape in reversed(shapes):
        value = Sleep(BACKWARD)(value)
        arrays.insert(0, tt.alloc(value, *shape))
    vector = new = theano.shared(np.zeros(sum(sizes), "float32"))
    if kind == "overlap":
        new = synk.ops.in_buckets(vector, arrays, shapes)
    else:
        for array, size, end in zip(arrays, sizes, np.cumsum(sizes)):
            new = tt.set_subtensor(new[int(end) - size : int(end)], array.flatten())
    function = synk.function([x], updates=[(vector, new, "avg")])

    def step(data):
        with synk.fuse():
            function(data)
            if kind != "no exchange":
                synk.all_reduce(vector, weights=function)

    return step


def _without_exchange(step):
    """Return the functions of a step, without the all-reduce between them."""

    def run(*data):
        with synk.fuse():
            for function in step.functions:
                function(*(data if function is step.functions[0] else ()))

    return run


def _pixels(options):
    return options.pixels or (64 if options.quick else 224)


class Job:
    """A job on the machines; a call returns the seconds of a step."""

    def __init__(self, machines, options, names):
        address = str(machines.folder / "overlap")
        with Listener(address, "AF_UNIX") as listener:
            paths = os.pathsep.join([str(common.ROOT), str(common.ROOT / "benchmarks")])
            self._job = machines.start(
                Path(__file__).resolve(), "--be", address, _pixels(options), options.wire or "",
                ",".join(names), tasks=2, environment={
                    **common.ONE_THREAD, "PYTHONPATH": paths, "SYNKHRONOS_SPARE_TASKS": "1",
                    "SYNKHRONOS_RANKS": str(options.ranks),
                },
            )  # fmt: skip
            self._connection = listener.accept()
        self.ranks = self._receive()

    def __call__(self, name, kind):
        self._connection.send((name, kind, STEPS[name]))
        return self._receive()

    def _receive(self):
        try:
            return self._connection.recv()
        except EOFError:
            raise RuntimeError(f"the job has ended: {self._job.wait(10).output}") from None

    def close(self):
        self._connection.send(None)
        self._job.wait(60).check()
        self._connection.close()


# The row


def measure(options):
    sys.path.append(str(common.ROOT / "tests" / "support"))
    from namespaces import Machines, why_no_mpi, why_no_namespaces

    why_not = why_no_mpi() or why_no_namespaces()
    if why_not:
        raise SystemExit(f"overlap: this row needs machines made of namespaces: {why_not}")
    names = [options.network] if options.network else [*STEPS]
    rounds = 3 if options.quick else 9
    with Machines(2) as machines:
        job = Job(machines, options, names)
        try:
            turns = {
                (name, kind): lambda name=name, kind=kind: job(name, kind)
                for name in names
                for kind in KINDS
            }
            times, limit = {}, ", 1 Gbit/s"
            times[", no limit"] = common.take_turns(turns, rounds, "overlap")
            machines.limit(LIMITED)
            times[limit] = common.take_turns(turns, rounds, "overlap, limited")
            if options.delay:
                machines.delay(options.delay / 1e6)
                limit = f", 1 Gbit/s, {options.delay:g} µs"
                times[limit] = common.take_turns(turns, rounds, "overlap, limited and delayed")
            round_trip = machines.round_trip()
        finally:
            job.close()
    notes = [
        f"{rounds} rounds; steps in each: {', '.join(f'{name} {n}' for name, n in STEPS.items())}; "
        f"{job.ranks // 2} rank(s) per machine, BLAS with one thread. The limit is tbf's, on what a "
        f"machine sends. At last, a round trip takes {1e6 * round_trip:.0f} µs.",
        "Ratios are speed-ups: the time of an ordinary step divided by the time of the other.",
    ]
    if RESNET in names:
        notes.append(f"{RESNET} has images of {_pixels(options)} x {_pixels(options)} pixels.")
    return common.Result(
        f"a training step on two machines over TCP, wire={options.wire!r}", _lines(times, names), notes
    )


def _lines(times, names):
    lines = []
    for limit, taken in reversed(times.items()):
        for name in names:
            ordinary = taken[name, "ordinary"]
            lines.append(common.line(f"{name}: ordinary{limit}", "ms", ordinary))
            for kind in KINDS[1:]:
                lines.append(
                    common.line(f"{name}: {kind}{limit}", "ms", taken[name, kind], ordinary,
                                "ordinary", at_least=1)
                )  # fmt: skip
                if kind == "no exchange":
                    lines[-1].goal, lines[-1].reached = "", None
    return lines


def draw(figure, result):
    limit = result["lines"][0]["what"].partition(",")[2]
    lines = [line for line in result["lines"] if line["what"].partition(",")[2] == limit]
    axes = figure.add_subplot()
    labels = [line["what"].partition(",")[0] for line in lines]
    colours = {"ordinary": "other", "overlap": "synk", "no exchange": "other light"}
    each = [COLOURS[colours[label.split(": ")[1]]] for label in labels]
    common.bars(axes, lines, labels, each, "ms")
    axes.set_title(f"a training step,{limit}")


if __name__ == "__main__":
    main()
