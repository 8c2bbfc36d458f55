"""``python -m synkhronos launch``: the ``mpirun`` line of a job, and the process that runs it.

OpenMPI's mpirun starts one task per machine, and passes on the output of the tasks. It is started in a
session of its own, so that Ctrl-C reaches only ``launch``: mpirun itself would end the job at once.
``launch`` passes it on as the signal `INTERRUPT`, for which the script has a handler (``host/job``).
"""

import importlib.util
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import IO, Dict, List, Mapping, NamedTuple, Optional, Sequence

from synkhronos.host import job
from synkhronos.host.signals import die_with_parent
from synkhronos.machines.job import loss_messages
from synkhronos.machines.job.config import Job, JobError
from synkhronos.machines.job.signals_of_user import INTERRUPT, SignalsOfUser

# The variables that all machines need, with the value that they have here
_PASSED = ("PYTHONPATH", "PYTHONHASHSEED", "THEANO_FLAGS", "THEANORC", "PYTENSOR_FLAGS",
           "OMP_NUM_THREADS")  # fmt: skip
_PASSED_PREFIXES = ("SYNKHRONOS_", "NCCL_", "OPENBLAS_", "MKL_")
_OF_A_TASK = (job.TASK, job.LAUNCHED, job.SPARE, job.JOB, job.RESTARTS)

# The variables in which batch systems, or a user, tell mpirun the machines
_ALLOCATIONS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "PE_HOSTFILE", "LOADL_STEP_ID",
                "OMPI_MCA_orte_default_hostfile")  # fmt: skip

# With these, the kernel finds within about five seconds that another machine cannot be reached, and
# mpirun ends the job; the couriers find it earlier, and tell more, but exist only when all machines have
# met. With OpenMPI's own values, this takes minutes.
_KEEPALIVE = {"time": 1, "intvl": 1, "probes": 4}
#: mpirun's settings, of OpenMPI 4 and 5, of another way than ssh to start processes
_AGENTS = ("plm_rsh_agent", "plm_ssh_agent")
_REMEMBERED = 200  # characters
_END = 1 << 16  # characters of an output, in which the messages at the end of a job are
_GRACE = 5.0  # seconds after the end of the script, in which other tasks can end by themselves
_POLL_INTERVAL = 0.5  # seconds between two checks of whether the terminal is ours
_LAST = 1.0  # seconds between two checks of whether mpirun has ended


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


def find_mpirun(environ: Mapping[str, str] = os.environ) -> Mpirun:
    """Return the mpirun in ``PATH``.

    Raises
    ------
    JobError
        If there is none, or if it is not OpenMPI's.
    """
    install = "install OpenMPI, on Debian with: apt-get install openmpi-bin"
    path = shutil.which("mpirun", path=environ.get("PATH"))
    if path is None:
        raise JobError(f"several machines need mpirun, which is not in PATH; {install}")
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JobError(f"{path} does not work: {error}") from None
    found = re.search(r"\(Open MPI\) (\S+)", done.stdout)
    if found is None:
        said = (done.stdout or done.stderr).strip().splitlines() or ["nothing"]
        raise JobError(f"{path} is not OpenMPI's, but says {said[0]!r}; {install}")
    return Mpirun(path, found[1])


def check_mpi4py() -> None:
    """Raise a `JobError` if this Python has no mpi4py."""
    if importlib.util.find_spec("mpi4py") is None:
        raise JobError(
            f"several machines need mpi4py, which {sys.executable} does not find; install it on every "
            f"machine: python -m pip install 'synkhronos[mpi]'"
        )


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
        Whether it is a script. Then it gets Ctrl-C, a courier on each machine, and ranks whose lines
        begin with the name of their machine.
    survives_deaths : bool
        Whether this mpirun can continue, with ULFM, without tasks that have died.
    """
    tasks = 2 if is_script else 1  # a rank that leads the machine, and its courier
    line = [mpirun, *(["--allow-run-as-root"] if os.geteuid() == 0 else []), "--bind-to", "none"]
    if what.hosts:
        line += ["--map-by", "seq"]  # in this order; otherwise mpirun puts its own machine first
    else:
        apart = job.tasks_apart(environ)
        line += ["--oversubscribe", *([] if apart else ["--map-by", f"ppr:{tasks}:node"])]
    for name, count in _KEEPALIVE.items():
        line += ["--mca", f"oob_tcp_keepalive_{name}", str(count)]
    line += ["--mca", "ess_base_forward_signals", f"{INTERRUPT.name},SIGUSR1,SIGUSR2"]
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


def passed(environ: Mapping[str, str]) -> List[str]:
    """Return the names of the variables that other machines get from this one."""
    names = [name for name in environ if name in _PASSED or name.startswith(_PASSED_PREFIXES)]
    return sorted(name for name in names if name not in _OF_A_TASK)


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

    SIGTERM and SIGHUP end the job. If this process dies, so does the job. The exit code is 1 if mpirun
    returns 0, but has lost a machine, and with ULFM the code of the signal that has ended the script.

    Parameters
    ----------
    line : list of str
        The command and its arguments.
    environ : dict, optional
        Its environment variables, by default those of this process.
    signals : SignalsOfUser, optional
        The signals that this process gets, if there are several jobs one after another.
    reads_input : bool
        Whether the script gets the standard input of this process.
    reads_output : bool
        Whether the end of stdout is returned. Otherwise, mpirun writes to that of this process itself.
    """
    signals = signals or SignalsOfUser()
    terminal = reads_input and _is_terminal()
    stdin = None if reads_input else subprocess.DEVNULL
    with signals.deferred() as mask:

        def prepare() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            die_with_parent(signal.SIGTERM)

        process = subprocess.Popen(
            line,
            env=environ,
            stdin=subprocess.PIPE if terminal else stdin,
            stdout=subprocess.PIPE if reads_output else None,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=prepare,
        )
        signals.pass_to(process)
    if terminal:
        threading.Thread(target=_pass_terminal, args=(process.stdin,), daemon=True).start()
    output, errors = _Output(process, process.stdout), _Errors(process, process.stderr)
    returned = code = process.wait()
    output.join()
    errors.join()
    if signals.ended_by:
        code = 128 + signals.ended_by
    elif errors.code and (code == 0 or errors.code > 128):
        code = errors.code
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
                self._look_at(self.said[-_REMEMBERED:] + text)
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

    def _look_at(self, said: str) -> None:
        pass


class _Errors(_Output):
    """Copies the stderr of mpirun.

    Attributes
    ----------
    code : int
        The exit code of a failure that mpirun reports there; 0 if there is none.
    """

    TARGET, NEEDS_READER = 2, False  # the messages are needed here
    code = 0

    def _look_at(self, said: str) -> None:
        ended = loss_messages.SCRIPT.search(said)
        if ended and not self.code:  # with ULFM, mpirun goes on while other tasks do, and returns 0
            self.code = 128 + signal.Signals[ended[1]]
            timer = threading.Timer(_GRACE, self._process.terminate)
            timer.daemon = True
            timer.start()
        elif loss_messages.DAEMON in said:  # OpenMPI 5.0.11's mpirun ends the job, and returns 0
            self.code = self.code or 1


def _is_terminal() -> bool:
    return sys.stdin is not None and os.isatty(0)


def _pass_terminal(pipe: IO[bytes]) -> None:
    """Write the input of the terminal to a pipe: mpirun reads no terminal of another session."""
    with pipe:
        while True:
            if os.tcgetpgrp(0) != os.getpgrp():
                time.sleep(_POLL_INTERVAL)  # in the background, where reading would stop this process
            elif select.select([0], [], [], _POLL_INTERVAL)[0]:
                typed = os.read(0, 4096)
                if not typed:
                    return
                try:
                    os.write(pipe.fileno(), typed)
                except BrokenPipeError:
                    return
