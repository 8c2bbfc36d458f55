"""call: what a call costs beyond its computation.

A function that sums one number a rank, on two ranks, against a round trip between two processes and
against the same function called in Theano alone.
"""

import itertools
import math
import os
import time

import common
from common import COLOURS, Contestant, Line

import numpy as np

BLOCK = 300  # calls in a turn
GROUP = 10  # calls timed together
WARM_UP = 60  # calls before these: a waiter has to learn again that looking pays
SIZES = range(1, 9)
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
        _pin([os.getpid(), child])

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


def replicated_call(size, spin=None, pinned=False, count=False):
    """The function on `size` ranks; `spin` None leaves that to the library."""
    import psutil
    import synkhronos as synk

    counts = _count_posts() if count else None
    synk.fork(size)
    if spin is not None:
        transport = synk._world.current().transport
        transport._most_spins = transport._spins = transport._most_spins if spin else 0
    x, total = _graph()
    function = synk.function([x], (total, "sum"))
    synk.distribute()
    rows = synk.data(np.ones(size))
    if function(rows) != size:
        raise RuntimeError(f"expected {size}, got {function(rows)}")
    workers = psutil.Process().children()
    if pinned:
        _pin([os.getpid(), *(worker.pid for worker in workers)])

    def turn(what="time"):
        if what == "idle":
            return idle()
        before = counts.sum() if count else 0
        spent = time.process_time()
        seconds = _time(lambda: function(rows))
        calls = WARM_UP + BLOCK
        master = (time.process_time() - spent) / calls
        posts = (counts.sum() - before) / calls if count else None
        return {"seconds": seconds, "master": master, "posts": posts}

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


def _pin(processes):
    """Give each process a core of its own, as an idle system does by itself.

    On a busy one both may end up on the same core, where a switch is all that a wake-up takes.
    """
    for process, core in zip(processes, itertools.cycle(sorted(os.sched_getaffinity(0)))):
        os.sched_setaffinity(process, {core})


def _time(call):
    """Return the seconds of a call: the median of short groups, which a disturbance does not shift."""
    for _ in range(WARM_UP):
        call()
    groups = []
    for _ in range(BLOCK // GROUP):
        start = time.perf_counter()
        for _ in range(GROUP):
            call()
        groups.append((time.perf_counter() - start) / GROUP)
    return float(np.median(groups))


def _cpu_seconds(process):
    """Return the processor time of another process; in nanoseconds where the kernel tells them."""
    try:
        with open(f"/proc/{process.pid}/schedstat") as file:
            return int(file.read().split()[0]) / 1e9
    except (OSError, IndexError):
        times = process.cpu_times()
        return times.user + times.system


def _count_posts():
    """Count the posts of all semaphores that the library makes from now on, over all ranks."""
    import mmap

    from synkhronos.transports import local

    # One place a semaphore, as each has one rank that posts it: no count is lost.
    counts = np.frombuffer(mmap.mmap(-1, 8 * 4096), np.int64)
    make = local._semaphore
    made = iter(range(len(counts)))

    class Counted:
        def __init__(self):
            self._semaphore, self._place = make(), next(made)

        def __getattr__(self, name):
            return getattr(self._semaphore, name)

        def release(self):
            counts[self._place] += 1
            self._semaphore.release()

    local._semaphore = Counted
    return counts


# The row


def measure(options):
    rounds, pinned = 9 if options.quick else 41, not options.free
    with common.contestants(
        serial=Contestant(serial_call),
        asleep=Contestant(round_trip, False, pinned),
        spinning=Contestant(round_trip, True, pinned),
        call=Contestant(replicated_call, 2, None, pinned),
        call_asleep=Contestant(replicated_call, 2, False, pinned),
    ) as players:
        times = common.take_turns(players, rounds, "calls")
        idle = [100 * players["call"]("idle") for _ in range(2 if options.quick else 5)]
    for name in ("call", "call_asleep"):
        times[name] = [one["seconds"] for one in times[name]]
    trip = times["asleep"]
    lines = [
        common.line("Theano, serial call", "µs", times["serial"], trip, "trip"),
        common.line("round trip, blocking", "µs", trip),
        common.line("round trip, spinning", "µs", times["spinning"], trip, "trip"),
        common.line("synkhronos, defaults", "µs", times["call"], trip, "trip", at_most=0.6),
        common.line("synkhronos, spin off", "µs", times["call_asleep"], trip, "trip", at_most=2.5),
        Line("worker's CPU while idle", "%", idle, goal="< 1", reached=np.median(idle) < 1),
    ]
    growth, notes = measure_growth(options)
    serial = np.median(times["serial"])
    notes = [
        f"ratios are against the blocking round trip; per turn {BLOCK} calls after {WARM_UP} to "
        f"warm up, timed in groups of {GROUP}, of which the median counts; {rounds} turns each",
        f"a call adds {1e6 * (np.median(times['call']) - serial):.0f} µs to Theano's own, "
        f"{1e6 * (np.median(times['call_asleep']) - serial):.0f} µs with the spin off",
        f"idle: over {IDLE_SECONDS:g} s from the end of the last command on",
        *notes,
    ]
    title = "a trivial function on 2 ranks, the sum of one number a rank"
    return common.Result(title, lines, notes, {"growth": growth})


def measure_growth(options):
    """Measure what a call costs the master on 1 to 8 ranks, and say what that means for more."""
    made = {str(size): Contestant(replicated_call, size, False, False, True) for size in SIZES}
    with common.contestants(**made) as players:
        turns = common.take_turns(players, 5 if options.quick else 21, "growth")
    growth = {
        "size": list(SIZES),
        "posts": [np.median([turn["posts"] for turn in turns[size]]) for size in made],
        "master": [1e6 * np.median([turn["master"] for turn in turns[size]]) for size in made],
        "call": [1e6 * np.median([turn["seconds"] for turn in turns[size]]) for size in made],
    }
    sizes = np.array(SIZES[1:])
    slope, fixed = np.polyfit(sizes - 1, growth["master"][1:], 1)
    off = np.abs(fixed + slope * (sizes - 1) - growth["master"][1:]) / growth["master"][1:]
    growth["model"] = [fixed, slope]
    posts = (
        "as counted"
        if all(math.isclose(count, 2 * (size - 1)) for size, count in zip(SIZES, growth["posts"]))
        else f"but counted were {growth['posts']}"
    )
    at = {size: fixed + slope * (size - 1) for size in (64, 1024)}
    return growth, [
        f"growth: a call on n ranks takes 2 (n - 1) posts of a semaphore ({posts} on 1 to 8 ranks) "
        f"and of the master's time {fixed:.0f} + {slope:.1f} (n - 1) µs, at most {off.max():.0%} off "
        f"on 2 to 8 ranks (spin off, more ranks than cores); so {at[64] / 1e3:.2f} ms on 64 and "
        f"{at[1024] / 1e3:.1f} ms on 1024 ranks",
    ]


def draw(figure, record):
    left, right = figure.subplots(1, 2, width_ratios=(1.45, 1))
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
    common.bars(left, lines, labels, colours, "µs")
    trip = common.find(record, "round trip, blocking")["median"]
    left.set_xlim(0, max(left.get_xlim()[1], 2.7 * trip))
    for place, factor in ((1, 0.6), (0, 2.5)):
        common.mark_goal(left, factor * trip, place, f"goal {factor} ×")
    left.set_title("A trivial call on 2 ranks")
    growth = record["extra"]["growth"]
    fixed, slope = growth["model"]
    sizes = np.array(growth["size"])
    right.plot(sizes, growth["master"], "o", color=COLOURS["synk"], label="measured")
    right.plot(
        sizes[1:],
        fixed + slope * (sizes[1:] - 1),
        "-",
        color=COLOURS["synk light"],
        label=f"{fixed:.0f} + {slope:.1f} (n - 1) µs",
        zorder=1,
    )
    right.set(xlabel="ranks n", ylabel="µs a call", ylim=(0, None), xticks=sizes)
    right.set_title("CPU time of the master, spin off")
    right.grid(axis="y", color="#e3e3e3")
    right.legend(loc="upper left")


if __name__ == "__main__":
    main()
