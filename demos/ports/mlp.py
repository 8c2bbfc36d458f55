"""A multilayer perceptron in the form of the Deep Learning Tutorials: `index` selects the minibatch.

The data are in shared variables. A call gives only the number of a minibatch, and `givens` replace x and
y by its rows. The model, the penalties, the functions `train_model` and `validate_model`, and the early
stopping by the validation error are described in the chapter "Multilayer Perceptron" of the tutorials,
http://deeplearning.net/tutorial/mlp.html. The data here are scikit-learn's digits.
"""

import numpy as np
import synkhronos as synk
import theano
import theano.tensor as T
from synkhronos.extensions import train
from sklearn.datasets import load_digits


def load_data(n_train=1200):
    digits = load_digits()
    order = np.random.RandomState(0).permutation(len(digits.target))
    images, labels = digits.data[order] / 16, digits.target[order]

    def shared_dataset(rows):
        x = theano.shared(images[rows].astype(theano.config.floatX), borrow=True)
        y = theano.shared(labels[rows].astype(theano.config.floatX), borrow=True)
        return x, T.cast(y, "int32")

    return shared_dataset(slice(n_train)), shared_dataset(slice(n_train, None))


class HiddenLayer:
    def __init__(self, random, inputs, n_in, n_out):
        bound = np.sqrt(6.0 / (n_in + n_out))
        weights = random.uniform(-bound, bound, (n_in, n_out)).astype(theano.config.floatX)
        self.W = theano.shared(weights, name="W", borrow=True)
        self.b = theano.shared(np.zeros(n_out, theano.config.floatX), name="b", borrow=True)
        self.output = T.tanh(T.dot(inputs, self.W) + self.b)


class LogisticRegression:
    def __init__(self, inputs, n_in, n_out):
        self.W = theano.shared(np.zeros((n_in, n_out), theano.config.floatX), name="W", borrow=True)
        self.b = theano.shared(np.zeros(n_out, theano.config.floatX), name="b", borrow=True)
        self.p_y_given_x = T.nnet.softmax(T.dot(inputs, self.W) + self.b)

    def negative_log_likelihood(self, y):
        return -T.mean(T.log(self.p_y_given_x)[T.arange(y.shape[0]), y])

    def errors(self, y):
        return T.mean(T.neq(T.argmax(self.p_y_given_x, axis=1), y))


def main(steps=40, batch_size=75, learning_rate=0.4, L1_reg=1e-5, L2_reg=1e-4, patience=3):
    synk.fork()
    (train_x, train_y), (valid_x, valid_y) = load_data()
    index, x, y = T.lscalar("index"), T.matrix("x"), T.ivector("y")

    hidden = HiddenLayer(np.random.RandomState(1234), x, 64, 50)
    classifier = LogisticRegression(hidden.output, 50, 10)
    params = [hidden.W, hidden.b, classifier.W, classifier.b]
    L1 = abs(hidden.W).sum() + abs(classifier.W).sum()
    L2_sqr = (hidden.W**2).sum() + (classifier.W**2).sum()
    cost = classifier.negative_log_likelihood(y) + L1_reg * L1 + L2_reg * L2_sqr
    updates = [(param, param - learning_rate * T.grad(cost, param)) for param in params]

    batch = slice(index * batch_size, (index + 1) * batch_size)
    train_givens = {x: train_x[batch], y: train_y[batch]}
    train_model = train.parallel_function([index], cost, updates=updates, givens=train_givens)
    valid_givens = {x: valid_x[batch], y: valid_y[batch]}
    validate_model = synk.function([index], classifier.errors(y), givens=valid_givens)

    n_train = train_x.get_value(borrow=True).shape[0] // batch_size
    n_valid = valid_x.get_value(borrow=True).shape[0] // batch_size
    costs, best, epochs_left = [], np.inf, patience
    while len(costs) < steps and epochs_left:
        for minibatch in range(min(n_train, steps - len(costs))):
            costs.append(float(train_model(minibatch)))
        error = np.mean([validate_model(i) for i in range(n_valid)])
        print(f"after {len(costs)} minibatches: validation error {100 * error:.2f}%")
        best, epochs_left = (error, patience) if error < best else (best, epochs_left - 1)
    return costs


if __name__ == "__main__":
    from show import show

    show(main, "cost")
