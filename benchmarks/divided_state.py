"""divided state: Adam's state divided among the ranks, for ResNet-50: memory and time.

With ZeRO, stage 1 (Rajbhandari et al., 2020), each rank keeps and updates its part of the optimizer's
state only, and the ranks gather the result. The library does not do this, so this row does it with
public functions: after the all-reduce of the gradient, each rank updates its part of Adam's averages and
replaces its part of the gradient vector by the step and the rest by zeros; a sum over the ranks gathers
the whole step, which every rank subtracts from its parameters. Against the ordinary step, on 2 and 4
ranks with 4 images each. The least that either needs is measured by hand: NumPy in shared memory, and
two processes that meet by polling counters, without commands or checks.
"""

import gc
import mmap
import multiprocessing
import time
from typing import Any, Callable, NamedTuple

import common
import step_large
import training_steps
from common import COLOURS, ONE_THREAD, Contestant, Line, line
from training_steps import FAST, KEPT

import numpy as np
import psutil
from synkhronos.arithmetic.partition import share

RANKS = (2, 4)
EACH = step_large.EACH  # images a rank
LEARNING_RATE, BETA1, BETA2, EPSILON = 0.001, 0.9, 0.999, 1e-8
ORDINARY = ("gradient", "all-reduce", "update")
DIVIDED = ("gradient", "all-reduce", "update of the part", "gathering", "subtraction")


def main():
    common.main(__doc__, measure, draw, step_large.add_options)


# The steps


class DividedAdam(NamedTuple):
    """Adam in three functions' updates, of which the second is for a part of the parameters.

    Attributes
    ----------
    vector : shared vector
        The gradient of all parameters, and after the second function the step.
    first : shared scalar
        The first element of a rank's part; 0 at first.
    length : int
        The number of elements in a part.
    fill, update, subtract : list of updates
        These compute the gradient, update the part and write its step, and change the parameters.
    """

    vector: Any
    first: Any
    length: int
    fill: list
    update: list
    subtract: list


def divided_adam(loss, params, ranks, clears=True):
    """Return the same steps as of ``updates.adam``, with state vectors for one rank's part.

    With `clears`, the update also sets the rest of the vector to zero.
    """
    import theano
    import theano.tensor as tt
    from synkhronos.extensions import updates
    from theano.tensor.extra_ops import cpu_contiguous

    rate = theano.shared(np.float32(0), "corrected_rate")
    fill, subtract, vector = updates.sgd(loss, params, rate)
    length, rest = divmod(vector.get_value(borrow=True).size, ranks)
    if rest:
        raise ValueError(f"expected parameters that can be divided by {ranks}, got {rest} more")
    first = theano.shared(np.int64(0), "first")
    count = theano.shared(np.float32(0), "step_count")
    mean, squares = (theano.shared(np.zeros(length, "float32"), f"{name}_part") for name in "mv")
    gradient = vector[first : first + length]
    new_count = count + np.float32(1)
    # The averages are computed apart from the step, as in the rule.
    new_mean = cpu_contiguous(np.float32(BETA1) * mean + np.float32(1 - BETA1) * gradient)
    squared = np.float32(1 - BETA2) * tt.sqr(gradient)
    new_squares = cpu_contiguous(np.float32(BETA2) * squares + squared)
    of_mean, of_squares = (-tt.expm1(new_count * np.float32(np.log(beta))) for beta in (BETA1, BETA2))
    step = new_mean / (tt.sqrt(new_squares) + np.float32(EPSILON))
    new = tt.set_subtensor(vector[first : first + length], step)
    if clears:
        new = tt.set_subtensor(new[:first], np.float32(0))
        new = tt.set_subtensor(new[first + length :], np.float32(0))
    update = [
        (mean, new_mean),
        (squares, new_squares),
        (count, new_count),
        (rate, np.float32(LEARNING_RATE) * tt.sqrt(of_squares) / of_mean),
        (vector, new),
    ]
    return DividedAdam(vector, first, length, fill, update, subtract)


def divided_step(inputs, loss, adam, more_updates, ranks):
    """Return a function that takes a step with a divided state on all ranks, and returns the loss."""
    import synkhronos as synk

    gradient = synk.function(inputs, loss, updates=[*adam.fill, *more_updates])
    update = synk.function([], updates=adam.update)
    subtract = synk.function([], updates=adam.subtract)
    synk.distribute()
    for rank in range(ranks):
        synk.set_value(rank, adam.first, rank * adam.length)

    def step(*data, batch=None):
        with synk.fuse():
            loss = gradient(*data, batch=batch)
            synk.all_reduce(adam.vector, weights=gradient)
            update()
            synk.all_reduce(adam.vector, "sum")
            subtract()
        return loss.result()

    return step


def ordinary(ranks, pixels):
    """The library's own step: every rank updates everything."""
    import synkhronos as synk
    from synkhronos.extensions import train, updates

    model, _ = step_large.build(pixels)

    def rule(loss, params):
        fill, *rest = updates.adam(loss, params, LEARNING_RATE, BETA1, BETA2, EPSILON)
        return [*fill, *model.average_updates], *rest

    spent = training_steps.time_parts(ranks, ORDINARY)
    common.fork(ranks)
    step = train.make_train_function(model.loss, model.params, model.x, model.y, rule)
    synk.distribute()
    yield _turn(step, _images(ranks, pixels), ranks, ORDINARY, spent)
    synk.close()


def divided(ranks, pixels):
    """A step whose state is divided, by public functions of the library."""
    import synkhronos as synk

    model, _ = step_large.build(pixels)
    adam = divided_adam(model.loss, model.params, ranks)
    spent = training_steps.time_parts(ranks, DIVIDED)
    common.fork(ranks)
    step = divided_step([model.x, model.y], model.loss, adam, model.average_updates, ranks)
    yield _turn(step, _images(ranks, pixels), ranks, DIVIDED, spent)
    synk.close()


def _turn(step, arrays, ranks, parts, spent):
    """Return a function that takes steps, and returns their time and the memory of the ranks."""
    import synkhronos as synk

    data = [synk.data(array) for array in arrays]

    def turn(steps):
        step(*data, batch=slice(0, EACH * ranks))
        before, begin = spent.copy(), time.perf_counter()
        for _ in range(steps):
            loss = step(*data, batch=slice(0, EACH * ranks))
        seconds = (time.perf_counter() - begin) / steps
        return {
            "seconds": seconds,
            "parts": dict(zip([*parts, "waiting"], (spent - before).mean(axis=0) / steps)),
            "memory": _memory(),
            "loss": float(loss),
        }

    return turn


def _images(ranks, pixels):
    random = np.random.RandomState(0)
    pictures = random.standard_normal((ranks * EACH, 3, pixels, pixels)).astype("float32")
    return pictures, random.randint(0, 1000, ranks * EACH).astype("int32")


def _memory():
    """Return the proportional set size of each rank, in bytes, as a mean."""
    gc.collect()
    own = psutil.Process()
    return np.mean([one.memory_full_info().pss for one in [own, *own.children()]])


# By hand


class ByHand(NamedTuple):
    """What one of two processes needs to take either step, with gradient vectors in shared memory.

    Attributes
    ----------
    number : int
        Of the process.
    counters : memoryview of int
        How often each process has come to a meeting.
    vectors : numpy.ndarray
        The vector of each process.
    part : slice
        The elements that this process reduces, and with a divided state updates.
    gradient, update_all, update_part, subtract : callable
        The compiled functions.
    """

    number: int
    counters: memoryview
    vectors: np.ndarray
    part: slice
    gradient: Callable
    update_all: Callable
    update_part: Callable
    subtract: Callable

    def meet(self):
        self.counters[self.number] += 1
        while min(self.counters) < self.counters[self.number]:
            pass

    def average(self):
        """Average this process's part, and return it and the same part of the other vector."""
        own, other = self.vectors[self.number, self.part], self.vectors[1 - self.number, self.part]
        own += other
        own *= np.float32(0.5)
        return own, other

    def ordinary(self, *rows):
        self.gradient(*rows)
        self.meet()
        own, other = self.average()
        other[...] = own
        self.meet()
        self.update_all()

    def divided(self, *rows):
        self.gradient(*rows)
        self.meet()
        self.average()
        self.update_part()
        self.meet()
        theirs = slice(*share(self.vectors.shape[1], 2, 1 - self.number))
        self.vectors[self.number, theirs] = self.vectors[1 - self.number, theirs]
        self.meet()
        self.subtract()

    def seconds(self, kind, rows, steps):
        step = getattr(self, kind)
        step(*rows)
        begin = time.perf_counter()
        for _ in range(steps):
            step(*rows)
        return (time.perf_counter() - begin) / steps


def by_hand(pixels):
    """Two processes that take either step with the least that it needs."""
    import theano
    from synkhronos.extensions import updates

    training_steps.use_kernels()
    model, _ = step_large.build(pixels)
    adam = divided_adam(model.loss, model.params, 2, clears=False)
    _, all_updates, vector = updates.adam(model.loss, model.params, LEARNING_RATE, BETA1, BETA2, EPSILON)
    fill = [*adam.fill, *model.average_updates]
    functions = (
        theano.function([model.x, model.y], model.loss, updates=fill),
        theano.function([], updates=all_updates, givens={vector: adam.vector}),
        theano.function([], updates=adam.update),
        theano.function([], updates=adam.subtract),
    )
    size = adam.vector.get_value(borrow=True).size
    memory = mmap.mmap(-1, 4 * 2 * size)
    vectors = np.frombuffer(memory, "float32").reshape(2, size)
    counters = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")[:2]
    pictures, labels = _images(2, pixels)

    def process(number):
        """Bind the functions to a process's vector, and return it and its rows."""
        adam.vector.set_value(vectors[number], borrow=True)
        adam.first.set_value(number * adam.length)
        rows = slice(number * EACH, (1 + number) * EACH)
        part = slice(*share(size, 2, number))
        return ByHand(number, counters, vectors, part, *functions), (pictures[rows], labels[rows])

    def follow(connection):
        other, rows = process(1)
        while (asked := connection.recv()) is not None:
            other.seconds(asked[0], rows, asked[1])

    connection, theirs = multiprocessing.Pipe()
    follower = multiprocessing.get_context("fork").Process(target=follow, args=(theirs,), daemon=True)
    follower.start()
    leader, rows = process(0)

    def turn(steps):
        found = {}
        for kind in ("ordinary", "divided"):
            connection.send((kind, steps))
            found[kind] = leader.seconds(kind, rows, steps)
            assert np.shares_memory(adam.vector.get_value(borrow=True), vectors[0])
        return found

    yield turn
    connection.send(None)
    follower.join()


# The row


def measure(options):
    pixels = options.pixels or (64 if options.quick else 224)
    rounds, steps = (1, 1) if options.quick else (5, 2)
    lines, notes, extra = [], [], {}
    for ranks in RANKS:
        players = {
            "ordinary": Contestant(ordinary, ranks, pixels, environment={**KEPT, **FAST}),
            "divided": Contestant(divided, ranks, pixels, environment={**KEPT, **FAST}),
        }
        if ranks == 2:
            variables = {**ONE_THREAD, **KEPT, **FAST}
            players["by hand"] = Contestant(by_hand, pixels, environment=variables)
        with common.contestants(**players):
            each = {name: lambda one=one: one(steps) for name, one in players.items()}
            turns = common.take_turns(each, rounds, f"{ranks} ranks")
        lines += _lines(ranks, turns)
        notes += _notes(ranks, turns)
        extra[str(ranks)] = {name: _median_parts(turns[name]) for name in ("ordinary", "divided")}
    title = f"Adam's state divided, ResNet-50, {pixels} x {pixels} pixels, {EACH} images a rank"
    return common.Result(title, lines, notes, extra)


def _lines(ranks, turns):
    """Return the lines for a number of ranks."""
    both = turns["ordinary"], turns["divided"]
    memory = [[turn["memory"] / 1e6 for turn in one] for one in both]
    seconds = [[turn["seconds"] for turn in one] for one in both]
    lines = [
        Line(f"{ranks} ranks, ordinary: memory per rank", "MB", memory[0]),
        Line(
            f"{ranks} ranks, divided: memory per rank",
            "MB",
            memory[1],
            list(np.divide(memory[1], memory[0])),
            "ordinary",
        ),
        line(f"{ranks} ranks, ordinary: a step", "ms", seconds[0]),
        line(f"{ranks} ranks, divided: a step", "ms", seconds[1], seconds[0], "ordinary"),
    ]
    if "by hand" in turns:
        hand = {kind: [turn[kind] for turn in turns["by hand"]] for kind in ("ordinary", "divided")}
        lines += [
            line("by hand, 2 processes, ordinary: a step", "ms", hand["ordinary"]),
            line(
                "by hand, 2 processes, divided: a step",
                "ms",
                hand["divided"],
                hand["ordinary"],
                "ordinary by hand",
            ),
        ]
    return lines


def _median_parts(turns):
    return {
        name: float(np.median([turn["parts"][name] for turn in turns])) for name in turns[0]["parts"]
    }


def _notes(ranks, turns):
    notes = []
    for name in ("ordinary", "divided"):
        parts = _median_parts(turns[name])
        told = ", ".join(f"{part} {1e3 * seconds:.1f} ms" for part, seconds in parts.items())
        notes.append(f"{ranks} ranks, {name}: {told}, as a mean of the ranks; waiting is in the others")
    ours, theirs = (turns[name][0]["loss"] for name in ("divided", "ordinary"))
    notes.append(
        f"{ranks} ranks, the loss of the last step of the first turn: {theirs:.6f} ordinary, {ours:.6f} "
        f"divided; compiled code rounds the two differently"
    )
    return notes


def draw(figure, record):
    left, right = figure.subplots(1, 2)
    colours = {"ordinary": COLOURS["synk"], "divided": COLOURS["synk light"]}
    for axes, what, unit in ((left, "memory per rank", "MB"), (right, "a step", "ms")):
        lines = [one for one in record["lines"] if one["what"].endswith(what)]
        labels = [one["what"].split(":")[0].replace(", ", ",\n", 1) for one in lines]
        shown = [colours["divided" if "divided" in label else "ordinary"] for label in labels]
        common.bars(axes, lines, labels, shown, unit)
        axes.set_title(what)


if __name__ == "__main__":
    main()
