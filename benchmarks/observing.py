"""observing: the cost of collecting the loss of a training step, and of profiling it.

The step of ``step_small``, on two ranks of one world, in turns: unchanged, which collects the loss in
every step; without the loss; and inside ``profile()``.
"""

import time

import common
from common import Contestant, line
from step_small import BATCH, digits, network

RANKS = 2


def main():
    common.main(__doc__, measure, draw)


def observed():
    """The step, with and without its loss and its profile."""
    import synkhronos as synk

    loss, params, x, y, rule, *values = network()
    common.fork(RANKS)
    grad_updates, param_updates, grad_shared = rule(loss, params, *values)
    gradient = synk.function([x, y], [loss], updates=grad_updates)
    update = synk.function([], updates=param_updates)
    synk.distribute()
    data = [synk.data(array) for array in digits()]

    def steps(number, subset):
        begin = time.perf_counter()
        for step in range(number):
            start = step * BATCH % (len(data[0]) - BATCH + 1)
            with synk.fuse():
                value = gradient(*data, batch=slice(start, start + BATCH), output_subset=subset)
                synk.all_reduce(grad_shared, weights=gradient)
                update()
            value.result()
        return (time.perf_counter() - begin) / number

    def turn(how, number):
        steps(1, None)
        if how == "profiled":
            with synk.profile():
                return steps(number, None)
        return steps(number, [] if how == "without" else None)

    yield turn
    synk.close()


def measure(options):
    rounds, number = (4, 2) if options.quick else (31, 4)
    with common.contestants(observed=Contestant(observed)) as players:
        times = common.take_turns(
            {
                how: lambda how=how: players["observed"](how, number)
                for how in ("without", "with", "profiled")
            },
            rounds,
            "steps",
        )
    lines = [
        line("no loss collected", "ms", times["without"]),
        line("loss collected", "ms", times["with"], times["without"], "no loss", at_most=1.01),
        line("profiled, loss collected", "ms", times["profiled"], times["with"], "loss", at_most=1.01),
    ]
    notes = [f"{number} steps a turn after one to warm up, {rounds} turns each, {RANKS} ranks"]
    return common.Result(f"Lasagne's MNIST CNN, batch {BATCH}", lines, notes)


def draw(figure, record):
    names = ["no loss", "loss", "loss, profiled"]
    colours = [common.COLOURS[name] for name in ("other", "synk", "synk light")]
    common.bars(figure.subplots(), record["lines"], names, colours, "ms a step")


if __name__ == "__main__":
    main()
