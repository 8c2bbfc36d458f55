"""`fork` and `close`: the start and the end of a world."""

from __future__ import annotations

import atexit
import warnings
from typing import Sequence

from synkhronos._errors import AlreadyForkedError
from synkhronos.engines.base import Engine
from synkhronos.engines.theano_cpu import TheanoCpuEngine
from synkhronos.host.signals import defer_termination
from synkhronos.transports.limits import too_many_files
from synkhronos.transports.local import LocalTransport
from synkhronos.world.devices import Bind, check_int, choose_devices, kind_of, log_communicator
from synkhronos.world.threads import ThreadLimits
from synkhronos.world.world import World, current_world, enter_world, world_exists


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
) -> int:
    """Set up `n` processes: this one, the master, and ``n - 1`` workers.

    On the CPU, the workers are started by the first ``distribute()``, or by the first call that needs
    them, so that they inherit the compiled functions. On GPUs they are started immediately, and each
    rank is bound to its device; call `fork` before anything else uses a GPU.

    Parameters
    ----------
    n_parallel : int, optional
        The number of processes. By default one per GPU, or on the CPU one per core that this process
        may use.
    use_gpu : bool, optional
        Whether to use GPUs. By default they are used if pygpu finds any.
    master_rank : int, default: 0
        The rank of this process.
    profile_workers : bool, default: False
        Whether each worker writes a cProfile file ``synk_worker_<rank>.prof`` to the current directory.
    max_n_var, max_dim : int
        Ignored; accepted for compatibility.
    devices : list of str, optional
        One Theano device per rank, such as ``["cuda0", "cuda1"]``. A device may be repeated.
    timeout : float, optional
        The time in seconds after which a barrier fails. By default there is no limit as long as every
        process lives.

    Returns
    -------
    int
        The number of processes, `n`.

    Raises
    ------
    AlreadyForkedError
        If there are processes already; call `close` first.
    TypeError, ValueError
        If an argument is wrong, or a device cannot be used.
    RuntimeError
        If this process already uses a GPU.
    SynkhronosError
        If the system refuses a resource. The message says which limit was reached, and what to do.

    Examples
    --------
    >>> import synkhronos as synk
    >>> synk.fork(2, use_gpu=False)
    2
    >>> synk.close()
    """
    if world_exists():
        raise AlreadyForkedError("fork(): there are processes already; call synk.close() first")
    for name, flag in (("use_gpu", use_gpu), ("profile_workers", profile_workers)):
        if not isinstance(flag, bool) and not (flag is None and name == "use_gpu"):
            raise TypeError(f"fork: {name}: expected True or False, got {flag!r}")
    devices = choose_devices(n_parallel, use_gpu, devices)
    size = len(devices)
    master_rank = check_int(master_rank, "fork: master_rank")
    if not 0 <= master_rank < size:
        raise ValueError(f"fork: master_rank: expected 0 to {size - 1}, got {master_rank}")
    check_int(max_n_var, "fork: max_n_var")
    check_int(max_dim, "fork: max_dim")
    timeout = _check_timeout(timeout)
    engine = _make_engine(devices)
    try:
        threads = ThreadLimits()
    except OSError as error:
        raise too_many_files(error) from error
    with defer_termination():
        transport = LocalTransport(size, master_rank, timeout)
        world = World(transport, engine, threads, profile_workers)
        enter_world(world)
    if not world.workers_inherit:
        _start(world, devices)
    return size


def _make_engine(devices) -> Engine:
    if kind_of(devices[0]) == "cpu":
        return TheanoCpuEngine()
    from synkhronos.engines.theano_gpu import TheanoGpuEngine

    return TheanoGpuEngine()


def _start(world, devices):
    """Start the workers, and bind every rank to its device; if that fails, close the world."""
    try:
        world.start()
        log_communicator(world.run(Bind(devices))[world.master_rank])
    except BaseException:
        world.close()
        raise


def close() -> None:
    """End the workers and free all shared memory. It is called automatically when the script exits.

    Shared variables keep the master's values. Functions and `Data` cannot be used afterwards. `fork` can
    be called again, except for several processes on GPUs.

    Raises
    ------
    SynkhronosError
        If it is called in a worker.

    Warns
    -----
    RuntimeWarning
        If there are no processes to close.
    """
    if not world_exists():
        warnings.warn("synk.close(): there are no processes to close", RuntimeWarning, stacklevel=2)
        return
    current_world().close()


@atexit.register
def _close_at_exit():
    if world_exists() and current_world().transport.is_master_process():
        try:
            close()
        except KeyboardInterrupt:
            pass  # it was deferred until everything was closed, and the script ends anyway


def _check_timeout(timeout):
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"fork: timeout: expected seconds or None, got {timeout!r}")
    if not timeout > 0:
        raise ValueError(f"fork: timeout: expected more than 0 seconds, got {timeout}")
    return float(timeout)
