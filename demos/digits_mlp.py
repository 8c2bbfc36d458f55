"""A multilayer perceptron for handwritten digits, with Theano or with PyTensor.

    python digits_mlp.py --processes 2

The digits are the 1797 small pictures of scikit-learn. The script trains with the compiler that is
installed, and compares the first epoch with the same training in one process.
"""

import time

import script

script.need("sklearn")
import synkhronos as synk
from script import TITLE, T, compiler
from synkhronos.extensions import train, updates

import numpy as np
from sklearn.datasets import load_digits

TEST = 360  # pictures


class Network:
    """Layers of rectifiers, and the loss and the accuracy of what they recognize.

    It consists of operations that Theano and PyTensor both have. `sizes` has the number of inputs, and
    the number of units of each layer.
    """

    def __init__(self, sizes, seed):
        random = np.random.RandomState(seed)
        self.x, self.y = T.matrix("x", dtype="float32"), T.ivector("y")
        self.params, layer = [], self.x
        for index, (before, after) in enumerate(zip(sizes, sizes[1:])):
            weights = random.normal(0, np.sqrt(2 / before), (before, after)).astype("float32")
            W = compiler.shared(weights, f"W{index}")
            b = compiler.shared(np.zeros(after, "float32"), f"b{index}")
            self.params += [W, b]
            layer = T.dot(T.maximum(layer, 0) if index else layer, W) + b
        shifted = layer - layer.max(axis=1, keepdims=True)
        log_probabilities = shifted - T.log(T.exp(shifted).sum(axis=1, keepdims=True))
        self.loss = -log_probabilities[T.arange(self.y.shape[0]), self.y].mean()
        self.accuracy = T.eq(layer.argmax(axis=1), self.y).mean(dtype="float32")


def read_digits():
    """Return the images and the labels, to train and to test."""
    digits = load_digits()
    order = np.random.RandomState(2017).permutation(len(digits.target))
    x, y = (digits.data / 16).astype("float32")[order], digits.target[order].astype("int32")
    return (x[TEST:], y[TEST:]), (x[:TEST], y[:TEST])


def run_epoch(step, data, n_rows, batch, random):
    """Train on every row once, in random order; return the mean loss."""
    order, losses = random.permutation(n_rows), []
    for start in range(0, n_rows - batch + 1, batch):
        loss = float(step(*data, batch=order[start : start + batch]))
        script.check_loss(loss, f"in batch {len(losses) + 1}")
        losses.append(loss)
    return np.mean(losses)


def main():
    parser = script.parser(__doc__)
    script.add_processes(parser, default=2, devices=False)
    whole = script.whole
    parser.add_argument("--epochs", type=whole(1, 10_000), default=10, help="default: 10")
    parser.add_argument("--batch", type=whole(1, 1000), default=50, help="rows (default: 50)")
    parser.add_argument("--units", type=whole(1, 10_000), default=64, help="per layer (default: 64)")
    parser.add_argument("--learning-rate", type=script.positive(), default=0.002, metavar="RATE",
                        help="of Adam (default: 0.002)")  # fmt: skip
    parser.add_argument("--seed", type=whole(0, 2**32 - 1), default=1, help="default: 1")
    options = parser.parse_args()
    n = script.fork(options.processes, use_gpu=False)
    train_digits, test_digits = read_digits()
    print(f"Digits of 8x8 pixels, {TITLE}; processes: {n}", flush=True)
    script.say_too_small()

    sizes = [64, options.units, options.units, 10]
    network, alone = Network(sizes, options.seed), Network(sizes, options.seed)

    def build(make, one):
        rule = {"update_rule": updates.adam, "learning_rate": options.learning_rate}
        return make(one.loss, one.params, one.x, one.y, **rule)

    step = build(train.make_train_function, network)
    evaluate = synk.function([network.x, network.y], [network.loss, network.accuracy])
    synk.distribute()
    data = [synk.data(one) for one in train_digits]
    test = [synk.data(one) for one in test_digits]
    n_rows, random = len(train_digits[0]), np.random.RandomState(options.seed)
    for epoch in range(options.epochs):
        start = time.time()
        loss = run_epoch(step, data, n_rows, options.batch, random)
        seconds = time.time() - start
        _, accuracy = evaluate(*test)
        print(f"epoch {epoch + 1}: loss {loss:.4f}, test accuracy {accuracy:.2%}, {seconds:.2f} s")
        if epoch == 0:
            serial = build(train.make_train_function_theano, alone)
            again = np.random.RandomState(options.seed)
            expected = run_epoch(serial, train_digits, n_rows, options.batch, again)
            assert np.allclose(loss, expected, rtol=1e-3), (loss, expected)
    first, *others = synk.gather(network.params[0])
    assert all(np.array_equal(first, other) for other in others)
    synk.close()
    print(f"The loss of the first epoch matches plain {TITLE} on one process.")


if __name__ == "__main__":
    script.run(main)
