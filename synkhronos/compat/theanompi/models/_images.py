"""What the layers for images compute: convolutions, normalized channels, and parts of images."""

from __future__ import annotations

from typing import Any, Sequence

import theano.tensor as tt
from theano.sandbox.rng_mrg import MRG_RandomStreams

Variable = Any  # of Theano, which has no types

#: For parts of images and for dropout
streams = MRG_RandomStreams(23455)


def convolution(
    images: Variable, W: Variable, b: Variable, stride: int, pad: Any, groups: int = 1
) -> Variable:
    """Return the positive parts of a convolution with biases (bc01)."""
    output = tt.nnet.conv2d(images, W, border_mode=pad, subsample=(stride, stride), num_groups=groups)
    return tt.nnet.relu(output + b.dimshuffle("x", 0, "x", "x"))


def sides_of(sides: Sequence[int], sizes: Sequence[int], stride: int, pad: Any) -> list[int]:
    """Return height and width of the output of a convolution or a pooling."""
    found = []
    for side, size in zip(sides, sizes):
        margin = {"valid": 0, "full": size - 1, "half": size // 2}[pad] if isinstance(pad, str) else pad
        found.append((side + 2 * margin - size) // stride + 1)
    return found


class CrossChannelNormalization:
    r"""Local response normalization across channels (c01b).

    .. math:: y_i = x_i \Bigl(k + \alpha \sum_{|j - i| \le n / 2} x_j^2\Bigr)^{-\beta}

    after Krizhevsky, Sutskever and Hinton (2012), section 3.3.

    Parameters
    ----------
    alpha, k, beta : float
    n : int
        The number of channels in a sum; odd.
    """

    def __init__(self, alpha: float = 1e-4, k: float = 2, beta: float = 0.75, n: int = 5) -> None:
        if n % 2 == 0:
            raise ValueError(f"CrossChannelNormalization: n: expected an odd number, got {n}")
        self.alpha, self.k, self.beta, self.n = alpha, k, beta, n

    def __call__(self, c01b: Variable) -> Variable:
        """Return the normalized images."""
        squares, margin = tt.sqr(c01b), self.n // 2
        edge = tt.zeros((margin, *(c01b.shape[axis] for axis in (1, 2, 3))), squares.dtype)
        padded = tt.concatenate([edge, squares, edge], axis=0) if margin else squares
        channels = c01b.shape[0]
        total: Any = sum(padded[shift : shift + channels] for shift in range(self.n))
        return c01b * (self.k + self.alpha * total) ** -self.beta


def _choices(margin: int, flag_on: Variable, *count: int) -> tuple[Variable, Variable]:
    """Return the first lines, for both axes, and whether to mirror; those of the middle if off."""
    draws = streams.uniform(size=(3, *count), low=0.001, high=0.999)
    starts = tt.floor(draws[:2] * (2 * margin + 1))
    starts = tt.cast(tt.switch(flag_on > 0, starts, margin), "int64")
    return starts, tt.and_(flag_on > 0, draws[2] > 0.5)


def cut_batch(
    images: Variable, shape: Sequence[int], size: int, margin: int, flag_on: Variable
) -> Variable:
    """Return the same part of all images, of `size` lines on both axes (c01b)."""
    starts, mirror = _choices(margin, flag_on)
    row, column = starts[0], starts[1]
    part = images[:, row : row + size, column : column + size]
    return tt.switch(mirror, part[:, :, ::-1], part)


def cut_each(
    images: Variable, shape: Sequence[int], size: int, margin: int, flag_on: Variable
) -> Variable:
    """Return a part of each image, of `size` lines on both axes (c01b)."""
    starts, mirror = _choices(margin, flag_on, shape[3])
    lines = tt.arange(size)
    rows = starts[0].dimshuffle("x", "x", "x", 0) + lines.dimshuffle("x", 0, "x", "x")
    forward, backward = (item.dimshuffle(0, "x") for item in (lines, lines[::-1]))
    order = tt.switch(mirror.dimshuffle("x", 0), backward, forward)
    columns = (starts[1].dimshuffle("x", 0) + order).dimshuffle("x", "x", 0, 1)
    channels = tt.arange(shape[0]).dimshuffle(0, "x", "x", "x")
    return images[channels, rows, columns, tt.arange(shape[3]).dimshuffle("x", "x", "x", 0)]
