"""rules: training rules: how fast they learn, what they cost, and a rank that is ten times slower.

Learning: Lasagne's MNIST CNN on scikit-learn's digits, two ranks, validated after each epoch. Cost: the
part of the time outside of steps, in the same training. A slow rank: steps of four ranks, one of them
ten times slower, in a window of time, against the three fast ranks alone. There a step of a fast rank
takes 60 ms. It sleeps most of this time, so that four ranks do not compete for two cores. The row
``rules_resnet`` has learning and cost for a residual network.
"""

import argparse
import os
import time

import common
from common import COLOURS, ONE_THREAD, Contestant, Line

import numpy as np

RANKS = 2
BATCH, EPOCHS = 25, 8  # rows of a rank; of the curves
LEARNING_RATE, MOMENTUM = 0.02, 0.9
PLAIN_RATE = 0.1  # without momentum
ADDED_UP = ("Downpour", "ASGD", "SSP")  # the changes of all ranks are added up: without momentum

# One of four ranks is slower.
PACE, FACTOR, PACED_BATCH = 0.06, 10, 4  # seconds of a fast rank's step; rows of a step
GOAL, FREE = 0.9, ("EASGD", "Downpour", "ASGD", "GoSGD")  # rules in which nobody waits

# The parts of the time that the systems of 2016 and 2017 report for exchanges.
PUBLISHED = {
    "Platoon, EASGD, period 10: LSTM, 1 GPU of a K80": 1 - 870 / 912,
    "Theano-MPI, BSP: AlexNet, 2 GPUs of K80s": 0.78 / (10.35 + 0.78),
    "Theano-MPI, BSP: GoogLeNet, 2 GPUs of K80s": 1.00 / (31.40 + 1.00),
    "Theano-MPI, BSP: ResNet-50, 2 GPUs of K80s": 0.81 / (80.09 + 0.81),
}


def main():
    common.main(__doc__, measure, draw)


def rule_named(name):
    """Return the rule that is measured under this name."""
    from synkhronos.extensions import rules

    return {
        "alone": rules.Rule,
        "BSP": rules.BSP,
        "LocalSGD": lambda: rules.LocalSGD(period=10),
        "DiLoCo": lambda: rules.DiLoCo(period=10, outer_momentum=0.5),
        "EASGD": lambda: rules.EASGD(alpha=0.5, period=10),
        "Downpour": lambda: rules.Downpour(push_period=5, pull_period=5),
        "ASGD": rules.ASGD,
        "SSP": lambda: rules.SSP(staleness=3),
        "GoSGD": lambda: rules.GoSGD(probability=0.1),
    }[name]()


NAMES = ("BSP", "LocalSGD", "DiLoCo", "EASGD", "Downpour", "ASGD", "SSP", "GoSGD")


# The network


def cnn():
    """Return the parts by name: the CNN of the MNIST demo, without dropout, and the digits."""
    demo = common.load_demo("lasagne_mnist", "network")
    model = demo.build_model(argparse.Namespace(seed=1, model="cnn", no_dropout=True))
    return {
        "loss": model.losses.mean(),
        "params": model.params,
        "inputs": [model.x, model.y],
        "measured": {"loss": model.valid_loss, "accuracy": model.accuracy},
        "data": digits(),
        "rates": (LEARNING_RATE, PLAIN_RATE),
    }


def digits():
    """Return scikit-learn's digits in three parts."""
    return common.load_demo("lasagne_mnist", "mnist").load_digits("sklearn").parts


# Contestants


def world(ranks, network):
    """Ranks that train the network by any rule, always from the same start."""
    import synkhronos as synk
    from synkhronos.extensions import rules, updates

    common.fork(ranks)
    parts = network()
    params = parts["params"]

    def step(update, **hyper):
        return rules.make_step(parts["loss"], params, parts["inputs"], update, **hyper)

    rate, plain_rate = parts["rates"]
    with_momentum = step(updates.nesterov_momentum, learning_rate=rate, momentum=MOMENTUM)
    steps = {"momentum": with_momentum, "plain": step(updates.sgd, learning_rate=plain_rate)}
    measured = synk.function(parts["inputs"], parts["measured"])
    synk.distribute()
    data = {name: [synk.data(one) for one in arrays] for name, arrays in parts["data"].items()}
    shareds = {one for step in steps.values() for one in step.update.get_shared()}
    start = [(shared, shared.get_value()) for shared in shareds]

    def arguments(name):
        for shared, value in start:
            synk.broadcast(shared, value)
        return steps["plain" if name in ADDED_UP else "momentum"], params, data["train"]

    def learn(name, seed):
        """Return the validations of a training: seconds, rows of all ranks, losses, accuracies."""
        record = rules.train(
            *arguments(name), rule_named(name), BATCH, EPOCHS,
            validate=(measured, data["valid"]), seed=seed, progress=False,
        )  # fmt: skip
        found = {
            "seconds": [one["seconds"] for one in record.validations],
            "rows": [ranks * one["samples"] for one in record.validations],
            "loss": [one["loss"] for one in record.validations],
        }
        return {**found, "accuracy": float(measured(*data["test"])["accuracy"])}

    def window(name, seconds, batch, paces):
        """Return the steps of all ranks in a window of time, and the part of it outside of steps."""
        by_rank = synk.spmd(steps_for, *arguments(name), rule_named(name), seconds, batch, paces)
        return {
            "steps": [steps for steps, _ in by_rank],
            "share": float(np.mean([share for _, share in by_rank])),
        }

    yield lambda what, *given: {"learn": learn, "window": window}[what](*given)
    synk.close()


def steps_for(rank, step, params, data, rule, seconds, batch, paces):
    """Take steps for a while. Return their number, and the part of the time outside of them.

    A step of a rank takes at least its pace: the rank sleeps until then.
    """
    rule.seed = 1
    rule.prepare(step)
    rank.in_step = rule.is_synchronous
    rule.start(rank, params)
    rank.barrier()
    begin, number, exchanging, within = time.perf_counter(), 0, 0.0, 0
    for rows in rank.minibatches(len(data[0]), batch, epochs=1_000_000, seed=1):
        start = time.perf_counter()
        rule.take_step(rank, step, data, rows)
        rest = paces[rank.rank] - (time.perf_counter() - start)
        if rest > 0:
            time.sleep(rest)
        computed, number = time.perf_counter(), number + 1
        rule.after_step(rank, params, number)
        rank.clock = number
        end = time.perf_counter()
        if end - begin > seconds:
            rank.stop()
        else:
            exchanging, within = exchanging + end - computed, number
    rank.clock = 1 << 40  # nobody waits for this rank any more
    rule.finish(rank, params)
    return within, exchanging / seconds


# The row


def measure(options):
    rounds = 1 if options.quick else 3
    lines, extra = [], {}
    cost_in = {"environment": ONE_THREAD}
    with common.contestants(
        one=Contestant(world, 1, cnn, **cost_in), two=Contestant(world, RANKS, cnn, **cost_in)
    ) as players:
        extra["curves"] = measure_learning(players["two"], min(rounds, 2), lines)
        measure_cost("CNN", players, 1.0 if options.quick else 3.0, rounds, lines)
    with common.contestants(
        three=Contestant(world, 3, cnn, **cost_in), four=Contestant(world, 4, cnn, **cost_in)
    ) as players:
        _slow_rank(players, 1.5 if options.quick else 6.0, rounds, lines)
    notes = [
        *notes_on_training(LEARNING_RATE, PLAIN_RATE),
        f"four ranks on {len(os.sched_getaffinity(0))} cores: a fast rank takes {1e3 * PACE:g} ms for a "
        f"step, the slow one {1e3 * PACE * FACTOR:g} ms; it computes the gradient of the CNN for "
        f"{PACED_BATCH} rows, and sleeps for the rest",
        "published figures of GPUs, from the READMEs: "
        + "; ".join(f"{what} {share:.1%}" for what, share in PUBLISHED.items())
        + "; other networks, and for Platoon the whole overhead of its framework",
    ]
    return common.Result("training rules", lines, notes, extra)


def notes_on_training(rate, plain_rate):
    return [
        f"learning: {EPOCHS} epochs on 1259 digits, 2 ranks, {BATCH} rows of each in a step; "
        f"learning rate {rate}, Nesterov momentum {MOMENTUM}; {', '.join(ADDED_UP)}: plain "
        f"gradient descent, {plain_rate}",
        "periods: LocalSGD, DiLoCo, EASGD 10, Downpour 5; DiLoCo outer momentum 0.5, EASGD alpha 0.5, "
        "SSP staleness 3, GoSGD probability 0.1",
        "outside of steps: exchanges, and waiting in them for other ranks, in the mean over the ranks; "
        "for BSP the update is part of it",
    ]


def measure_learning(player, rounds, lines):
    """Train by each rule; add the accuracies to the lines, and return the curves by rule."""
    turns = common.take_turns(
        {name: lambda name=name: player("learn", name, 1) for name in NAMES}, rounds, "learning"
    )
    for name in NAMES:
        accuracies = [100 * one["accuracy"] for one in turns[name]]
        lines.append(Line(f"learning: {name}, test accuracy", "%", accuracies))
    return {name: turns[name] for name in NAMES}


def measure_cost(what, players, seconds, rounds, lines):
    """Add lines of the time outside of steps, and of the speed against ranks that exchange nothing."""
    two = players["two"]
    turns = {
        name: lambda name=name: two("window", name, seconds, BATCH, [0.0] * RANKS)
        for name in ("alone", *NAMES)
    }
    if "one" in players:
        turns["one"] = lambda: players["one"]("window", "alone", seconds, BATCH, [0.0])
    results = common.take_turns(turns, rounds, f"cost, {what}")
    steps = {name: np.array([sum(one["steps"]) for one in results[name]]) for name in results}
    for name in NAMES:
        shares = [100 * one["share"] for one in results[name]]
        lines.append(Line(f"{what}: {name}, outside of steps", "%", shares))
    for name in NAMES:
        speed = Line(f"{what}: {name}, steps", "/s", list(steps[name] / seconds))
        speed.ratios, speed.of = list(steps[name] / steps["alone"]), "no exchange"
        lines.append(speed)
    if "one" in players:
        lines.append(Line(f"{what}: EASGD, 2 ranks / 1 rank", "×", list(steps["EASGD"] / steps["one"])))


def _slow_rank(players, seconds, rounds, lines):
    """Add lines of the steps of four ranks, one of them slow."""
    slow, equal = [PACE] * 3 + [FACTOR * PACE], [PACE] * 4
    turns = {}
    for name in NAMES:
        for case, player, paces in (
            ("slow", players["four"], slow),
            ("equal", players["four"], equal),
            ("three", players["three"], equal[:3]),
        ):
            turns[name, case] = lambda name=name, player=player, paces=paces: player(
                "window", name, seconds, PACED_BATCH, paces
            )
    results = common.take_turns(turns, rounds, "a slow rank")
    for name in NAMES:
        steps = {
            case: np.array([sum(one["steps"]) for one in results[name, case]], float)
            for case in ("slow", "equal", "three")
        }
        line = Line(f"slow rank: {name}, steps", "/s", list(steps["slow"] / seconds))
        line.ratios, line.of = list(steps["slow"] / steps["three"]), "three fast alone"
        if name in FREE:
            line.goal, line.reached = f"≥ {GOAL:g}", line.ratio >= GOAL
        lines.append(line)
        lines.append(
            Line(f"slow rank: {name}, of four equal ranks", "×", list(steps["slow"] / steps["equal"]))
        )


# The picture


def draw(figure, record):
    figure.set_size_inches(10, 8.4)
    (by_time, by_rows), (cost, slow) = figure.subplots(2, 2)
    draw_learning(by_time, by_rows, record)
    draw_cost(cost, record, "CNN", PUBLISHED)
    _draw_slow_rank(slow, record)


def draw_learning(by_time, by_rows, record):
    """Draw the curves of each rule, of the round of middle length, on two axes."""
    styles = dict(zip(NAMES, STYLES))
    for axis, across in ((by_time, "seconds"), (by_rows, "rows")):
        for name, turns in record["extra"]["curves"].items():
            middle = sorted(turns, key=lambda one: one["seconds"][-1])[len(turns) // 2]
            axis.semilogy(middle[across], middle["loss"], label=name, **styles[name])
        axis.set_xlabel("seconds" if across == "seconds" else "rows used by all ranks")
        axis.grid(color="#e3e3e3")
    by_time.set_ylabel("loss on the validation digits")
    by_time.set_title("Learning: against time")
    by_rows.set_title("... and against rows")
    by_rows.legend(fontsize=8, ncols=2)


STYLES = [
    {"color": colour, "linestyle": line, "linewidth": 1.5}
    for colour, line in (
        ("#333333", "-"), ("#8a8f98", "-"), ("#8a8f98", "--"), ("#1f6fb4", "-"),
        ("#2e8b57", "-"), ("#2e8b57", "--"), ("#d9822b", "-"), ("#c0392b", "-"),
    )
]  # fmt: skip


def draw_cost(axis, record, what, published):
    """Draw the parts of the time outside of steps, with published ones below them."""
    bars = []  # label, per cent, colour
    for name in NAMES:
        share = common.find(record, f"{what}: {name}, outside of steps")["median"]
        bars.append((name, share, COLOURS["synk"]))
    for source, share in published.items():
        bars.append((source.replace(": ", ":\n"), 100 * share, COLOURS["other light"]))
    places = range(len(bars))[::-1]
    axis.barh(places, [one[1] for one in bars], color=[one[2] for one in bars], height=0.66)
    for place, (_, value, _) in zip(places, bars):
        common.write(axis, f"{value:.1f}%", (value, place), (4, 0), va="center", fontsize=8)
    axis.set_yticks(list(places), [one[0] for one in bars], fontsize=7)
    axis.tick_params(axis="y", length=0)
    axis.set_xlim(0, 1.2 * max(one[1] for one in bars))
    grey = " (grey: published, other machines)" if published else ""
    axis.set_xlabel(f"% of the time outside of steps{grey}")
    axis.set_title("Cost of the exchanges, 2 ranks")


def _draw_slow_rank(axis, record):
    lines = [common.find(record, f"slow rank: {name}, steps") for name in NAMES]
    ratios = [one["ratio"] for one in lines]
    places = range(len(NAMES))[::-1]
    colours = [COLOURS["other"] if name not in FREE else COLOURS["synk"] for name in NAMES]
    axis.barh(places, ratios, color=colours, height=0.62)
    for place, ratio in zip(places, ratios):
        common.write(axis, f"{ratio:.2f}", (ratio, place), (4, 0), va="center", fontweight="bold")
    axis.axvline(GOAL, linestyle="--", color=COLOURS["goal"])
    common.write(
        axis,
        f"goal {GOAL:g}",
        (GOAL, len(NAMES) - 0.55),
        (-3, 0),
        ha="right",
        fontsize=8,
        color=COLOURS["goal"],
    )
    axis.set_yticks(list(places), NAMES)
    axis.tick_params(axis="y", length=0)
    axis.set_xlim(0, 1.25 * max(1, *ratios))
    axis.set_xlabel("steps per second, against the three fast ranks alone")
    axis.set_title("One of four ranks is ten times slower")


if __name__ == "__main__":
    main()
