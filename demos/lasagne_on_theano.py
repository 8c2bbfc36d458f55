"""``from lasagne_on_theano import lasagne``: Lasagne 0.1, PyPI's latest, on Theano 1.0.

It asks for ``theano.tensor.signal.downsample.max_pool_2d``. Theano 1.0 has the same function as
``pool.pool_2d``, so a module of the old name that holds it is all that is missing.
"""

import sys
import types
import warnings

import synkhronos  # noqa: F401  (before Theano: with it, Theano imports on today's NumPy)
from theano.tensor.signal import pool

downsample = types.ModuleType("theano.tensor.signal.downsample")
downsample.max_pool_2d = pool.pool_2d
sys.modules[downsample.__name__] = downsample
# Its calls name Theano's arguments as of 2015: they work, with a warning for each.
warnings.filterwarnings("ignore", category=UserWarning, module="lasagne")

import lasagne  # noqa: E402, F401
