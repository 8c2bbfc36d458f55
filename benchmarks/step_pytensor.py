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
from training_steps import KEPT, NOT_KEPT, RANKS

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
    """Return the contestants of a mode by name; the ideal has several, which run together."""

    def environment(of_malloc):
        chosen = {"SYNKHRONOS_COMPILER": "pytensor", "PYTENSOR_FLAGS": f"mode={mode}"}
        return {**ONE_THREAD, **of_malloc, **chosen}

    def serial(batch, of_malloc, number=0):
        return Contestant(
            training_steps.serial, network, digits, batch, number, environment=environment(of_malloc)
        )

    def apart(of_malloc):
        return [serial(BATCH // RANKS, of_malloc, number) for number in range(RANKS)]

    ranks = environment(KEPT)
    for name in ONE_THREAD:  # the library divides the threads itself
        del ranks[name]
    return {
        f"{mode} one": [serial(BATCH, KEPT)],
        f"{mode} synk": [
            Contestant(training_steps.replicated, network, digits, BATCH, environment=ranks)
        ],
        f"{mode} ideal": apart(KEPT),
        f"{mode} bare": apart(NOT_KEPT),
    }


def measure(options):
    rounds, each = (4, 5) if options.quick else (15, 20)
    made = {name: both for mode in MODES for name, both in contestants_of(mode).items()}
    players = {f"{name} {k}": one for name, both in made.items() for k, one in enumerate(both)}
    with common.contestants(**players):

        def together(name):
            for player in made[name]:
                player.begin(each)
            results = [player.result() for player in made[name]]
            # Each makes its part of the rows in its time: what counts is the rows per second of all.
            return len(results) / sum(1 / result["seconds"] for result in results)

        turns = {name: lambda name=name: together(name) for name in made}
        turns = common.take_turns(turns, rounds, "steps")
    seconds = {name: np.array(turns[name]) for name in turns}
    notes = [
        f"per turn {each} steps after one to warm up, {rounds} turns each; one BLAS thread per process",
        "ratios are formed within each round; malloc keeps freed memory, unless it is said otherwise",
    ]
    title = f"MLP {'-'.join(map(str, SIZES))}, batch {BATCH}"
    return common.Result(title, [line for mode in MODES for line in lines_of(mode, seconds)], notes)


def lines_of(mode, seconds):
    """Return the lines of a mode."""
    one, own, ideal, bare = (seconds[f"{mode} {name}"] for name in ("one", "synk", "ideal", "bare"))
    reached = bool(np.median(ideal / own) >= GOAL)
    return [
        common.line(f"{mode}: one process, {BATCH} rows", "ms", one),
        common.line(f"{mode}: synkhronos, {RANKS} ranks", "ms", own, one, "one process"),
        common.line(f"{mode}: ideal, {RANKS} × {BATCH // RANKS} rows", "ms", ideal),
        common.line(f"{mode}: ideal, malloc as it is", "ms", bare),
        Line(f"{mode}: ideal / synkhronos", "×", list(ideal / own), goal=f"≥ {GOAL}", reached=reached),
    ]


def draw(figure, record):
    for axes, mode in zip(figure.subplots(1, len(MODES)), MODES):
        one, own, ideal, _, ratio = [
            line for line in record["lines"] if line["what"].startswith(f"{mode}:")
        ]
        labels = ["one process", "ideal:\n2 processes apart", f"Synkhronos,\n{RANKS} ranks"]
        colours = [COLOURS[name] for name in ("other", "other light", "synk")]
        common.bars(axes, [one, ideal, own], labels, colours, "ms")
        axes.set_title(f"{mode}: {ratio['median']:.0%} of the ideal")


if __name__ == "__main__":
    main()
