"""Data-parallel Theano on all the cores or GPUs of one machine or several.

Import it before Theano. Build functions with `function` in place of ``theano.function``; the rows of the
inputs are split over the ranks, and the results are combined:

>>> import numpy as np
>>> import synkhronos as synk
>>> import theano.tensor as T
>>> synk.fork(2, use_gpu=False)  # this process and one worker
2
>>> x = T.dmatrix("x")
>>> f = synk.function([x], [x.mean(), (x.sum(axis=0), "sum")])
>>> mean, total = f(np.arange(12.0).reshape(6, 2))  # three rows on each rank
>>> print(mean, total)
5.5 [30. 36.]

Each rank has its own values of shared variables, and its own updates. `broadcast` and `all_reduce` make
them equal. A training step averages the gradients, so that all ranks have the same parameters:

>>> import theano
>>> w, y = theano.shared(np.zeros(2), name="w"), T.dvector("y")
>>> loss = ((x.dot(w) - y) ** 2).mean()
>>> step = synk.extensions.train.make_train_function(
...     loss, [w], x, y, synk.extensions.updates.sgd, learning_rate=0.1)
>>> rows = np.random.RandomState(0).normal(size=(100, 2))
>>> losses = [float(step(rows, rows.dot([1, 2]))) for _ in range(50)]
>>> print(w.get_value().round(2))
[1. 2.]
>>> synk.close()

`fork` sets up the processes, `data` puts an array in memory that all of them share, `profile` measures
how they spend their time, and `save` and `load` store their state. Each function has examples:
``help(synk.fork)``. In a notebook, call ``fork(restart=True)``, so that the cell can be run again.

The layers of the source code follow, from top to bottom; a layer imports only layers below it. Each
folder's docstring describes its contents.

===================  ==============================================================================
``startup``          what ``python -m synkhronos run`` does before the first line of a script
``compat``           the names of older libraries, for scripts written for them
``extensions``       update rules and training steps, built on the public names
``ops``              collectives as operations in graphs
``programs``         programs that every rank runs at its own pace: center, messages, controller
``profiles``         measures how each rank spends its time, and draws it
``checkpoints``      saving and loading the state of all ranks
``variables``        shared variables across ranks: replicas and collectives
``functions``        building, replicating and calling functions
``arrays``           `Data` in memory that every rank can reach
``world``            ranks, commands, barriers, failures; start, restart and end of the processes
``machines``         several machines: their leaders and progress processes, MPI, and the start of a job
``services``         memory and processes for ranks at their own pace: messages, questions, stripes
``engines``          graph compilers and their array types: Theano on CPUs and GPUs, PyTensor
``transports``       starting, synchronizing and sending: fork, semaphores, shared memory
``comms``            collectives on arrays: in shared memory, with NCCL
``stores``           arrays that every rank can reach through a handle
``host``             the setup of the machine and of the process
``arithmetic``       row numbers, reductions, and states of random generators
===================  ==============================================================================

``_errors`` defines the exceptions, ``_typing`` the names of types, ``_checks`` checks of arguments,
``_html`` the tables in notebooks, ``_text`` the lists in messages; ``_public`` imports the public names.

The loggers are below ``synkhronos``. The environment variable ``SYNKHRONOS_LOG`` may be ``info``, for
the start and the end of the processes, compiling and sending, or ``debug``, for every command on every
rank with its time. The lines are written to stderr, and each has the rank of its process.
"""

import os as _os
import sys as _sys
import typing as _python_typing  # ``_typing`` is a module of this package

from synkhronos._version import __version__ as __version__
from synkhronos.host import heap as _heap
from synkhronos.host import log as _log
from synkhronos.host import preparation as _preparation

_preparation.apply()
_heap.keep()
_log.set_up()

__all__ = [
    "AlreadyForkedError",
    "Attached",
    "Center",
    "ClosedError",
    "Comparison",
    "Data",
    "Function",
    "FuseError",
    "In",
    "Listener",
    "MismatchError",
    "NotForkedError",
    "Out",
    "PowerSGD",
    "Profile",
    "ProgramLock",
    "Rank",
    "RankGroup",
    "Results",
    "StepHook",
    "StepReport",
    "SynkhronosError",
    "SynkhronosWarning",
    "TopK",
    "WorkerError",
    "WorldBrokenError",
    "all_gather",
    "all_reduce",
    "attach",
    "broadcast",
    "close",
    "data",
    "distribute",
    "fork",
    "free_shmems",
    "function",
    "fuse",
    "gather",
    "get_lengths",
    "get_n_gpu",
    "get_shapes",
    "get_shmems",
    "get_value",
    "in_sync",
    "is_forked",
    "load",
    "make_slices",
    "on_step",
    "profile",
    "reduce",
    "reseed",
    "restart",
    "save",
    "scatter",
    "set_shmems",
    "set_value",
    "size",
    "spmd",
]

#: While this is ``argv[0]``, Python is locating the module of ``python -m``, or the command runs.
_COMMANDS = ("-m", "synkhronos", "platoon-launcher", "tmlauncher")

if _python_typing.TYPE_CHECKING or _os.path.basename("".join(_sys.argv[:1])) not in _COMMANDS:
    with _preparation.no_collection():
        from synkhronos._public import *
else:
    # The commands must work even where the rest of the package cannot be imported; so the names are
    # imported when first used.
    def __getattr__(name: str) -> _python_typing.Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import synkhronos._public

        return getattr(synkhronos._public, name)


from synkhronos import extensions as extensions
from synkhronos import ops as ops


def __dir__() -> _python_typing.List[str]:
    return [*__all__, "__version__", "extensions", "ops"]
