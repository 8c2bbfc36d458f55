"""Whether this process is a task of an MPI job, according to its environment.

``python -m synkhronos run`` records in `TASK` that this process, and not one of its children, is a task
of the job. Nothing here imports mpi4py.
"""

import atexit
import os
from typing import Callable, Dict, List, Mapping, MutableMapping, NamedTuple, Optional

#: Environment variables of this package
TASK = "SYNKHRONOS_TASK"  # the process id of a task
LAUNCHED = "SYNKHRONOS_LAUNCHED"  # 1 for the tasks that ``launch`` starts
RANKS = "SYNKHRONOS_RANKS"  # the number of ranks on each machine
DEVICES = "SYNKHRONOS_DEVICES"  # the devices of the ranks of this machine, with commas in between
SPARE = "SYNKHRONOS_SPARE_TASKS"  # how many tasks of each machine are not ranks
JOB = "SYNKHRONOS_JOB"  # the same for all tasks of a job, also after it was restarted
INPUT = "SYNKHRONOS_INPUT"  # the standard input of ``launch``, and by which numbers it is known
RESTARTS = "SYNKHRONOS_RESTARTS"  # how often the job was restarted
APART = "SYNKHRONOS_TASKS_ARE_MACHINES"  # this many consecutive tasks count as a machine, for tests

#: The signals by which ``launch`` passes on SIGINT and SIGTERM, which mpirun would not pass on
INTERRUPT, TERMINATE = "SIGURG", "SIGPWR"

# The number of a task and the number of tasks, for mpirun of OpenMPI, srun and the PMI of others
_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)


class Task(NamedTuple):
    """One process of a job."""

    number: int
    size: int


def task_of(environ: Mapping[str, str]) -> Optional[Task]:
    """Return which task of a job a process is, according to its environment; None if it is alone."""
    for number, size in _VARIABLES:
        try:
            task = Task(int(environ[number]), int(environ[size]))
        except (KeyError, ValueError):
            continue
        return task if task.size > 1 else None
    return None


def variables(environ: Mapping[str, str]) -> Dict[str, str]:
    """Return the environment variables by which this process, after ``exec``, is a task."""
    return {} if task_of(environ) is None else {TASK: str(os.getpid())}


def own_task(environ: MutableMapping[str, str] = os.environ) -> Optional[Task]:
    """Return which task this process is; None if it is not a task, or is a child of a task."""
    return task_of(environ) if environ.get(TASK) == str(os.getpid()) else None


def ranks(environ: Mapping[str, str] = os.environ) -> Optional[int]:
    """Return the number of ranks in `RANKS`; None if it is not set."""
    text = environ.get(RANKS, "")
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{RANKS}: expected a number from 1 on, got {text!r}")
    return int(text)


def tasks_apart(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number in `APART`; 0 if it is not set."""
    return int(environ.get(APART) or 0)


def spare_tasks(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number in `SPARE`; 0 if it is not set."""
    return int(environ.get(SPARE) or 0)


def survives_deaths(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the job continues when tasks die: OpenMPI's mpirun was given ``--with-ft ulfm``."""
    return environ.get("OMPI_MCA_mpi_ft_enable") == "1"


def devices(environ: Mapping[str, str] = os.environ) -> Optional[List[str]]:
    """Return the devices in `DEVICES`; None if it is not set."""
    text = environ.get(DEVICES, "")
    return [name.strip() for name in text.split(",")] if text else None


def provide(end: Callable[[], None]) -> None:
    """Prepare a script: `end` lets the other tasks end after it."""
    task = own_task()
    if task is not None and task.number == 0:
        atexit.register(_if_task, end)


def _if_task(end: Callable[[], None]) -> None:
    """Call `end`, unless this is a child of the task."""
    if own_task() is not None:
        end()
