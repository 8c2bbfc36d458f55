"""`fork` and `close`: the start and the end of a world; `size` and `is_forked`."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import warnings
import weakref
from typing import TYPE_CHECKING, Any, Sequence

from synkhronos._checks import check_flag, check_int, check_number
from synkhronos._errors import AlreadyForkedError
from synkhronos.host import job
from synkhronos.host.log import logger
from synkhronos.host.machine import OtherPrograms, affinity
from synkhronos.host.progress import Progress
from synkhronos.host.signals import DeferredSignals
from synkhronos.transports.base import Transport
from synkhronos.transports.limits import too_many_files
from synkhronos.transports.tree import make_local
from synkhronos.world.devices import bind_devices, by_rank, choose_devices, kind_of, make_engine
from synkhronos.world.logged import LoggedWorld
from synkhronos.world.rank_state import Ask
from synkhronos.world.threads import ThreadLimits
from synkhronos.world.world import MODES, Options, World, current_world, enter_world, world_exists

if TYPE_CHECKING:
    from synkhronos.world.job import Machines

#: The operations of Theano's functions: this library's where possible, or only Theano's.
FAST, THEANO = CHOICES = ("fast", "theano")

#: A call during a call of another thread is refused, or waits.
REFUSE, WAIT = THREADS = ("refuse", "wait")

#: An environment variable. If it is 1, every call compares the replicas of shared variables.
CHECK = "SYNKHRONOS_CHECK"

#: An environment variable: which calls are verified.
VERIFY = "SYNKHRONOS_VERIFY"

#: An environment variable: whose operations functions are compiled with.
KERNELS = "SYNKHRONOS_KERNELS"

_LONG = 60.0  # seconds of a run after which other programs are worth a remark
_MISSED = 0.5  # cores that the ranks have to lack for it
_IDLE = 0.3  # of a core that each rank has to use for it


class Processes(int):
    """The number of processes; as a context manager, it closes them at the end of the block."""

    _world: Any = None  # a weak reference

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *error: object) -> None:
        world = None if self._world is None else self._world()
        if world is not None and not world.closed and world_exists() and world is current_world():
            close()

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


def fork(
    n_parallel: int | None = None,
    use_gpu: bool | None = None,
    master_rank: int = 0,
    profile_workers: bool = False,
    max_n_var: int = 1000,
    max_dim: int = 16,
    *,
    devices: Sequence[str] | None = None,
    timeout: float | None = None,
    check: bool | None = None,
    verify: str | None = None,
    threads: str = REFUSE,
    kernels: str | None = None,
    pass_fds: Sequence[Any] = (),
    restart: bool = False,
) -> Processes:
    """Set up `n` processes: this one, the master, and ``n - 1`` workers.

    On the CPU, the workers are started by the first ``distribute()``, or by the first call that needs
    them, so that they inherit the compiled functions. On GPUs and with JAX they are started immediately,
    and each rank is bound to its device; call `fork` before anything else uses a GPU or JAX.

    Parameters
    ----------
    n_parallel : int, optional
        The number of processes, on all machines. By default a process per GPU, or on the CPU a process
        per core that this process may use; or the number that the job requests, for example with
        ``launch --ranks``.
    use_gpu : bool, optional
        Whether to use GPUs. By default they are used if pygpu finds any.
    master_rank : int, default: 0
        The rank of this process.
    profile_workers : bool, default: False
        Whether each worker writes a cProfile file ``synk_worker_<rank>.prof`` to the current directory.
    max_n_var, max_dim : int
        Ignored; accepted for compatibility.
    devices : list of str, optional
        The device of each rank: devices of Theano, such as ``["cuda0", "cuda1"]``, where a device may be
        repeated; or devices of JAX, such as ``["jax:cpu", "jax:cpu"]``, for which PyTensor then compiles
        with JAX.
    timeout : float, optional
        The time in seconds after which a barrier fails. By default there is no limit as long as every
        process lives.
    check : bool, optional
        Whether every call of a function compares the replicas of shared variables, and raises
        `MismatchError` if they differ where they should be equal. It takes time for each byte of the
        variables. By default it is True if the environment variable ``SYNKHRONOS_CHECK`` is 1.
    verify : {"first", "always", "off", "raise"}, optional
        Which calls of functions and training steps are compared with the same calls on one process, on
        some of their rows, before they are made. A result that differs by more than rounding gives a
        `SynkhronosWarning`, or with ``"raise"`` a `MismatchError`. By default it is the value of the
        environment variable ``SYNKHRONOS_VERIFY``, or else ``"first"``: the first calls of each.
    threads : {"refuse", "wait"}
        What happens to a call that a thread makes during a call of another thread: an error is raised,
        or the call waits. A call during a call of the same thread, as in a signal handler, is an error.
    kernels : {"fast", "theano"}, optional
        Whether Theano's functions that are compiled from now on use this library's operations on the
        CPU, which give the same results in less time, or only Theano's own operations. By default it is
        the value of the environment variable ``SYNKHRONOS_KERNELS``, or else ``"fast"``. It applies to
        every ``theano.function`` of this process, also after `close`.
    pass_fds : list of int or file, optional
        Pipes, sockets and locked files that the workers may use, as file objects or descriptors. The
        workers give up their copies of all other pipes, sockets and locked files when they start.
    restart : bool, default: False
        Whether existing processes are closed first, as in a notebook cell that is run again. Functions
        and `Data` must be built again.

    Returns
    -------
    int
        The number of processes, `n`. The int is also a context manager: ``with synk.fork(2):`` calls
        `close` at the end of the block.

    Raises
    ------
    AlreadyForkedError
        If processes already exist; call `close` first, or use ``restart=True``.
    TypeError, ValueError
        If an argument is wrong, or a device cannot be used.
    RuntimeError
        If this process already uses a GPU or JAX, even with ``restart=True``.
    SynkhronosError
        If the system refuses a resource. The message names the limit and the remedy.

    Examples
    --------
    >>> import synkhronos as synk
    >>> synk.fork(2, use_gpu=False)
    2
    >>> synk.close()
    >>> with synk.fork(2, use_gpu=False) as n:
    ...     print(n, synk.size(), synk.is_forked())
    2 2 True
    >>> synk.is_forked()
    False
    """
    options = _options(profile_workers, check, verify, threads, pass_fds)
    restart = check_flag(restart, "fork: restart")
    use_gpu = None if use_gpu is None else check_flag(use_gpu, "fork: use_gpu")
    if world_exists():
        _check_replaceable(current_world(), restart)
    machines, by_machine = _place(n_parallel, use_gpu, devices)
    size = sum(map(len, by_machine))
    master_rank, timeout = _check_master(master_rank, size), _check_timeout(timeout)
    for name, ignored in (("max_n_var", max_n_var), ("max_dim", max_dim)):
        check_int(ignored, f"fork: {name}")
    kernels, engine = _check_choice(KERNELS, "kernels", kernels, CHOICES), make_engine(by_machine[0])
    if world_exists():
        close()
    engine.use_kernels(kernels == FAST)
    try:
        limits = ThreadLimits()
    except OSError as error:
        raise too_many_files(error) from error
    with DeferredSignals():
        transport = _make_transport(machines, by_machine, master_rank, timeout, options)
        kind = LoggedWorld if logger.isEnabledFor(logging.INFO) else World
        world = kind(transport, engine, limits, options)
        enter_world(world)
    if len(by_machine) == 1 and set(by_machine[0]) == {"cpu"}:
        world.remarks.append(functools.partial(_remark_on_others, OtherPrograms(), weakref.ref(world)))
    _start(world, by_machine)
    processes = Processes(size)
    processes._world = weakref.ref(world)
    return processes


def _options(
    profile_workers: bool, check: bool | None, verify: str | None, threads: str, pass_fds: Sequence[Any]
) -> Options:
    profile_workers = check_flag(profile_workers, "fork: profile_workers")
    audits = os.environ.get(CHECK) == "1" if check is None else check_flag(check, "fork: check")
    verify = _check_choice(VERIFY, "verify", verify, MODES)
    waits = _check_choice("", "threads", threads, THREADS) == WAIT
    return Options(profile_workers, audits, verify, waits, _check_files(pass_fds))


def _place(
    n_parallel: int | None, use_gpu: bool | None, devices: Sequence[str] | None
) -> tuple[Machines | None, list[list[str]]]:
    """Return the machines of this process's job, None for a single machine, and the devices of each."""
    machines = None
    if job.own_task() is not None:
        from synkhronos.world.job import machines_of_job

        machines = machines_of_job()
    if machines is not None and len(machines.facts) > 1:
        return machines, machines.place(n_parallel, use_gpu, devices)
    if devices is None:
        devices = job.devices()
    if n_parallel is None and devices is None:
        n_parallel = job.ranks() if machines is None else machines.facts[0].ranks
    return None, [choose_devices(n_parallel, use_gpu, devices)]


def _make_transport(
    machines: Machines | None,
    by_machine: list[list[str]],
    master_rank: int,
    timeout: float | None,
    options: Options,
) -> Transport:
    if machines is None:
        return make_local(len(by_machine[0]), master_rank, timeout)
    return machines.start(by_machine, master_rank, timeout, options.profile_workers)


def _check_master(master_rank: Any, size: int) -> int:
    rank = check_int(master_rank, "fork: master_rank")
    if not 0 <= rank < size:
        raise ValueError(f"fork: master_rank: expected 0 to {size - 1}, got {rank}")
    return rank


def _check_choice(variable: str, name: str, given: str | None, choices: Sequence[str]) -> str:
    """Return one of several words: an argument, the value of an environment variable, or the first."""
    where = f"fork: {name}"
    if given is None and variable:
        given, where = os.environ.get(variable) or choices[0], variable
    if given is None or given not in choices:
        raise ValueError(f"{where}: expected one of {', '.join(map(repr, choices))}, got {given!r}")
    return given


def _check_files(files: Sequence[Any]) -> list[int]:
    """Return the descriptors of files."""
    if not isinstance(files, (list, tuple)):
        raise TypeError(f"fork: pass_fds: expected a list of open files or descriptors, got {files!r}")
    found = []
    for stream in files:
        try:
            found.append(
                check_int(stream if hasattr(stream, "__index__") else stream.fileno(), "fork: pass_fds")
            )
            os.fstat(found[-1])
        except (AttributeError, ValueError, OSError) as error:
            raise ValueError(
                f"fork: pass_fds: expected open files or descriptors, got {stream!r}"
            ) from error
    return found


def _check_replaceable(world: World, restart: bool) -> None:
    if not restart:
        raise AlreadyForkedError(
            "fork(): there are processes already; call synk.close() first, or fork(restart=True)"
        )
    if not world.workers_inherit:
        raise RuntimeError(
            f"fork(restart=True): this process uses {world.rank_state.engine.in_use}, so no worker can "
            f"be forked from it any more; start the script again"
        )


def _start(world: World, by_machine: list[list[str]]) -> None:
    """Start the workers, unless they start later, and bind every rank to its device.

    If that fails, close the world.
    """
    if world.workers_inherit:
        return
    numbers = [[machine] * len(item) for machine, item in enumerate(by_machine)]
    devices = by_rank(by_machine, world.master_rank)
    hosts = by_rank(numbers, world.master_rank)
    try:
        world.start()
        if kind_of(devices[0]) == "cpu":
            return
        with world.part(Progress).show(f"preparing the devices {', '.join(devices)}"):
            reason = world.run(Ask(bind_devices, devices, hosts))[world.master_rank]
        if reason is not None:
            logger.warning("collectives use shared memory, not NCCL: %s", reason)
    except BaseException:
        world.close()
        raise


def close() -> None:
    """End the workers and free all shared memory. It is called automatically when the script exits.

    Shared variables keep the master's values. Functions and `Data` cannot be used afterwards. `fork` can
    be called again, except for several processes on GPUs or with JAX.

    Raises
    ------
    SynkhronosError
        If `close` is called in a worker.

    Warns
    -----
    RuntimeWarning
        If there are no processes to close.
    SynkhronosWarning
        If replicas of shared variables differed in calls that used them, and no collective has combined
        them since.
    """
    if not world_exists():
        warnings.warn("synk.close(): there are no processes to close", RuntimeWarning, stacklevel=2)
        return
    world = current_world()
    world.close()
    for issue_warning in world.remarks:
        issue_warning()


def _remark_on_others(others: OtherPrograms, reference: weakref.ref[World]) -> None:
    """Log, after a long run, that other programs used cores that the ranks needed."""
    world = reference()
    if world is None or others.seconds < _LONG:
        return
    used, available, ranks = others.cores(), affinity(), world.size
    was_idle = others.own_cores() < _IDLE * ranks  # as between the cells of a notebook
    if 1 < ranks <= available and available - used < ranks - _MISSED and not was_idle:
        logger.warning(
            "other programs used %.1f of %d cores during this run, so its %d ranks waited for each "
            "other; one rank less, fork(%d), may be faster",
            used, available, ranks, ranks - 1,
        )  # fmt: skip


def size() -> int:
    """Return the number of processes.

    Examples
    --------
    See `fork`.
    """
    return current_world().size


def is_forked() -> bool:
    """Return whether there are processes: `fork` has been called, and `close` has not.

    Examples
    --------
    See `fork`.
    """
    return world_exists()


@atexit.register
def _close_at_exit() -> None:
    if world_exists() and current_world().transport.is_master_process():
        try:
            close()
        except KeyboardInterrupt:
            pass  # it was deferred until everything was closed, and the script ends anyway


def _check_timeout(timeout: Any) -> float | None:
    if timeout is None:
        return None
    seconds = check_number(timeout, "fork: timeout", "seconds or None")
    if not seconds > 0:
        raise ValueError(f"fork: timeout: expected more than 0 seconds, got {timeout}")
    return seconds
