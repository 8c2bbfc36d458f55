"""step, PyTensor: a training step of a multilayer perceptron on two ranks, as C code and by Numba.

Every step reads 512 rows, all-reduces the flat gradient, applies Nesterov momentum and collects the
loss. Against PyTensor in one process with one BLAS thread; and the ideal: two such processes that know
nothing of each other, each with 256 rows, at the same time. Run it with the Python of an environment
that has PyTensor::

    .venv-pytensor/bin/python benchmarks/step_pytensor.py
"""

import common
import training_steps
from common import COLOURS, ONE_THREAD, Contestant, Line
from training_steps import KEPT, NOT_KEPT, RANKS, Apart

import numpy as np

BATCH = 512
ROWS = 5120
SIZES = (784, 512, 512, 10)
LEARNING_RATE, MOMENTUM = 0.01, 0.9
MODES = ("CVM", "NUMBA")
GOAL = 0.95


def main():
    common.main(__doc__, measure, draw)


def network():
    """Return the arguments of ``make_train_function``."""
    from synkhronos.extensions import updates

    one = common.load_demo(".", "digits_mlp").Network(SIZES, seed=1)
    rule = updates.nesterov_momentum, LEARNING_RATE, MOMENTUM
    return one.loss, one.params, one.x, one.y, *rule


def digits():
    """Return images and labels; what they show does not matter for speed."""
    random = np.random.RandomState(0)
    images = random.rand(ROWS, SIZES[0]).astype("float32")
    return images, random.randint(0, SIZES[-1], ROWS).astype("int32")


def contestants_of(mode):
    """Return by name: the contestants of a mode, and the groups that run at the same time."""

    def environment(of_malloc):
        chosen = {"SYNKHRONOS_COMPILER": "pytensor", "PYTENSOR_FLAGS": f"mode={mode}"}
        return {**ONE_THREAD, **of_malloc, **chosen}

    def serial(batch, of_malloc, *of_rank):
        return Contestant(
            training_steps.serial, network, digits, batch, *of_rank, environment=environment(of_malloc)
        )

    def apart(of_malloc):
        return Apart(lambda *of_rank: serial(BATCH // RANKS, of_malloc, *of_rank))

    def hand_made(is_driven):
        arguments = training_steps.by_hand, network, digits, BATCH // RANKS
        return Apart(
            lambda *of_rank: Contestant(*arguments, *of_rank, is_driven, environment=environment(KEPT)),
            share_gradients=True,
        )

    ranks = environment(KEPT)
    for name in ONE_THREAD:  # the library divides the threads itself
        del ranks[name]
    made = {
        "one": serial(BATCH, KEPT),
        "synk": Contestant(training_steps.replicated, network, digits, BATCH, environment=ranks),
        "ideal": apart(KEPT),
        "bare": apart(NOT_KEPT),
        "by hand": hand_made(is_driven=False),
        "driven": hand_made(is_driven=True),
    }
    return {f"{mode} {name}": one for name, one in made.items()}


def measure(options):
    rounds, each = (4, 5) if options.quick else (15, 20)
    made = {name: one for mode in MODES for name, one in contestants_of(mode).items()}
    groups = {name: getattr(one, "players", [one]) for name, one in made.items()}
    players = {f"{name} {k}": one for name, group in groups.items() for k, one in enumerate(group)}
    with common.contestants(**players):
        turns = {name: lambda one=one: one(each) for name, one in made.items()}
        for mode in MODES:
            turns[f"{mode} together"] = lambda ideal=made[f"{mode} ideal"]: ideal(each, True)
        turns = common.take_turns(turns, rounds, "steps")
    seconds = {name: np.array([turn["seconds"] for turn in turns[name]]) for name in turns}
    notes = [
        f"per turn {each} steps after one to warm up, {rounds} turns each; one BLAS thread per process",
        "ratios are formed within each round; malloc keeps freed memory, unless it is said otherwise",
        "step by step: each process waits for the other one before each step, which any exchange of "
        "gradients requires; " + training_steps.BY_HAND,
    ]
    title = f"MLP {'-'.join(map(str, SIZES))}, batch {BATCH}"
    return common.Result(title, [line for mode in MODES for line in lines_of(mode, seconds)], notes)


def lines_of(mode, seconds):
    """Return the lines of a mode."""
    names = "one", "synk", "ideal", "together", "by hand", "driven", "bare"
    one, own, ideal, together, by_hand, driven, bare = (seconds[f"{mode} {name}"] for name in names)
    reached = bool(np.median(ideal / own) >= GOAL)
    return [
        common.line(f"{mode}: one process, {BATCH} rows", "ms", one),
        common.line(f"{mode}: synkhronos, {RANKS} ranks", "ms", own, one, "one process"),
        common.line(f"{mode}: ideal, {RANKS} × {BATCH // RANKS} rows", "ms", ideal),
        common.line(f"{mode}: ideal, but step by step", "ms", together),
        common.line(f"{mode}: by hand, {RANKS} processes", "ms", by_hand),
        common.line(f"{mode}: by hand, and one process has the script", "ms", driven),
        common.line(f"{mode}: ideal, malloc as it is", "ms", bare),
        Line(f"{mode}: ideal / synkhronos", "×", list(ideal / own), goal=f"≥ {GOAL}", reached=reached),
        Line(f"{mode}: ideal / by hand", "×", list(ideal / by_hand)),
        Line(f"{mode}: ideal / by hand, one has the script", "×", list(ideal / driven)),
        Line(f"{mode}: step by step / synkhronos", "×", list(together / own)),
        Line(f"{mode}: by hand / synkhronos", "×", list(by_hand / own)),
    ]


def draw(figure, record):
    for axes, mode in zip(figure.subplots(1, len(MODES)), MODES):
        lines = [line for line in record["lines"] if line["what"].startswith(f"{mode}:")]
        one, own, ideal, *_ = lines
        [by_hand] = [line for line in lines if line["what"].endswith("processes")]
        [ratio] = [line for line in lines if line["what"].endswith("ideal / synkhronos")]
        labels = ["one process", "ideal:\n2 processes apart", "by hand", f"Synkhronos,\n{RANKS} ranks"]
        colours = [COLOURS[name] for name in ("other", "other light", "other light", "synk")]
        common.bars(axes, [one, ideal, by_hand, own], labels, colours, "ms")
        axes.set_title(f"{mode}: {ratio['median']:.0%} of the ideal")


if __name__ == "__main__":
    main()
