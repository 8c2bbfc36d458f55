"""``python -m synkhronos launch``: the ``mpirun`` line of a job, and the process that runs it.

OpenMPI's mpirun starts one task per machine, and passes on the output of the tasks. It is started in a
session of its own, so that Ctrl-C reaches only ``launch``: mpirun itself would end the job at once.
``launch`` passes it on, and SIGTERM, as another signal, of which the script's parent knows the meaning
(``script_process``).
"""

import importlib.metadata
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Dict, List, Mapping, MutableMapping, NamedTuple, Optional, Sequence

from synkhronos.host import environment, job
from synkhronos.host.doctor.check import ProbeError, probe
from synkhronos.host.signals import die_with_parent
from synkhronos.machines.job import loss_messages, networks
from synkhronos.machines.job.config import Job, JobError
from synkhronos.machines.job.script_process import ENDED, EXITED, TERMINATED
from synkhronos.machines.job.signals_of_user import INTERRUPT, TERMINATE, SignalsOfUser

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
# What the parent of the script writes, and the part of it that is not for users
_SCRIPT = re.compile(f"{ENDED.format(r'(SIG[A-Z0-9]+)')}|{EXITED.format(r'([0-9]+)')}")
_OWN = re.compile(f"(?:{TERMINATED}|{EXITED.format('[0-9]+')})\n".encode())
_REMEMBERED = 200  # characters
_END = 1 << 16  # characters of an output, in which the messages at the end of a job are
_GRACE = 5.0  # seconds after the end of the script, in which other tasks can end by themselves
_LAST = 1.0  # seconds between two checks of whether mpirun has ended


#: Prints the versions of mpi4py and of the MPI library that it loads, as JSON
LIBRARY = """
import json
from mpi4py import rc
rc.initialize = rc.finalize = False
import mpi4py
from mpi4py import MPI
library = MPI.Get_library_version().strip().split("\\0")[0].splitlines()[0].partition(",")[0]
print(json.dumps({"mpi4py": mpi4py.__version__, "library": " ".join(library.split())}))
"""


class Mpirun(NamedTuple):
    """OpenMPI's mpirun.

    Attributes
    ----------
    path, version : str
        Its path and its version.
    """

    path: str
    version: str

    @property
    def survives_deaths(self) -> bool:
        """Whether it can continue without tasks that have died; OpenMPI 5 and newer can."""
        return int(self.version.split(".")[0]) >= 5


def find_mpirun(environ: MutableMapping[str, str] = os.environ) -> Mpirun:
    """Return OpenMPI's mpirun, the first one in ``PATH``.

    The variable HOME, without which OpenMPI 5 does not start, is set if it is not.

    Raises
    ------
    JobError
        If there is none.
    """
    environ.setdefault("HOME", os.path.expanduser("~"))
    folders = environ.get("PATH", "").split(os.pathsep)
    names = [os.path.join(folder, name) for folder in folders for name in ("mpirun", "mpirun.openmpi")]
    complaint = "several machines need mpirun, which is not in PATH"
    for path in filter(shutil.which, names):
        try:
            done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise JobError(f"{path} does not work: {error}") from None
        found = re.search(r"\(Open MPI\) (\S+)", done.stdout)
        if found is not None:
            return Mpirun(path, found[1])
        said = (done.stdout or done.stderr).strip().splitlines() or ["nothing"]
        complaint = f"{path} is not OpenMPI's, but says {said[0]!r}"
    raise JobError(f"{complaint}; install OpenMPI, on Debian with: apt-get install openmpi-bin")


def find_mpi4py() -> Dict[str, str]:
    """Return the output of `LIBRARY`. Raise a `JobError` if there is no mpi4py that works."""
    try:
        return probe(LIBRARY)
    except ProbeError as error:
        raise JobError(
            f"several machines need mpi4py, which {sys.executable} cannot import: {error}; install it "
            f"on every machine: python -m pip install 'synkhronos[mpi]'"
        ) from None


def check_mpi4py(mpirun: Mpirun) -> None:
    """Raise a `JobError` if mpi4py does not load OpenMPI."""
    about = find_mpi4py()
    if "Open MPI" not in about["library"]:
        complaint = f"mpi4py loads {about['library']}, but {mpirun.path} is OpenMPI's {mpirun.version}"
        raise JobError(f"{complaint}; to fix this: {remedy_for_library(mpirun, about)}")


def remedy_for_library(mpirun: Mpirun, about: Mapping[str, str]) -> str:
    """Return how mpi4py loads the MPI library of this mpirun, by the output of `LIBRARY`."""
    name = "mpich" if about["library"].startswith("MPICH") else "impi-rt"
    ways = [f"python -m pip uninstall {name}"] if about["library"] and _is_installed(name) else []
    own = Path(mpirun.path).resolve().parent.parent
    folders = [own / "lib", own / "lib64", *environment.library_folders()[0]]
    library = environment.find_library(folders, "libmpi.so.40")
    if library is not None and about["mpi4py"] >= "4.1":
        ways.append(f"set MPI4PY_LIBMPI={library}")
    ways = ways or ["python -m pip install --force-reinstall 'mpi4py>=4.1'"]
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
    if any(agent in one for agent in _AGENTS for one in (*environ, *what.mpi)):
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
    line += ["--mca", "ess_base_forward_signals", f"{INTERRUPT.name},{TERMINATE.name},SIGUSR1,SIGUSR2"]
    line += [*(["--with-ft", "ulfm"] if survives_deaths else []), *what.mpi]
    own = {**what.environment, **({job.LAUNCHED: "1", job.SPARE: "1"} if is_script else {})}
    options = [one for name in passed(environ) if name not in own for one in ("-x", name)]
    options += [one for name, value in own.items() for one in ("-x", f"{name}={value}")]
    if not what.by_host:
        slots = ",".join(host for host in what.hosts for _ in range(tasks))
        machines = ["-H", slots] if slots else []
        return [*line, *options, *machines, "-n", str(tasks * what.machines), *program]
    for number, host in enumerate(what.hosts):  # mpirun takes variables separately for each part
        line += [":"] if number else []
        for name, value in what.by_host.get(host, {}).items():
            line += ["-x", f"{name}={value}"]
        slots = ",".join([host] * tasks)
        line += [*options, "-H", slots, "-n", str(tasks), *program]
    return line


def with_networks(what: Job, mpirun: str, environ: Mapping[str, str] = os.environ) -> Job:
    """Return a job whose machines exchange messages by the networks that they share."""
    program = [sys.executable, "-c", networks.ASK]
    line = command(what, program, mpirun, environ, is_script=False)
    count = 1 if job.tasks_apart(environ) else what.machines
    return what._replace(mpi=[*networks.options(line, count, [*environ, *what.mpi]), *what.mpi])


def passed(environ: Mapping[str, str]) -> List[str]:
    """Return the names of the variables that other machines get from this one."""
    names = [name for name in environ if name in _PASSED or name.startswith(_PASSED_PREFIXES)]
    return sorted(name for name in names if name not in _NOT_PASSED)


class Ending(NamedTuple):
    """The end of an ``mpirun``.

    Attributes
    ----------
    code : int
        The exit code of the job.
    said : str
        The end of what mpirun and the tasks have written to stderr.
    printed : str
        The same of stdout, if it was read.
    ended_by : int
        The signal that has ended mpirun; 0 if there was none.
    """

    code: int
    said: str
    printed: str
    ended_by: int


def run(
    line: Sequence[str],
    environ: Optional[Dict[str, str]] = None,
    signals: Optional[SignalsOfUser] = None,
    reads_input: bool = True,
    reads_output: bool = False,
) -> Ending:
    """Run an ``mpirun`` line until it ends, and pass signals on to it.

    SIGTERM and SIGHUP reach the script as SIGTERM; a second one ends the job. If this process dies, so
    does the job. The exit code is that of the script, unless a signal has ended another task, or 1 if
    mpirun returns 0, but has lost a machine.

    Parameters
    ----------
    line : list of str
        The command and its arguments.
    environ : dict, optional
        Its environment variables, by default those of this process.
    signals : SignalsOfUser, optional
        The signals that this process gets, if there are several jobs one after another.
    reads_input : bool
        Whether mpirun gets the standard input of this process.
    reads_output : bool
        Whether the end of stdout is returned. Otherwise, mpirun writes to that of this process itself.
    """
    signals = signals or SignalsOfUser()
    with signals.deferred() as mask:

        def prepare() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            die_with_parent(signal.SIGTERM)

        process = subprocess.Popen(
            line,
            env=environ,
            stdin=None if reads_input else subprocess.DEVNULL,
            stdout=subprocess.PIPE if reads_output else None,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=prepare,
        )
        signals.pass_to(process)
    output, errors = _Output(process, process.stdout), _Errors(process, process.stderr, signals)
    returned = code = process.wait()
    output.join()
    errors.join()
    if errors.code is not None and 0 <= code <= 128:
        code = errors.code
    elif signals.ended_by:
        code = 128 + signals.ended_by
    elif errors.has_lost_machine:
        code = code or 1
    return Ending(code if code >= 0 else 128 - code, errors.said, output.said, max(0, -returned))


class _Output:
    """Copies the stdout of mpirun, if it is a pipe, in a thread.

    Attributes
    ----------
    said : str
        The end of it.
    """

    TARGET = 1  # file descriptor
    NEEDS_READER = True  # whether mpirun's pipe is closed if nobody reads the copy

    def __init__(self, process: "subprocess.Popen[bytes]", pipe: Optional[IO[bytes]]) -> None:
        self._process, self._pipe, self.said = process, pipe, ""
        thread = threading.Thread(target=self._pass_on, daemon=True)
        thread.start()
        self.join = thread.join

    def _pass_on(self) -> None:
        if self._pipe is None:
            return
        with self._pipe:
            while data := self._read(self._pipe):
                text = data.decode(errors="replace")
                data = self._look_at(self.said[-_REMEMBERED:] + text, data)
                self.said = (self.said + text)[-_END:]
                try:
                    while data:
                        data = data[os.write(self.TARGET, data) :]
                except OSError:  # nobody reads it
                    if self.NEEDS_READER:
                        return  # mpirun then finds the same

    def _read(self, pipe: IO[bytes]) -> bytes:
        """Return what arrives; nothing at the end, which may not come while others hold the pipe."""
        while not select.select([pipe], [], [], _LAST)[0]:
            if self._process.poll() is not None:
                return b""  # processes that mpirun has started live on
        return os.read(pipe.fileno(), 1 << 16)

    def _look_at(self, said: str, data: bytes) -> bytes:
        """Return what is to be copied of the data."""
        return data


class _Errors(_Output):
    """Copies the stderr of mpirun, without the lines that are for this process.

    Attributes
    ----------
    code : int or None
        The exit code of the script, if its parent has written it.
    has_lost_machine : bool
        Whether mpirun has written that it has lost a machine.
    """

    TARGET, NEEDS_READER = 2, False  # the messages are needed here
    code, has_lost_machine = None, False

    def __init__(
        self, process: "subprocess.Popen[bytes]", pipe: Optional[IO[bytes]], signals: SignalsOfUser
    ) -> None:
        self._signals = signals
        super().__init__(process, pipe)

    def _look_at(self, said: str, data: bytes) -> bytes:
        ended = _SCRIPT.search(said)
        if ended and self.code is None:  # with ULFM, mpirun goes on while other tasks do
            self.code = 128 + signal.Signals[ended[1]] if ended[1] else int(ended[2])
            timer = threading.Timer(_GRACE, self._process.terminate)
            timer.daemon = True
            timer.start()
        # OpenMPI 5.0.11's mpirun then ends the job, and returns 0.
        self.has_lost_machine = self.has_lost_machine or loss_messages.DAEMON in said
        if TERMINATED in said:
            self._signals.note_passed_on()
        return _OWN.sub(b"", data)
