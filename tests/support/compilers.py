"""The graph compiler of this environment, by names for tests that run with either compiler.

With a mode in ``PYTENSOR_FLAGS``, as in
``mode=NUMBA``, the functions that tests build in the mode ``FAST_COMPILE`` are built in it, too.
"""

import contextlib
import doctest
import functools
import re
import warnings

import numpy as np

from synkhronos.engines import names
from synkhronos.engines.names import clone
from synkhronos.host.compiler import NAME

compiler, tt = names.package, names.tensor  # theano and theano.tensor, or pytensor and pytensor.tensor
#: Whether Numba compiles all functions that have no mode of their own.
BY_NUMBA = NAME == "pytensor" and compiler.config.mode == "NUMBA"
FLOAT16 = "float32" if BY_NUMBA else "float16"  # Numba has none

if NAME == "pytensor":
    import pytensor.sparse as sparse
    from pytensor.compile import UnusedInputError
    from pytensor.compile.builders import OpFromGraph
    from pytensor.compile.ops import wrap_py as as_op
    from pytensor.gradient import NullTypeGradError
    from pytensor.graph.basic import Apply
    from pytensor.graph.op import Op
    from pytensor.graph.utils import MissingInputError
    from pytensor.graph.rewriting.basic import MergeOptimizer
    from pytensor.link.c.type import generic
    from pytensor.tensor.random.utils import RandomStream

    try:
        from pytensor.conditional.op import ifelse
    except ImportError:  # PyTensor 3.0
        from pytensor.ifelse import ifelse

    if compiler.config.mode != "Mode":  # the default
        modes = compiler.compile.mode.predefined_modes
        modes["FAST_COMPILE"] = modes[compiler.config.mode]

    change_flags = compiler.config.change_flags
    sigmoid, softplus = tt.sigmoid, tt.softplus
    sparse_grad = getattr(sparse, "sparse_grad", None)  # removed in PyTensor 3.3
    try:
        from pytensor.gradient import pushforward
    except ImportError:  # PyTensor 2
        from pytensor.gradient import Rop
    else:
        Rop = functools.partial(pushforward, use_op_pushforward=True)
    ON_CPU = None

    def RandomStreams(seed):  # noqa: N802
        """Return the streams of the compiler."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # shared generators are preferred to it
            return RandomStream(seed)

    Streams = RandomStreams  # whose states are arrays, if there are such

    def relu(x):
        return tt.maximum(x, 0)

    def softmax(x):
        return tt.special.softmax(x, axis=1)

    @contextlib.contextmanager
    def default_mode(mode):
        """Have functions without a mode built in this one."""
        with compiler.config.change_flags(mode=mode):
            yield

    def check_mode(mode):
        """Check that functions are built in this mode, unless tests name another than FAST_COMPILE."""
        wanted = compiler.compile.get_mode(mode)
        x = tt.dvector()
        for given in (None, "FAST_COMPILE") if mode != "Mode" else (None,):
            linker = compiler.function([x], x.sum(), mode=given).maker.linker
            assert type(linker) is type(wanted.linker), (given, linker)

else:
    import theano.sparse as sparse
    from theano import Apply, Op
    from theano.compile import get_default_mode, get_mode
    from theano.compile.builders import OpFromGraph
    from theano.compile.ops import as_op
    from theano.gof import MergeOptimizer
    from theano.gof.fg import MissingInputError
    from theano.gradient import NullTypeGradError
    from theano.gof.type import generic
    from theano.ifelse import ifelse
    from theano.sandbox.rng_mrg import MRG_RandomStreams as Streams
    from theano.tensor.shared_randomstreams import RandomStreams

    UnusedInputError = compiler.compile.UnusedInputError
    sparse_grad = compiler.sparse_grad
    change_flags = compiler.change_flags
    Rop = tt.Rop
    relu, softmax, sigmoid, softplus = tt.nnet.relu, tt.nnet.softmax, tt.nnet.sigmoid, tt.nnet.softplus
    #: Serial functions compute on the CPU, even if others are compiled for a device.
    ON_CPU = get_default_mode().excluding("gpuarray")

    @contextlib.contextmanager
    def default_mode(mode):
        """Have functions without a mode built in this one."""
        module = compiler.compile.mode
        before, module.instantiated_default_mode = module.instantiated_default_mode, get_mode(mode)
        try:
            yield
        finally:
            module.instantiated_default_mode = before


def cross_entropy(probabilities, labels):
    """Return the loss of each row, whose label is the number of a column."""
    if NAME == "theano":
        return tt.nnet.categorical_crossentropy(probabilities, labels)
    if BY_NUMBA:  # it does not check indices
        from pytensor.raise_op import Assert

        is_column = tt.all(labels < probabilities.shape[1])
        labels = Assert("a label is too large")(labels, is_column)
    return -tt.log(probabilities)[tt.arange(labels.shape[0]), labels]


def run_examples(docstring, name, names=None):
    """Run the examples of a docstring, which import Theano, with the compiler; return their number."""
    text = re.sub(r"\btheano\b", NAME, docstring)
    test = doctest.DocTestParser().get_doctest(text, names or {}, name, None, 0)
    failed, tried = doctest.DocTestRunner().run(test)
    assert not failed, name
    return tried


def scan(step, **kwargs):
    """Return what a loop returns, without the updates of random streams."""
    if NAME == "theano":
        return compiler.scan(step, **kwargs)[0]
    return compiler.scan(step, **kwargs, return_updates=False)


def shared(value, name=None, broadcastable=None):
    """Return a shared tensor, with the axes that are broadcast, if they are given."""
    value = np.asarray(value)
    return names.shared(value, name, broadcastable or (False,) * value.ndim)


__all__ = [
    "FLOAT16", "NAME", "ON_CPU", "Apply", "MergeOptimizer",
    "MissingInputError", "NullTypeGradError", "Op", "OpFromGraph", "RandomStreams", "Rop", "Streams",
    "UnusedInputError", "as_op", "change_flags", "clone", "compiler", "cross_entropy", "default_mode",
    "generic", "ifelse", "relu", "run_examples", "scan", "shared", "sigmoid", "softmax", "softplus",
    "sparse", "sparse_grad", "tt",
]  # fmt: skip
