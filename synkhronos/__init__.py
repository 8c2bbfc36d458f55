"""Data-parallel Theano on all the cores or GPUs of one machine.

The layers, from top to bottom; a layer imports only layers below it. Each folder's docstring describes
its contents.

===================  ==============================================================================
``extensions``       update rules and training steps, built on the public names only
``_profile``         measures how each rank spends its time
``checkpoints``      saving and loading the state of all ranks
``variables``        shared variables across ranks: replicas and collectives
``functions``        building, replicating and calling functions
``arrays``           `Data` in memory that every rank can reach
``world``            ranks, commands, barriers, failures; start, restart and end of the processes
``engines``          graph compilers and their array types: Theano on NumPy arrays and on GPUs
``transports``       starting, synchronizing and sending: fork, semaphores, shared memory
``comms``            collectives on arrays: in shared memory, with NCCL
``stores``           arrays that every rank can reach through a handle
``host``             the setup of the machine and of the process
``arithmetic``       row numbers, reductions, and states of random generators
===================  ==============================================================================

``_errors`` defines the exceptions, ``_typing`` the names of types; ``_public`` imports the public names.

The loggers are below ``synkhronos``. The environment variable ``SYNKHRONOS_LOG`` may be ``info``, for
the start and the end of the processes and for what is compiled and sent, or ``debug``, for every command
on every rank with its time. The lines are written to stderr, and each has the rank of its process.
"""

import sys as _sys

from synkhronos._version import __version__ as __version__
from synkhronos.host import environment as _environment
from synkhronos.host import heap as _heap
from synkhronos.host import imports as _imports
from synkhronos.host import log as _log

_environment.apply()
_imports.provide()
_heap.keep()
_log.set_up()

__all__ = [
    "AlreadyForkedError",
    "ClosedError",
    "Comparison",
    "Data",
    "Function",
    "FuseError",
    "In",
    "MismatchError",
    "NotForkedError",
    "Out",
    "Profile",
    "SynkhronosError",
    "SynkhronosWarning",
    "WorkerError",
    "WorldBrokenError",
    "all_gather",
    "all_reduce",
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
    "profile",
    "reduce",
    "reseed",
    "restart",
    "save",
    "scatter",
    "set_shmems",
    "set_value",
    "size",
]

if _sys.argv[:1] == ["-m"]:
    # Python is locating the module of ``python -m``. If that is this package, its commands must work
    # even where the rest of it cannot be imported; so the names are imported when first used.
    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import synkhronos._public

        return getattr(synkhronos._public, name)

else:
    from synkhronos._public import *
