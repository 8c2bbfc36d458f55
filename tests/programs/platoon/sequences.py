"""Made-up sequences of words: the label says whether there are more words of the upper half."""

import numpy as np
import theano
import theano.tensor as T

WORDS, LENGTH, CELLS = 10, 5, 5


def load(n, seed):
    x = np.random.RandomState(seed).randint(0, WORDS, size=(n, LENGTH)).astype("int32")
    return x, ((x >= WORDS // 2).sum(axis=1) > LENGTH // 2).astype("int32")


def minibatches(n, size, random):
    while True:
        order = random.permutation(n)
        for start in range(0, n - size + 1, size):
            yield order[start : start + size]


def init_params(seed=123):
    random = np.random.RandomState(seed)
    shapes = [(WORDS, CELLS), (CELLS, 4 * CELLS), (CELLS, 4 * CELLS), (4 * CELLS,), (CELLS, 2), (2,)]
    names = ["Wemb", "lstm_W", "lstm_U", "lstm_b", "U", "b"]
    scales = [0.3, 0.5, 0.5, 0.0, 0.5, 0.0]
    return [
        theano.shared((scale * random.normal(size=shape)).astype("float32"), name)
        for scale, shape, name in zip(scales, shapes, names)
    ]


def build(params):
    """Return functions of gradients and updates, and of predictions."""
    Wemb, W, U_, b_, U, b = params
    x, y, rate = T.imatrix("x"), T.ivector("y"), T.fscalar("rate")

    def step(x_, h, c):
        gates = x_ + T.dot(h, U_)
        i, f, o = (T.nnet.sigmoid(gates[:, k * CELLS : (k + 1) * CELLS]) for k in range(3))
        c = f * c + i * T.tanh(gates[:, 3 * CELLS :])
        return o * T.tanh(c), c

    # Without a scan, the gradient of which compiles for longer than the example runs.
    words = T.dot(Wemb[x], W) + b_
    h = c = total = T.zeros((x.shape[0], CELLS), "float32")
    for place in range(LENGTH):
        h, c = step(words[:, place], h, c)
        total += h
    probabilities = T.nnet.softmax(T.dot(total / LENGTH, U) + b)
    cost = T.nnet.categorical_crossentropy(probabilities, y).mean()
    shared = [theano.shared(p.get_value() * 0, f"{p.name}_grad") for p in params]
    f_grad_shared = theano.function([x, y], cost, updates=list(zip(shared, T.grad(cost, params))))
    f_update = theano.function([rate], [], updates=[(p, p - rate * g) for p, g in zip(params, shared)])
    f_pred = theano.function([x], probabilities.argmax(axis=1))
    return f_grad_shared, f_update, f_pred


def pred_error(f_pred, data):
    return float((f_pred(data[0]) != data[1]).mean())
