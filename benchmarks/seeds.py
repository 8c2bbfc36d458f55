"""seeds: the tables of Theano-MPI, Platoon and Synkhronos of 2017, on this machine.

Theano-MPI: networks for ImageNet that a session trains with BSP, averaging parameters after each batch.
Time to train and to exchange on 2 ranks, against plain Theano in one process, and against two processes
apart. The networks have fewer pixels and filters, and smaller batches, so that cores train them.

Platoon: an LSTM for reviews with EASGD every 10 minibatches. As many ranks as there are cores are
measured; for more, the speed-up is computed from the share of time that two ranks exchange.

Synkhronos: Lasagne's MNIST CNN with a function, with and without the loss and the all-reduce of the
parameters after each minibatch, and as one command.

Every process has one thread, as every process there has one GPU, and Theano's own operations.
"""

import argparse
import multiprocessing
import os
import time

import common
import seed_models
from common import COLOURS, ONE_THREAD, Contestant, Line
from seed_models import LSTM_BATCH, NETWORKS

import numpy as np

RANKS = 2
IMAGES = 5120  # the table of Theano-MPI has seconds for so many
#: Seconds of Platoon's LSTM: plain Theano, and by the number of ranks
PLATOON = {0: 870, 1: 912, 2: 477, 3: 329, 4: 254}
#: Seconds of an epoch of MNIST's CNN in 2017, by what the ranks do
MNIST = {"plain": 0.72, "neither": 0.46, "no loss": 0.53, "both": 0.66}
MNIST_BATCH, MNIST_BATCHES, MNIST_ROWS = 500, 100, 5000  # of an epoch; rows that are used here
PERIOD, ALPHA = 10, 0.5  # of EASGD
BSP_GOAL, EASGD_GOAL, ONE_GOAL = 0.97, 0.99, 1.02
ALIKE = {**ONE_THREAD, "SYNKHRONOS_KERNELS": "theano", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def main():
    common.main(__doc__, measure, draw, add_options)


def add_options(parser):
    parser.add_argument(
        "--networks", nargs="*", choices=list(NETWORKS), default=list(NETWORKS), metavar="NAME",
        help=f"of Theano-MPI's table; default: {' '.join(NETWORKS)}",
    )  # fmt: skip


# Contestants


def trained(make, *arguments, sizes=(1, RANKS)):
    """Compile a model, and fork the processes that train it: alone, and in worlds of `sizes` ranks.

    A turn is of a world, by its size; of ``"plain"``, which is one process; of ``"apart"``, which are
    processes that know nothing of each other; or of ``"waiting"``, which are these with a barrier after
    each step, and without an exchange.
    """
    seed_models.keep(getattr(seed_models, make)(*arguments))
    barrier = multiprocessing.get_context("fork").Barrier(RANKS)
    made = {f"alone {number}": Contestant(alone, barrier, method="fork") for number in range(RANKS)}
    made.update({str(size): Contestant(ranks, size, method="fork") for size in sizes})
    with common.contestants(**made) as players:

        def turn(who, steps, rule):
            apart = [f"alone {number}" for number in range(RANKS)]
            names = {"plain": ["alone 0"], "apart": apart, "waiting": apart}
            asked = [players[name] for name in names.get(who, [who])]
            for player in asked:
                player.begin(steps, "waiting" if who == "waiting" else rule)
            results = [player.result() for player in asked]
            # Each takes its time for a step: what counts is the steps per second of all.
            rate = sum(1 / result["step"] for result in results)
            return {**results[0], "step": len(results) / rate}

        yield turn


def alone(barrier):
    """Plain Theano: iterations in a loop, without a world and without a recorder."""

    def turn(steps, rule):
        model = seed_models.kept({"batches": 1 + steps})
        model.train_iter(0)
        begin = time.perf_counter()
        for number in range(steps):
            model.train_iter(number)
            if rule == "waiting":
                barrier.wait()
        return {"step": (time.perf_counter() - begin) / steps}

    yield turn


def ranks(size):
    """A session of so many ranks; its record has the times."""
    import synkhronos as synk
    from synkhronos.extensions import rules
    from synkhronos.extensions.session import Recorder, Session

    made = {"BSP": "BSP", "EASGD": rules.EASGD(ALPHA, PERIOD)}
    common.fork(size)

    def turn(steps, rule):
        session = Session(
            "seed_models:kept",
            made[rule],
            recorder=Recorder(print_every=0),
            config={"batches": 1 + steps},
            progress=False,
        )
        record = session.run()
        step = max(one[-1] - one[0] for one in record.seconds) / steps  # the first is to warm up
        parts = {
            name: float(np.mean([sum(of_rank[1:]) / steps for of_rank in record.times[name]]))
            for name in ("exchange", "wait")
        }
        return {"step": step, **parts}

    yield turn
    synk.close()


def mnist_alone():
    """Plain Theano with the demo's CNN and Nesterov momentum, which returns the loss."""
    import theano

    model, updates = _cnn()
    function = theano.function([model.x, model.y], model.losses.mean(), updates=updates)
    arrays = digits()
    yield lambda what, steps: _seconds(lambda rows: function(*[one[rows] for one in arrays]), steps)


def mnist_ranks():
    """The same on two ranks, by calls as in 2017, and by one command for a step."""
    import synkhronos as synk
    from synkhronos.extensions import train

    common.fork(RANKS)
    model, updates = _cnn()
    inputs, loss = [model.x, model.y], model.losses.mean()
    silent, told = synk.function(inputs, updates=updates), synk.function(inputs, loss, updates=updates)
    command = train.parallel_function(inputs, loss, updates=updates)
    synk.distribute()
    data = [synk.data(array) for array in digits()]

    def reducing(function):
        def step(rows):
            function(*data, batch=rows)
            synk.all_reduce(model.params)

        return step

    ways = {
        "neither": lambda rows: silent(*data, batch=rows),
        "no loss": reducing(silent),
        "both": reducing(told),
        "command": lambda rows: command(*data, batch=rows),
    }
    yield lambda what, steps: _seconds(ways[what], steps)
    synk.close()


def _cnn():
    demo = common.load_demo("lasagne_mnist", "network")
    model = demo.build_model(argparse.Namespace(seed=1, model="cnn", no_dropout=False))
    rule = demo.lasagne.updates.nesterov_momentum
    return model, rule(model.losses.mean(), model.params, 0.01, 0.9)


def digits():
    """Return images and labels; what they show does not matter for speed."""
    random = np.random.RandomState(0)
    images = random.rand(MNIST_ROWS, 1, 28, 28).astype("float32")
    return images, random.randint(0, 10, MNIST_ROWS).astype("int32")


def _seconds(step, steps):
    """Return the seconds of a step."""
    starts = range(0, MNIST_ROWS, MNIST_BATCH)
    step(slice(0, MNIST_BATCH))
    begin = time.perf_counter()
    for number in range(steps):
        start = starts[number % len(starts)]
        step(slice(start, start + MNIST_BATCH))
    return {"step": (time.perf_counter() - begin) / steps}


# Measuring


def measure(options):
    rounds = 2 if options.quick else 7
    lines, extra = [], {}
    for name in options.networks:
        steps = 2 if options.quick else 6
        _measure_network(name, rounds, steps, lines, extra.setdefault("networks", {}))
    _measure_lstm(rounds, PERIOD * (1 if options.quick else 2), lines, extra.setdefault("lstm", {}))
    _measure_mnist(rounds, 2 if options.quick else 6, lines, extra.setdefault("mnist", {}))
    return common.Result("the tables of the systems before this one", lines, _notes(), extra)


def _turns(players, whos, rounds, arguments, title):
    """Let contestants of one process take turns; return their times, by name and by kind."""
    one = players["one"]
    turns = {who: lambda who=who: one(who, *arguments) for who in whos}
    results = common.take_turns(turns, rounds, title)
    return {
        who: {key: np.array([turn[key] for turn in of_who]) for key in of_who[0]}
        for who, of_who in results.items()
    }


def _measure_network(name, rounds, steps, lines, pairs):
    there = NETWORKS[name]
    with common.contestants(one=Contestant(trained, "network", name, environment=ALIKE)) as players:
        found = _turns(players, ("plain", "apart", "waiting", "1", "2"), rounds, (steps, "BSP"), name)
    one_gpu, train, exchange = there.seconds or (None,) * 3
    one_process, one_rank = (found[who]["step"] * IMAGES / there.batch for who in ("plain", "1"))
    in_all = IMAGES / there.batch / RANKS  # steps of both ranks, for all images
    apart, two = (found[who]["step"] * in_all for who in ("apart", "2"))
    barrier = found["waiting"]["step"] * in_all
    waiting = found["2"]["wait"] * in_all
    exchanged = found["2"]["exchange"] * in_all + waiting
    published = one_gpu and one_gpu / (train + exchange)
    speed_up = _line(f"{name}: plain / 2 ranks", one_process / two, published, "×")
    lines += [
        _line(f"{name}: plain Theano", one_process, one_gpu, "s"),
        common.line(f"{name}: 1 rank", "s", one_rank, one_process, "plain", at_most=ONE_GOAL),
        _line(f"{name}: 2 ranks, to train", two - exchanged, train, "s"),
        _line(f"{name}: 2 ranks, to exchange", exchanged, exchange, "s"),
        Line(f"{name}: 2 ranks, of this waiting", "s", list(waiting)),
        common.line(f"{name}: two processes apart", "s", apart),
        _compared(f"{name}: apart / 2 ranks", apart, two, BSP_GOAL),
        Line(f"{name}: apart / apart with a barrier", "×", list(apart / barrier)),
        speed_up,
    ]
    pairs[name] = speed_up.median, published


def _measure_lstm(rounds, steps, lines, pairs):
    cores = len(os.sched_getaffinity(0))
    sizes = [size for size in PLATOON if 0 < size <= max(cores, RANKS)]
    one = Contestant(_trained_lstm, sizes, environment=ALIKE)
    with common.contestants(one=one) as players:
        whos = ("plain", "apart", *map(str, sizes))
        found = _turns(players, whos, rounds, (steps, "EASGD"), "LSTM")
    plain, apart = found["plain"]["step"], found["apart"]["step"]
    share = found["2"]["exchange"] / found["2"]["step"]
    lines += [
        common.line("LSTM: plain Theano, a minibatch", "ms", plain),
        common.line("LSTM: EASGD, 1 rank", "ms", found["1"]["step"], plain, "plain", at_most=ONE_GOAL),
        common.line("LSTM: EASGD, 2 ranks, each", "ms", found["2"]["step"]),
        common.line("LSTM: two processes apart, each", "ms", apart),
        Line("LSTM: EASGD, 2 ranks, exchange", "%", list(100 * share)),
        _compared("LSTM: apart / EASGD, 2 ranks", apart, found["2"]["step"], EASGD_GOAL),
    ]
    for size, seconds in list(PLATOON.items())[1:]:
        published = PLATOON[0] / seconds
        if size in sizes:
            name, speed_up = "plain / EASGD", size * plain / found[str(size)]["step"]
        else:
            name, speed_up = "computed from the exchange", size * (1 - share)
        line = _line(f"LSTM: {name}, {size} rank{'s' if size > 1 else ''}", speed_up, published, "×")
        lines.append(line)
        pairs[f"{size}" if size in sizes else f"{size}, computed"] = line.median, published


def _trained_lstm(sizes):
    yield from trained("lstm", sizes=sizes)


def _measure_mnist(rounds, steps, lines, pairs):
    with common.contestants(
        plain=Contestant(mnist_alone, environment=ALIKE), two=Contestant(mnist_ranks, environment=ALIKE)
    ) as players:
        turns = {"plain": lambda: players["plain"]("plain", steps)}
        for what in (*list(MNIST)[1:], "command"):
            turns[what] = lambda what=what: players["two"](what, steps)
        results = common.take_turns(turns, rounds, "MNIST")
    epochs = {
        what: MNIST_BATCHES * np.array([turn["step"] for turn in of_what])
        for what, of_what in results.items()
    }
    names = {
        "neither": "2 ranks, no loss, no all-reduce",
        "no loss": "2 ranks, no loss",
        "both": "2 ranks, loss and all-reduce",
        "command": "2 ranks, all in one command",
    }
    lines.append(_line("MNIST: plain Theano, an epoch", epochs["plain"], MNIST["plain"], "s"))
    for what, name in names.items():
        published = MNIST["plain"] / MNIST[what] if what in MNIST else None
        lines.append(_line(f"MNIST: {name}", epochs[what], MNIST.get(what), "s"))
        lines.append(_line(f"MNIST: plain / {name}", epochs["plain"] / epochs[what], published, "×"))
        pairs[name.replace("2 ranks, ", "")] = lines[-1].median, published


def _line(what, samples, published, unit):
    """Return a line with the published figure beside its name."""
    beside = "" if published is None else f" (published: {common.number(published)} {unit})"
    return Line(what + beside, unit, list(samples))


def _compared(what, ideal, seconds, goal):
    """Return a line of the speed relative to the ideal."""
    line = Line(what, "×", list(ideal / seconds), goal=f"≥ {goal:g}")
    line.reached = line.median >= goal
    return line


def _notes():
    networks = "; ".join(
        f"{name}: {one.batch} images of {one.pixels} × {one.pixels} pixels, {one.width:g} of the filters"
        + (f" ({one.there} there)" if one.there else " (not in the table there)")
        for name, one in NETWORKS.items()
    )
    return [
        f"Theano-MPI: seconds for {IMAGES} images, as in its table, of networks that are scaled to fit "
        f"cores: a step of a rank has {networks}. The published figures are of GPUs of Tesla K80s",
        "to train: everything but the exchange; the exchange includes the wait for the other rank; with "
        "a barrier: the processes apart wait for each other after each step, and exchange nothing",
        f"Platoon: the LSTM for reviews with 128 cells, {LSTM_BATCH} reviews of {seed_models.LENGTH} "
        f"words in a minibatch, by Adam; EASGD with alpha {ALPHA:g}, every {PERIOD} minibatches. The "
        f"speed-up is that of a number of minibatches in all. If there are fewer cores than ranks, it "
        "is computed: the ranks times the share of time that 2 ranks do not exchange. Published: GPUs "
        "of 2 K80s",
        f"Synkhronos: an epoch of {MNIST_BATCHES} minibatches of {MNIST_BATCH} rows, computed from some "
        f"of them; published: 2 GTX 1080",
        "every process has one thread, malloc that keeps memory, and Theano's own operations; the data "
        "is noise, and the same minibatch each time for the networks and the LSTM",
    ]


# The picture


def draw(figure, record):
    figure.set_size_inches(13, 4.2)
    titles = {
        "networks": "Theano-MPI's networks: 2 ranks / plain",
        "lstm": "Platoon's LSTM, EASGD: ranks",
        "mnist": "Synkhronos' MNIST: 2 ranks / plain",
    }
    for axes, (key, title) in zip(figure.subplots(1, len(titles)), titles.items()):
        _draw_pairs(axes, record["extra"][key])
        axes.set_title(title)
    axes.legend(loc="lower right", fontsize=8)


def _draw_pairs(axes, pairs):
    """Draw a bar for each speed-up here, and one for that published."""
    places = np.arange(len(pairs))[::-1]
    for column, shift, label, colour in (
        (0, 0.2, "here", COLOURS["synk"]),
        (1, -0.2, "published, GPUs", COLOURS["other light"]),
    ):
        values = [one[column] or 0 for one in pairs.values()]
        axes.barh(places + shift, values, 0.36, color=colour, label=label)
        for place, value in zip(places, values):
            if value:
                at = value, place + shift
                common.write(axes, f"{value:.2f}", at, (4, 0), va="center", fontsize=8)
    axes.set_yticks(places, list(pairs))
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, 1.2 * max(value for one in pairs.values() for value in one if value))
    axes.set_xlabel("speed-up")


if __name__ == "__main__":
    main()
