"""What the two training scripts share: the network, the images, the loop, the report.

Nothing here knows of ranks. A script hands ``train`` two functions of its own:

``step(rows, labels)``
    takes a step on a minibatch, and returns the loss before it;
``evaluate(rows, labels)``
    the loss and the accuracy on the rows held out, with the running averages of batch norm.
"""

import argparse
import math
import sys
import time
from pathlib import Path
from typing import NamedTuple

import synkhronos  # before Theano: with it, Theano imports on today's NumPy
import numpy as np
import theano
import theano.tensor as T
from PIL import Image, ImageOps
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parent.parent))
from lasagne_on_theano import lasagne

theano.config.floatX = "float32"

MOMENTUM = 0.9
RATE = 0.1 / 256  # the learning rate of the paper, for each image of a minibatch
DEFAULTS = {"steps": 100, "batch_a_process": 8, "valid": 64, "evaluate_every": 20}
SMALL = {"steps": 4, "batch_a_process": 4, "valid": 8, "evaluate_every": 4}
# Of ImageNet's pixels in [0, 1], by colour.
PIXEL_MEAN = np.array([0.485, 0.456, 0.406], "float32")
PIXEL_DEVIATION = np.array([0.229, 0.224, 0.225], "float32")


class UserError(Exception):
    """Options or files with which nothing can be done, and why."""


# The network


class BatchNormLayer(lasagne.layers.Layer):
    """Batch normalisation: each channel with mean 0 and variance 1, then scaled and shifted.

    In training by the mean and the variance of the rows at hand, that is of the rank's own rows, or
    of a slice of them; no rank waits for another's. With ``deterministic=True`` the running
    averages of both normalise. What a step makes of these is in `updates`, once the layer has its
    output for training: the function that computes the gradient is to do them, on each rank from
    its own rows.

    A running average is the mean of all steps so far; from the tenth on the newest step has the
    weight 0.1. That of the variance is of the unbiased estimate, so that it tends to the same value
    however many rows a rank has.

    Parameters
    ----------
    incoming : Layer or tuple
        Channels on axis 1; every other axis is normalised over.
    weight : float
        Of the newest step in the running averages, at least.
    epsilon : float
        Added to the variance.
    """

    def __init__(self, incoming, weight=0.1, epsilon=1e-5, **kwargs):
        super().__init__(incoming, **kwargs)
        self.weight, self.epsilon = weight, epsilon
        self.updates = []
        channels = self.input_shape[1:2]
        self.scale = self._param("scale", 1, channels)
        self.shift = self._param("shift", 0, channels)
        average = {"trainable": False, "running_average": True}
        self.mean = self._param("mean", 0, channels, **average)
        self.variance = self._param("variance", 1, channels, **average)
        self.steps = self._param("steps", 0, (), **average)

    def _param(self, name, value, shape, **tags):
        value = lasagne.init.Constant(value)
        return self.add_param(value, shape, name, regularizable=False, **tags)

    def get_output_for(self, input, deterministic=False, **kwargs):
        axes = [axis for axis in range(input.ndim) if axis != 1]
        pattern = [0 if axis == 1 else "x" for axis in range(input.ndim)]
        if deterministic:
            mean, variance = self.mean, self.variance
            centred = input - mean.dimshuffle(pattern)
        else:
            # Theano's own batch_normalization_train computes the squares as powers, and with them
            # a step of the whole network takes a quarter more time.
            mean = input.mean(axes)
            centred = input - mean.dimshuffle(pattern)
            variance = T.sqr(centred).mean(axes)
            self.updates = self._updates(mean, variance, input.size // input.shape[1])
        scale = self.scale / T.sqrt(variance + self.epsilon)
        return centred * scale.dimshuffle(pattern) + self.shift.dimshuffle(pattern)

    def _updates(self, mean, variance, numbers):
        newest = T.maximum(1 / (self.steps + 1), self.weight)
        unbiased = variance * T.cast(numbers / (numbers - 1), variance.dtype)
        return [
            (self.mean, (1 - newest) * self.mean + newest * mean),
            (self.variance, (1 - newest) * self.variance + newest * unbiased),
            (self.steps, self.steps + 1),
        ]


class ConvLayer(lasagne.layers.Conv2DLayer):
    """A convolution alone, in Theano 1.0's own terms: neither images nor filters are copied.

    Lasagne 0.1 pads the images in a step of its own, and has Theano turn the filters round.
    """

    def __init__(self, incoming, filters, size, stride=1):
        weights = lasagne.init.HeNormal(gain="relu")
        super().__init__(incoming, filters, size, stride, pad=size // 2, W=weights, b=None)

    def get_output_for(self, input, **kwargs):
        return T.nnet.conv2d(
            input,
            self.W,
            self.input_shape,
            self.get_W_shape(),
            border_mode=self.pad,
            subsample=self.stride,
            filter_flip=False,
        )


def rectified(layer):
    return lasagne.layers.NonlinearityLayer(layer, lasagne.nonlinearities.rectify)


def build_bottleneck(layer, width, stride):
    """Convolutions of 1x1 to `width` channels, 3x3, 1x1 to four times as many; the input added."""
    residual = rectified(BatchNormLayer(ConvLayer(layer, width, 1, stride)))
    residual = rectified(BatchNormLayer(ConvLayer(residual, width, 3)))
    residual = BatchNormLayer(ConvLayer(residual, 4 * width, 1))
    if layer.output_shape != residual.output_shape:
        layer = BatchNormLayer(ConvLayer(layer, 4 * width, 1, stride))
    return rectified(lasagne.layers.ElemwiseSumLayer([layer, residual]))


def build_resnet(x, size, classes, blocks=(3, 4, 6, 3), width=64):
    """The residual network of He et al., "Deep residual learning for image recognition" (2015).

    Each number of `blocks` is a stage of that many bottlenecks, with half the resolution and twice
    the width of the stage before. The defaults make the network of 50 layers.
    """
    layer = lasagne.layers.InputLayer((None, 3, size, size), x)
    layer = rectified(BatchNormLayer(ConvLayer(layer, width, 7, stride=2)))
    layer = lasagne.layers.MaxPool2DLayer(layer, 3, stride=2, pad=1)
    for stage, length in enumerate(blocks):
        for block in range(length):
            stride = 2 if stage > 0 and block == 0 else 1
            layer = build_bottleneck(layer, width * 2**stage, stride)
    layer = lasagne.layers.GlobalPoolLayer(layer)
    return lasagne.layers.DenseLayer(layer, classes, nonlinearity=lasagne.nonlinearities.softmax)


class Model(NamedTuple):
    x: T.TensorVariable
    y: T.TensorVariable
    params: list  # to be trained
    averages: list  # the running averages of batch norm
    loss: T.TensorVariable
    average_updates: list
    valid_loss: T.TensorVariable
    accuracy: T.TensorVariable


def build_model(options, images=None):
    """The network, its graph and its parameters; one seed gives one set of initial weights.

    With images, the input `x` is row numbers, and the graph begins with loading these images.
    """
    lasagne.random.set_rng(np.random.RandomState(options.seed))
    y = T.ivector("y")
    if images is None:
        x = pixels = T.tensor4("x")
    else:
        x = T.ivector("rows")
        pixels = LoadImages(images, options.size)(x)
    network = build_resnet(pixels, options.size, options.classes, options.blocks, options.width)
    cross_entropy = lasagne.objectives.categorical_crossentropy
    loss = cross_entropy(lasagne.layers.get_output(network), y).mean()
    prediction = lasagne.layers.get_output(network, deterministic=True)
    norms = [one for one in lasagne.layers.get_all_layers(network) if hasattr(one, "updates")]
    return Model(
        x=x,
        y=y,
        params=lasagne.layers.get_all_params(network, trainable=True),
        averages=lasagne.layers.get_all_params(network, running_average=True),
        loss=loss,
        average_updates=[update for norm in norms for update in norm.updates],
        valid_loss=cross_entropy(prediction, y).mean(),
        accuracy=T.eq(prediction.argmax(axis=1), y).mean(dtype=theano.config.floatX),
    )


# The images


class SyntheticImages:
    """Noise with a label each, drawn anew from the row's number whenever it is loaded."""

    def __init__(self, rows, classes, seed):
        self.source = f"{rows} synthetic ones, noise with random labels"
        self.labels = np.random.RandomState(seed).randint(classes, size=rows).astype("int32")
        self._seed = seed

    def load(self, row, out):
        np.random.default_rng([self._seed, row]).standard_normal(dtype=out.dtype, out=out)


class ImageFolder:
    """Image files, each in the folder of its class: ``DIR/cat/1.jpg``, ``DIR/dog/1.png``."""

    def __init__(self, folder):
        folder, suffixes = Path(folder), Image.registered_extensions()
        if not folder.is_dir():
            raise UserError(f"expected a folder of images, got {folder}")
        classes = sorted(path for path in folder.iterdir() if path.is_dir())
        found = [
            [path for path in sorted(one.rglob("*")) if path.suffix.lower() in suffixes]
            for one in classes
        ]
        self.names = [one.name for one, paths in zip(classes, found) if paths]
        self.paths = [path for paths in found for path in paths]
        self.labels = np.repeat(
            np.arange(len(self.names), dtype="int32"), [len(paths) for paths in found if paths]
        )
        if len(self.names) < 2:
            raise UserError(
                f"expected image files in a folder for each class in {folder}, two classes or "
                f"more, got {len(self.paths)} files in {len(self.names)} classes"
            )
        self.source = f"{len(self.paths)} of {len(self.names)} classes, from {folder}"

    def load(self, row, out):
        """The middle of the image, scaled to `out`, with ImageNet's mean 0 and variance 1."""
        size = out.shape[1:]
        try:
            with Image.open(self.paths[row]) as image:
                image.draft("RGB", size)  # has JPEG decode no more pixels than are needed
                pixels = np.asarray(ImageOps.fit(image.convert("RGB"), size), "float32")
        except Exception as error:  # Pillow's decoders raise all sorts of them
            raise UserError(f"{self.paths[row]} cannot be read as an image: {error}") from error
        out[...] = ((pixels / 255 - PIXEL_MEAN) / PIXEL_DEVIATION).transpose(2, 0, 1)


def load_images(options):
    """The images that the options ask for; they decide how many classes there are."""
    if options.data is None:
        rows = options.valid + 10 * options.batch
        return SyntheticImages(rows, options.classes, options.seed)
    images = ImageFolder(options.data)
    options.classes = len(images.names)
    options.valid = min(options.valid, len(images.labels) // 10 + 1)
    return images


class LoadImages(theano.Op):
    """The images of some rows, as a part of the graph.

    So each rank loads the images of its own rows, at the same time as the others, and with
    ``num_slices`` no more of them at once than it computes on. What is scattered is row numbers.
    Loading while another minibatch computes would gain nothing on a machine whose cores all compute:
    an image takes some milliseconds to decode, and hundreds to train on.
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
        return [[False]]  # there is no gradient by a row number

    def grad(self, inputs, gradients):
        return [theano.gradient.DisconnectedType()()]


class Minibatches:
    """Row numbers and labels: those held out, and minibatches in random order without end."""

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


# The loop


def train(minibatches, valid, step, evaluate, options):
    """Trains, printing a line at each evaluation; returns the seconds and the loss of each step."""
    seconds, losses = [], []
    with progress_bar(options.steps * options.batch) as bar:
        write(bar, " step    loss  valid loss  valid accuracy  seconds a step")
        for first in range(0, options.steps, options.evaluate_every):
            bar.set_description("training", refresh=False)
            for _ in range(first, min(first + options.evaluate_every, options.steps)):
                taken, loss = timed_step(minibatches, step)
                seconds.append(taken)
                losses.append(loss)
                bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
                bar.update(options.batch)
            bar.set_description("evaluating")
            valid_loss, accuracy = evaluate(*valid)
            line = len(losses), np.mean(losses[first:]), valid_loss, accuracy
            taken = np.median(seconds[first:])
            write(bar, "{:5d}  {:6.4f}  {:10.4f}  {:14.2%}  {:14.3f}".format(*line, taken))
    return seconds, losses


def timed_step(minibatches, step):
    """The seconds of a step, loading its images included, and its loss."""
    start = time.perf_counter()
    loss = float(step(*next(minibatches)))
    return time.perf_counter() - start, loss


def progress_bar(images):
    """A bar with the loss and the rate; none where stderr is a file or a pipe."""
    return tqdm(total=images, unit=" images", leave=False, disable=None)


def write(bar, line):
    bar.write(line)
    sys.stdout.flush()


# What goes in and what comes out


def parser(description):
    """The options that both scripts have."""
    options = argparse.ArgumentParser(description=description.splitlines()[0])
    options.add_argument(
        "--small",
        action="store_true",
        help="the whole network on whole images, but {steps} steps of {batch_a_process} images a "
        "process: some minutes on two cores".format(**SMALL),
    )
    options.add_argument(
        "--data", metavar="DIR", help="image files, each in the folder of its class; without: noise"
    )
    options.add_argument("--steps", type=int, help="default: {steps}".format(**DEFAULTS))
    options.add_argument(
        "--batch",
        type=int,
        metavar="IMAGES",
        help="of all processes together; default: {batch_a_process} a process".format(**DEFAULTS),
    )
    options.add_argument(
        "--slices",
        type=int,
        default=1,
        help="compute a gradient in that many slices, for minibatches larger than the memory",
    )
    options.add_argument("--learning-rate", type=float, help="default: 0.1 for 256 images")
    options.add_argument("--valid", type=int, metavar="IMAGES", help="to hold out")
    options.add_argument("--evaluate-every", type=int, metavar="STEPS")
    options.add_argument("--seed", type=int, default=1, help="of weights, noise and shuffling")
    network = options.add_argument_group("the network (default: ResNet-50 for ImageNet)")
    network.add_argument("--size", type=int, default=224, help="pixels of an image's side")
    network.add_argument("--classes", type=int, default=1000, help="those of DIR, if given")
    network.add_argument("--blocks", type=int, nargs="+", default=[3, 4, 6, 3], help="a stage")
    network.add_argument("--width", type=int, default=64, help="filters in the first stage")
    return options


def complete(options, processes):
    """Fills in the defaults that depend on other options, and refuses what cannot work."""
    defaults = SMALL if options.small else DEFAULTS
    for name in ("steps", "valid", "evaluate_every"):
        if getattr(options, name) is None:
            setattr(options, name, defaults[name])
    options.processes = processes
    options.batch = options.batch or defaults["batch_a_process"] * processes
    options.learning_rate = options.learning_rate or RATE * options.batch
    for name in ("steps", "batch", "slices", "valid", "evaluate_every"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name.replace('_', '-')}: expected 1 or more")
    # What is left of the sides, and so the numbers a channel that the last batch norm has.
    side = math.ceil(options.size / 2 ** (len(options.blocks) + 1))
    fewest = max(1, options.batch // processes // options.slices)
    if side * side * fewest < 2:
        raise UserError(
            f"--batch: {options.batch} images leave batch norm a single number a channel to "
            f"normalise; give each process and slice two images, or larger ones"
        )


def describe(model, images, options):
    trained = sum(param.get_value(borrow=True).size for param in model.params)
    print(f"Images:  {images.source}; {options.valid} held out")
    print(
        f"Network: {2 + 3 * sum(options.blocks)} layers, {trained / 1e6:.1f} million parameters, "
        f"{options.size}x{options.size} pixels, {options.classes} classes"
    )
    print(
        f"Steps:   {options.steps} of {options.batch} images, in {options.slices} slice(s), "
        f"learning rate {options.learning_rate:g}, seed {options.seed}",
        flush=True,
    )


def print_table(rows):
    """Rows are ``(what, seconds of each step, images a step, loss or None)``."""
    print(f"\n{'':28}images/s  seconds a step    loss")
    for what, seconds, images, loss in rows:
        median = np.median(seconds)
        loss = "-" if loss is None else f"{loss:.4f}"
        print(f"{what:28}{images / median:8.2f}  {median:14.3f}  {loss:>6}")


def run(main):
    """Runs a script; what a user can mend is a message without a traceback."""
    try:
        main()
    except KeyboardInterrupt:  # the workers are ended as the script ends
        problem = "interrupted"
    except UserError as error:
        problem = str(error)
    except synkhronos.WorkerError as error:
        if error.type_name != UserError.__name__:
            raise
        problem = error.message
    else:
        return
    # Theano adds, below the message, which node of the graph it was.
    sys.exit(f"{Path(sys.argv[0]).name}: {problem.splitlines()[0]}")
