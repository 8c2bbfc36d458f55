"""A generative adversarial network that learns a normal distribution in two dimensions.

After I. Goodfellow et al., "Generative Adversarial Nets", 2014 (arXiv:1406.2661): two training
functions in turn, for a discriminator and for a generator that maximizes log D(G(z)), as section 3
recommends. Adam has the momentum 0.5 of A. Radford et al., 2015 (arXiv:1511.06434). The noise is an
input, drawn by NumPy.
"""

import numpy as np
import theano
import theano.tensor as T

N_NOISE, N_HIDDEN = 3, 24
MEAN, SPREAD = np.array([3.0, -2.0]), np.array([[0.8, 0.3], [0.0, 0.5]])
random = np.random.RandomState(1)


def shared(value):
    return theano.shared(np.asarray(value, theano.config.floatX))


def normal(*shape):
    return random.normal(size=shape).astype(theano.config.floatX)


class Network:
    """Two layers; the hidden one is rectified."""

    def __init__(self, n_in, n_out):
        self.W, self.b = shared(normal(n_in, N_HIDDEN) / np.sqrt(n_in)), shared(np.zeros(N_HIDDEN))
        self.V, self.c = shared(normal(N_HIDDEN, n_out) / np.sqrt(N_HIDDEN)), shared(np.zeros(n_out))
        self.params = [self.W, self.b, self.V, self.c]

    def __call__(self, inputs):
        return T.dot(T.nnet.relu(T.dot(inputs, self.W) + self.b, 0.2), self.V) + self.c


def adam(loss, params, rate=0.03, decay_1=0.5, decay_2=0.999):
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


def main(steps=40, batch_size=65):
    """Return, for each step, the losses of both networks, and how far the samples' mean is off."""
    real, z = T.matrix("real"), T.matrix("z")
    generator, discriminator = Network(N_NOISE, 2), Network(2, 1)
    fake = generator(z)
    for_real, for_fake = discriminator(real), discriminator(fake)
    d_loss = T.nnet.softplus(-for_real).mean() + T.nnet.softplus(for_fake).mean()
    g_loss = T.nnet.softplus(-for_fake).mean()

    d_updates = adam(d_loss, discriminator.params)
    train_d = theano.function([real, z], d_loss, updates=d_updates)
    g_updates = adam(g_loss, generator.params)
    train_g = theano.function([z], g_loss, updates=g_updates)
    generate = theano.function([z], fake)

    history, fixed_noise = [], normal(200, N_NOISE)
    for _ in range(steps):
        samples = (MEAN + normal(batch_size, 2).dot(SPREAD)).astype(theano.config.floatX)
        d_value = train_d(samples, normal(batch_size, N_NOISE))
        g_value = train_g(normal(batch_size, N_NOISE))
        error = np.linalg.norm(generate(fixed_noise).mean(axis=0) - MEAN)
        history.append((float(d_value), float(g_value), float(error)))
    return history


if __name__ == "__main__":
    from show import show

    show(main, "discriminator", "generator", "error")
