"""A recurrent network of LSTM cells, by `theano.scan`, that reads digits row by row.

The cell follows S. Hochreiter and J. Schmidhuber, "Long Short-Term Memory", 1997, with the forget
gate of F. Gers et al., 2000, and the gates side by side in one matrix, as in the chapter "LSTM Networks
for Sentiment Analysis" of the Deep Learning Tutorials, http://deeplearning.net/tutorial/lstm.html. As
there, data and masks have time along axis 0: (time, sequences, features). Gradients are clipped by their
norm (R. Pascanu et al., 2013, arXiv:1211.5063), and applied by RMSprop.
"""

import numpy as np
import synkhronos as synk
import theano
import theano.tensor as T
from synkhronos.extensions import train
from sklearn.datasets import load_digits

N_FEATURES, N_CELLS, N_CLASSES = 8, 16, 10
random = np.random.RandomState(2)


def shared(value, name):
    return theano.shared(np.asarray(value, theano.config.floatX), name)


def lstm(x, mask, W, U, b):
    """Return the outputs at all times; where a sequence has ended, the last one is kept."""
    n_cells = U.get_value(borrow=True).shape[0]

    def part(gates, number):
        return gates[:, number * n_cells : (number + 1) * n_cells]

    def step(now, alive, output, cell, U):
        gates = now + T.dot(output, U)
        write, forget, read = (T.nnet.sigmoid(part(gates, number)) for number in range(3))
        new_cell = forget * cell + write * T.tanh(part(gates, 3))
        new_output = read * T.tanh(new_cell)
        alive = alive[:, None]
        return alive * new_output + (1 - alive) * output, alive * new_cell + (1 - alive) * cell

    start = T.zeros((x.shape[1], n_cells))
    (outputs, _), _ = theano.scan(
        step, sequences=[T.dot(x, W) + b, mask], outputs_info=[start, start], non_sequences=[U]
    )
    return outputs


def rmsprop(loss, params, rate=0.02, decay=0.9, largest_norm=1.0):
    gradients = T.grad(loss, params)
    norm = T.sqrt(sum((gradient**2).sum() for gradient in gradients))
    updates = []
    for param, gradient in zip(params, gradients):
        clipped = gradient * T.minimum(1, largest_norm / norm)
        square = shared(param.get_value() * 0, "square")
        new_square = decay * square + (1 - decay) * clipped**2
        updates += [(square, new_square), (param, param - rate * clipped / T.sqrt(new_square + 1e-6))]
    return updates


def main(steps=40, batch_size=51):
    synk.fork()
    x, mask, y = T.tensor3("x"), T.matrix("mask"), T.ivector("y")
    forget_first = np.repeat([0, 1, 0, 0], N_CELLS)
    W = shared(random.normal(0, 0.3, (N_FEATURES, 4 * N_CELLS)), "W")
    orthogonal = [np.linalg.qr(random.normal(size=(N_CELLS, N_CELLS)))[0] for _ in range(4)]
    U = shared(np.hstack(orthogonal), "U")
    b = shared(forget_first, "b")
    V, c = shared(random.normal(0, 0.1, (N_CELLS, N_CLASSES)), "V"), shared(np.zeros(N_CLASSES), "c")

    last = lstm(x, mask, W, U, b)[-1]
    probabilities = T.nnet.softmax(T.dot(last, V) + c)
    loss = T.nnet.categorical_crossentropy(probabilities, y).mean()
    updates = rmsprop(loss, [W, U, b, V, c])
    x_in, mask_in = synk.In(x, axis=1), synk.In(mask, axis=1)
    train_step = train.parallel_function([x_in, mask_in, y], loss, updates=updates)
    predict = synk.function([x_in, mask_in], (probabilities.argmax(axis=1), "gather"))

    digits = load_digits()
    images = (digits.images / 16).transpose(1, 0, 2)  # (time, rows, pixels)
    images = images.astype(theano.config.floatX)
    lengths = random.randint(7, 9, size=len(digits.target))  # some lack their last row
    masks = (np.arange(8)[:, None] < lengths).astype(theano.config.floatX)
    labels = digits.target.astype("int32")
    losses = []
    for _ in range(steps):
        rows = random.randint(len(labels), size=batch_size)
        losses.append(float(train_step(images[:, rows], masks[:, rows], labels[rows])))
    some = slice(150)
    print(f"accuracy {np.mean(predict(images[:, some], masks[:, some]) == labels[some]):.4f}")
    return losses


if __name__ == "__main__":
    from show import show

    show(main, "loss")
