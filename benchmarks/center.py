"""center: exchanges of 102 MB with a center, by 1, 2 and 4 ranks at once, against NumPy's copy.

Each rank exchanges its own variables, as large as the parameters of ResNet-50, several times one after
the other. The copy is of the same size, by as many ranks at once.
"""

import functools
import os
import pickle
import time

import common
from common import COLOURS, Contestant, line

import numpy as np

RANKS = (1, 2, 4)
ITEMS = 25_500_000  # float32
WHAT = ("pull", "push", "elastic", "messages")
GOAL = 2.5


def main():
    common.main(__doc__, measure, draw)


def exchanging(ranks):
    """The ranks of a transport, each with its variable and two centers."""
    from synkhronos.transports.local import LocalTransport

    transport = LocalTransport(ranks)
    if ranks > 1:
        transport.start(_serve)
    common.pin([os.getpid(), *common.worker_ids()])
    own = _prepare(transport)

    def turn(what, times):
        """Return the seconds of one exchange of the slowest rank."""
        if ranks == 1:
            return own(what, times)
        transport.post(pickle.dumps((what, times)))
        seconds = [own(what, times)]
        seconds += [pickle.loads(reply) for reply in transport.collect() if reply is not None]
        return max(seconds)

    yield turn
    if ranks > 1:
        transport.post(pickle.dumps(None))
    transport.close(5)


def _serve(transport):
    own = _prepare(transport)
    while (asked := pickle.loads(transport.receive())) is not None:
        transport.reply(pickle.dumps(own(*asked)))


def _prepare(transport):
    """Return a function that repeats what it is asked for, and returns the seconds of one time."""
    from specifications.engine import NaiveEngine, Shared
    from synkhronos.programs.center import Center
    from synkhronos.services.messages import Messages
    from synkhronos.services.stripes import Stripes

    named_memory, engine = transport.store.named_memory, NaiveEngine()
    variable = Shared(np.full(ITEMS, transport.rank, "float32"), "w")
    copy = variable.storage.copy()
    stripes = functools.partial(Stripes, named_memory)
    adding = Center(stripes, engine, variable, "added", os.sched_yield)
    elastic = Center(stripes, engine, variable, "elastic", os.sched_yield)
    messages = Messages(named_memory, transport.rank, transport.size)
    calls = {
        "copy": lambda: np.copyto(copy, variable.storage),
        "pull": adding.pull,
        "push": adding.push,
        "elastic": lambda: elastic.elastic(0.5),
        # To itself, as the two copies are what is measured, and not the wait for another rank.
        "messages": lambda: (messages.send(transport.rank, variable.storage), messages.receive()),
    }

    def repeat(what, times):
        calls[what]()
        if transport.size > 1:
            transport.barrier()
        began = time.perf_counter()
        for _ in range(times):
            calls[what]()
        return (time.perf_counter() - began) / times

    return repeat


def measure(options):
    rounds, times = (4, 3) if options.quick else (21, 5)
    made = {f"{ranks}": Contestant(exchanging, ranks, environment=common.ONE_THREAD) for ranks in RANKS}
    with common.contestants(**made) as players:
        taken = common.take_turns(
            {
                (ranks, what): lambda ranks=ranks, what=what: players[f"{ranks}"](what, times)
                for ranks in RANKS
                for what in ("copy", *WHAT)
            },
            rounds,
            "exchanges",
        )
    lines = []
    for ranks in RANKS:
        copy = taken[ranks, "copy"]
        at_once = f"{ranks} at once" if ranks > 1 else "one rank"
        lines.append(line(f"{at_once}: NumPy's copy", "ms", copy))
        for what in WHAT:
            goal = GOAL if ranks == 1 and what != "messages" else None
            label = f"{at_once}: {_label(what)}"
            lines.append(line(label, "ms", taken[ranks, what], copy, "copy", at_most=goal))
    notes = [
        f"{4 * ITEMS / 1e6:.0f} MB of float32, {times} per turn after one to warm up, {rounds} turns; "
        f"the time of the slowest rank; ranks are bound to a core each, as far as there are so many",
        "arrays of 102 MB read and written: copy 2, pull 3, push 5, elastic 4; a message is written to "
        "memory of all ranks and read to a new array",
    ]
    return common.Result("exchanges of 102 MB with a center", lines, notes)


def _label(what):
    return "a message sent and received" if what == "messages" else f"{what}()"


def draw(figure, record):
    axes = figure.subplots()
    for number, (what, colour) in enumerate(zip(WHAT, ("synk light", "synk", "other light", "other"))):
        ratios = []
        for ranks in RANKS:
            at_once = f"{ranks} at once" if ranks > 1 else "one rank"
            ratios.append(common.find(record, f"{at_once}: {_label(what)}")["ratio"])
        places = np.arange(len(RANKS)) + 0.2 * (number - 1.5)
        axes.bar(places, ratios, 0.18, color=COLOURS[colour], label=_label(what))
    axes.axhline(GOAL, color=COLOURS["goal"], linestyle=":")
    axes.set_xticks(range(len(RANKS)), ["1 rank", *(f"{ranks} at once" for ranks in RANKS[1:])])
    axes.set_ylabel("times of as many copies at once")
    axes.set_ylim(0, 3.2)
    axes.legend(loc="upper center", ncols=len(WHAT), frameon=False)


if __name__ == "__main__":
    main()
