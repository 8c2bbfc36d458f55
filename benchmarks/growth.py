"""growth: the cost of calls and all-reduces with growing numbers of ranks, and a model of it.

With more ranks than cores, times are processor times. Semaphore posts, messages and bytes are counted.
The constants of the model are fitted to 2 to 8 ranks, and for calls with a tree to 12 to 24; it is
tested on 32 and 64 ranks.
"""

import math

import common
from common import COLOURS, Contestant, Line

import numpy as np
from scipy.optimize import nnls
from synkhronos.arithmetic.machines import children
from synkhronos.functions.comparing.watch import PATIENCE
from synkhronos.transports.tree import MOST_WITHOUT, RADIX

FITTED = range(1, 9)
FITTED_TREES = (12, 16, 24)  # for calls; the other quantities are only tried there
TRIED = (32, 64)
SIZES = (*FITTED, *FITTED_TREES, *TRIED)
MOST_LARGE = 32  # ranks that have a large array
FORETOLD = 1024
SMALL, LARGE = 64, 1 << 23  # elements of the arrays: at least one per rank; larger than the caches
KINDS = ("posts", "increases", "messages written", "bytes written", "messages read", "bytes read")
CALLS, BARRIERS, REDUCES = 100, 100, {SMALL: 100, LARGE: 3}


def main():
    common.main(__doc__, measure, draw)


# The model. All times are microseconds of processor time.


def rounds(size):
    """Return the rounds of a dissemination barrier."""
    return (int(size) - 1).bit_length()


def has_tree(size):
    """Return whether the ranks start each other along a tree."""
    return size > MOST_WITHOUT


def posts_of_master(size):
    """Return how many posts the master makes in a call."""
    return len(children(0, size, RADIX)) if has_tree(size) else size - 1


def count_call(size):
    """Return the posts, increases of the counter and messages of a call, over all ranks."""
    others = size - 1
    return {
        "posts": size if has_tree(size) else 2 * others,
        "increases": others * has_tree(size),
        "messages written": (1 + others) * bool(others),
        "messages read": 2 * others,
    }


def count_all_reduce(size):
    """Return the posts and messages of an all-reduce, over all ranks: an exchange and a barrier."""
    return {"posts": 2 * size * rounds(size), "messages written": size, "messages read": size**2}


def bytes_moved(size, nbytes):
    """Return the bytes of the arrays that all ranks read and write in an all-reduce."""
    return 2 * nbytes * size


def model_call(size, constants):
    """Return the master's time in a call."""
    return (
        constants["call"]
        + constants["call, a post"] * posts_of_master(size)
        + constants["call, a worker"] * (size - 1)
    )


def model_barrier(size, constants):
    """Return a rank's time in a barrier."""
    return constants["barrier"] + constants["barrier, a round"] * rounds(size)


def model_all_reduce(size, nbytes, constants):
    """Return a rank's time in an all-reduce of arrays of that many bytes."""
    return (
        2 * model_barrier(size, constants)
        + constants["all-reduce"]
        + constants["all-reduce, a rank"] * (size - 1)
        + constants["all-reduce, a byte"] * nbytes * (size - 1) / size
    )


def fit(measured):
    """Return the nonnegative constants that minimize the squared relative errors."""
    sizes = [size for size in FITTED if size > 1]
    others = np.array(sizes) - 1
    each = np.ones(len(sizes))
    at = {what: np.array([measured[what][str(size)] for size in sizes]) for what in measured}
    constants = {}

    def least(names, terms, values, scale):
        found, _ = nnls(np.transpose(terms) / scale[:, None], values / scale)
        constants.update(zip(names, map(float, found)))

    of_calls = [*sizes, *FITTED_TREES]
    calls = np.array([measured["call"][str(size)] for size in of_calls])
    posts = np.array([posts_of_master(size) for size in of_calls])
    terms = np.ones(len(calls)), posts, np.array(of_calls) - 1
    least(("call", "call, a post", "call, a worker"), terms, calls, calls)
    of_rounds = np.array([rounds(size) for size in sizes])
    least(("barrier", "barrier, a round"), (each, of_rounds), at["barrier"], at["barrier"])
    two_barriers = np.array([2 * model_barrier(size, constants) for size in sizes])
    small = at["small"] - two_barriers
    least(("all-reduce", "all-reduce, a rank"), (each, others), small, at["small"])
    # The additional time of a large array is proportional to its bytes on other ranks.
    foreign = 4 * (LARGE - SMALL) * others / np.array(sizes)
    least(("all-reduce, a byte",), (foreign,), at["large"] - at["small"], at["large"])
    return constants


# Contestants


def ranks(size, counting):
    """This many ranks, which do not poll. Counting takes time, so it is done separately."""
    import synkhronos as synk
    import theano
    import theano.tensor as tt
    from commands import Nothing, RepeatAllReduce, RepeatBarrier

    counts = _count(size) if counting else np.zeros((size, len(KINDS)))
    last_pieces = _keep_pieces()
    common.fork(size)
    world = synk.world.world.current_world()
    world.transport._may_poll = world.transport._has_cores[0] = False
    lengths = (SMALL, LARGE) if size <= MOST_LARGE else (SMALL,)
    arrays = {length: theano.shared(np.ones(length, "float32")) for length in lengths}
    x = tt.dvector("x")
    function = synk.function([x], (x.sum() + sum(one[0] for one in arrays.values()), "sum"))
    synk.distribute()
    rows = synk.data(np.arange(size) + 0.5)  # so that no two ranks have the same output

    def calls():
        import time

        for _ in range(PATIENCE + 1):  # in some of these, values of the replicas are compared
            function(rows)
        before, start = counts.sum(axis=0), time.process_time()
        seconds = common.seconds_of(lambda: function(rows), CALLS, warm_up=0)
        used = (time.process_time() - start) / CALLS
        return used, seconds, ((counts.sum(axis=0) - before) / CALLS).tolist()

    def turn(what):
        if what == "call":
            return calls()
        if what == "barrier":
            return [np.mean(world.run(RepeatBarrier(BARRIERS)))]
        length = {"small": SMALL, "large": LARGE}[what]
        times = REDUCES[length]
        command = RepeatAllReduce(world.registry.numbers[arrays[length]], times)
        world.run(command)
        before = counts.sum(axis=0)
        by_rank = world.run(command)
        after = counts.sum(axis=0)
        world.run(Nothing())
        counted = after - before - (counts.sum(axis=0) - after)  # minus the counts of an empty command
        made = times + max(1, times // 5)  # with those that warm up
        return [
            np.mean([used for _, used in by_rank]),
            by_rank[0][0],
            (counted / made).tolist(),
            _bytes_of(last_pieces),
        ]

    yield turn
    synk.close()


def _keep_pieces():
    """Keep the pieces of this process's last reduction: a list, which is the same from now on."""
    from synkhronos.comms.shm import SharedMemoryCommunicator

    last_pieces, reduce_part = [], SharedMemoryCommunicator.reduce_part

    def keeping(comm, pieces, *others):
        last_pieces[:] = pieces
        reduce_part(comm, pieces, *others)

    SharedMemoryCommunicator.reduce_part = keeping
    return last_pieces


def _bytes_of(pieces):
    """Return the bytes that the pieces of a reduction are made of and written to."""
    return sum(
        sum(part.nbytes for part in parts) + reduced.nbytes + sum(other.nbytes for other in others)
        for reduced, parts, others in pieces
    )


def _count(size):
    """Count the posts and messages of the ranks made from now on: an array, ranks by `KINDS`."""
    import mmap

    from synkhronos.transports import local, tree
    from synkhronos.world.world import current_world, world_exists

    # One row per rank, which only that rank writes to: no count is lost.
    counts = np.frombuffer(mmap.mmap(-1, 8 * size * len(KINDS)), np.int64).reshape(size, -1)

    def add(kind, number=1):
        if world_exists():
            counts[current_world().transport.rank, KINDS.index(kind)] += number

    class Semaphore(local.Semaphore):
        kind = "posts"

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            post = self.post

            def counted():
                add(self.kind)
                post()

            self.post = counted

    class Mailbox(local.Mailbox):
        def put(self, payload):
            add("messages written")
            add("bytes written", len(payload))
            super().put(payload)

        def get(self):
            payload = super().get()
            add("messages read")
            add("bytes read", len(payload))
            return payload

    make = tree.TreeTransport.__init__

    def __init__(self, *args, **kwargs):
        make(self, *args, **kwargs)
        self._replied.kind = "increases"  # nobody waits for it

    local.Semaphore = tree.Semaphore = Semaphore
    local.Mailbox, tree.TreeTransport.__init__ = Mailbox, __init__
    return counts


# The row


def measure(options):
    turns = 3 if options.quick else 8
    results = _take_turns_by_size(False, turns)
    counted = _take_turns_by_size(True, 1)
    samples = {
        what: {str(size): [1e6 * one[0] for one in results[size][what]] for size in sizes_of(what)}
        for what in TITLES
    }
    measured = {
        what: {size: float(np.median(one)) for size, one in of_size.items()}
        for what, of_size in samples.items()
    }
    constants = fit(measured)
    lines = _lines(samples, measured, constants)
    counted, wrong = _check_counts(counted)
    notes = _notes(constants, counted, wrong, measured)
    extra = {"measured": measured, "constants": constants, "counted": counted}
    return common.Result("calls and all-reduces on 1 to 64 ranks, and a model", lines, notes, extra)


def sizes_of(what):
    """Return the sizes on which something is measured."""
    return [size for size in SIZES if what != "large" or size <= MOST_LARGE]


def _take_turns_by_size(counting, turns):
    """Return the values of each turn, by size and by quantity."""
    made = {
        str(size): Contestant(ranks, size, counting, environment=common.ONE_THREAD) for size in SIZES
    }
    with common.contestants(**made) as players:
        times = common.take_turns(
            {
                (int(size), what): lambda player=player, what=what: player(what)
                for size, player in players.items()
                for what in TITLES
                if int(size) in sizes_of(what)
            },
            turns,
            "counting" if counting else "growth",
        )
    return {
        size: {what: times[size, what] for what in TITLES if size in sizes_of(what)} for size in SIZES
    }


TITLES = {
    "call": "call, the master",
    "barrier": "barrier, a rank",
    "small": f"all-reduce of {4 * SMALL} B, a rank",
    "large": f"all-reduce of {4 * LARGE / 2**20:g} MB, a rank",
}


def foretell(what, size, constants):
    """Return what the model says of a measured thing."""
    if what == "call":
        return model_call(size, constants)
    if what == "barrier":
        return model_barrier(size, constants)
    return model_all_reduce(size, 4 * {"small": SMALL, "large": LARGE}[what], constants)


def is_fitted(what, size):
    """Return whether the model is fitted to a measured thing on this number of ranks."""
    return size in FITTED or (what == "call" and size in FITTED_TREES)


def _lines(samples, measured, constants):
    lines = []
    for what, title in TITLES.items():
        for size in [size for size in (2, 4, *SIZES[7:]) if size in sizes_of(what)]:
            model = foretell(what, size, constants)
            line = Line(f"{title}: n = {size}", "µs", samples[what][str(size)])
            line.ratios, line.of = [one / model for one in line.samples], "model"
            lines.append(line)
        foretold = foretell(what, FORETOLD, constants)
        lines.append(Line(f"{title}: n = {FORETOLD}, the model", "µs", [foretold]))
    return lines


def _check_counts(results):
    """Return the counts by size, and in words those that the model has otherwise."""
    counted, wrong = {}, []
    for what, model in (("call", count_call), ("small", count_all_reduce)):
        counted[what] = {}
        for size, of_size in results.items():
            found = dict(zip(KINDS, np.median([one[2] for one in of_size[what]], axis=0).tolist()))
            counted[what][str(size)] = found
            for kind, number in model(size).items():
                if not math.isclose(found[kind], number, abs_tol=0.5):
                    wrong.append(f"{what} on {size} ranks: {found[kind]:g} {kind}, not {number}")
    counted["bytes"] = {}
    for size in sizes_of("large"):
        found = results[size]["large"][-1][3]
        counted["bytes"][str(size)] = found
        expected = bytes_moved(size, 4 * LARGE) / size
        if size > 1 and not math.isclose(found, expected, rel_tol=0.01):
            wrong.append(f"all-reduce on {size} ranks: {found} bytes moved a rank, not {expected:g}")
    return counted, wrong


def _notes(constants, counted, wrong, measured):
    off = {
        name: max(
            abs(foretell(what, size, constants) / measured[what][str(size)] - 1)
            for what in TITLES
            for size in sizes_of(what)
            if size > 1 and is_fitted(what, size) == (name == "fitted")
        )
        for name in ("fitted", "tried")
    }
    c = constants
    most = TRIED[-1]
    times_model = model_call(most, constants) / model_call(8, constants)
    times_measured = measured["call"][str(most)] / measured["call"]["8"]
    call, reduce = counted["call"]["8"], counted["small"]["8"]
    return [
        "processor time, spin off, more ranks than cores; L(n) = ceil(log2 n) rounds of a barrier",
        "counted, "
        + ("as the model says: " if not wrong else f"BUT {'; '.join(wrong)}; the model: ")
        + f"a call takes 2 (n - 1) posts, n messages written and 2 (n - 1) read; on more than "
        f"{MOST_WITHOUT} ranks n posts, of the master P(64) = {posts_of_master(64)}; an all-reduce "
        "2 n L(n) posts, n messages written and n² read, and each rank reads and writes as many bytes "
        "of the arrays as there are, whatever n",
        f"on 8 ranks a call writes {call['bytes written']:.0f} bytes and reads {call['bytes read']:.0f} "
        f"beside the data, an all-reduce of one array {reduce['bytes written']:.0f} and "
        f"{reduce['bytes read']:.0f}",
        f"call, the master: {c['call']:.1f} + {c['call, a post']:.2f} P(n) + "
        f"{c['call, a worker']:.2f} (n - 1) µs, P(n) posts of the master: on {most} ranks "
        f"{times_model:.2f} times as long as on 8 by the model, {times_measured:.2f} times as measured",
        f"barrier, a rank: {c['barrier']:.1f} + {c['barrier, a round']:.2f} L(n) µs",
        f"all-reduce of B bytes, a rank: two barriers + {c['all-reduce']:.1f} + "
        f"{c['all-reduce, a rank']:.2f} (n - 1) + {1e6 * c['all-reduce, a byte']:.0f} (n - 1) / n "
        f"B / 10⁶ µs",
        f"the model is at most {off['fitted']:.0%} off where it was fitted, on 2 to 8 ranks and, for "
        f"calls, {', '.join(map(str, FITTED_TREES))}, and {off['tried']:.0%} elsewhere, up to {most} "
        f"ranks; further out it is a guess",
    ]


def draw(figure, record):
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.35))
    measured, counted = record["extra"]["measured"], record["extra"]["counted"]
    constants = record["extra"]["constants"]
    sizes = [int(size) for size in counted["call"]]
    far = np.unique(
        np.append(np.geomspace(2, FORETOLD, 60).astype(int), [MOST_WITHOUT, MOST_WITHOUT + 1])
    )
    for what, model, label, colour in (
        ("call", count_call, "a call: 2 (n - 1), or n with a tree", COLOURS["good"]),
        ("small", count_all_reduce, "an all-reduce: 2 n ⌈log₂ n⌉", COLOURS["synk"]),
    ):
        posts = [counted[what][str(size)]["posts"] for size in sizes]
        left.plot(sizes[1:], posts[1:], "o", color=colour, markersize=5)
        left.plot(far, [model(size)["posts"] for size in far], color=colour, label=label)
    left.set(ylabel="posts, all ranks", title="Posts of semaphores")
    styles = {
        "large": COLOURS["goal"],
        "small": COLOURS["synk"],
        "call": COLOURS["good"],
        "barrier": COLOURS["other"],
    }
    for what, colour in styles.items():
        points = [(int(size), value) for size, value in measured[what].items() if int(size) > 1]
        for size, value in points:
            face = colour if is_fitted(what, size) else "white"
            right.plot(size, value, "o", color=colour, markerfacecolor=face, markersize=5)
        model = [foretell(what, size, constants) for size in far]
        right.plot(far, model, color=colour, label=TITLES[what])
    right.set(ylabel="µs", title="Processor time (filled: fitted; hollow: only tried; line: model)")
    for axes in (left, right):
        axes.set(xscale="log", yscale="log", xlabel="ranks n")
        axes.set_xticks([2, 4, 8, 16, 32, 64, 256, 1024], [2, 4, 8, 16, 32, 64, 256, 1024])
        axes.minorticks_off()
        axes.grid(color="#e3e3e3")
    left.legend(loc="upper left")
    right.set_ylim(0.8, right.get_ylim()[1])
    right.legend(loc="lower right", fontsize=8.5, ncols=2)


if __name__ == "__main__":
    main()
