"""Data-parallel Theano on all the cores or GPUs of one machine.

The layers, from the script down; each knows those below it only.

========================  =======================================================================
``extensions``            update rules and training steps, on the public names alone
``_launch``               ``fork``, ``close``, the worker's loop
``_collectives``          shared variables across ranks
``_binding``, ``_fuse``   data bound to variables; several calls as one command
``_function``             matching and checking a call's arguments; reducing its outputs
``_call``, ``_replicate``  what a rank does in a call; bringing functions to the ranks
``_data``                 arrays in shared memory
``_world``                the ranks, their commands, the barriers between them, failures
``engines``               graph compilers with their array types: Theano on NumPy
``comms``                 collectives on arrays: naive, shared memory
``transports``            how ranks start and bytes reach them: fork, shared memory, semaphores
``_partition`` and others  pure arithmetic: rows, operations, random streams
========================  =======================================================================
"""

from synkhronos import _environment
from synkhronos._version import __version__ as __version__

_environment.prepare()

from synkhronos._binding import free_shmems, get_shmems, set_shmems
from synkhronos._collectives import (
    all_gather,
    all_reduce,
    broadcast,
    gather,
    get_lengths,
    get_shapes,
    get_value,
    reduce,
    scatter,
    set_value,
)
from synkhronos._data import Data, data
from synkhronos._errors import (
    AlreadyForkedError,
    ClosedError,
    NotForkedError,
    SynkhronosError,
    WorkerError,
    WorldBrokenError,
)
from synkhronos._function import Function, function
from synkhronos._fuse import fuse
from synkhronos._launch import close, fork, get_n_gpu
from synkhronos._partition import make_slices
from synkhronos._replicate import distribute

__all__ = [
    "AlreadyForkedError",
    "ClosedError",
    "Data",
    "Function",
    "NotForkedError",
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
    "make_slices",
    "reduce",
    "scatter",
    "set_shmems",
    "set_value",
]
