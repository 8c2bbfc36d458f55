"""A PixelCNN: masked convolutions predict each pixel from the pixels above it and to its left.

After A. van den Oord et al., "Pixel Recurrent Neural Networks", 2016 (arXiv:1601.06759): the first layer
has a mask of kind A, which hides the pixel itself, the others are residual layers with masks of kind B.
Trained with Adam (arXiv:1412.6980) on black and white digits. New images are drawn pixel by pixel.
"""

import numpy as np
import synkhronos as synk
import theano
import theano.tensor as T
from synkhronos.extensions import train
from sklearn.datasets import load_digits

N_MAPS, SIDE = 12, 8
random = np.random.RandomState(5)


def shared(value):
    return theano.shared(np.asarray(value, theano.config.floatX))


class MaskedConvolution:
    def __init__(self, n_in, n_out, size, kind):
        self.mask = np.ones((n_out, n_in, size, size), theano.config.floatX)
        middle = size // 2
        self.mask[:, :, middle, middle + (kind == "B") :] = 0
        self.mask[:, :, middle + 1 :] = 0
        n_visible = self.mask[0].sum()
        self.W = shared(random.normal(0, np.sqrt(1 / n_visible), self.mask.shape))
        self.b = shared(np.zeros(n_out))
        self.params = [self.W, self.b]

    def __call__(self, images):
        # conv2d with filter_flip=False, so that the mask is not mirrored
        convolved = T.nnet.conv2d(images, self.W * self.mask, border_mode="half", filter_flip=False)
        return convolved + self.b.dimshuffle("x", 0, "x", "x")


def adam(loss, params, rate=0.04, decay_1=0.9, decay_2=0.999):
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


def main(steps=40, batch_size=49):
    synk.fork()
    x = T.tensor4("x")
    first = MaskedConvolution(1, N_MAPS, 5, "A")
    middle = MaskedConvolution(N_MAPS, N_MAPS, 3, "B")
    last = MaskedConvolution(N_MAPS, 1, 1, "B")
    hidden = T.nnet.relu(first(x))
    hidden = hidden + T.nnet.relu(middle(hidden))
    probabilities = T.nnet.sigmoid(last(hidden))
    loss = T.nnet.binary_crossentropy(probabilities, x).mean()

    updates = adam(loss, first.params + middle.params + last.params)
    train_step = train.parallel_function([x], loss, updates=updates)
    predict = synk.function([x], (probabilities, "gather"))

    images = (load_digits().images > 12).astype(theano.config.floatX)[:, None]
    losses = []
    for _ in range(steps):
        rows = random.randint(len(images), size=batch_size)
        losses.append(float(train_step(images[rows])))
    drawn = np.zeros((4, 1, SIDE, SIDE), theano.config.floatX)
    for row, column in np.ndindex(SIDE, SIDE):
        chances = predict(drawn)[:, 0, row, column]
        drawn[:, 0, row, column] = random.uniform(size=4) < chances
    for row in range(SIDE):
        print("  ".join("".join(".#"[int(pixel)] for pixel in image[0, row]) for image in drawn))
    return losses


if __name__ == "__main__":
    from show import show

    show(main, "loss")
