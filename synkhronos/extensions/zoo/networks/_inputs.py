"""The first layer of a network for images, and checks of what all networks are given."""

from __future__ import annotations

from typing import Any

import lasagne
import theano.tensor as tt


def image_input(
    name: str, pixels: int, channels: int, input: Any = None, at_least: int = 1
) -> tuple[Any, Any]:
    """Return an input layer for square images, and its variable.

    Parameters
    ----------
    name : str
        Of the network, for errors.
    pixels, channels : int
        Height and width, and the number of colors.
    input : float tensor of 4 dimensions, optional
        An expression to be used instead of a new variable.
    at_least : int
        The fewest pixels of which the network leaves any.

    Raises
    ------
    ValueError
        If there are fewer pixels.
    """
    if pixels < at_least:
        raise ValueError(f"{name}: expected at least {at_least} pixels, got {pixels}")
    if input is None:
        input = tt.tensor4("images")
    return lasagne.layers.InputLayer((None, channels, pixels, pixels), input), input


def same_pool(layer: Any) -> Any:
    """Take the maximum of windows of 3x3 at distances of 2: half the size, rounded up.

    The papers' frameworks let windows reach over the border. Padding gives the same sizes.
    """
    return lasagne.layers.MaxPool2DLayer(layer, 3, stride=2, pad=1)


def average_pool(layer: Any) -> Any:
    """Take the mean of windows of 3x3 at distances of 2, of which the last may reach over the border."""
    mode = "average_exc_pad"
    return lasagne.layers.Pool2DLayer(layer, 3, stride=2, ignore_border=False, mode=mode)
