"""Sentences rated good or bad: `f_grad_shared` stores the gradients, and `f_update` applies them.

The two functions, with the gradients in shared variables between them, are described in the chapter
"LSTM Networks for Sentiment Analysis", http://deeplearning.net/tutorial/lstm.html. Many programs for
machine translation have them, too. The rule is AdaDelta (M. Zeiler, 2012, arXiv:1212.5701). The network
has gated recurrent units (K. Cho et al., 2014, arXiv:1406.1078), whose outputs are averaged over the
words. Data and masks have time along axis 0. The sentences are drawn at random, and are good if they
have more good words than bad ones.
"""

import numpy as np
import synkhronos as synk
import theano
import theano.tensor as T
from synkhronos.extensions import train

N_WORDS, N_OPINIONS = 20, 8  # words 0 to 7 are good, and 8 to 15 bad
N_FEATURES, N_UNITS, LONGEST = 8, 12, 9
random = np.random.RandomState(6)


def shared(value, name):
    return theano.shared(np.asarray(value, theano.config.floatX), name)


def load_data(n_sentences=600):
    """Return words and masks, (time, sentences), and whether each sentence is good."""
    opinion = np.repeat([1, -1, 0], [N_OPINIONS, N_OPINIONS, N_WORDS - 2 * N_OPINIONS])
    words = random.randint(N_WORDS, size=(LONGEST, n_sentences))
    masks = np.arange(LONGEST)[:, None] < random.randint(4, LONGEST + 1, size=n_sentences)
    ratings = (opinion[words] * masks).sum(axis=0)
    return words.astype("int32"), masks.astype(theano.config.floatX), (ratings > 0).astype("int32")


class Network:
    def __init__(self):
        def weights(n_in, n_out, name):
            return shared(random.normal(0, 1 / np.sqrt(n_in), (n_in, n_out)), name)

        self.embedding = shared(random.normal(0, 1, (N_WORDS, N_FEATURES)), "embedding")
        self.W, self.b = weights(N_FEATURES, 3 * N_UNITS, "W"), shared(np.zeros(3 * N_UNITS), "b")
        self.U = weights(N_UNITS, 2 * N_UNITS, "U")
        self.U_new = weights(N_UNITS, N_UNITS, "U_new")
        self.V, self.c = weights(N_UNITS, 2, "V"), shared(np.zeros(2), "c")
        self.params = [self.embedding, self.W, self.b, self.U, self.U_new, self.V, self.c]

    def probabilities(self, words, mask):
        n_times, n_sentences = words.shape
        features = self.embedding[words.flatten()].reshape((n_times, n_sentences, N_FEATURES))

        def step(now, alive, state, U, U_new):
            gates = T.nnet.sigmoid(now[:, : 2 * N_UNITS] + T.dot(state, U))
            reset, keep = gates[:, :N_UNITS], gates[:, N_UNITS:]
            new = T.tanh(now[:, 2 * N_UNITS :] + T.dot(reset * state, U_new))
            alive = alive[:, None]
            return alive * (keep * state + (1 - keep) * new) + (1 - alive) * state

        states, _ = theano.scan(
            step,
            sequences=[T.dot(features, self.W) + self.b, mask],
            outputs_info=[T.zeros((n_sentences, N_UNITS))],
            non_sequences=[self.U, self.U_new],
        )
        mean = (states * mask[:, :, None]).sum(axis=0) / mask.sum(axis=0)[:, None]
        return T.nnet.softmax(T.dot(mean, self.V) + self.c)


def adadelta(params, gradients, inputs, cost, decay=0.95, epsilon=1e-3):
    """Return a function that computes the cost and stores the gradients, and one that uses them."""
    stored, squares, steps = (
        [shared(param.get_value() * 0, f"{param.name}_{what}") for param in params]
        for what in ("gradient", "square", "step")
    )

    def mean_square(old, new):
        return decay * old + (1 - decay) * new**2

    keep = list(zip(stored, gradients))
    keep += [(square, mean_square(square, one)) for square, one in zip(squares, gradients)]
    f_grad_shared = train.parallel_function(inputs, cost, updates=keep, name="adadelta_f_grad_shared")

    updates = []
    for param, one, square, step in zip(params, stored, squares, steps):
        change = -T.sqrt(step + epsilon) / T.sqrt(square + epsilon) * one
        updates += [(step, mean_square(step, change)), (param, param + change)]
    f_update = synk.function([], [], updates=updates, name="adadelta_f_update")
    return f_grad_shared, f_update


def main(steps=40, batch_size=51):
    synk.fork()
    words, mask, y = T.imatrix("words"), T.matrix("mask"), T.ivector("y")
    network = Network()
    probabilities = network.probabilities(words, mask)
    cost = -T.log(probabilities[T.arange(y.shape[0]), y] + 1e-8).mean()
    gradients = T.grad(cost, wrt=network.params)
    inputs = [synk.In(words, axis=1), synk.In(mask, axis=1), y]
    f_grad_shared, f_update = adadelta(network.params, gradients, inputs, cost)
    errors = T.neq(probabilities.argmax(axis=1), y).mean()
    f_error = synk.function(inputs, errors)

    all_words, all_masks, labels = load_data()
    costs = []
    for _ in range(steps):
        rows = random.randint(500, size=batch_size)
        costs.append(float(f_grad_shared(all_words[:, rows], all_masks[:, rows], labels[rows])))
        f_update()
    error = f_error(all_words[:, 500:], all_masks[:, 500:], labels[500:])
    print(f"error on new sentences: {100 * error:.2f}%")
    return costs


if __name__ == "__main__":
    from show import show

    show(main, "cost")
