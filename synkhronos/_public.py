"""The public names: everything that ``import synkhronos`` provides."""

from synkhronos.host import compile_cache as _compile_cache
from synkhronos.host import environment as _environment

_environment.check()
_compile_cache.check()
_compile_cache.explain_lock()

from synkhronos._errors import (
    AlreadyForkedError,
    ClosedError,
    FuseError,
    MismatchError,
    NotForkedError,
    SynkhronosError,
    SynkhronosWarning,
    WorkerError,
    WorldBrokenError,
)
from synkhronos._profile import Profile, profile
from synkhronos.arithmetic.partition import make_slices
from synkhronos.arrays.binding import free_shmems, get_shmems, set_shmems
from synkhronos.arrays.data import Data, data
from synkhronos.checkpoints.checkpoint import load, save
from synkhronos.functions.check import Comparison
from synkhronos.functions.build import function
from synkhronos.functions.function import Function
from synkhronos.functions.random import reseed
from synkhronos.functions.replicate import distribute
from synkhronos.functions.wrappers import In, Out
from synkhronos.variables.collectives import all_gather, all_reduce, broadcast, gather, reduce
from synkhronos.variables.in_sync import in_sync
from synkhronos.variables.replicas import get_lengths, get_shapes, get_value, scatter, set_value
from synkhronos.world.devices import get_n_gpu
from synkhronos.world.fuse import fuse
from synkhronos.world.launch import close, fork, is_forked, size
from synkhronos.world.restart import restart
