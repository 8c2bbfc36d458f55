"""Trains a small convolutional network on scikit-learn's digits, once with each wire format.

Prints a JSON object: for each format, the loss on the whole training set after every epoch. The
arguments are the number of epochs, the seeds of the weights and of the order of the images, and the
formats.
"""

import json
import sys

import synkhronos as synk
import numpy as np
import theano
import theano.tensor as tt
from sklearn.datasets import load_digits
from synkhronos.extensions import train, updates
from theano.tensor.signal.pool import pool_2d

BATCH = 64


def network(seed):
    """Return the loss, its parameters and its inputs: 8 x 8 pixels, two convolutions, two layers."""
    rng = np.random.RandomState(seed)

    def weights(*shape):
        inputs = np.prod(shape[1:]) if len(shape) == 4 else shape[0]
        value = rng.randn(*shape) * np.sqrt(2 / inputs)
        return theano.shared(value.astype("float32")), theano.shared(np.zeros(shape[-1], "float32"))

    x, y = tt.ftensor4("x"), tt.ivector("y")
    layers = [weights(32, 1, 3, 3), weights(64, 32, 3, 3), weights(576, 128), weights(128, 10)]
    (first, _), (second, _), (third, bias), (last, last_bias) = layers
    hidden = pool_2d(tt.nnet.relu(tt.nnet.conv2d(x, first)), (2, 2), ignore_border=True)
    hidden = tt.nnet.relu(tt.nnet.conv2d(hidden, second, border_mode=(1, 1)))
    hidden = tt.nnet.relu(hidden.flatten(2).dot(third) + bias)
    output = tt.nnet.softmax(hidden.dot(last) + last_bias)
    loss = tt.nnet.categorical_crossentropy(output, y).mean()
    return loss, [first, second, third, bias, last, last_bias], x, y


def losses(wire, images, labels, epochs, seed, order_seed):
    """Train; return the loss on all digits after each epoch."""
    loss, params, x, y = network(seed)
    step = train.make_train_function(loss, params, x, y, updates.momentum, 0.004, wire=wire)
    evaluate = synk.function([x, y], loss)
    rng, found = np.random.RandomState(order_seed), []
    for _ in range(epochs):
        order = rng.permutation(len(labels))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            step(images, labels, batch=order[start : start + BATCH])
        found.append(float(evaluate(images, labels)))
    return found


def main(epochs, seed, order_seed, *formats):
    digits = load_digits()
    images = (digits.images[:, None] / 16).astype("float32")
    synk.fork(2, use_gpu=False)
    images, labels = synk.data(images), synk.data(digits.target.astype("int32"))
    names = {"PowerSGD": synk.PowerSGD, "TopK": synk.TopK}
    found = {}
    for text in formats:
        wire = eval(text, names) if "(" in text else None if text == "None" else text
        found[text] = losses(wire, images, labels, int(epochs), int(seed), int(order_seed))
    synk.close()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
