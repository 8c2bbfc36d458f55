"""call: what a call costs beyond its computation.

A function that sums one number a rank, on two ranks, against a round trip between two processes and
against the same function called in Theano alone.
"""

import os
import time

import common
from common import COLOURS, Contestant, Line

import numpy as np

RANKS = 2
BLOCK = 300  # calls in a turn
GROUP = 10  # calls timed together
WARM_UP = 60  # calls before these: a waiter has to learn again that looking pays
IDLE_SECONDS = 2.0


def main():
    common.main(__doc__, measure, draw, add_options)


def add_options(parser):
    parser.add_argument(
        "--free",
        action="store_true",
        help="let the system choose cores; else the two of each pair have a core each",
    )


# Contestants


def round_trip(spins, pinned):
    """A round trip between two processes over two semaphores, spinning or asleep."""
    import posix_ipc

    there, back, more = (posix_ipc.Semaphore(None, posix_ipc.O_CREX) for _ in range(3))
    for semaphore in (there, back, more):
        semaphore.unlink()
    take = _take_spinning if spins else posix_ipc.Semaphore.acquire
    child = os.fork()
    if not child:
        while True:  # until it is killed
            more.acquire()  # asleep between the turns
            for _ in range(WARM_UP + BLOCK):
                take(there)
                back.release()
    if pinned:
        common.pin([os.getpid(), child])

    def trip():
        there.release()
        take(back)

    def turn():
        more.release()
        return _time(trip)

    yield turn
    os.kill(child, 9)
    os.waitpid(child, 0)


def _take_spinning(semaphore):
    while not semaphore.value:
        pass
    semaphore.acquire()


def serial_call():
    """The function in Theano alone."""
    import synkhronos  # noqa: F401
    import theano

    x, total = _graph()
    function = theano.function([x], total)
    function.trust_input = True  # as the library's own are
    value = np.ones(1)
    yield lambda: _time(lambda: function(value))


def replicated_call(spin=None, pinned=False):
    """The function on `RANKS` ranks; `spin` None leaves that to the library."""
    import psutil
    import synkhronos as synk

    common.fork(RANKS)
    if spin is not None:
        transport = synk.world.world.current_world().transport
        transport._most_spins = transport._spins = transport._most_spins if spin else 0
    x, total = _graph()
    function = synk.function([x], (total, "sum"))
    synk.distribute()
    rows = synk.data(np.ones(RANKS))
    if function(rows) != RANKS:
        raise RuntimeError(f"expected {RANKS}, got {function(rows)}")
    workers = [psutil.Process(worker) for worker in common.worker_ids()]
    if pinned:
        common.pin([os.getpid(), *common.worker_ids()])

    def turn(what="time"):
        if what == "idle":
            return idle()
        return _time(lambda: function(rows))

    def idle():
        """Return how much of a core each worker uses after the last command."""
        _time(lambda: function(rows))
        before = [_cpu_seconds(worker) for worker in workers]
        time.sleep(IDLE_SECONDS)
        used = [_cpu_seconds(worker) - start for worker, start in zip(workers, before)]
        return max(used) / IDLE_SECONDS

    yield turn
    synk.close()


def _graph():
    import theano.tensor as tt

    x = tt.dvector("x")
    return x, x.sum()


def _time(call):
    return common.seconds_of(call, BLOCK, GROUP, WARM_UP)


def _cpu_seconds(process):
    """Return the processor time of another process; in nanoseconds where the kernel tells them."""
    try:
        with open(f"/proc/{process.pid}/schedstat") as file:
            return int(file.read().split()[0]) / 1e9
    except (OSError, IndexError):
        times = process.cpu_times()
        return times.user + times.system


# The row


def measure(options):
    rounds, pinned = 9 if options.quick else 41, not options.free
    with common.contestants(
        serial=Contestant(serial_call),
        asleep=Contestant(round_trip, False, pinned),
        spinning=Contestant(round_trip, True, pinned),
        call=Contestant(replicated_call, None, pinned),
        call_asleep=Contestant(replicated_call, False, pinned),
    ) as players:
        times = common.take_turns(players, rounds, "calls")
        idle = [100 * players["call"]("idle") for _ in range(2 if options.quick else 5)]
    trip = times["asleep"]
    lines = [
        common.line("Theano, serial call", "µs", times["serial"], trip, "trip"),
        common.line("round trip, blocking", "µs", trip),
        common.line("round trip, spinning", "µs", times["spinning"], trip, "trip"),
        common.line("synkhronos, defaults", "µs", times["call"], trip, "trip", at_most=0.6),
        common.line("synkhronos, spin off", "µs", times["call_asleep"], trip, "trip", at_most=2.5),
        Line("worker's CPU while idle", "%", idle, goal="< 1", reached=np.median(idle) < 1),
    ]
    serial = np.median(times["serial"])
    notes = [
        f"ratios are against the blocking round trip; per turn {BLOCK} calls after {WARM_UP} to "
        f"warm up, timed in groups of {GROUP}, of which the median counts; {rounds} turns each",
        f"a call adds {1e6 * (np.median(times['call']) - serial):.0f} µs to Theano's own, "
        f"{1e6 * (np.median(times['call_asleep']) - serial):.0f} µs with the spin off",
        f"idle: over {IDLE_SECONDS:g} s from the end of the last command on",
    ]
    title = "a trivial function on 2 ranks, the sum of one number a rank"
    return common.Result(title, lines, notes)


def draw(figure, record):
    axes = figure.subplots()
    names = [one["what"] for one in record["lines"][:5]]
    colours = [COLOURS[name] for name in ("other light", "other", "other", "synk", "synk light")]
    lines = [common.find(record, name) for name in names]
    labels = [
        "Theano,\nserial call",
        "round trip,\nblocking",
        "round trip,\nspinning",
        "Synkhronos,\ndefaults",
        "Synkhronos,\nspin off",
    ]
    common.bars(axes, lines, labels, colours, "µs")
    trip = common.find(record, "round trip, blocking")["median"]
    axes.set_xlim(0, max(axes.get_xlim()[1], 2.7 * trip))
    for place, factor in ((1, 0.6), (0, 2.5)):
        common.mark_goal(axes, factor * trip, place, f"goal {factor} ×")
    axes.set_title("A trivial call on 2 ranks")


if __name__ == "__main__":
    main()
