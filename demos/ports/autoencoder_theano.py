"""A denoising autoencoder whose minibatches are in shared variables: `train_step` has no inputs.

After P. Vincent et al., "Extracting and Composing Robust Features with Denoising Autoencoders", 2008:
pixels are hidden at random, and the network, with the same weights in both directions, learns to restore
them. As programs for GPUs do, the script puts each minibatch into shared variables by `set_value`, and
`givens` have the function read them there. For validation it puts a chunk of several minibatches into a
shared variable, and an index selects one of them.
"""

import numpy as np
import theano
import theano.tensor as T
from sklearn.datasets import load_digits

N_PIXELS, N_HIDDEN, N_TRAIN = 64, 40, 1500
random = np.random.RandomState(7)


def shared(value):
    return theano.shared(np.asarray(value, theano.config.floatX))


def main(steps=40, batch_size=51, learning_rate=0.3, momentum=0.9):
    x, is_seen, index = T.matrix("x"), T.matrix("is_seen"), T.lscalar("index")
    W = shared(random.normal(0, 0.1, (N_PIXELS, N_HIDDEN)))
    hidden_bias, visible_bias = shared(np.zeros(N_HIDDEN)), shared(np.zeros(N_PIXELS))
    params = [W, hidden_bias, visible_bias]
    hidden = T.nnet.sigmoid(T.dot(x * is_seen, W) + hidden_bias)
    restored = T.nnet.sigmoid(T.dot(hidden, W.T) + visible_bias)
    error = T.sqr(restored - x).sum(axis=1).mean()
    updates = []
    for param, gradient in zip(params, T.grad(error, params)):
        velocity = shared(param.get_value() * 0)
        new_velocity = momentum * velocity - learning_rate * gradient
        updates += [(velocity, new_velocity), (param, param + new_velocity)]

    batch = [shared(np.zeros((batch_size, N_PIXELS))) for _ in range(2)]  # images, what is seen
    chunk = shared(np.zeros((1, N_PIXELS)))
    givens = dict(zip([x, is_seen], batch))
    train_step = theano.function([], error, updates=updates, givens=givens)
    rows = chunk[index * batch_size : (index + 1) * batch_size]
    validate = theano.function([index], error, givens={x: rows, is_seen: T.ones_like(rows)})

    images = (load_digits().data / 16).astype(theano.config.floatX)
    errors = []
    for _ in range(steps):
        chosen = images[random.randint(N_TRAIN, size=batch_size)]
        seen = random.uniform(size=chosen.shape) < 0.8
        values = [chosen, seen.astype(chosen.dtype)]
        for one, value in zip(batch, values):
            one.set_value(value)
        errors.append(float(train_step()))
    chunk.set_value(images[N_TRAIN:])
    n_batches = (len(images) - N_TRAIN) // batch_size
    error = np.mean([validate(number) for number in range(n_batches)])
    print(f"error of new images, of which all is seen: {error:.4f}")
    return errors


if __name__ == "__main__":
    from show import show

    show(main, "error")
