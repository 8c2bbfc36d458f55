"""The public names: everything that ``import synkhronos`` provides.

``as`` tells type checkers that a name is provided.
"""

from synkhronos.host import preparation as _preparation

_preparation.check()

from synkhronos._errors import (
    AlreadyForkedError as AlreadyForkedError,
    ClosedError as ClosedError,
    FuseError as FuseError,
    MismatchError as MismatchError,
    NotForkedError as NotForkedError,
    SynkhronosError as SynkhronosError,
    SynkhronosWarning as SynkhronosWarning,
    WorkerError as WorkerError,
    WorldBrokenError as WorldBrokenError,
)
from synkhronos.arithmetic.partition import make_slices as make_slices
from synkhronos.arrays.binding import (
    free_shmems as free_shmems,
    get_shmems as get_shmems,
    set_shmems as set_shmems,
)
from synkhronos.arrays.data import data as data
from synkhronos.arrays.data import Data as Data
from synkhronos.checkpoints.checkpoint import (
    load as load,
    save as save,
)
from synkhronos.comms.formats import (
    PowerSGD as PowerSGD,
    TopK as TopK,
)
from synkhronos.functions.comparing.serial_comparison import Comparison as Comparison
from synkhronos.functions.build import function as function
from synkhronos.functions.function import Function as Function
from synkhronos.functions.on_step import (
    StepHook as StepHook,
    StepReport as StepReport,
    on_step as on_step,
)
from synkhronos.functions.replica_tracker import reseed as reseed
from synkhronos.functions.replicate import distribute as distribute
from synkhronos.functions.signature import (
    In as In,
    Out as Out,
)
from synkhronos.profiles.profile import (
    Profile as Profile,
    profile as profile,
)
from synkhronos.programs.attached import (
    Attached as Attached,
    Listener as Listener,
    attach as attach,
)
from synkhronos.programs.center import Center as Center
from synkhronos.programs.center import ProgramLock as ProgramLock
from synkhronos.programs.collectives import RankGroup as RankGroup
from synkhronos.programs.rank import Rank as Rank
from synkhronos.programs.spmd import (
    Results as Results,
    spmd as spmd,
)
from synkhronos.variables.collectives import (
    all_gather as all_gather,
    all_reduce as all_reduce,
    broadcast as broadcast,
    gather as gather,
    reduce as reduce,
)
from synkhronos.variables.collectives import in_sync as in_sync
from synkhronos.variables.replicas import (
    get_lengths as get_lengths,
    get_shapes as get_shapes,
    get_value as get_value,
    scatter as scatter,
    set_value as set_value,
)
from synkhronos.world.devices import get_n_gpu as get_n_gpu
from synkhronos.world.schedule import fuse as fuse
from synkhronos.world.launch import (
    close as close,
    fork as fork,
    is_forked as is_forked,
    size as size,
)
from synkhronos.world.restart import restart as restart
