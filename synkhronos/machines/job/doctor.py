"""The checks of ``python -m synkhronos doctor`` for several machines: MPI, and each machine."""

import json
import re
import subprocess
import sys
from typing import Any, Dict, Iterator, List

from synkhronos.host.compiler import TITLE
from synkhronos.host.probe import OK, PROBLEM, WARNING, ProbeError, Result, probe
from synkhronos.machines.job import launcher
from synkhronos.machines.job.config import Job, JobError, make_job

TIME_LIMIT = 60  # seconds, for what runs on other machines

LIBRARY = """
import json
from mpi4py import rc
rc.initialize = rc.finalize = False
import mpi4py
from mpi4py import MPI
print(json.dumps({"mpi4py": mpi4py.__version__, "library": MPI.Get_library_version()}))
"""

HOST = """
import importlib, json, platform, re, socket, sys
found = {"Python": platform.python_version()}
for name, package in (("Synkhronos", "synkhronos._version"), ("NumPy", "numpy"), ("mpi4py", "mpi4py")):
    try:
        found[name] = importlib.import_module(package).__version__
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"
try:
    from importlib.metadata import version
    found["COMPILER"] = version("COMPILER")
except Exception as error:
    found["COMPILER"] = f"{type(error).__name__}: {error}"
try:
    from mpi4py import rc
    rc.initialize = rc.finalize = False
    from mpi4py import MPI
    library = MPI.Get_library_version()
    openmpi = re.search(r"Open MPI v?([0-9][^\\s,]*)", library)
    found["OpenMPI"] = openmpi[1] if openmpi else library.strip().splitlines()[0]
except Exception as error:
    found["OpenMPI"] = f"{type(error).__name__}: {error}"
try:
    from synkhronos.machines.job.sources import digest_of
    found["digest"] = digest_of()
except Exception as error:
    found["digest"] = f"{type(error).__name__}: {error}"
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


def check_mpi() -> Result:
    """Check what several machines need: OpenMPI's mpirun, and mpi4py for the same MPI."""
    only = "only several machines need it"
    try:
        mpirun = launcher.find_mpirun()
    except JobError as error:
        return Result("MPI", OK, f"not usable, but {only}: {error}")
    found = f"mpirun of OpenMPI {mpirun.version}"
    try:
        launcher.check_mpi4py()
        about = probe(LIBRARY)
    except (JobError, ProbeError) as error:
        return Result("MPI", OK, f"{found}; mpi4py is not usable, but {only}: {error}")
    return judge_mpi(mpirun.version, about)


def judge_mpi(version: str, about: Dict[str, str]) -> Result:
    """Compare the version of mpirun with the output of `LIBRARY`."""
    library = about["library"].strip().split("\0")[0].splitlines()[0]
    found = f"mpirun of OpenMPI {version}, mpi4py {about['mpi4py']}"
    of_library = re.search(r"Open MPI v?([0-9][^\s,]*)", library)
    if of_library is None or of_library[1] != version:
        remedy = (
            "let both be of one installation: python -m pip install --force-reinstall mpi4py; or put "
            "the mpirun of this library first in PATH"
        )
        return Result("MPI", WARNING, f"{found}, which loads {library.partition(',')[0]}", remedy)
    return Result("MPI", OK, found)


def check_hosts(hosts: str) -> Iterator[Result]:
    """Check that each machine of a job is reachable and has the same versions; measure the latency."""
    try:
        what = make_job(None, None, hosts, None, None, None)
        mpirun = launcher.find_mpirun()
        launcher.check_mpi4py()
    except JobError as error:
        yield Result("hosts", PROBLEM, hosts, str(error))
        return
    reached: Dict[str, Dict[str, Any]] = {}
    for host in what.hosts:
        try:
            reached[host] = ask(mpirun.path, [host], HOST)
        except ProbeError as error:
            yield Result(host, PROBLEM, f"cannot be asked: {error}", remedy_of(host))
        else:
            first = what.hosts[0]
            yield judge_host(host, reached[host], first, reached.get(first, reached[host]))
    if len(reached) > 1:
        yield check_round_trips(mpirun.path, list(reached))


def remedy_of(host: str) -> str:
    """Return what to try if a machine cannot be asked."""
    return (
        f"try 'ssh {host} {sys.executable} --version': it must work without a password, and Python, "
        f"Synkhronos and OpenMPI must be in the same places there"
    )


def judge_host(host: str, about: Dict[str, Any], first: str, expected: Dict[str, Any]) -> Result:
    """Compare the output of `HOST` on one machine with the output on the first machine."""
    names = ("Synkhronos", "Python", "NumPy", TITLE, "mpi4py", "OpenMPI")
    found = ", ".join(f"{name} {about[name]}" for name in names)
    found = f"{found}, {about['package']} with the digest {about['digest']}"
    missing = [name for name in names if "Error: " in about[name]]
    if missing:
        return Result(host, PROBLEM, found, f"install {', '.join(missing)} there")
    others = [name for name in names if about[name] != expected[name]]
    if others:
        wanted = ", ".join(f"{name} {expected[name]}" for name in others)
        return Result(host, PROBLEM, found, f"install there what {first} has: {wanted}")
    if about["digest"] != expected["digest"]:
        remedy = f"{first} has other source files, {expected['package']}; copy them to the other"
        return Result(host, PROBLEM, found, remedy)
    return Result(host, OK, found)


def check_round_trips(mpirun: str, hosts: List[str]) -> Result:
    """Measure the time of a message from the first machine to each other machine and back."""
    try:
        times = ask(mpirun, hosts, ROUND_TRIPS)["microseconds"]
    except ProbeError as error:
        remedy = (
            "the machines must reach each other at all TCP ports; with several networks, name one: "
            "OMPI_MCA_btl_tcp_if_include=NETWORK"
        )
        return Result("round trip", PROBLEM, f"no message arrived: {error}", remedy)
    each = ", ".join(f"{host} {time:.0f} µs" for host, time in zip(hosts[1:], times))
    return Result("round trip", OK, f"from {hosts[0]}, median of 201: {each}")


def ask(mpirun: str, hosts: List[str], code: str) -> Dict[str, Any]:
    """Run code on machines, and return the JSON that the first one prints."""
    what = Job(hosts, len(hosts), {}, {}, [])
    line = launcher.command(what, [sys.executable, "-c", code], mpirun, is_script=False)
    process = subprocess.Popen(
        line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        printed, said = process.communicate(timeout=TIME_LIMIT)
    except subprocess.TimeoutExpired:
        raise ProbeError(f"no answer within {TIME_LIMIT} s") from None
    finally:
        process.kill()
        process.wait()
    if process.returncode or not printed.strip():
        raise ProbeError(complaint_of(said) or f"exit status {process.returncode}")
    return json.loads(printed.strip().splitlines()[-1])


def complaint_of(said: str) -> str:
    """Return the most informative line: the end of a traceback, or the first, which is often ssh's."""
    lines = [line.strip() for line in said.splitlines() if line.strip(" -") and "Warning: " not in line]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return errors[-1] if errors else next(iter(lines), "")
