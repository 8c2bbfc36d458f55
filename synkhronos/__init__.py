"""Data-parallel Theano on all the cores or GPUs of one machine.

The layers, from the top; each imports only layers below it. What a folder holds is in its docstring.

===================  ==============================================================================
``extensions``       update rules and training steps, on the public names alone
``_profile``         where each rank's time goes
``checkpoints``      saving and loading what all ranks have
``variables``        shared variables across ranks: each rank's own value, and collectives
``functions``        making, replicating and calling functions
``arrays``           `Data` in memory that every rank can reach
``world``            the ranks, their commands and barriers, failures; beginning, restart and end
``engines``          graph compilers with their array types: Theano on NumPy, on a GPU
``transports``       how ranks start and meet, and how bytes travel: fork, semaphores, shared memory
``comms``            collectives on arrays: in shared memory, by NCCL
``stores``           arrays that every rank can reach through a handle
``host``             the machine and the process as they are set up
``arithmetic``       on row numbers, values and states of random generators
===================  ==============================================================================

``_errors`` has the exceptions, ``_typing`` the names of types, ``_public`` the imports of what follows.
"""

import sys as _sys

from synkhronos._version import __version__ as __version__
from synkhronos.host import environment as _environment
from synkhronos.host import heap as _heap

_environment.apply()
_heap.keep()

__all__ = [
    "AlreadyForkedError",
    "ClosedError",
    "Data",
    "Function",
    "FuseError",
    "NotForkedError",
    "Profile",
    "SynkhronosError",
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
