"""call: the overhead of a call.

A function that sums one number per rank, on two ranks, is compared with the same function in Theano
alone, as scripts call it, and with a round trip between two processes that poll. Theano takes less time
if it is told not to check arguments, which is in the table, too. A round trip between processes that
sleep takes 2 to 50 microseconds, depending on the run. By hand: two processes that call the function
and add up their results, with nothing that could find a mistake, an interrupt or a dead process.
"""

import mmap
import os
import time

import common
from common import COLOURS, Contestant, Line

import numpy as np
import posix_ipc

RANKS = 2
BLOCK = 300  # calls in a turn
GROUP = 10  # calls timed together
WARM_UP = 60  # calls before these, in which a waiting rank adapts its polling
IDLE_SECONDS = 2.0


def main():
    common.main(__doc__, measure, draw, add_options)


def add_options(parser):
    parser.add_argument(
        "--free",
        action="store_true",
        help="let the system choose the cores; by default each process of a pair is bound to a core",
    )


# Contestants


def round_trip(polls, pinned):
    """A round trip between two processes over two semaphores, polling or asleep."""
    take = _poll if polls else posix_ipc.Semaphore.acquire

    def trip(there, back):
        there.release()
        take(back)

    def answer(there, back):
        take(there)
        back.release()

    yield from _two_processes(trip, answer, pinned)


def call_by_hand(pinned):
    """The function in two processes: each calls it with its number, and one adds up the results."""
    import synkhronos  # noqa: F401
    import theano

    x, total = _graph()
    function = theano.function([x], total)
    function.trust_input = True
    value, result = np.ones(1), memoryview(mmap.mmap(-1, 8)).cast("d")

    def call(there, back):
        there.release()
        own = function(value)
        _poll(back)
        return np.asarray(own + result[0])

    def answer(there, back):
        _poll(there)
        result[0] = function(value)
        back.release()

    yield from _two_processes(call, answer, pinned)


def _two_processes(call, answer, pinned):
    """Time ``call(there, back)`` in this process; another one runs ``answer(there, back)`` each time."""
    there, back, more = (posix_ipc.Semaphore(None, posix_ipc.O_CREX) for _ in range(3))
    for semaphore in (there, back, more):
        semaphore.unlink()
    child = os.fork()
    if not child:
        while True:  # until it is killed
            more.acquire()  # asleep between the turns
            for _ in range(WARM_UP + BLOCK):
                answer(there, back)
    if pinned:
        common.pin([os.getpid(), child])

    def turn():
        more.release()
        return _time(lambda: call(there, back))

    yield turn
    os.kill(child, 9)
    os.waitpid(child, 0)


def _poll(semaphore):
    while True:
        try:
            return semaphore.acquire(0)
        except posix_ipc.BusyError:
            pass


def serial_call(trusts):
    """The function in plain Theano, which checks its argument unless it is told to trust it."""
    import synkhronos  # noqa: F401
    import theano

    x, total = _graph()
    function = theano.function([x], total)
    function.trust_input = trusts
    value = np.ones(1)
    yield lambda: _time(lambda: function(value))


def replicated_call(may_poll=True, pinned=False):
    """The function on `RANKS` ranks, which wait by the default policy or sleep immediately."""
    import psutil
    import synkhronos as synk

    common.fork(RANKS)
    if not may_poll:
        transport = synk.world.world.current_world().transport
        transport._may_poll = transport._has_cores[0] = False
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
        """Return the fraction of a core that each worker uses after the last command."""
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
    """Return the processor time of another process, in nanoseconds if the kernel provides them."""
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
        serial=Contestant(serial_call, False),
        trusted=Contestant(serial_call, True),
        asleep=Contestant(round_trip, False, pinned),
        polling=Contestant(round_trip, True, pinned),
        by_hand=Contestant(call_by_hand, pinned),
        call=Contestant(replicated_call, True, pinned),
        call_asleep=Contestant(replicated_call, False, pinned),
    ) as players:
        times = common.take_turns(players, rounds, "calls")
        idle = [100 * players["call"]("idle") for _ in range(2 if options.quick else 5)]
    serial, trip = np.array(times["serial"]), np.array(times["polling"])
    trusted = np.array(times["trusted"])
    added = {name: np.array(times[name]) - serial for name in ("call", "call_asleep")}
    lines = [
        common.line("Theano, serial call", "µs", serial),
        common.line("Theano, argument not checked", "µs", trusted),
        common.line("round trip, polling", "µs", trip),
        common.line("round trip, asleep", "µs", times["asleep"]),
        common.line("by hand, not checked", "µs", times["by_hand"]),
        common.line("added by hand to that", "µs", times["by_hand"] - trusted, trip, "trip"),
        common.line("synkhronos, defaults", "µs", times["call"]),
        common.line("added to the serial call", "µs", added["call"], trip, "trip", at_most=10),
        common.line("added to the one not checked", "µs", times["call"] - trusted, trip, "trip"),
        common.line("synkhronos, asleep", "µs", times["call_asleep"]),
        common.line(
            "added, asleep", "µs", added["call_asleep"], times["asleep"], "trip asleep", at_most=2.5
        ),
        Line("worker's CPU while idle", "%", idle, goal="< 1", reached=np.median(idle) < 1),
    ]
    notes = [
        f"per turn {BLOCK} calls after {WARM_UP} to warm up, timed in groups of {GROUP}, of which the "
        f"median counts; {rounds} turns each; ratios are formed within each round",
        f"idle: over {IDLE_SECONDS:g} s from the end of the last command on",
    ]
    title = "a trivial function on 2 ranks, the sum of one number per rank"
    return common.Result(title, lines, notes)


def draw(figure, record):
    axes = figure.subplots()
    labels = {
        "Theano, serial call": "Theano,\nserial call",
        "round trip, polling": "round trip,\npolling",
        "round trip, asleep": "round trip,\nasleep",
        "synkhronos, defaults": "Synkhronos,\ndefaults",
        "synkhronos, asleep": "Synkhronos,\nasleep",
    }
    colours = [COLOURS[name] for name in ("other light", "other", "other", "synk", "synk light")]
    lines = [common.find(record, name) for name in labels]
    common.bars(axes, lines, list(labels.values()), colours, "µs")
    serial, trip = lines[0]["median"], lines[1]["median"]
    axes.set_xlim(0, max(axes.get_xlim()[1], 1.1 * (serial + 10 * trip)))
    common.mark_goal(axes, serial + 10 * trip, 1, "serial + 10 trips")
    axes.set_title("A trivial call on 2 ranks")


if __name__ == "__main__":
    main()
