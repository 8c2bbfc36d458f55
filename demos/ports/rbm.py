"""A restricted Boltzmann machine, trained by persistent contrastive divergence.

After T. Tieleman, "Training Restricted Boltzmann Machines using Approximations to the Likelihood
Gradient", 2008, in the form of the chapter "Restricted Boltzmann Machines" of the Deep Learning
Tutorials, http://deeplearning.net/tutorial/rbm.html: the gradient of the difference of free energies,
with the end of the chain held constant, and the chain in a shared variable that the training function
updates. The random numbers of Gibbs sampling are inputs, drawn by NumPy.
"""

import numpy as np
import synkhronos as synk
import theano
import theano.tensor as T
from synkhronos.extensions import train
from sklearn.datasets import load_digits

N_VISIBLE, N_HIDDEN = 64, 50
random = np.random.RandomState(3)


def shared(value, name):
    return theano.shared(np.asarray(value, theano.config.floatX), name)


def uniform(*shape):
    return random.uniform(size=shape).astype(theano.config.floatX)


class RBM:
    def __init__(self):
        self.W = shared(random.normal(0, 0.05, (N_VISIBLE, N_HIDDEN)), "W")
        self.visible_bias = shared(np.zeros(N_VISIBLE), "visible_bias")
        self.hidden_bias = shared(np.zeros(N_HIDDEN), "hidden_bias")
        self.params = [self.W, self.visible_bias, self.hidden_bias]

    def hidden_mean(self, visible):
        return T.nnet.sigmoid(T.dot(visible, self.W) + self.hidden_bias)

    def visible_mean(self, hidden):
        return T.nnet.sigmoid(T.dot(hidden, self.W.T) + self.visible_bias)

    def free_energy(self, visible):
        hidden = T.nnet.softplus(T.dot(visible, self.W) + self.hidden_bias).sum(axis=1)
        return -T.dot(visible, self.visible_bias) - hidden

    def gibbs(self, hidden, for_visible, for_hidden):
        visible = T.cast(for_visible < self.visible_mean(hidden), theano.config.floatX)
        return visible, T.cast(for_hidden < self.hidden_mean(visible), theano.config.floatX)


def main(steps=40, batch_size=60, learning_rate=0.4, momentum=0.5):
    """Return, for each step, the error of reconstruction: the cross-entropy per image."""
    synk.fork()
    x, for_visible, for_hidden = T.matrix("x"), T.tensor3("for_visible"), T.tensor3("for_hidden")
    rbm = RBM()
    chain = shared(uniform(batch_size, N_HIDDEN) < 0.5, "chain")

    hidden = chain
    for k in range(2):  # Gibbs steps
        visible, hidden = rbm.gibbs(hidden, for_visible[:, k], for_hidden[:, k])
    cost = rbm.free_energy(x).mean() - rbm.free_energy(visible).mean()
    gradients = T.grad(cost, rbm.params, consider_constant=[visible])
    updates = []
    for param, gradient in zip(rbm.params, gradients):
        velocity = shared(param.get_value() * 0, "velocity")
        new_velocity = momentum * velocity - learning_rate * gradient
        updates += [(velocity, new_velocity), (param, param + new_velocity)]
    updates += [(chain, hidden, None)]  # each process keeps its own rows
    reconstructed = rbm.visible_mean(rbm.hidden_mean(x))
    error = T.nnet.binary_crossentropy(reconstructed, x).sum(axis=1).mean()
    inputs = [x, for_visible, for_hidden]
    of_cost = dict(gradients=gradients, params=rbm.params)
    train_rbm = train.parallel_function(inputs, error, updates=updates, **of_cost)
    synk.scatter(chain, chain.get_value())

    images = (load_digits().data > 8).astype(theano.config.floatX)
    errors = []
    for _ in range(steps):
        rows = random.randint(len(images), size=batch_size)
        numbers = uniform(batch_size, 2, N_VISIBLE), uniform(batch_size, 2, N_HIDDEN)
        errors.append(float(train_rbm(images[rows], *numbers)))
    return errors


if __name__ == "__main__":
    from show import show

    show(main, "error")
