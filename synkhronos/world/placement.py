"""Places ranks on several machines, given the arguments of ``fork()`` and the facts of the machines."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple, Sequence

import numpy as np

from synkhronos._errors import SynkhronosError
from synkhronos.arithmetic.machines import ranks_of_machines
from synkhronos.arithmetic.partition import shares
from synkhronos.host import job
from synkhronos.world.devices import JAX, check_devices, kind_of

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
    facts: Sequence[Fact],
    n_parallel: int | None,
    use_gpu: bool | None,
    devices: Sequence[str] | None,
) -> list[list[str]]:
    """Return the devices of each machine, one for each rank, from the arguments of ``fork()``."""
    number = len(facts)
    if devices is None and any(fact.devices for fact in facts):
        return _devices_of_job(facts, n_parallel, use_gpu)
    if devices is not None:
        devices = check_devices(n_parallel, use_gpu, devices)
        _check_for_machines(devices)
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


def _devices_of_job(
    facts: Sequence[Fact], n_parallel: int | None, use_gpu: bool | None
) -> list[list[str]]:
    without = [fact.host for fact in facts if not fact.devices]
    if without:
        raise ValueError(f"fork: {job.DEVICES} names no devices on {', '.join(without)}")
    every = [device for fact in facts for device in fact.devices or ()]
    check_devices(n_parallel, use_gpu, every)
    _check_for_machines(every)
    return [fact.devices or [] for fact in facts]


def _check_for_machines(devices: Sequence[str]) -> None:
    if kind_of(devices[0]) in JAX:
        raise ValueError(f"fork: devices: devices of JAX are for a single machine, got {devices}")


def by_rank(by_machine: Sequence[list], master_rank: int) -> list:
    """Return the items of all ranks by rank, given a list for each machine."""
    items = [None] * sum(map(len, by_machine))
    for ranks, own in zip(
        ranks_of_machines([len(item) for item in by_machine], master_rank), by_machine
    ):
        items[ranks.start : ranks.stop] = own
    return items


def digest_of(package: Path = PACKAGE) -> str:
    """Return a digest of the names and the contents of the source files in a folder.

    It takes some hundredths of a second for this package.
    """
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(package.rglob("*.py")):
        for part in (str(path.relative_to(package)).encode(), path.read_bytes()):
            digest.update(b"%d " % len(part))
            digest.update(part)
    return digest.hexdigest()
