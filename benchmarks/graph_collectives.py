"""graph-collectives: sums over 2 ranks inside a graph, against the same sums as commands in ``fuse()``.

A chain of 8 sums of 4 bytes to 4 MB is either one function in which each operation is a collective, or 8
calls of ``synk.all_reduce`` on a variable, fused to one command, after one function. A function with a
chain of 8 copies shows the part that is not communication.
"""

import os

import common
from common import COLOURS, Contestant, line

import numpy as np

RANKS, CHAIN = 2, 8
BYTES = {"4 B": 4, "1 kB": 1 << 10, "16 kB": 1 << 14, "64 kB": 1 << 16, "1 MB": 1 << 20, "4 MB": 1 << 22}
TIMES = {"4 B": 200, "1 kB": 200, "16 kB": 200, "64 kB": 100, "1 MB": 10, "4 MB": 3}


def main():
    common.main(__doc__, measure, draw)


def replicated():
    """The library on two ranks."""
    import synkhronos as synk
    import theano
    import theano.tensor as tt
    from theano.compile.ops import DeepCopyOp

    common.fork(RANKS)
    x, calls = tt.fvector("x"), {}

    def chain(step, size):
        value = theano.shared(np.ones(BYTES[size] // 4, "float32")) * x.sum()
        for _ in range(CHAIN):
            value = step(value)
        return synk.function([x], (value[:1], None))

    rows = synk.data(np.full(RANKS, 1 / RANKS, "float32"))
    for size in BYTES:
        calls["graph", size] = chain(synk.ops.all_reduce, size)
        calls["copies", size] = chain(DeepCopyOp(), size)
        variable = theano.shared(np.zeros(BYTES[size] // 4, "float32"))
        first = synk.function([x], updates=[(variable, tt.zeros_like(variable) + x.sum())])
        calls["commands", size] = first, variable
    synk.distribute()
    common.pin([os.getpid(), *common.worker_ids()])

    def commands(size):
        first, variable = calls["commands", size]
        with synk.fuse():
            first(rows)
            for _ in range(CHAIN):
                synk.all_reduce(variable, "sum")
        return variable.get_value(borrow=True)[:1]

    def turn(what, size):
        call = commands if what == "commands" else lambda size: calls[what, size](rows)
        return common.seconds_of(lambda: call(size), TIMES[size])

    for size in BYTES:
        for what in ("graph", "commands"):
            value = commands(size) if what == "commands" else calls[what, size](rows)
            if value != RANKS**CHAIN / RANKS:
                raise RuntimeError(f"{what}, {size}: expected {RANKS**CHAIN / RANKS}, got {value}")
    yield turn
    synk.close()


def measure(options):
    rounds = 4 if options.quick else 21
    with common.contestants(synk=Contestant(replicated)) as players:
        turns = {
            (what, size): lambda what=what, size=size: players["synk"](what, size)
            for size in BYTES
            for what in ("graph", "commands", "copies")
        }
        times = common.take_turns(turns, rounds, "collectives in a graph")
    lines = []
    for size in BYTES:
        graph, commands, copies = (times[what, size] for what in ("graph", "commands", "copies"))
        each = np.subtract(graph, copies) / CHAIN
        lines += [
            line(f"{size}: in the graph", "µs", graph, commands, "commands"),
            line(f"{size}: as commands", "µs", commands),
            line(f"{size}: copies, no communication", "µs", copies),
            line(f"{size}: each collective", "µs", each),
        ]
    notes = [
        f"float32, {rounds} turns each; {CHAIN} sums one after another; ranks are bound to a core each, "
        f"as far as there are so many",
        "each collective: the call with collectives less the call with copies, for one of them",
    ]
    return common.Result("sums over the ranks inside a graph", lines, notes, {"bytes": BYTES})


def draw(figure, record):
    nbytes = record["extra"]["bytes"]
    axes = figure.subplots()
    for what, label, style, colour in (
        ("in the graph", f"{CHAIN} sums in the graph", "o-", "synk"),
        ("copies, no communication", f"{CHAIN} copies in the graph", "o--", "synk light"),
        ("as commands", f"{CHAIN} fused commands", "s-", "other"),
    ):
        medians = [common.find(record, f"{size}: {what}")["median"] for size in nbytes]
        axes.loglog(nbytes.values(), medians, style, color=COLOURS[colour], label=label)
    axes.set_xticks(list(nbytes.values()), [size.replace(" ", "\n") for size in nbytes])
    axes.minorticks_off()
    axes.grid(color="#e3e3e3")
    axes.set_ylabel("µs, medians")
    axes.legend(loc="upper left")


if __name__ == "__main__":
    main()
