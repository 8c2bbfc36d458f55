"""Choosing a machine and a device for each rank, and binding the ranks to their devices."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Sequence

import numpy as np

from synkhronos._checks import check_int
from synkhronos._errors import SynkhronosError, text_of
from synkhronos.arithmetic.machines import ranks_of_machines
from synkhronos.arithmetic.partition import shares
from synkhronos.engines.base import Engine
from synkhronos.engines.cpu import CpuEngine
from synkhronos.host import compiler, environment, job, nvidia
from synkhronos.host.machine import cores
from synkhronos.transports.limits import check_size
from synkhronos.world.rank_state import RankState

_logger = logging.getLogger("synkhronos")

#: An environment variable. If it is 1, NCCL is tried even if several ranks share a GPU.
SHARED_GPU = "SYNKHRONOS_NCCL_SHARED_GPU"

#: The kinds of JAX's devices
JAX = ("jax:cpu", "jax:cuda")

_CROWD = 16  # more processes per core than anyone intends

_COUNT_GPUS = """
import pygpu.gpuarray
print("count", pygpu.gpuarray.count_devices("cuda", 0))
"""


def get_n_gpu() -> int:
    """Return the number of GPUs that pygpu can use.

    They are counted in a subprocess, so that no CUDA context is created in this process.

    Returns
    -------
    int
        The number of CUDA devices; 0 without pygpu, and with PyTensor: JAX's GPUs are not chosen by
        ``fork()``, but named.
    """
    if compiler.NAME == "pytensor" or find_spec("pygpu") is None or not nvidia.driver_is_visible():
        return 0
    counted = subprocess.run(
        environment.fresh_python(_COUNT_GPUS), capture_output=True, text=True, check=False
    )
    words = counted.stdout.split()
    return int(words[-1]) if words[-2:-1] == ["count"] else 0


def choose_devices(
    n_parallel: int | None, use_gpu: bool | None, devices: Sequence[str] | None
) -> list[str]:
    """Return a list of device names, one per rank, from the arguments of ``fork()``."""
    if n_parallel is not None:
        n_parallel = check_int(n_parallel, "fork: n_parallel")
        if n_parallel < 1:
            raise ValueError(f"fork: n_parallel: expected 1 or more, got {n_parallel}")
        check_size(n_parallel)
    if devices is not None:
        return check_devices(n_parallel, use_gpu, devices)
    n_gpu = 0 if use_gpu is False else get_n_gpu()
    if use_gpu and not n_gpu:
        raise ValueError(_why_no_gpu())
    if not n_gpu:
        if (n_parallel or 0) > _CROWD * cores():
            _logger.warning(
                "%d processes share %d core(s): they start and compute slowly; one per core is fastest",
                n_parallel, cores(),
            )  # fmt: skip
        return ["cpu"] * (n_parallel or cores())
    if n_parallel is not None and n_parallel > n_gpu:
        raise ValueError(
            f"fork: n_parallel: expected at most {n_gpu}, the number of GPUs, got {n_parallel}; name "
            f"the devices for several ranks on one: devices=['cuda0', 'cuda0']; or use_gpu=False"
        )
    return [f"cuda{number}" for number in range(n_parallel or n_gpu)]


def check_devices(n_parallel: int | None, use_gpu: bool | None, devices: Sequence[str]) -> list[str]:
    """Return the argument `devices` of ``fork()``, or raise an error if it is wrong."""
    if not isinstance(devices, (list, tuple)) or not all(isinstance(item, str) for item in devices):
        raise TypeError(f"fork: devices: expected a list of device names, got {devices!r}")
    if not devices:
        raise ValueError("fork: devices: expected at least one device name, got an empty list")
    if n_parallel not in (None, len(devices)):
        raise ValueError(
            f"fork: n_parallel is {n_parallel}, but {len(devices)} devices are named: {devices}"
        )
    kinds = {kind_of(device) for device in devices}
    unknown = [device for device in devices if kind_of(device) is None]
    if unknown:
        raise ValueError(
            f"fork: devices: expected names such as 'cpu', 'cuda0', 'opencl0:0' or 'jax:cpu', got "
            f"{unknown}"
        )
    if len(kinds) > 1:
        raise ValueError(f"fork: devices: expected devices of one kind, got {devices}")
    (kind,) = kinds
    if use_gpu is not None and use_gpu is (kind in ("cpu", "jax:cpu")):
        raise ValueError(f"fork: use_gpu is {use_gpu}, but the devices are {devices}")
    if kind in JAX:
        _check_jax(devices)
    elif kind != "cpu":
        _check_gpus(devices)
    return list(devices)


def _check_gpus(devices: Sequence[str]) -> None:
    if compiler.NAME == "pytensor":
        raise ValueError(
            f"fork: devices: with PyTensor all ranks compute on the CPU; expected 'cpu' for each, or "
            f"devices of JAX, such as 'jax:cpu', got {devices}"
        )
    if find_spec("pygpu") is None:
        raise ValueError(
            f"fork: devices: {devices} need pygpu, which is not installed (Debian: python3-pygpu)"
        )


def _check_jax(devices: Sequence[str]) -> None:
    if compiler.NAME != "pytensor":
        raise ValueError(
            f"fork: devices: {devices} need PyTensor, and this process uses {compiler.TITLE}; import "
            f"pytensor before synkhronos, or set SYNKHRONOS_COMPILER=pytensor"
        )
    if find_spec("jax") is None:
        raise ValueError(
            f"fork: devices: {devices} need JAX, which is not installed: python -m pip install jax"
        )
    if kind_of(devices[0]) == "jax:cuda" and len(set(devices)) < len(devices):
        raise ValueError(f"fork: devices: JAX needs a GPU for each rank, got {devices}")


def kind_of(device: str) -> str | None:
    """Return ``"cpu"``, ``"cuda"``, ``"opencl"``, or one of `JAX`; None if it is not a device name."""
    if device in ("cpu", "jax:cpu"):
        return device
    for kind, number in (("cuda", r"\d*"), ("opencl", r"\d+:\d+"), ("jax:cuda", r"\d+")):
        if re.fullmatch(kind + number, device):
            return kind
    return None


def _why_no_gpu() -> str:
    if compiler.NAME == "pytensor":
        return "fork: use_gpu=True, but with PyTensor all ranks compute on the CPU; use use_gpu=False"
    hidden = environment.hidden_folder("pygpu")
    if hidden is not None:
        return (
            f"fork: use_gpu=True, but this virtual environment does not see pygpu, which is in "
            f"{hidden}; make it with: python3 -m venv --system-site-packages {sys.prefix}"
        )
    if find_spec("pygpu") is None:
        return (
            "fork: use_gpu=True, but pygpu is not installed; install it (Debian: python3-pygpu), or "
            "use use_gpu=False"
        )
    why = nvidia.explain_missing()
    return (
        f"fork: use_gpu=True, but pygpu finds no GPU{why and ': ' + why}; 'python -m synkhronos doctor' "
        f"gives details"
    )


def bind_devices(state: RankState, devices: Sequence[str], machines: Sequence[int]) -> str | None:
    """Bind every rank to its device, and choose the fastest communicator for its arrays.

    Parameters
    ----------
    state : RankState
        The rank.
    devices : list of str
        The device of each rank.
    machines : list of int
        The machine of each rank.

    Returns
    -------
    str or None
        Why NCCL is not used.
    """
    from synkhronos.comms.staged import StagedCommunicator

    engine: Any = state.engine  # that of GPUs has a context
    state.device = devices[state.rank]
    kind = kind_of(state.device)
    if kind == "opencl" and not state.is_master:
        _separate_pocl_cache(state.rank)
    try:
        engine.setup(state.device, announce=state.is_master)
    except Exception as error:
        raise ValueError(
            f"fork: rank {state.rank} cannot use the device {state.device!r}: {text_of(error)}"
        ) from error
    state.comm = StagedCommunicator(
        state.comm, state.store, engine.read, engine.to_device, engine.overwrite
    )
    if state.size == 1 or kind in JAX:
        return None
    if kind != "cuda":
        return "the devices are not CUDA devices"
    if len(set(zip(machines, devices))) < state.size:
        if os.environ.get(SHARED_GPU) != "1":
            return f"ranks share a GPU; set {SHARED_GPU}=1 in the environment to try NCCL"
        _make_ranks_look_apart(state.rank)
    try:
        from synkhronos.comms.nccl import CannotJoinError, join
    except ImportError as error:  # pygpu is incomplete, on every rank
        return str(error)
    try:
        state.comm = join(state.comm, engine.context, engine.arithmetic)
    except CannotJoinError as error:
        return str(error)
    return None


def _separate_pocl_cache(rank: int) -> None:
    """Give this rank a PoCL cache of its own.

    If two ranks build the same kernel in one cache, PoCL 3.1 can fail with "Unknown error".
    """
    shared = os.environ.get("POCL_CACHE_DIR") or os.path.expanduser("~/.cache/pocl")
    os.environ["POCL_CACHE_DIR"] = os.path.join(shared, f"synkhronos-{rank}")


def _make_ranks_look_apart(rank: int) -> None:
    """Make NCCL treat ranks on one GPU as ranks on different hosts, connected by loopback."""
    # A value that is set already may be inherited from another rank, or meant for all ranks.
    os.environ["NCCL_HOSTID"] = f"{os.environ.get('NCCL_HOSTID', 'synkhronos')}-{rank}"
    for name, value in (
        ("NCCL_MULTI_RANK_GPU_ENABLE", "1"),  # from NCCL 2.30 on
        ("NCCL_SOCKET_IFNAME", "lo"),
        ("NCCL_IB_DISABLE", "1"),
    ):
        os.environ.setdefault(name, value)


def make_engine(devices: Sequence[str]) -> Engine:
    """Return the engine for devices, which are of one kind."""
    kind = kind_of(devices[0])
    if kind == "cpu":
        return CpuEngine()
    if kind in JAX:
        from synkhronos.engines.pytensor.jax_engine import PyTensorJaxEngine

        return PyTensorJaxEngine()
    from synkhronos.engines.theano.gpu_engine import TheanoGpuEngine

    return TheanoGpuEngine()


# Several machines


PACKAGE = Path(__file__).resolve().parents[1]


class Fact(NamedTuple):
    """The facts that a machine tells the others.

    Attributes
    ----------
    host : str
        The name of the machine.
    versions : tuple of str
        The versions of this package, Python, NumPy, and the graph compiler with its name.
    digest : str
        The digest of the source files of this package.
    ranks : int or None
        The number of its ranks, if the job specifies it.
    cores, gpus : int
        The number of its cores and GPUs.
    devices : list of str or None
        The devices of its ranks, if the job specifies them.
    """

    host: str
    versions: tuple[str, str, str, str]
    digest: str
    ranks: int | None
    cores: int
    gpus: int
    devices: list[str] | None


def check_versions(facts: Sequence[Fact]) -> None:
    """Raise a `SynkhronosError` if the machines have different versions, or other source files."""
    first, names = facts[0], ("Synkhronos", "Python", "NumPy", "the graph compiler")
    for fact in facts:
        for name, own, other in zip(names, first.versions, fact.versions):
            if own != other:
                raise SynkhronosError(
                    f"{name} has the version {own} on {first.host} and {other} on {fact.host}; install "
                    f"the same version on every machine"
                )
        if first.digest != fact.digest:
            raise SynkhronosError(
                f"Synkhronos has other source files on {first.host} than on {fact.host}, though both "
                f"are of the version {first.versions[0]}; copy the package from one machine to the other"
            )


def place(
    facts: Sequence[Fact], n_parallel: int | None, use_gpu: bool | None, devices: Sequence[str] | None
) -> list[list[str]]:
    """Return the devices of each machine, one for each rank, from the arguments of ``fork()``."""
    number, of_job = len(facts), devices is None and any(fact.devices for fact in facts)
    if of_job:
        without = [fact.host for fact in facts if not fact.devices]
        if without:
            raise ValueError(f"fork: {job.DEVICES} names no devices on {', '.join(without)}")
        devices = [device for fact in facts for device in fact.devices or ()]
    if devices is not None:
        devices = check_devices(n_parallel, use_gpu, devices)
        if kind_of(devices[0]) in JAX:
            raise ValueError(f"fork: devices: devices of JAX are for a single machine, got {devices}")
        n_parallel = len(devices)
    if n_parallel is not None and n_parallel < number:
        raise ValueError(
            f"fork: n_parallel: expected at least {number}, one rank for each of the machines "
            f"{', '.join(fact.host for fact in facts)}, got {n_parallel}"
        )
    on_gpus = devices is None and use_gpu is not False and all(fact.gpus for fact in facts)
    if use_gpu and devices is None and not on_gpus:
        counted = ", ".join(f"{fact.host}: {fact.gpus}" for fact in facts)
        raise ValueError(f"fork: use_gpu=True, but not every machine has a GPU: {counted}")
    counts = [fact.ranks or (fact.gpus if on_gpus else fact.cores) for fact in facts]
    if of_job:
        counts = [len(fact.devices or ()) for fact in facts]
    if n_parallel is not None and n_parallel != sum(counts):
        counts = shares(n_parallel, number)
    if devices is not None:
        ends = np.cumsum(counts)
        return [list(devices[end - count : end]) for end, count in zip(ends, counts)]
    if not on_gpus:
        return [["cpu"] * count for count in counts]
    for fact, count in zip(facts, counts):
        if count > fact.gpus:
            raise ValueError(
                f"fork: {count} ranks were asked for on {fact.host}, which has {fact.gpus} GPU(s)"
            )
    return [[f"cuda{rank}" for rank in range(count)] for count in counts]


def by_rank(by_machine: Sequence[list[Any]], master_rank: int) -> list[Any]:
    """Return the items of all ranks by rank, given a list for each machine."""
    items = [None] * sum(map(len, by_machine))
    for ranks, own in zip(
        ranks_of_machines([len(item) for item in by_machine], master_rank), by_machine
    ):
        items[ranks.start : ranks.stop] = own
    return items


def digest_of() -> str:
    """Return a digest of the names and the contents of the source files of this package.

    It takes some hundredths of a second.
    """
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(PACKAGE.rglob("*.py")):
        for part in (str(path.relative_to(PACKAGE)).encode(), path.read_bytes()):
            digest.update(b"%d " % len(part))
            digest.update(part)
    return digest.hexdigest()
