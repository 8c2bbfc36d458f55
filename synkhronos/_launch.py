"""`fork` and `close`: the beginning and the end of a world, and what a worker does in between."""

from __future__ import annotations

import atexit
import importlib.util
import os
import subprocess
import sys
import warnings
from typing import Sequence

import numpy as np

from synkhronos import _world
from synkhronos._errors import AlreadyForkedError
from synkhronos._machine import cores
from synkhronos._world import World
from synkhronos.comms.shm import SharedMemoryCommunicator
from synkhronos.engines.theano_cpu import TheanoCpuEngine
from synkhronos.transports.local import LocalTransport

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_COUNT_GPUS = """
import pygpu.gpuarray
print("count", pygpu.gpuarray.count_devices("cuda", 0))
"""


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
    them, so that they inherit the compiled functions.

    Parameters
    ----------
    n_parallel : int, optional
        Processes in all; None: one a core that this process may run on.
    use_gpu : bool, optional
        None: GPUs if there is one that can be used. False: the CPU.
    master_rank : int
        The rank of this process.
    profile_workers : bool
        Whether each worker writes a cProfile file ``synk_worker_<rank>.prof``.
    max_n_var, max_dim : int
        Accepted and not needed.
    devices : list of str, optional
        A Theano device a rank; repeats are allowed.
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
    """
    if _world.exists():
        raise AlreadyForkedError("fork(): there is a world already; call synk.close() first")
    for name, flag in (("use_gpu", use_gpu), ("profile_workers", profile_workers)):
        if not isinstance(flag, bool) and not (flag is None and name == "use_gpu"):
            raise TypeError(f"fork: {name}: expected True or False, got {flag!r}")
    devices = _choose_devices(n_parallel, use_gpu, devices)
    size = len(devices)
    master_rank = _check_int(master_rank, "master_rank")
    if not 0 <= master_rank < size:
        raise ValueError(f"fork: master_rank: expected 0 to {size - 1}, got {master_rank}")
    _check_int(max_n_var, "max_n_var")
    _check_int(max_dim, "max_dim")
    timeout = _check_timeout(timeout)
    engine = TheanoCpuEngine()
    engine.setup(devices[master_rank])
    threads = _Threads()

    def connect(size, master_rank, memory=None):
        transport = LocalTransport(size, master_rank, timeout, size <= cores(), memory)
        threads.limit(size)
        return transport, SharedMemoryCommunicator(transport)

    transport, comm = connect(size, master_rank)
    world = World(transport, comm, engine, lambda here: _serve(here, threads, profile_workers))
    world.connect = connect
    world.on_close = threads.restore
    _world.enter(world)
    return size


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
        close()


def get_n_gpu() -> int:
    """Count the GPUs that pygpu can use, in a subprocess, so that no CUDA context is made here.

    Returns
    -------
    int
        0 without pygpu.
    """
    if importlib.util.find_spec("pygpu") is None:
        return 0
    counted = subprocess.run(
        [sys.executable, "-c", _COUNT_GPUS], capture_output=True, text=True, check=False
    )
    words = counted.stdout.split()
    return int(words[-1]) if words[-2:-1] == ["count"] else 0


def _serve(here, threads, profile):
    """Be a worker: run one command after another, until the master says that it was the last."""
    if not profile:
        return _serve_commands(here, threads)
    import cProfile

    profiler = cProfile.Profile()
    try:
        profiler.runcall(_serve_commands, here, threads)
    finally:
        profiler.dump_stats(f"synk_worker_{here.rank}.prof")


def _serve_commands(here, threads):
    threads.limit(here.size)
    while True:
        payload = here.transport.receive()
        if payload == b"":
            return
        here.transport.reply(here.execute(payload))


class _Threads:
    """Divides the threads of BLAS and OpenMP, so that `n` ranks do not run `n` times the cores."""

    def __init__(self):
        self._environment = {name: os.environ.get(name) for name in _THREAD_VARIABLES}
        self._before = {library.filepath: library.num_threads for library in _libraries()}

    def limit(self, ranks):
        """Limit the libraries that are loaded, and, by the environment, those that will be."""
        each = max(1, cores() // ranks)
        for library in _libraries():
            wanted = min(each, self._wanted(library))
            if library.num_threads != wanted:  # in a worker OpenBLAS would begin its threads anew
                library.set_num_threads(wanted)
        for name in _THREAD_VARIABLES:
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
        return self._before.get(library.filepath, self._asked("OMP_NUM_THREADS"))

    def _asked(self, name):
        value = self._environment[name] or ""
        return int(value) if value.isdigit() and int(value) else cores()


def _libraries():
    """Return the loaded libraries of BLAS and OpenMP."""
    from threadpoolctl import ThreadpoolController  # takes 7 ms, and no import of ours needs it

    return ThreadpoolController().lib_controllers


def _choose_devices(n_parallel, use_gpu, devices):
    """Return the list of Theano device names, one a rank."""
    if n_parallel is not None:
        n_parallel = _check_int(n_parallel, "n_parallel")
        if n_parallel < 1:
            raise ValueError(f"fork: n_parallel: expected 1 or more, got {n_parallel}")
    if devices is None:
        if use_gpu:
            raise ValueError(_why_no_gpu())
        return ["cpu"] * (n_parallel or cores())
    if not isinstance(devices, (list, tuple)) or not all(isinstance(one, str) for one in devices):
        raise TypeError(f"fork: devices: expected a list of device names, got {devices!r}")
    if not devices:
        raise ValueError("fork: devices: expected at least one device name, got an empty list")
    if n_parallel not in (None, len(devices)):
        raise ValueError(
            f"fork: n_parallel is {n_parallel}, but {len(devices)} devices are named: {devices}"
        )
    others = sorted({one for one in devices if one != "cpu"})
    if others:
        raise ValueError(f"fork: devices: this version computes on 'cpu' only, got {others}")
    if use_gpu:
        raise ValueError(f"fork: use_gpu is True, but the devices are {devices}")
    return list(devices)


def _why_no_gpu():
    if importlib.util.find_spec("pygpu") is None:
        return (
            "fork: use_gpu=True, but pygpu is not installed; install it (Debian: python3-pygpu), or "
            "use use_gpu=False"
        )
    if not get_n_gpu():
        return "fork: use_gpu=True, but pygpu finds no GPU; 'python -m synkhronos doctor' says more"
    return "fork: use_gpu=True, but this version computes on the CPU only; use use_gpu=False"


def _check_int(value, name):
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"fork: {name}: expected an int, got {value!r}")
    return int(value)


def _check_timeout(timeout):
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"fork: timeout: expected seconds or None, got {timeout!r}")
    if not timeout > 0:
        raise ValueError(f"fork: timeout: expected more than 0 seconds, got {timeout}")
    return float(timeout)
