"""What the rows of training steps share: the contestants, the comparison, the picture.

A row gives ``network()``, the arguments of ``make_train_function``, and ``data()``, images and labels;
both are called in the contestants' processes.
"""

import mmap
import time

import common
from common import COLOURS, ONE_THREAD, Contestant, Line

import numpy as np

RANKS = 2
PARTS = ("gradient", "all-reduce", "update", "waiting", "CPU time of the gradient")


# Contestants


def serial(network, data, batch, number=0):
    """Plain Theano on `batch` rows a step, on the device of rank `number`."""
    from synkhronos.extensions import train

    common.use_device(number)
    step = train.make_train_function_theano(*network())
    arrays = data()

    def turn(steps):
        before = time.process_time()
        seconds = _time(step, arrays, batch, steps)
        return {"seconds": seconds, "cpu": (time.process_time() - before) / (1 + steps)}

    yield turn


def replicated(network, data, batch):
    """The library on `RANKS` ranks, and where each rank's time goes."""
    import synkhronos as synk
    from synkhronos.extensions import train

    spent = _time_parts()
    common.fork(RANKS)
    step = train.make_train_function(*network())
    synk.distribute()
    arrays = [synk.data(array) for array in data()]

    def turn(steps):
        before, begin = spent.copy(), time.perf_counter()
        seconds = _time(step, arrays, batch, steps)
        each = (time.perf_counter() - begin) / (1 + steps)
        parts = (spent - before) / (1 + steps)
        return {"seconds": seconds, "parts": parts.tolist(), "split": _split(each, parts)}

    yield turn
    synk.close()


def _time(step, data, batch, steps):
    """Return the seconds that each step takes."""
    step(*data, batch=slice(0, batch))
    begin = time.perf_counter()
    for number in range(1, 1 + steps):
        start = number * batch % (len(data[0]) - batch + 1)
        step(*data, batch=slice(start, start + batch))
    return (time.perf_counter() - begin) / steps


def _time_parts():
    """Let every rank to be forked add up the seconds that it spends in each part, in shared memory."""
    from synkhronos.world import fuse as _fuse
    from synkhronos.transports.local import LocalTransport

    nbytes = RANKS * len(PARTS) * 8
    spent = np.frombuffer(mmap.mmap(-1, nbytes), "float64").reshape(RANKS, len(PARTS))

    def run(sequence, here):
        results = []
        for part, command in enumerate(sequence.commands):
            start, cpu_start = time.perf_counter(), time.process_time()
            results.append(command.run(here))
            spent[here.rank, part] += time.perf_counter() - start
            if PARTS[part] == "gradient":
                spent[here.rank, -1] += time.process_time() - cpu_start
        return results

    barrier = LocalTransport.barrier

    def timed_barrier(transport):
        start = time.perf_counter()
        barrier(transport)
        spent[transport.rank, PARTS.index("waiting")] += time.perf_counter() - start

    _fuse.Sequence.run, LocalTransport.barrier = run, timed_barrier
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


def measure(title, network, data, batch, what, rounds, steps, speed_up=None):
    """Return the `Result` of steps on `batch` rows of `what`."""
    each = batch // RANKS
    with common.contestants(
        serial=Contestant(serial, network, data, batch, environment=ONE_THREAD),
        synk=Contestant(replicated, network, data, batch),
        first=Contestant(serial, network, data, each, environment=ONE_THREAD),
        second=Contestant(serial, network, data, each, 1, environment=ONE_THREAD),
    ) as players:

        def ideal():
            pair = players["first"], players["second"]
            for player in pair:
                player.begin(steps)
            results = [player.result() for player in pair]
            # Each makes half of the rows in its time: what counts is the rows a second of both.
            seconds = len(pair) / sum(1 / result["seconds"] for result in results)
            return {"seconds": seconds, "cpu": np.mean([result["cpu"] for result in results])}

        turns = common.take_turns(
            {
                "serial": lambda: players["serial"](steps),
                "synk": lambda: players["synk"](steps),
                "ideal": ideal,
            },
            rounds,
            "steps",
        )
    parts = np.median([turn["parts"] for turn in turns["synk"]], axis=0)
    serial_times, own, ideal_times = (
        np.array([turn["seconds"] for turn in turns[name]]) for name in ("serial", "synk", "ideal")
    )
    ideal_cpu = np.median([turn["cpu"] for turn in turns["ideal"]])
    lines = [
        common.line(f"plain Theano, {batch} {what}", "ms", serial_times),
        common.line("synkhronos, 2 ranks", "ms", own, serial_times, "serial", at_least=speed_up or 0),
        common.line(f"ideal, {RANKS} × {each} {what}", "ms", ideal_times),
        Line(
            "ideal / synkhronos",
            "×",
            list(ideal_times / own),
            goal="≥ 0.97",
            reached=np.median(ideal_times / own) >= 0.97,
        ),
        Line("serial / ideal", "×", list(serial_times / ideal_times)),
    ]
    if speed_up is None:
        lines[1].goal, lines[1].reached = "", None
    splits = [turn["split"] for turn in turns["synk"]]
    split = {name: float(np.median([one[name] for one in splits])) for name in splits[0]}
    notes = [
        f"per turn {steps} steps after one to warm up, {rounds} turns each; one BLAS thread a process",
        "ratios are speed-ups within each round",
        "where a step of synkhronos goes: "
        + ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in split.items()),
        "gradient: {:.2f} and {:.2f} ms on the ranks, of CPU time {:.2f} and {:.2f} ms; a whole step "
        "of the ideal takes {:.2f} ms of CPU time".format(
            *1e3 * parts[:, 0], *1e3 * parts[:, -1], 1e3 * ideal_cpu
        ),
    ]
    if common.devices():
        notes.append("a call on a device returns before its work is done: the parts are of the calls")
    return common.Result(title, lines, notes, {"parts": split})


def draw(figure, record):
    left, right = figure.subplots(1, 2, width_ratios=(1.2, 1))
    serial, own, ideal = record["lines"][:3]
    lines = [serial, ideal, own]
    labels = ["plain Theano,\n1 process", "ideal:\n2 processes apart", "Synkhronos,\n2 ranks"]
    colours = [COLOURS[name] for name in ("other", "other light", "synk")]
    common.bars(left, lines, labels, colours, "ms")
    speed_up = lines[2]["ratio"]
    of_ideal = common.find(record, "ideal / synkhronos")["median"]
    left.set_title(f"A step: {speed_up:.2f} × as fast, {of_ideal:.0%} of the ideal")
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
