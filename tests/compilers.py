"""The graph compiler of this environment, by names for tests that run with either compiler.

With PyTensor, the test files in `OF_BOTH` are run, and no others: those are about Theano alone.
"""

import contextlib
import warnings

from synkhronos.engines import names
from synkhronos.host.compiler import NAME

#: The test files that are about PyTensor alone.
OF_PYTENSOR = ("test_pymc.py", "test_pytensor.py", "test_rows_potential.py")

#: The test files that run with PyTensor.
OF_BOTH = (
    "test_call.py",
    "test_collectives_oracle.py",
    "test_compiler.py",
    "test_containers.py",
    "test_engines.py",
    "test_function_oracle.py",
    "test_generators.py",
    "test_spmd.py",
    "test_stateful.py",
    "test_uneven.py",
    "test_worlds.py",
    *OF_PYTENSOR,
)

compiler, tt = names.package, names.tensor  # theano and theano.tensor, or pytensor and pytensor.tensor

if NAME == "pytensor":
    import pytensor.sparse as sparse
    from pytensor.graph.basic import Apply
    from pytensor.graph.op import Op
    from pytensor.tensor.random.utils import RandomStream

    ON_CPU = None

    def RandomStreams(seed):  # noqa: N802
        """Return the streams of the compiler."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # shared generators are preferred to it
            return RandomStream(seed)

    def relu(x):
        return tt.maximum(x, 0)

    @contextlib.contextmanager
    def default_mode(mode):
        """Have functions without a mode built in this one."""
        with compiler.config.change_flags(mode=mode):
            yield

else:
    import theano.sparse as sparse
    from theano import Apply, Op
    from theano.compile import get_default_mode, get_mode
    from theano.tensor.shared_randomstreams import RandomStreams

    relu = tt.nnet.relu
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


__all__ = [
    "NAME", "OF_BOTH", "OF_PYTENSOR", "ON_CPU", "Apply", "Op", "RandomStreams", "compiler",
    "default_mode", "relu", "sparse", "tt",
]  # fmt: skip
