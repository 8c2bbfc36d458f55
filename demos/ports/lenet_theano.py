"""A convolutional network in the form of the Deep Learning Tutorials: the batch size is in the graph.

After Y. LeCun et al., "Gradient-Based Learning Applied to Document Recognition", 1998, as described in
the chapter "Convolutional Neural Networks (LeNet)", http://deeplearning.net/tutorial/lenet.html:
`reshape` and `input_shape` are given the size of a minibatch as a number. The data, scikit-learn's
digits, are in shared variables.
"""

import numpy as np
import theano
import theano.tensor as T
from theano.tensor.signal import pool
from sklearn.datasets import load_digits

N_TRAIN, SIDE, N_KERNELS, N_HIDDEN = 1200, 8, (6, 12), 40
random = np.random.RandomState(8)


def shared(value):
    return theano.shared(np.asarray(value, theano.config.floatX))


def uniform(bound, shape):
    return shared(random.uniform(-bound, bound, shape))


class LeNetConvPoolLayer:
    def __init__(self, inputs, filter_shape, image_shape, poolsize=(2, 2), border_mode="valid"):
        n_in = np.prod(filter_shape[1:])
        n_out = filter_shape[0] * np.prod(filter_shape[2:]) / np.prod(poolsize)
        self.W = uniform(np.sqrt(6 / (n_in + n_out)), filter_shape)
        self.b = shared(np.zeros(filter_shape[0]))
        maps = T.nnet.conv2d(
            inputs,
            self.W,
            filter_shape=filter_shape,
            input_shape=image_shape,
            border_mode=border_mode,
        )
        pooled = pool.pool_2d(maps, ws=poolsize, ignore_border=True)
        self.output = T.tanh(pooled + self.b.dimshuffle("x", 0, "x", "x"))
        self.params = [self.W, self.b]


def load_data():
    digits = load_digits()
    order = random.permutation(len(digits.target))
    images, labels = digits.data[order] / 16, digits.target[order]
    parts = slice(N_TRAIN), slice(N_TRAIN, None)
    return [(shared(images[part]), T.cast(shared(labels[part]), "int32")) for part in parts]


def main(steps=40, batch_size=75, learning_rate=0.5):
    (train_x, train_y), (test_x, test_y) = load_data()
    index, x, y = T.lscalar("index"), T.matrix("x"), T.ivector("y")

    layer0 = LeNetConvPoolLayer(
        x.reshape((batch_size, 1, SIDE, SIDE)),
        filter_shape=(N_KERNELS[0], 1, 3, 3),
        image_shape=(batch_size, 1, SIDE, SIDE),
        border_mode="half",
    )
    layer1 = LeNetConvPoolLayer(
        layer0.output,
        filter_shape=(N_KERNELS[1], N_KERNELS[0], 3, 3),
        image_shape=(batch_size, N_KERNELS[0], SIDE // 2, SIDE // 2),
        poolsize=(1, 1),
    )
    features = layer1.output.flatten(2)
    n_features = N_KERNELS[1] * (SIDE // 2 - 2) ** 2
    W = uniform(np.sqrt(6 / (n_features + N_HIDDEN)), (n_features, N_HIDDEN))
    b = shared(np.zeros(N_HIDDEN))
    V, c = shared(np.zeros((N_HIDDEN, 10))), shared(np.zeros(10))
    p_y_given_x = T.nnet.softmax(T.dot(T.tanh(T.dot(features, W) + b), V) + c)
    cost = -T.mean(T.log(p_y_given_x)[T.arange(y.shape[0]), y])
    errors = T.mean(T.neq(T.argmax(p_y_given_x, axis=1), y))

    params = [V, c, W, b, *layer1.params, *layer0.params]
    updates = [(param, param - learning_rate * T.grad(cost, param)) for param in params]
    batch = slice(index * batch_size, (index + 1) * batch_size)
    train_givens = {x: train_x[batch], y: train_y[batch]}
    train_model = theano.function([index], cost, updates=updates, givens=train_givens)
    test_givens = {x: test_x[batch], y: test_y[batch]}
    test_model = theano.function([index], errors, givens=test_givens)

    n_train, n_test = (one.get_value(borrow=True).shape[0] // batch_size for one in (train_x, test_x))
    costs = [float(train_model(step % n_train)) for step in range(steps)]
    print(f"test error {100 * np.mean([test_model(i) for i in range(n_test)]):.2f}%")
    return costs


if __name__ == "__main__":
    from show import show

    show(main, "cost")
