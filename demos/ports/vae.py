"""A variational autoencoder of digits.

After D. P. Kingma and M. Welling, "Auto-Encoding Variational Bayes", 2014 (arXiv:1312.6114): encoder and
decoder with a hidden layer each, the reparametrization z = mu + sigma * epsilon, and the bound of their
appendix B. It is trained with Adam (arXiv:1412.6980). epsilon is an input, drawn by NumPy.
"""

import numpy as np
import synkhronos as synk
import theano
import theano.tensor as T
from synkhronos.extensions import train
from sklearn.datasets import load_digits

N_PIXELS, N_HIDDEN, N_LATENT = 64, 100, 8
random = np.random.RandomState(0)


def shared(value):
    return theano.shared(np.asarray(value, theano.config.floatX))


class Layer:
    def __init__(self, n_in, n_out):
        self.W = shared(random.normal(0, np.sqrt(1.0 / n_in), (n_in, n_out)))
        self.b = shared(np.zeros(n_out))
        self.params = [self.W, self.b]

    def __call__(self, inputs):
        return T.dot(inputs, self.W) + self.b


def adam(loss, params, rate=0.02, decay_1=0.9, decay_2=0.999):
    t = shared(0)
    updates = [(t, t + 1)]
    step = rate * T.sqrt(1 - decay_2 ** (t + 1)) / (1 - decay_1 ** (t + 1))
    for param, gradient in zip(params, T.grad(loss, params)):
        mean, variance = shared(param.get_value() * 0), shared(param.get_value() * 0)
        new_mean = decay_1 * mean + (1 - decay_1) * gradient
        new_variance = decay_2 * variance + (1 - decay_2) * gradient**2
        updates += [(mean, new_mean), (variance, new_variance)]
        updates += [(param, param - step * new_mean / (T.sqrt(new_variance) + 1e-8))]
    return updates


def main(steps=40, batch_size=101):
    synk.fork()
    x, epsilon = T.matrix("x"), T.matrix("epsilon")
    encode, decode = Layer(N_PIXELS, N_HIDDEN), Layer(N_LATENT, N_HIDDEN)
    to_mu, to_log_sigma = Layer(N_HIDDEN, N_LATENT), Layer(N_HIDDEN, N_LATENT)
    to_pixels = Layer(N_HIDDEN, N_PIXELS)
    layers = [encode, to_mu, to_log_sigma, decode, to_pixels]

    hidden = T.tanh(encode(x))
    mu, log_sigma = to_mu(hidden), to_log_sigma(hidden)
    z = mu + T.exp(log_sigma) * epsilon
    pixels = T.nnet.sigmoid(to_pixels(T.tanh(decode(z))))
    divergence = -0.5 * (1 + 2 * log_sigma - mu**2 - T.exp(2 * log_sigma)).sum(axis=1)
    reconstruction = T.nnet.binary_crossentropy(pixels, x).sum(axis=1)
    loss = (divergence + reconstruction).mean()

    updates = adam(loss, [param for layer in layers for param in layer.params])
    train_step = train.parallel_function([x, epsilon], [loss, divergence.mean()], updates=updates)

    images = (load_digits().data > 8).astype(theano.config.floatX)
    losses = []
    for _ in range(steps):
        rows = random.randint(len(images), size=batch_size)
        noise = random.normal(size=(batch_size, N_LATENT)).astype(theano.config.floatX)
        value, _ = train_step(images[rows], noise)
        losses.append(float(value))
    return losses


if __name__ == "__main__":
    from show import show

    show(main, "loss")
