"""The checks of ``python -m synkhronos doctor`` for several machines: MPI, and each machine."""

import functools
import re
import subprocess
import sys
from typing import Any, Dict, Iterator, List

from synkhronos.host.compiler import TITLE
from synkhronos.host.doctor.check import PROBLEM, Check, Fault, Finding, ProbeError, Result, ask
from synkhronos.machines.job import launcher
from synkhronos.machines.job.config import Job, JobError, make_job

TIME_LIMIT = 60  # seconds, for what runs on other machines

HOST = """
import importlib, json, platform, re, socket, sys
from importlib.metadata import version

def openmpi():
    from mpi4py import rc
    rc.initialize = rc.finalize = False
    from mpi4py import MPI
    library = MPI.Get_library_version()
    found = re.search(r"Open MPI v?([0-9][^\\s,]*)", library)
    return found[1] if found else library.strip().splitlines()[0]

def digest():
    from synkhronos.world.devices import digest_of
    return digest_of()

def version_in(package):
    return importlib.import_module(package).__version__

found = {}
for name, find, *arguments in (
    ("Python", platform.python_version),
    ("Synkhronos", version_in, "synkhronos._version"),
    ("NumPy", version_in, "numpy"),
    ("mpi4py", version_in, "mpi4py"),
    ("COMPILER", version, "COMPILER"),
    ("OpenMPI", openmpi),
    ("digest", digest),
):
    try:
        found[name] = find(*arguments)
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"
package = sys.modules.get("synkhronos")
found["package"] = getattr(package, "__file__", None)
found["name"] = socket.gethostname()
print(json.dumps(found))
""".replace("COMPILER", TITLE)

ROUND_TRIPS = """
import json, time
from mpi4py import rc
rc.initialize = rc.finalize = False  # whatever the environment says
from mpi4py import MPI
import numpy

MPI.Init()
world, mark = MPI.COMM_WORLD, numpy.zeros(1)
medians = []
for other in range(1, world.size):
    world.Barrier()
    times = []
    for _ in range(201):
        began = time.perf_counter()
        if world.rank == 0:
            world.Send(mark, other), world.Recv(mark, other)
        elif world.rank == other:
            world.Recv(mark, 0), world.Send(mark, 0)
        times.append(time.perf_counter() - began)
    medians.append(1e6 * sorted(times)[100])
if world.rank == 0:
    print(json.dumps({"microseconds": medians}), flush=True)
MPI.Finalize()
"""


def examine_mpi() -> Finding:
    """Check what several machines need: OpenMPI's mpirun, and mpi4py for the same MPI."""
    only = "only several machines need it"
    try:
        mpirun = launcher.find_mpirun()
    except JobError as error:
        return f"not usable, but {only}: {error}", ""
    return f"{mpirun.path} of OpenMPI {mpirun.version}, whose library mpi4py loads", ""


MPI = Check("MPI", examine_mpi, is_required=False)


def check_hosts(hosts: str) -> Iterator[Result]:
    """Check that each machine of a job is reachable and has the same versions; measure the latency."""
    reached: Dict[str, Dict[str, Any]] = {}
    try:
        what = make_job(None, None, hosts, None, None, None)
        mpirun = launcher.find_mpirun().path
    except JobError as error:
        yield Result("hosts", PROBLEM, hosts, str(error))
        return
    for host in what.hosts:
        examine = functools.partial(examine_host, mpirun, host, what.hosts[0], reached)
        yield Check(host, examine, is_required=True).run()
    if len(reached) > 1:
        examine = functools.partial(examine_round_trips, mpirun, list(reached))
        yield Check("round trip", examine, is_required=True).run()


def examine_host(mpirun: str, host: str, first: str, reached: Dict[str, Dict[str, Any]]) -> Finding:
    """Check one machine, and put the output of `HOST` into `reached`, by machine.

    Parameters
    ----------
    mpirun : str
        The path of mpirun.
    host : str
        The name of the host.
    first : str
        The first machine, with which it is compared.
    """
    try:
        reached[host] = about = ask_hosts(mpirun, [host], HOST)
    except ProbeError as error:
        raise Fault(
            f"cannot be asked: {error}",
            f"try 'ssh {host} {sys.executable} --version': it must work without a password, and "
            f"Python, Synkhronos and OpenMPI must be in the same places there",
        ) from None
    return judge_host(about, first, reached.get(first, about))


def judge_host(about: Dict[str, Any], first: str, expected: Dict[str, Any]) -> Finding:
    """Compare the output of `HOST` on one machine with the output on the first machine."""
    names = ("Synkhronos", "Python", "NumPy", TITLE, "mpi4py", "OpenMPI")
    found = ", ".join(f"{name} {about[name]}" for name in names)
    found = f"{found}, {about['package']} with the digest {about['digest']}"
    missing = [name for name in names if "Error: " in about[name]]
    if missing:
        raise Fault(found, f"install {', '.join(missing)} there")
    others = [name for name in names if about[name] != expected[name]]
    if others:
        wanted = ", ".join(f"{name} {expected[name]}" for name in others)
        raise Fault(found, f"install there what {first} has: {wanted}")
    if about["digest"] != expected["digest"]:
        remedy = f"{first} has other source files, {expected['package']}; copy them to the other"
        raise Fault(found, remedy)
    return found, ""


def examine_round_trips(mpirun: str, hosts: List[str]) -> Finding:
    """Measure the time of a message from the first machine to each other machine and back."""
    try:
        times = ask_hosts(mpirun, hosts, ROUND_TRIPS)["microseconds"]
    except ProbeError as error:
        remedy = (
            "the machines must reach each other at all TCP ports; with several networks, name one: "
            "OMPI_MCA_btl_tcp_if_include=NETWORK"
        )
        raise Fault(f"no message arrived: {error}", remedy) from None
    each = ", ".join(f"{host} {time:.0f} µs" for host, time in zip(hosts[1:], times))
    return f"from {hosts[0]}, median of 201: {each}", ""


def ask_hosts(mpirun: str, hosts: List[str], code: str) -> Dict[str, Any]:
    """Run code on machines, and return the JSON that the first one prints."""
    what = launcher.with_networks(Job(hosts, len(hosts), {}, {}, []), mpirun)
    line = launcher.command(what, [sys.executable, "-c", code], mpirun, is_script=False)
    return ask(line, TIME_LIMIT, complaint_of, stdin=subprocess.DEVNULL)


def complaint_of(said: str) -> str:
    """Return the most informative line: the end of a traceback, or the first, which is often ssh's."""
    lines = [line.strip() for line in said.splitlines() if line.strip(" -") and "Warning: " not in line]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return errors[-1] if errors else next(iter(lines), "")
