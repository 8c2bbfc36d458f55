"""Import Lasagne 0.1, the latest on PyPI, on Theano 1.0: ``from lasagne_on_theano import lasagne``.

Lasagne imports ``theano.tensor.signal.downsample.max_pool_2d``, which is ``pool.pool_2d`` in Theano 1.0.
This module provides it under the old name.
"""

import sys
import types
import warnings

import synkhronos  # noqa: F401  (before Theano, which otherwise cannot be imported)
from theano.tensor.signal import pool

downsample = types.ModuleType("theano.tensor.signal.downsample")
downsample.max_pool_2d = pool.pool_2d
sys.modules[downsample.__name__] = downsample
# Lasagne uses the names that Theano's arguments had in 2015. They work, but each call warns.
warnings.filterwarnings("ignore", category=UserWarning, module="lasagne")

import lasagne  # noqa: E402, F401
