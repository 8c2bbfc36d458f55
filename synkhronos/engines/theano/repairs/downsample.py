"""The module ``theano.tensor.signal.downsample``, which Lasagne 0.1, the latest on PyPI, imports.

Python loads it by that name. Theano 1.0 has its function under another name, with other arguments.
"""

from __future__ import annotations

import warnings
from typing import Any

from theano.tensor.signal.pool import pool_2d

# Lasagne uses a name that this argument had in 2015. It works, but each convolution would warn.
warnings.filterwarnings(
    "ignore", "The `image_shape` keyword argument", category=UserWarning, module="lasagne"
)


def max_pool_2d(
    input: Any,
    ds: Any,
    ignore_border: bool | None = None,
    st: Any = None,
    padding: tuple[int, int] = (0, 0),
    mode: str = "max",
) -> Any:
    """Return the pooling of the last two axes, as Theano 0.8 did."""
    return pool_2d(input, ds, ignore_border, st, padding, mode)
