"""A controller: one process decides who validates, the learning rate, and when to stop.

    python controller.py --processes 2

Every process trains at its own pace, and exchanges its parameters with a center every few steps. After
each step it asks the controller what to do. The controller has the only count of all steps, so it can
have the center validated every 100 steps, by the process that asks then, while the others go on. It
halves the learning rate when the validation loss has not improved for a while, and stops all processes
when it has not for longer. What is tested at the end is the center with the best validation loss.
"""

import script

script.need("sklearn")
import synkhronos as synk
from script import T, compiler

import numpy as np
from sklearn.datasets import load_digits

HIDDEN, BATCH, PERIOD = 32, 20, 5  # units; rows and steps of a process between two exchanges
ALPHA = 0.5  # how far the parameters of a process and the center move towards each other


class Controller:
    """Decides for all processes. It runs in a process of its own, and prints what it decides."""

    def __init__(self, options):
        self.every, self.patience, self.rate = (
            options.every,
            options.patience,
            options.learning_rate,
        )
        self.steps, self.asked = 0, 0
        self.validator, self.validated_step = None, 0  # who validates now, and after which step
        self.best, self.best_step = np.inf, 0
        self.since = 0  # validations without a better loss

    def __call__(self, request, rank, info):
        self.asked += 1
        answers = {
            "step": self.after_step,
            "validated": self.after_validation,
            "end": self.at_the_end,
        }
        return answers[request](rank, info)

    def after_step(self, rank, info):
        """Return the learning rate of this process, and what it does now."""
        self.steps += 1
        if self.since >= self.patience:
            return self.rate, "stop"
        if self.validator == rank:
            self.validator = None  # it goes on
        if self.validator is None and self.steps >= self.validated_step + self.every:
            self.validator, self.validated_step = rank, self.steps
            return self.rate, "validate"
        return self.rate, "train"

    def after_validation(self, rank, loss):
        """Return whether this is the best center so far."""
        self.since += 1
        decision = ""
        if loss < self.best:
            self.best, self.best_step, self.since = loss, self.validated_step, 0
            decision = "the best so far"
        elif self.since >= self.patience:
            decision = f"no better for {self.since} validations: stop"
        elif self.since % (self.patience // 2) == 0:
            self.rate /= 2
            decision = f"no better for {self.since} validations: learning rate {self.rate:g}"
        line = f"{self.validated_step:6d}  process {rank:<6d}  {loss:15.4f}  {decision}"
        print(line.rstrip(), flush=True)
        return self.since == 0

    def at_the_end(self, rank, info):
        return self.asked, self.best_step


def build(options):
    """Return the parameters, the learning rate, and the functions that train and that measure."""
    random = np.random.RandomState(options.seed)
    x, y = T.matrix("x", dtype="float64"), T.ivector("y")
    W1 = compiler.shared(random.normal(0, 0.1, (64, HIDDEN)), "W1")
    W2 = compiler.shared(random.normal(0, 0.1, (HIDDEN, 10)), "W2")
    b1, b2 = compiler.shared(np.zeros(HIDDEN), "b1"), compiler.shared(np.zeros(10), "b2")
    params, rate = [W1, b1, W2, b2], compiler.shared(options.learning_rate, "rate")
    powers = T.exp(T.dot(T.tanh(T.dot(x, W1) + b1), W2) + b2)
    probabilities = powers / powers.sum(axis=1, keepdims=True)
    loss = -T.log(probabilities[T.arange(y.shape[0]), y]).mean()
    accuracy = T.eq(probabilities.argmax(axis=1), y).mean(dtype="float64")
    updates = [(param, param - rate * T.grad(loss, param)) for param in params]
    return (
        params,
        rate,
        synk.function([x, y], loss, updates=updates),
        synk.function([x, y], [loss, accuracy]),
    )


def program(rank, model, train_data, valid_data, options):
    """Train until the controller says stop; leave the best parameters in the shared variables."""
    params, rate, train, measure = model
    center = rank.center(params)
    best = rank.center(params, name="best")

    def validate():
        """Return the loss of the center, and its parameters."""
        own, values = [param.get_value() for param in params], center.value()
        assign(params, values)
        loss, _ = rank.call(measure, *valid_data)
        assign(params, own)
        return float(loss), values

    steps = 0
    for rows in rank.minibatches(len(train_data[0]), BATCH, options.epochs, seed=options.seed):
        script.check_loss(float(rank.call(train, *train_data, batch=rows)), f"at step {steps + 1}")
        steps += 1
        if steps % PERIOD == 0:
            center.elastic(ALPHA)
        new_rate, task = rank.ask("step")
        rate.set_value(new_rate)
        if task == "stop":
            rank.stop()
        elif task == "validate":
            loss, values = validate()
            if rank.ask("validated", loss):
                best.assign(values)
    rank.barrier()
    best.pull()
    return steps, rank.ask("end") if rank.is_master else None


def assign(params, values):
    for param, value in zip(params, values):
        param.set_value(value)


def main():
    parser = script.parser(__doc__)
    script.add_processes(parser, default=2, devices=False)
    parser.add_argument(
        "--patience", type=script.whole(2), metavar="N", default=6, help="validations (default: 6)"
    )
    parser.add_argument(
        "--every",
        type=script.whole(),
        metavar="STEPS",
        default=100,
        help="between two validations (default: 100)",
    )
    parser.add_argument(
        "--learning-rate",
        type=script.positive(),
        metavar="RATE",
        default=1.0,
        help="at first (default: 1)",
    )
    parser.add_argument(
        "--epochs", type=script.whole(), metavar="N", default=300, help="at most (default: 300)"
    )
    parser.add_argument(
        "--seed",
        type=script.whole(0, 2**32 - 1),
        metavar="N",
        default=1,
        help="of weights and shuffling (default: 1)",
    )
    options = parser.parse_args()
    n = script.fork(options.processes, use_gpu=False)
    digits = load_digits()
    order = np.random.RandomState(2017).permutation(len(digits.target))
    x, y = (digits.data / 16)[order], digits.target[order].astype("int32")
    parts = {"train": slice(0, 1200), "valid": slice(1200, 1500), "test": slice(1500, None)}
    data = {name: [synk.data(x[rows]), synk.data(y[rows])] for name, rows in parts.items()}
    model = build(options)
    print(f"Digits of 8x8 pixels: 1200 to train, 300 to validate, 297 to test; processes: {n}")
    script.say_too_small()
    print("  step  validated by  validation loss  decision", flush=True)
    results = synk.spmd(
        program, model, data["train"], data["valid"], options, controller=Controller(options)
    )
    (_, (asked, best_step)), *_ = results
    loss, accuracy = model[-1](*data["test"])
    if not results.stopped:
        print(f"It was not stopped before the end of {options.epochs} epochs.")
    print(f"Steps by process: {', '.join(str(steps) for steps, _ in results)}; questions: {asked}")
    print(f"Test:   loss {loss:.4f}, accuracy {accuracy:.2%}, with the center of step {best_step}")
    synk.close()
    return accuracy


if __name__ == "__main__":
    script.run(main)
