"""step, small: a training step of Lasagne's MNIST CNN on two ranks.

Every step reads 500 rows, all-reduces the flat gradient, applies Nesterov momentum and collects the
loss. Against plain Theano in one process with one BLAS thread, and against the ideal: two processes
that know nothing of each other, each with 250 rows, at the same time.
"""

import argparse
import time

import common
from common import COLOURS, ONE_THREAD, Contestant, Line

import numpy as np

RANKS = 2
BATCH = 500
ROWS = 5000
LEARNING_RATE, MOMENTUM = 0.01, 0.9
PARTS = ("gradient", "all-reduce", "update", "waiting", "CPU time of the gradient")


def main():
    common.main(__doc__, measure, draw)


# Contestants


def serial(batch):
    """Plain Theano on `batch` rows a step."""
    from synkhronos.extensions import train

    step = train.make_train_function_theano(*_network())
    data = _digits()

    def turn(steps):
        before = time.process_time()
        seconds = _time(step, data, batch, steps)
        return {"seconds": seconds, "cpu": (time.process_time() - before) / (1 + steps)}

    yield turn


def replicated():
    """The library on `RANKS` ranks, and where each rank's time goes."""
    import synkhronos as synk
    from synkhronos.extensions import train

    synk.fork(RANKS)
    spent = _time_parts(synk._world.current().here.memory)
    step = train.make_train_function(*_network())
    synk.distribute()
    data = [synk.data(array) for array in _digits()]

    def turn(steps):
        before, begin = spent.copy(), time.perf_counter()
        seconds = _time(step, data, BATCH, steps)
        each = (time.perf_counter() - begin) / (1 + steps)
        parts = (spent - before) / (1 + steps)
        return {"seconds": seconds, "parts": parts.tolist(), "split": _split(each, parts)}

    yield turn
    synk.close()


def _network():
    """Return the arguments of ``make_train_function``."""
    import synkhronos as synk  # noqa: F401
    from synkhronos.extensions import updates

    demo = common.load_demo("lasagne_mnist")
    model = demo.build_model(argparse.Namespace(seed=1, model="cnn", no_dropout=False))
    rule = updates.nesterov_momentum, LEARNING_RATE, MOMENTUM
    return model.losses.mean(), model.params, model.x, model.y, *rule


def _digits():
    """Return images and labels; what they show does not matter for speed."""
    random = np.random.RandomState(0)
    images = random.rand(ROWS, 1, 28, 28).astype("float32")
    return images, random.randint(0, 10, ROWS).astype("int32")


def _time(step, data, batch, steps):
    """Return the seconds that each step takes."""
    step(*data, batch=slice(0, batch))
    begin = time.perf_counter()
    for number in range(1, 1 + steps):
        start = number * batch % (ROWS - batch + 1)
        step(*data, batch=slice(start, start + batch))
    return (time.perf_counter() - begin) / steps


def _time_parts(memory):
    """Let every rank add up the seconds that it spends in each part, in shared memory."""
    from synkhronos import _fuse
    from synkhronos.transports.local import LocalTransport

    spent = memory.empty((RANKS, len(PARTS)), "float64")
    spent[...] = 0

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


# The row


def measure(options):
    rounds, steps = (4, 2) if options.quick else (15, 8)
    with common.contestants(
        serial=Contestant(serial, BATCH, environment=ONE_THREAD),
        synk=Contestant(replicated),
        first=Contestant(serial, BATCH // RANKS, environment=ONE_THREAD),
        second=Contestant(serial, BATCH // RANKS, environment=ONE_THREAD),
    ) as players:

        def ideal():
            pair = players["first"], players["second"]
            for player in pair:
                player.begin(steps)
            results = [player.result() for player in pair]
            # Each makes 250 rows in its time: what counts is the rows a second of both.
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
        common.line("plain Theano, 500 rows", "ms", serial_times),
        common.line("synkhronos, 2 ranks", "ms", own, serial_times, "serial", at_least=1.9),
        common.line("ideal, 2 × 250 rows", "ms", ideal_times),
        Line(
            "ideal / synkhronos",
            "×",
            list(ideal_times / own),
            goal="≥ 0.97",
            reached=np.median(ideal_times / own) >= 0.97,
        ),
        Line("serial / ideal", "×", list(serial_times / ideal_times)),
    ]
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
    return common.Result("Lasagne's MNIST CNN, batch 500", lines, notes, {"parts": split})


def draw(figure, record):
    left, right = figure.subplots(1, 2, width_ratios=(1.2, 1))
    names = ["plain Theano, 500 rows", "ideal, 2 × 250 rows", "synkhronos, 2 ranks"]
    lines = [common.find(record, name) for name in names]
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


if __name__ == "__main__":
    main()
