"""Data-parallel Theano on all the cores or GPUs of one machine.

The layers, from the script down; each knows those below it only.

============================  ====================================================================
``extensions``                update rules and training steps, on the public names alone
``_restart``                  other workers in the place of those that died
``_launch``                   ``fork``, ``close``, the worker's loop
``_devices``                  the ranks' devices
``_checkpoint``               saving and loading what all ranks have
``_collectives``              shared variables across ranks, all together
``_replicas``                 shared variables across ranks, each for itself
``_shared_variables``         naming shared variables in these calls
``_profile``                  where each rank's time goes
``_random``                   random streams begun anew
``_fuse``                     several calls as one command
``_function``                 ``function`` and the calls of it
``_arguments``, ``_outputs``  a call before its start barrier and after its finish barrier
``_call``                     a call in between: what a rank does
``_replicate``                bringing functions to the ranks
``_signature``                the arguments of ``function``
``_binding``, ``_data``       data bound to variables; arrays in shared memory
``_world``                    the ranks, the barriers around their commands, failures
``_references``               where an array lies, in shared memory or in a file
``_here``                     commands, and what they find on a rank
``engines``                   graph compilers with their array types: Theano on NumPy, on a GPU
``comms``                     collectives on arrays: naive, shared memory, NCCL, staged through the host
``transports``                how ranks start and bytes reach them: fork, semaphores, shared memory
``host``                      the machine as it is set up: what is missing, what may be used
``_partition`` and others     arithmetic on rows, operations, random streams; conversion of values;
                              arrays in a file; the exceptions; the names of types
============================  ====================================================================
"""

from synkhronos._version import __version__ as __version__
from synkhronos.host import compile_cache as _compile_cache
from synkhronos.host import environment as _environment

_environment.prepare()
_compile_cache.check()

from synkhronos._binding import free_shmems, get_shmems, set_shmems
from synkhronos._checkpoint import load, save
from synkhronos._collectives import (
    all_gather,
    all_reduce,
    broadcast,
    gather,
    reduce,
)
from synkhronos._data import Data, data
from synkhronos._devices import get_n_gpu
from synkhronos._errors import (
    AlreadyForkedError,
    ClosedError,
    FuseError,
    NotForkedError,
    SynkhronosError,
    WorkerError,
    WorldBrokenError,
)
from synkhronos._function import Function, function
from synkhronos._fuse import fuse
from synkhronos._launch import close, fork
from synkhronos._partition import make_slices
from synkhronos._profile import Profile, profile
from synkhronos._random import reseed
from synkhronos._replicas import get_lengths, get_shapes, get_value, scatter, set_value
from synkhronos._replicate import distribute
from synkhronos._restart import restart

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
