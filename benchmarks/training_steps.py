"""What the rows of training steps share: the contestants, the comparison, the picture.

A row gives ``network()``, the arguments of ``make_train_function``; ``plain_network()``, the arguments
of a ``theano.function`` that trains; and ``data()``, images and labels. All are called in the
contestants' processes.
"""

if __name__ == "__main__":
    raise SystemExit(f"{__doc__}\nScripts use this file; run step_small.py.")

import mmap
import multiprocessing
import os
import resource
import tempfile
import time

import common
import torch_steps
from common import COLOURS, ONE_THREAD, Contestant, Line

import numpy as np
from synkhronos.host.heap import huge_pages

RANKS = 2
BY_HAND = (
    "by hand: the least that averages the gradients, NumPy in shared memory and processes that meet by "
    "polling counters, without commands, checks or protection against deaths"
)
PARTS = ("gradient", "all-reduce", "update", "waiting", "CPU time of the gradient")
KEPT = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}  # as by `python -m synkhronos run`
COMPARED = 8  # calls, some of which the library compares with one process
MOST_BYTES = 128 << 20  # of a gradient vector
NOT_KEPT = {"SYNKHRONOS_KEEP_MEMORY": "0"}
KERNELS = "SYNKHRONOS_KERNELS"
FAST, THEANOS = {KERNELS: "fast"}, {KERNELS: "theano"}  # the library's operations, or Theano's own


#: What the lines of other contestants are called, of those that there are
OTHERS = {
    "theanos": "Theano's operations, synkhronos, 2 ranks",
    "torch": f"PyTorch, 1 process, {RANKS} threads",
    "ddp": f"PyTorch DDP, {RANKS} processes of 1 thread",
    "ddp kept": f"PyTorch DDP with memory kept, {RANKS} processes",
    "by hand": f"by hand, {RANKS} processes",
}
#: The bars of the picture: how the line begins, the label and the colour
BARS = [
    ("Theano untouched", "Theano, untouched", "other"),
    ("Theano, 1 thread", "Theano, 1 thread,\nmemory kept", "other"),
    (OTHERS["torch"], f"PyTorch, 1 process,\n{RANKS} threads", "torch"),
    (OTHERS["ddp"], f"PyTorch DDP,\n{RANKS} processes", "torch"),
    (OTHERS["ddp kept"], "PyTorch DDP,\nmemory kept", "torch"),
    (OTHERS["theanos"], "Synkhronos, 2 ranks,\nTheano's operations", "synk light"),
    ("synkhronos, 2 ranks", "Synkhronos, 2 ranks", "synk"),
    ("ideal, 2", "ideal:\n2 processes apart", "other light"),
]


# Contestants


def untouched(plain_network, data, batch):
    """A script of plain Theano as a user starts it: one function, as many BLAS threads as cores."""
    import synkhronos  # noqa: F401  (it makes Theano importable; `NOT_KEPT` has it change no more)
    import theano

    common.use_device()
    inputs, loss, updates = plain_network()
    function = theano.function(inputs, loss, updates=updates)
    arrays = data()

    def step(*arrays, batch):
        return function(*[array[batch] for array in arrays])

    yield lambda steps: {"seconds": seconds_of_step(step, arrays, batch, steps)}


def serial(network, data, batch, number=0, counters=None):
    """Theano in one process on `batch` rows a step, on the device of rank `number`.

    With `counters`, the processes can be told to wait for each other before each step.
    """
    from synkhronos.extensions import train

    use_kernels()
    common.use_device(number)
    step = train.make_train_function_theano(*network())
    arrays = data()

    def step_together(*data, batch):
        counters[number] += 1
        while min(counters) < counters[number]:
            pass
        return step(*data, batch=batch)

    def turn(steps, together=False):
        before = time.process_time()
        seconds = seconds_of_step(step_together if together else step, arrays, batch, steps)
        return {"seconds": seconds, "cpu": (time.process_time() - before) / (1 + steps)}

    yield turn


def by_hand(network, data, batch, number, counters, gradients, is_driven=False):
    """The least that a data-parallel step on rank `number` needs, in a few lines of NumPy.

    The gradient vectors are in shared memory. The processes meet by polling counters, each averages its
    part of the vector and writes it to all. There are no commands, no checks, and no protection against
    a process that dies. The script runs on every rank, or only on the first if `is_driven`.
    """
    from synkhronos.arithmetic.partition import share
    from synkhronos.engines.names import package

    use_kernels()
    common.use_device(number)
    loss, params, x, y, rule, *hyper = network()
    grad_updates, param_updates, flat = rule(loss, params, *hyper)
    size = flat.get_value(borrow=True).size
    vectors = np.frombuffer(gradients, "float32").reshape(RANKS, -1)[:, :size]
    flat.set_value(vectors[number], borrow=True)
    gradient = package.function([x, y], loss, updates=grad_updates)
    update = package.function([], updates=param_updates)
    part = slice(*share(size, RANKS, number))

    def meet():
        counters[number] += 1
        while min(counters) < counters[number]:
            pass

    def step(*data, batch):
        loss = gradient(*[array[batch] for array in data])
        meet()
        first, *others = vectors[:, part]
        for other in others:
            first += other
        first *= np.float32(1 / RANKS)
        for other in others:
            other[...] = first
        meet()
        update()
        return float(loss)

    if is_driven:
        step = _driven(step, number, gradients)
    arrays = data()

    def turn(steps, _=True):
        before = time.process_time()
        seconds = seconds_of_step(step, arrays, batch, steps)
        assert np.shares_memory(flat.get_value(borrow=True), vectors[number])
        return {"seconds": seconds, "cpu": (time.process_time() - before) / (1 + steps)}

    yield turn


def _driven(step, number, gradients):
    """Let rank 0 tell the others the rows of each step, and average their losses when all are done."""
    lines = np.frombuffer(gradients, "float64")[-8 * (1 + RANKS) :].reshape(-1, 8)  # of the caches
    told, *done = [line.data for line in lines]
    count = 0

    def driven_step(*data, batch):
        nonlocal count
        count += 1
        if number == 0:
            told[0], told[1] = batch.start, batch.stop
            told[2] = count
        else:
            while told[2] < count:
                pass
            batch = slice(int(told[0]), int(told[1]))
        done[number][0] = step(*data, batch=batch)
        done[number][1] = count
        if number == 0:
            while min([one[1] for one in done]) < count:
                pass
        return sum([one[0] for one in done]) / RANKS

    return driven_step


class Apart:
    """The ideal: a process for each rank with its part of the rows, all at the same time.

    Parameters
    ----------
    make : callable
        ``make(number, counters)`` returns the `Contestant` of a rank, which runs `serial`, or with
        `share_gradients` ``make(number, counters, gradients)``, which runs `by_hand`.
    share_gradients : bool, default: False
    """

    def __init__(self, make, share_gradients=False):
        context = multiprocessing.get_context("spawn")
        shared = [context.RawArray("q", RANKS)]
        if share_gradients:
            shared.append(context.RawArray("b", RANKS * MOST_BYTES))
        self.players = [make(number, *shared) for number in range(RANKS)]

    def __call__(self, steps, together=False):
        """Return the seconds of a step, and of processor time, as a mean of the processes.

        By default the processes know nothing of each other. If they step `together`, each waits for
        the other ones before each step, which any exchange of gradients requires.
        """
        for player in self.players:
            player.begin(steps, together)
        results = [player.result() for player in self.players]
        # Each makes its part of the rows in its time: what counts is the rows per second of all.
        seconds = RANKS / sum(1 / result["seconds"] for result in results)
        return {"seconds": seconds, "cpu": np.mean([result["cpu"] for result in results])}


def replicated(network, data, batch):
    """The library on `RANKS` ranks, and where each rank's time goes."""
    import synkhronos as synk
    from synkhronos.extensions import train

    spent = time_parts()
    common.fork(RANKS)
    step = train.make_train_function(*network())
    synk.distribute()
    arrays = [synk.data(array) for array in data()]
    for _ in range(COMPARED):
        step(*arrays, batch=slice(0, batch))

    def turn(steps):
        before, faults, begin = spent.copy(), _faults(), time.perf_counter()
        seconds = seconds_of_step(step, arrays, batch, steps)
        each = (time.perf_counter() - begin) / (1 + steps)
        parts = (spent - before) / (1 + steps)
        faults = (_faults() - faults) / (1 + steps)
        return {
            "seconds": seconds,
            "parts": parts.tolist(),
            "split": _split(each, parts),
            "faults": faults,
        }

    yield turn
    synk.close()


def use_kernels():
    """Compile with the operations that an environment variable names, as `synk.fork` does."""
    from synkhronos.engines.cpu import CpuEngine

    if KERNELS in os.environ and not common.devices():
        CpuEngine().use_kernels(os.environ[KERNELS] == FAST[KERNELS])


def _faults():
    """Return how many minor page faults this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def seconds_of_step(step, data, batch, steps):
    """Return the seconds that each step takes."""
    step(*data, batch=slice(0, batch))
    begin = time.perf_counter()
    for number in range(1, 1 + steps):
        start = number * batch % (len(data[0]) - batch + 1)
        step(*data, batch=slice(start, start + batch))
    return (time.perf_counter() - begin) / steps


def time_parts(ranks=RANKS, commands=PARTS[:-2]):
    """Let every rank to be forked add up the seconds that it spends in each part, in shared memory.

    The parts are the commands of a step in their order, waiting in all of them, and the processor time
    of the first. Return an array of them by rank.
    """
    from synkhronos.transports.local import LocalTransport
    from synkhronos.world.rank_state import FusedCommand, RankState

    width = len(commands) + 2
    spent = np.frombuffer(mmap.mmap(-1, ranks * width * 8), "float64").reshape(ranks, width)

    is_timed = False

    def timed(rank, place, call, *arguments):
        nonlocal is_timed
        if is_timed:  # a part of a part, as in a call that is compared with one process
            return call(*arguments)
        is_timed, start, cpu_start = True, time.perf_counter(), time.process_time()
        try:
            result = call(*arguments)
        finally:
            is_timed = False
        spent[rank, place] += time.perf_counter() - start
        if place == 0:
            spent[rank, -1] += time.process_time() - cpu_start
        return result

    def run(fused, state):
        return [timed(state.rank, at, one.run, state) for at, one in enumerate(fused.commands)]

    def bind(fused, state):
        bound = [command.bind(state) for command in fused.commands]

        def run_changed(change):
            return [
                timed(state.rank, at, one, change if at == fused.place else None)
                for at, one in enumerate(bound)
            ]

        return run_changed

    run_sent = RankState.run_sent

    def timed_run_sent(state, sent):
        if type(sent) is not list:
            return run_sent(state, sent)
        return [timed(state.rank, at, run_sent, state, one) for at, one in enumerate(sent)]

    barrier = LocalTransport.barrier

    def timed_barrier(transport):
        start = time.perf_counter()
        barrier(transport)
        spent[transport.rank, -2] += time.perf_counter() - start

    FusedCommand.run, FusedCommand.bind, RankState.run_sent = run, bind, timed_run_sent
    LocalTransport.barrier = timed_barrier
    return spent


def _split(step, parts):
    """Split the seconds of a step into parts, as a mean over the ranks."""
    gradient, all_reduce, update, waiting, _ = parts.mean(axis=0)
    split = {
        "gradient": gradient,
        "update": update,
        "waiting for the other rank": waiting,
        "all-reduce itself": all_reduce - waiting,
    }
    return {**split, "starting, finishing": step - sum(split.values())}


# The comparison


def measure(
    title, network, plain_network, torch_network, data, batch, what, rounds, steps, speed_up, goals
):
    """Return the `Result` of steps on `batch` rows of `what`.

    `torch_network` is the name of the network in ``torch_networks``, the learning rate and the momentum.
    `speed_up` is the goal against untouched Theano, and `goals` are those against contestants of
    `OTHERS`.
    """
    with tempfile.TemporaryDirectory() as folder:
        alone, groups = _contestants(network, plain_network, torch_network, data, batch, folder)
        players = {
            **alone,
            **{f"{name} {n}": x for name, one in groups.items() for n, x in enumerate(one.players)},
        }
        turns = {name: lambda one=one: one(steps) for name, one in {**alone, **groups}.items()}
        turns["together"] = lambda: groups["ideal"](steps, True)
        with common.contestants(**players):
            turns = common.take_turns(turns, rounds, "steps")
    seconds = {name: np.array([turn["seconds"] for turn in turns[name]]) for name in turns}
    splits = [turn["split"] for turn in turns["synk"]]
    split = {name: float(np.median([one[name] for one in splits])) for name in splits[0]}
    lines, notes = _lines(seconds, batch, what, speed_up, goals), _notes(turns, rounds, steps, split)
    return common.Result(title, lines, notes, {"parts": split})


def _contestants(network, plain_network, torch_network, data, batch, folder):
    """Return by name: the contestants of one process or one world, and the groups, as `Apart`."""
    each = batch // RANKS
    one_thread = {**ONE_THREAD, **KEPT}

    def apart(variables):
        variables = {**ONE_THREAD, **variables, **FAST}
        return Apart(
            lambda *of_rank: Contestant(serial, network, data, each, *of_rank, environment=variables)
        )

    def hand_made(*of_rank):
        variables = {**one_thread, **FAST}
        return Contestant(by_hand, network, data, each, *of_rank, environment=variables)

    def ddp(name, malloc):
        arguments = torch_steps.ddp, torch_network[0], data, batch, *torch_network[1:]
        variables = {**ONE_THREAD, **malloc, "GLOO_SOCKET_IFNAME": "lo"}
        meeting = os.path.join(folder, name)
        return Apart(
            lambda number, _: Contestant(*arguments, meeting, number, RANKS, environment=variables)
        )

    def ours(kernels):
        return Contestant(replicated, network, data, batch, environment={**KEPT, **kernels})

    alone = {
        "untouched": Contestant(untouched, plain_network, data, batch, environment=NOT_KEPT),
        "serial": Contestant(serial, network, data, batch, environment={**one_thread, **THEANOS}),
        "synk": ours(FAST),
    }
    groups = {"ideal": apart(KEPT), "bare": apart(NOT_KEPT)}
    if not common.devices():  # the others are on the CPU, with arrays in shared memory
        alone["theanos"] = ours(THEANOS)
        groups["by hand"] = Apart(hand_made, share_gradients=True)
        if torch_steps.is_there():
            arguments = torch_steps.alone, torch_network[0], data, batch, *torch_network[1:]
            alone["torch"] = Contestant(*arguments, RANKS, environment=NOT_KEPT)
            groups["ddp"], groups["ddp kept"] = ddp("untouched", NOT_KEPT), ddp("kept", KEPT)
    return alone, groups


def _lines(seconds, batch, what, speed_up, goals):
    untouched, serial, own, ideal, together, bare = (
        seconds[name] for name in ("untouched", "serial", "synk", "ideal", "together", "bare")
    )
    lines = [
        common.line(f"Theano untouched, {batch} {what}", "ms", untouched),
        common.line("Theano, 1 thread, memory kept", "ms", serial),
        common.line("synkhronos, 2 ranks", "ms", own, untouched, "untouched", at_least=speed_up),
        common.line(f"ideal, {RANKS} × {batch // RANKS} {what}", "ms", ideal),
        common.line("ideal, but step by step", "ms", together),
        common.line("ideal, malloc as it is", "ms", bare),
        Line(
            "ideal / synkhronos",
            "×",
            list(ideal / own),
            goal="≥ 0.97",
            reached=bool(np.median(ideal / own) >= 0.97),
        ),
        Line("step by step / synkhronos", "×", list(together / own)),
        Line("1 thread / synkhronos", "×", list(serial / own)),
        Line("untouched / ideal", "×", list(untouched / ideal)),
    ]
    for name, line in OTHERS.items():
        if common.devices():
            break
        times = seconds.get(name, np.array([]))
        lines.append(common.line(line, "ms", times))
        if times.size:
            ratio = Line(f"{line.partition(',')[0]} / synkhronos", "×", list(times / own))
            if name in goals:
                ratio.goal, ratio.reached = f"≥ {goals[name]:g}", ratio.median >= goals[name]
            lines.append(ratio)
        if name == "by hand":
            lines.append(Line("ideal / by hand", "×", list(ideal / times)))
    return lines


def _notes(turns, rounds, steps, split):
    parts = np.median([turn["parts"] for turn in turns["synk"]], axis=0)
    ideal_cpu = np.median([turn["cpu"] for turn in turns["ideal"]])
    notes = [
        f"per turn {steps} steps after one to warm up, {rounds} turns each; untouched: as many BLAS "
        "threads as cores, malloc as it is; the others one BLAS thread per process",
        "Theano's operations: with kernels='theano'; synkhronos, the ideal and by hand have this "
        "library's operations (kernels='fast'); both contestants in one process have Theano's",
        f"memory kept: malloc keeps freed memory, and uses huge pages ({huge_pages('enabled')} by the "
        f"kernel's setting)",
        "ratios are speed-ups within each round; step by step: each process waits for the other one "
        "before each step, which any exchange of gradients requires; " + BY_HAND,
        "where a step of synkhronos goes: "
        + ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in split.items()),
        "gradient: {:.2f} and {:.2f} ms on the ranks, of CPU time {:.2f} and {:.2f} ms; a whole step "
        "of the ideal takes {:.2f} ms of CPU time".format(
            *1e3 * parts[:, 0], *1e3 * parts[:, -1], 1e3 * ideal_cpu
        ),
        "minor page faults per step and rank: {:.0f}".format(
            np.median([turn["faults"] for turn in turns["synk"]])
        ),
    ]
    if common.devices():
        return [*notes, "a call on a device returns before its work is done: the parts are of the calls"]
    return [*notes, torch_steps.note()]


def draw(figure, record):
    left, right = figure.subplots(1, 2, width_ratios=(1.45, 1))
    bars = []
    for prefix, label, colour in BARS:
        found = [one for one in record["lines"] if one["what"].startswith(prefix)]
        if found and found[0]["samples"]:
            bars.append((found[0], label, COLOURS[colour]))
    common.bars(left, *map(list, zip(*bars)), "ms")
    left.set_title(_title(record))
    parts = dict(record["extra"]["parts"])
    gradient = parts.pop("gradient")
    places = range(len(parts))[::-1]
    milliseconds = [1e3 * seconds for seconds in parts.values()]
    right.barh(places, milliseconds, 0.55, color=COLOURS["synk light"])
    for place, value in zip(places, milliseconds):
        text = f"{common.number(value)} ms"
        common.write(right, text, (max(0, value), place), (5, 0), va="center", fontweight="bold")
    right.set_yticks(list(places), [name.replace(" for ", "\nfor ") for name in parts])
    right.tick_params(axis="y", length=0)
    right.set(xlabel="ms, mean of the ranks", xlim=(min(0, *milliseconds), 1.5 * max(milliseconds)))
    right.grid(axis="x", color="#e3e3e3")
    right.set_title(f"Besides the gradient's {1e3 * gradient:.0f} ms")


def _title(record):
    """Return how fast a step is, compared with the others."""
    ratios = {one["what"]: one["median"] for one in record["lines"] if one["unit"] == "×"}
    speed_up = common.find(record, "synkhronos, 2 ranks")["ratio"]
    told = [f"{speed_up:.2f} × as fast as Theano", f"{ratios['ideal / synkhronos']:.0%} of the ideal"]
    ddp = ratios.get("PyTorch DDP / synkhronos")
    if ddp is not None:
        told.insert(1, f"{ddp:.2f} × PyTorch DDP")
    return ", ".join(told)
