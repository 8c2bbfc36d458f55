"""Images, synthetic or from files, loaded in the graph by their row numbers; and minibatches of them."""

if __name__ == "__main__":
    raise SystemExit(f"{__doc__}\nScripts use this file; run train_resnet.py.")

import synkhronos  # noqa: F401  # before Theano, which otherwise cannot be imported
import numpy as np
import theano
import theano.tensor as T
from command_line import UserError
from synkhronos.extensions.zoo import data


class SyntheticImages:
    """Noise with random labels. An image is drawn when it is loaded, with its row number as a seed."""

    def __init__(self, rows, classes, seed):
        self.source = f"{rows} synthetic, noise with random labels"
        self.labels = np.random.RandomState(seed).randint(classes, size=rows).astype("int32")
        self._seed = seed

    def load(self, row, out):
        np.random.default_rng([self._seed, row]).standard_normal(dtype=out.dtype, out=out)


class ImageFolder:
    """Image files in one folder per class: ``DIR/cat/1.jpg``, ``DIR/dog/1.png``."""

    def __init__(self, folder):
        try:
            self._files, self.names = data.labelled_files(folder)
        except (OSError, ValueError) as error:
            raise UserError(f"--data: {error}") from error
        self.labels = self._files.labels
        self.source = f"{len(self.labels)} of {len(self.names)} classes, from {folder}"

    def load(self, row, out):
        """Load the middle of an image into `out`, scaled, and normalized as ImageNet's pixels."""
        try:
            pixels = self._files.load_one(row, out.shape[1])
        except ValueError as error:
            raise UserError(str(error)) from error
        mean, deviation = data.IMAGENET_MEAN, data.IMAGENET_DEVIATION
        out[...] = (pixels - mean[:, None, None]) / deviation[:, None, None]


def load_images(options):
    """Return the images that the options select, and set the number of classes in the options."""
    if options.data is None:
        rows = options.valid + 10 * options.batch
        return SyntheticImages(rows, options.classes, options.seed)
    images = ImageFolder(options.data)
    options.classes = len(images.names)
    options.valid = min(options.valid, len(images.labels) // 10 + 1)
    return images


class LoadImages(theano.Op):
    """An operation of the graph that loads the images of some rows.

    Only row numbers are scattered. Each rank loads the images of its own rows, in parallel with the
    other ranks. With ``num_slices`` it loads one slice at a time.

    Loading images during the computation of another minibatch would not help if all cores are busy: an
    image takes a few milliseconds to decode, and hundreds to train on.
    """

    def __init__(self, images, size):
        self._images, self._size = images, size

    def make_node(self, rows):
        return theano.Apply(self, [T.as_tensor_variable(rows)], [T.ftensor4()])

    def perform(self, node, inputs, outputs):
        (rows,) = inputs
        pixels = np.empty((len(rows), 3, self._size, self._size), "float32")
        for row, image in zip(rows, pixels):
            self._images.load(row, image)
        outputs[0][0] = pixels

    def connection_pattern(self, node):
        return [[False]]  # there is no gradient with respect to row numbers

    def grad(self, inputs, gradients):
        return [theano.gradient.DisconnectedType()()]


class Minibatches:
    """Row numbers and labels: those held out, and an endless iterator of minibatches in random order."""

    def __init__(self, images, options):
        self._labels = images.labels
        rows = np.random.RandomState(options.seed).permutation(len(images.labels)).astype("int32")
        held_out, self._train = rows[: options.valid], rows[options.valid :]
        self.valid = held_out, self._labels[held_out]
        self._shuffle, self._batch = np.random.RandomState(options.seed), options.batch
        self._left = self._train[:0]

    def __iter__(self):
        return self

    def __next__(self):
        while len(self._left) < self._batch:
            self._left = np.concatenate([self._left, self._shuffle.permutation(self._train)])
        rows, self._left = self._left[: self._batch], self._left[self._batch :]
        return rows, self._labels[rows]
