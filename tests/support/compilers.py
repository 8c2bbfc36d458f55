"""The graph compiler of this environment, by names for tests that run with either compiler.

With PyTensor, the test files in `OF_BOTH` are run, and no others: those are about Theano alone, or about
what knows no compiler. The tests in `SLOW` then count as slow. With a mode in ``PYTENSOR_FLAGS``, as in
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

#: The test files that are about PyTensor alone.
OF_PYTENSOR = (
    "test_chains.py", "test_jax.py", "test_modes.py", "test_nutpie.py", "test_pymc.py",
    "test_pymc_models.py", "test_pytensor.py", "test_resident.py", "test_rows_potential.py",
)  # fmt: skip

#: The test files that run with PyTensor.
OF_BOTH = (
    "test_bad_input.py",
    "test_call.py",
    "test_center.py",
    "test_checkpoint.py",
    "test_clipped_gradients.py",
    "test_collectives_oracle.py",
    "test_compiler.py",
    "test_containers.py",
    "test_copyable.py",
    "test_data.py",
    "test_demos.py",
    "test_doctor_mpi.py",
    "test_drawing.py",
    "test_engines.py",
    "test_failures.py",
    "test_faults.py",
    "test_fixed_rows.py",
    "test_function_oracle.py",
    "test_functions.py",
    "test_generators.py",
    "test_graphs_of_steps.py",
    "test_in_sync.py",
    "test_layouts.py",
    "test_lifecycle.py",
    "test_losses.py",
    "test_machines.py",
    "test_machines_mpi.py",
    "test_none.py",
    "test_ops.py",
    "test_ops_calls.py",
    "test_ops_gradients.py",
    "test_ops_shapes.py",
    "test_outputs.py",
    "test_parallel_function.py",
    "test_rank_files.py",
    "test_recorder.py",
    "test_recurrence.py",
    "test_rehearsal.py",
    "test_restart.py",
    "test_rules.py",
    "test_rules_train.py",
    "test_session.py",
    "test_spmd.py",
    "test_stateful.py",
    "test_timing.py",
    "test_train.py",
    "test_train_rules.py",
    "test_uneven.py",
    "test_updates.py",
    "test_windows.py",
    "test_worlds.py",
    *OF_PYTENSOR,
)

#: Tests, by the start of their ids, that compile for long with PyTensor, or are not about compilers.
SLOW = (
    "test_center.py",
    "test_checkpoint.py::test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit[2]",
    "test_checkpoint.py::test_saving_and_loading_take_one_more_copy_at_most",
    "test_collectives_oracle.py",
    "test_data.py::test_data_that_changes_is_like_an_array_on_every_rank",
    "test_demos.py::test_the_demo_of_a_controller",
    "test_doctor_mpi.py",
    "test_failures.py",
    "test_faults.py",
    "test_machines.py::test_communicator",
    "test_machines.py::test_store",
    "test_machines.py::test_transport",
    "test_machines.py::test_wire_format",
    "test_machines_mpi.py",
    "test_ops.py::test_all_ranks_keep_one_order_in_every_mode[2 rank(s)-virtual machine, no",
    "test_ops.py::test_reductions_are_those_of_numpy_for_every_operation_and_dtype[1 rank(s)",
    "test_ops.py::test_reductions_are_those_of_numpy_for_every_operation_and_dtype[3 rank(s)",
    "test_ops.py::test_reductions_are_those_of_numpy_for_every_operation_and_dtype[4 rank(s)",
    "test_pytensor.py::test_batch_normalization_uses_the_rows_of_all_ranks[per-activation]",
    "test_restart.py::test_an_interrupted_step_was_taken_completely_or_not_at_all",
    "test_restart.py::test_thirty_restarts",
    "test_session.py::test_a_checkpoint",
    "test_session.py::test_a_resumed_session",
    "test_session.py::test_after_the_death",
    "test_session.py::test_generators",
    "test_session.py::test_linear_scaling",
    "test_session.py::test_the_examples",
    "test_session.py::test_the_first_interrupt",
    "test_spmd.py::test_a_wait_inside_is_limited_but_not_the_program",
    "test_train_rules.py::test_compiled_with_all_optimizations",
)

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
    "FLOAT16", "NAME", "OF_BOTH", "OF_PYTENSOR", "ON_CPU", "SLOW", "Apply", "MergeOptimizer",
    "MissingInputError", "NullTypeGradError", "Op", "OpFromGraph", "RandomStreams", "Rop", "Streams",
    "UnusedInputError", "as_op", "change_flags", "clone", "compiler", "cross_entropy", "default_mode",
    "generic", "ifelse", "relu", "run_examples", "scan", "shared", "sigmoid", "softmax", "softplus",
    "sparse", "sparse_grad", "tt",
]  # fmt: skip
