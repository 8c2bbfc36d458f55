"""`fork` and `close`: the beginning and the end of a world, and what a worker does in between."""

from __future__ import annotations

import atexit
import os
import tempfile
import warnings
from typing import Sequence

from synkhronos import _world
from synkhronos._devices import Bind, check_int, choose_devices, kind_of, report
from synkhronos._errors import AlreadyForkedError
from synkhronos._interrupts import hold_ending
from synkhronos._world import World
from synkhronos.comms.shm import SharedMemoryCommunicator
from synkhronos.engines.base import Engine
from synkhronos.engines.theano_cpu import TheanoCpuEngine
from synkhronos.host.machine import cores
from synkhronos.transports.limits import too_many_files
from synkhronos.transports.local import LocalTransport

_THREAD_VARIABLES = {  # by the name that threadpoolctl has for who reads it before OpenMP's
    "openmp": "OMP_NUM_THREADS",
    "openblas": "OPENBLAS_NUM_THREADS",
    "mkl": "MKL_NUM_THREADS",
}


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
    """Make a world of `n` processes, this one and ``n - 1`` workers.

    On the CPU the workers are forked by the first ``distribute()``, or by the first call that needs
    them, so that they inherit the compiled functions. On GPUs they are forked at once, and each rank
    is bound to its device: nothing may have used a GPU before.

    Parameters
    ----------
    n_parallel : int, optional
        Processes in all; None: one a GPU, on the CPU one a core that this process may run on.
    use_gpu : bool, optional
        None: GPUs if there is one that pygpu can use, else the CPU. True: GPUs. False: the CPU.
    master_rank : int
        The rank of this process.
    profile_workers : bool
        Whether each worker writes a cProfile file ``synk_worker_<rank>.prof``.
    max_n_var, max_dim : int
        Accepted and not needed.
    devices : list of str, optional
        A Theano device a rank, such as ``["cuda0", "cuda1"]``; repeats are allowed.
    timeout : float, optional
        Seconds that a barrier may last; None: as long as every process lives.

    Returns
    -------
    int
        `n`.

    Raises
    ------
    AlreadyForkedError
        If there is a world already.
    TypeError, ValueError
        Also for a device that cannot be used.
    RuntimeError
        If this process uses a GPU already.
    SynkhronosError
        If the system refuses what is needed; the message says what, and the remedy.
    """
    if _world.exists():
        raise AlreadyForkedError("fork(): there is a world already; call synk.close() first")
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
        threads = _Threads()
    except OSError as error:
        raise too_many_files(error) from error

    def connect(size, master_rank, memory=None):
        transport = LocalTransport(size, master_rank, timeout, size <= cores(), memory)
        threads.limit(size)
        return transport, SharedMemoryCommunicator(transport)

    with hold_ending():
        transport, comm = connect(size, master_rank)
        world = World(transport, comm, engine, lambda here: _serve(here, threads, profile_workers))
        world.connect = connect
        world.on_close = threads.restore
        _world.enter(world)
    if not engine.forks_late:
        _start(world, devices)
    return size


def _make_engine(devices) -> Engine:
    if kind_of(devices[0]) == "cpu":
        return TheanoCpuEngine()
    from synkhronos.engines.theano_gpu import TheanoGpuEngine

    return TheanoGpuEngine()


def _start(world, devices):
    """Start the workers, and bind every rank to its device; leave nothing behind if that fails."""
    try:
        world.start()
        report(world.run(Bind(devices))[world.master_rank])
    except BaseException:
        world.close()
        raise


def close() -> None:
    """End the workers and free all shared memory. Runs by itself at exit.

    Before ``fork()``, or a second time, it only warns.
    """
    if not _world.exists():
        warnings.warn("synk.close(): there are no processes to close", RuntimeWarning, stacklevel=2)
        return
    _world.current().close()


@atexit.register
def _close_at_exit():
    if _world.exists() and _world.current().transport.is_master_process():
        try:
            close()
        except KeyboardInterrupt:
            pass  # it has waited until all was closed, and the script ends anyway


def _serve(here, threads, profile):
    """Be a worker: run one command after another, until the master says that it was the last."""
    if not profile:
        return _serve_commands(here, threads)
    import cProfile

    profiler = cProfile.Profile()
    try:
        profiler.runcall(_serve_commands, here, threads)
    finally:
        _write_profile(profiler, f"synk_worker_{here.rank}.prof")


def _write_profile(profiler, name):
    """Put a file in the place of one of that name, and never through it, if it is a link or a pipe."""
    try:
        descriptor, unfinished = tempfile.mkstemp(prefix=f"{name}.", dir=os.curdir)
        os.close(descriptor)
        try:
            profiler.dump_stats(unfinished)
            os.replace(unfinished, name)
        except OSError:
            os.unlink(unfinished)
            raise
    except OSError as error:
        warnings.warn(f"profile_workers: {name} was not written: {error}", RuntimeWarning, stacklevel=2)


def _serve_commands(here, threads):
    threads.limit(here.size)
    while True:
        payload = here.transport.receive()
        if payload == b"":
            return
        reply = here.execute(payload)
        try:
            here.transport.reply(reply)
        except MemoryError as error:  # no room for it
            if here.transport.posted:
                raise
            here.transport.reply(here.failure(error))


class _Threads:
    """Divides the threads of BLAS and OpenMP, so that `n` ranks do not run `n` times the cores."""

    def __init__(self):
        self._environment = {name: os.environ.get(name) for name in _THREAD_VARIABLES.values()}
        self._before = {library.filepath: library.num_threads for library in _libraries()}

    def limit(self, ranks):
        """Limit the libraries that are loaded, and, by the environment, those that will be."""
        each = max(1, cores() // ranks)
        for library in _libraries():
            wanted = min(each, self._wanted(library))
            if library.num_threads != wanted:  # in a worker OpenBLAS would begin its threads anew
                library.set_num_threads(wanted)
        for name in _THREAD_VARIABLES.values():
            os.environ[name] = str(min(each, self._asked(name)))

    def restore(self):
        """Give the threads back."""
        for library in _libraries():
            library.set_num_threads(self._wanted(library))
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def _wanted(self, library):
        """Return the threads that a library had, or would have had, without us."""
        name = _THREAD_VARIABLES.get(library.internal_api, "OMP_NUM_THREADS")
        return self._before.get(library.filepath, self._asked(name))

    def _asked(self, name):
        """Return the threads that the user asks for by this variable, or else by that of OpenMP."""
        for one in (name, "OMP_NUM_THREADS"):
            try:
                value = int(self._environment[one] or 0)
            except ValueError:
                value = 0
            if value > 0:
                return value
        return cores()


def _libraries():
    """Return the loaded libraries of BLAS and OpenMP."""
    from threadpoolctl import ThreadpoolController  # takes 7 ms, and no import of ours needs it

    return ThreadpoolController().lib_controllers


def _check_timeout(timeout):
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"fork: timeout: expected seconds or None, got {timeout!r}")
    if not timeout > 0:
        raise ValueError(f"fork: timeout: expected more than 0 seconds, got {timeout}")
    return float(timeout)
