"""replicate: distribute() of ResNet-50's three functions, to one worker and to three.

Early, as in scripts: the workers are forked and inherit the functions. Late: workers that are already
running get the functions pickled. Both are compared with one ``pickle.loads`` of the same functions, as
Theano pickles them, in one process. Every turn starts with processes that have not loaded the functions'
C modules, except for the early ones, whose master has just compiled them.
"""

import argparse
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import common
from common import COLOURS, Contestant, Line

import numpy as np

RECURSION, STACK = 100_000, 512 << 20  # to pickle a deep graph
WORKERS = (1, 3)


def main():
    common.main(__doc__, measure, draw)


# The functions


def build(options):
    """Build, and return, the gradient, the update and the evaluation of a residual network."""
    import synkhronos as synk
    from synkhronos.extensions import train, updates

    demo = common.load_demo("resnet", "network")
    model = demo.build_model(options)

    def rule(loss, params, *arguments):
        gradient, *rest = updates.nesterov_momentum(loss, params, *arguments)
        return [*gradient, *model.average_updates], *rest

    step = train.make_train_function(model.loss, model.params, model.x, model.y, rule, 0.01, 0.9)
    return step, synk.function([model.x, model.y], [model.valid_loss, model.accuracy])


def network(quick):
    """Return the options of ResNet-50, or of a network a tenth as deep, for a quick run."""
    blocks = [1, 1] if quick else [3, 4, 6, 3]
    size = 32 if quick else 224
    return argparse.Namespace(
        seed=1, size=size, classes=1000, blocks=blocks, width=64, sync_batch_norm=False
    )


# Contestants


def early(options, folder):
    """Builds the functions once, and distributes them to new workers repeatedly."""
    import synkhronos as synk

    common.fork(2)
    start = time.perf_counter()
    made = build(options)  # what is dropped is not replicated
    built = time.perf_counter() - start
    state = synk.world.world.current_world().rank_state
    functions, shareds = list(state.functions.values()), dict(state.shareds)
    sizes = _write_pickles(state.engine, functions, shareds, Path(folder))
    synk.close()
    adopted = [made]

    def turn(workers):
        if not workers:
            return {"built": built, **sizes}
        common.fork(1 + workers)
        adopted[:] = _adopt(functions, shareds)
        seconds = _seconds(synk.distribute)
        synk.close()
        return seconds

    yield turn


def late(workers, folder):
    """In a new process: start workers, then load the functions and distribute them."""
    import synkhronos as synk
    import theano
    import theano.tensor as tt

    def turn():
        common.fork(1 + workers)
        x = tt.fvector("x")
        first = synk.function([x], (x.sum(), "sum"))
        synk.distribute()
        rows = np.ones(1 + workers, "float32")
        first(rows)
        # As if they had been built here: the C modules are loaded, and nothing is replicated.
        world = synk.world.world.current_world()
        functions, shareds = world.rank_state.engine.loads((Path(folder) / "ours").read_bytes(), {})
        adopted = _adopt(functions, shareds)
        times = [_seconds(synk.distribute)]
        for number in range(5):
            factor = theano.shared(np.float32(number))
            adopted.append(synk.function([x], ((x * factor).sum(), "sum")))
            times.append(_seconds(synk.distribute))
        if first(rows) != 1 + workers:
            raise RuntimeError(f"expected {1 + workers}, got {first(rows)}")
        synk.close()
        return times

    yield turn


def unpickled(folder):
    """In a new process: load the functions with ``pickle.loads`` only."""
    import pickle

    import synkhronos  # noqa: F401
    import theano
    import theano.tensor as tt

    x = tt.fvector("x")
    theano.function([x], x.sum())  # Theano has read its cache, as the workers' has
    payload = (Path(folder) / "plain").read_bytes()
    yield lambda: _with_deep_stack(lambda: _seconds(lambda: pickle.loads(payload)))


def _adopt(functions, shareds):
    """Register functions in this world as if they had just been built in it, and return them."""
    from synkhronos.world.world import current_world

    registry = current_world().registry
    numbers = {number: registry.add_shared(shared) for number, shared in shareds.items()}
    adopted = []
    for replica in functions:
        sliceable = [numbers[number] for number in replica.sliceable]
        updates = [(numbers[number], op) for number, op in replica.updates]
        number = registry.new_number()
        replica = replica._replace(number=number, sliceable=sliceable, updates=updates)
        adopted.append(_Adopted(replica))
        registry.add_function(adopted[-1])
    return adopted


class _Adopted:
    """What the registry needs of a function."""

    def __init__(self, replica):
        self.replica = replica


def _write_pickles(engine, functions, shareds, folder):
    """Write them as the library pickles them, and as Theano alone does."""
    import pickle

    start = time.perf_counter()
    ours = bytes(engine.dumps((functions, shareds), {}))
    seconds = time.perf_counter() - start
    compiled = [function.compiled for function in functions]
    plain = _with_deep_stack(lambda: pickle.dumps(compiled, pickle.HIGHEST_PROTOCOL))
    (folder / "ours").write_bytes(ours)
    (folder / "plain").write_bytes(plain)
    return {"ours": len(ours), "plain": len(plain), "pickled": seconds}


def _with_deep_stack(work):
    """Return ``work()``: deep graphs need deep recursion."""
    outcome = []
    sys.setrecursionlimit(RECURSION)
    threading.stack_size(STACK)
    thread = threading.Thread(target=lambda: outcome.append(work()))
    thread.start()
    thread.join()
    threading.stack_size(0)
    if not outcome:
        raise RuntimeError("that failed in a thread; see above")
    return outcome[0]


def _seconds(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _fresh(prepare, *arguments):
    """Return the value that a contestant returns in its only turn."""
    contestant = Contestant(prepare, *arguments, environment=common.ONE_THREAD)
    try:
        contestant.start()
        return contestant()
    finally:
        contestant.close()


# The row


def measure(options):
    rounds = 2 if options.quick else 5
    with tempfile.TemporaryDirectory() as folder:
        made = Contestant(early, network(options.quick), folder, environment=common.ONE_THREAD)
        with common.contestants(early=made) as players:
            about = players["early"](0)
            turns = {"unpickled": lambda: _fresh(unpickled, folder)}
            for workers in WORKERS:
                turns["early", workers] = lambda workers=workers: players["early"](workers)
                turns["late", workers] = lambda workers=workers: _fresh(late, workers, folder)
            times = common.take_turns(turns, rounds, "replicate")
    loads = np.array(times["unpickled"])
    lines = [common.line("pickle.loads in one process", "s", loads)]
    for workers in WORKERS:
        seconds = np.array(times["early", workers])
        lines.append(
            Line(
                f"early, {_count(workers)}",
                "s",
                list(seconds),
                goal="≤ 0.5 s",
                reached=np.median(seconds) <= 0.5,
            )
        )
    for workers in WORKERS:
        seconds = np.array(times["late", workers])[:, 0]
        made = common.line(f"late, {_count(workers)}", "s", seconds, loads, "loads", at_most=1.5)
        cores = len(os.sched_getaffinity(0))
        if workers > cores:  # they queue for the cores
            made.goal, made.reached = f"≤ 1.5 on {workers} cores", True if made.reached else None
        lines.append(made)
    again = 1e3 * np.concatenate(
        [np.array(times["late", workers])[:, 1:].ravel() for workers in WORKERS]
    )
    lines.append(
        Line(
            "a small function, later", "ms", list(again), goal="≤ 50 ms", reached=np.median(again) <= 50
        )
    )
    what = "two blocks, 32 x 32 pixels: a quick run" if options.quick else "ResNet-50, 224 x 224 pixels"
    notes = [
        f"the gradient, the update and the evaluation of {what}: built in {about['built']:.0f} s, "
        f"pickled in {about['pickled']:.2f} s; {about['ours'] / 1e6:.0f} MB pickled, by Theano alone "
        f"{about['plain'] / 1e6:.0f} MB",
        f"{rounds} turns each. Early: fork() to the end of distribute(), which forks the workers. Late: "
        "workers of a new process that know nothing of the functions; pickling is part of it",
        "the processes on both sides take the compiled C modules from Theano's cache",
        "a small function, later: one sum with one new shared variable, to 1 and to 3 workers",
    ]
    return common.Result(f"distribute() of three functions, {what}", lines, notes)


def _count(workers):
    return f"{workers} worker" + "s" * (workers > 1)


def draw(figure, record):
    axes = figure.subplots()
    lines = record["lines"][:-1]
    early_lines = [one for one in lines if one["what"].startswith("early")]
    labels = ["pickle.loads,\none process", *(one["what"].replace(", ", ",\n") for one in lines[1:])]
    colours = [
        COLOURS["other"],
        *[COLOURS["synk"]] * len(WORKERS),
        *[COLOURS["synk light"]] * len(WORKERS),
    ]
    common.bars(axes, lines, labels, colours, "s")
    for place, one in enumerate(lines[::-1]):
        if one in early_lines:
            common.mark_goal(axes, 0.5, place, "goal 0.5")
        elif one is not lines[0]:
            common.mark_goal(axes, 1.5 * lines[0]["median"], place, "goal 1.5 ×")
    axes.set_xlim(0, max(axes.get_xlim()[1], 1.7 * lines[0]["median"]))
    small = record["lines"][-1]["median"]
    axes.set_title(f"{record['title']} (a small function, later: {common.number(small)} ms)")


if __name__ == "__main__":
    main()
