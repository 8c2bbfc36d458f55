"""Running mpirun: passing signals on to it, and starting the job again after a loss.

mpirun is started in a session of its own, so that Ctrl-C reaches only ``launch``: mpirun itself would
end the job at once. ``launch`` passes it on, and SIGTERM, as another signal, of which the parent of the
script knows the meaning (``tasks``).

Before each start but the first, a short ``mpirun`` on each host, with the options of the job, shows
which hosts can be reached in the same way as the job reaches them, and ends there what is left of it.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from types import MappingProxyType
from typing import IO, Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Set

from synkhronos.host import job
from synkhronos.host.signals import die_with_parent
from synkhronos.machines.job import ending, launcher
from synkhronos.machines.job.config import Job, JobError
from synkhronos.machines.job.doctor import complaint_of
from synkhronos.machines.job.launcher import Mpirun
from synkhronos.machines.job.reports import Reports

_INTERRUPT, _TERMINATE = signal.Signals[job.INTERRUPT], signal.Signals[job.TERMINATE]
_ANSWER = 5.0  # seconds for the parent of the script to pass SIGTERM on, if it has started
_PASSED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_ENDING = (signal.SIGTERM, signal.SIGHUP)
_GRACE = 5.0  # seconds after the end of the script, in which other tasks can end by themselves
_LAST = 1.0  # seconds between two checks of whether mpirun has ended
_LIMIT = 15.0  # seconds for a host to answer
_POLL_INTERVAL = 0.05  # seconds
_CLEANING = 1.0  # seconds for an mpirun to remove its files
_ALLOCATED = "the batch system's machines"


class SignalsOfUser:
    """The handlers of this process's signals, which it passes on to an ``mpirun``.

    A signal that is ignored stays ignored.

    Attributes
    ----------
    ended_by : int
        The signal that ends the job; 0 if there was none.
    interrupted : bool
        Whether there was a SIGINT.
    """

    def __init__(self) -> None:
        self.ended_by, self.interrupted = 0, False
        self._numbers = {item for item in _PASSED if signal.getsignal(item) != signal.SIG_IGN}
        self._process: Optional[subprocess.Popen[bytes]] = None
        self._reports = Reports()

    @property
    def code(self) -> int:
        """The exit code for a signal that has come while no job ran; 0 if there was none."""
        number = self.ended_by or (signal.SIGINT if self.interrupted else 0)
        return 128 + number if number else 0

    @contextlib.contextmanager
    def deferred(self) -> Iterator[Set[int]]:
        """Let signals wait until the end of the block. Return those that waited before it."""
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._numbers)
        try:
            yield mask
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def pass_to(self, process: "subprocess.Popen[bytes]", reports: Reports) -> None:
        """Pass signals on to this process from now on; its tasks tell whether they have arrived."""
        self._process, self._reports = process, reports
        for number in self._numbers:
            signal.signal(number, self._handle)
        if self.code:  # between two jobs
            process.terminate()

    def _handle(self, number: int, frame: object) -> None:
        process: Any = self._process  # there are handlers since it was started
        if number == signal.SIGINT:
            self.interrupted = True
            process.send_signal(_INTERRUPT)
        elif number not in _ENDING:
            process.send_signal(number)
        elif self.ended_by:
            process.terminate()  # it ends the job soon
        else:
            self.ended_by = number
            process.send_signal(_TERMINATE)
            timer = threading.Timer(_ANSWER, self._terminate_unless_passed_on)
            timer.daemon = True
            timer.start()

    def _terminate_unless_passed_on(self) -> None:
        if not self._reports.gets_sigterm:
            self._process.terminate()  # type: ignore[union-attr]


class Ending(NamedTuple):
    """The end of an ``mpirun``.

    Attributes
    ----------
    code : int
        The exit code of the job.
    reports : Reports
        What the tasks have told.
    ended_by : int
        The signal that has ended mpirun; 0 if there was none.
    """

    code: int
    reports: Reports
    ended_by: int


def run(
    line: Sequence[str], signals: Optional[SignalsOfUser] = None, reads_input: bool = True
) -> Ending:
    """Run an ``mpirun`` line until it ends, and pass signals on to it.

    SIGTERM and SIGHUP reach the script as SIGTERM; a second one ends the job. If this process dies, so
    does the job. The exit code is that of the script if it has ended by itself, unless a signal has
    ended another task. Otherwise it is not 0, whatever mpirun returns: that of OpenMPI 5 may return 0
    after the loss of a machine.

    Parameters
    ----------
    line : list of str
        The command and its arguments.
    signals : SignalsOfUser, optional
        The signals that this process gets, if there are several jobs one after another.
    reads_input : bool
        Whether mpirun gets the standard input of this process.
    """
    signals, reports = signals or SignalsOfUser(), Reports()
    with signals.deferred() as mask:

        def prepare() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            die_with_parent(signal.SIGTERM)

        process = subprocess.Popen(
            line,
            stdin=None if reads_input else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=prepare,
        )
        signals.pass_to(process, reports)
    reader = threading.Thread(target=_pass_on_errors, args=[process, reports], daemon=True)
    reader.start()
    returned = code = process.wait()
    reader.join()
    if reports.code is not None and 0 <= code <= 128:
        code = reports.code
    elif signals.ended_by:
        code = 128 + signals.ended_by
    elif reports.is_started and reports.code is None:
        code = code or 1
    return Ending(code if code >= 0 else 128 - code, reports, max(0, -returned))


def _pass_on_errors(process: "subprocess.Popen[bytes]", reports: Reports) -> None:
    """Copy the stderr of mpirun, without the lines that are for this process."""
    has_ended = False
    with process.stderr as pipe:  # type: ignore[union-attr]  # it is a pipe
        while data := _read(process, pipe):
            shown = reports.read(data)
            if reports.code is not None and not has_ended:  # with ULFM, mpirun goes on while tasks do
                has_ended = True
                timer = threading.Timer(_GRACE, process.terminate)
                timer.daemon = True
                timer.start()
            with contextlib.suppress(OSError):  # nobody reads it
                while shown:
                    shown = shown[os.write(2, shown) :]


def _read(process: "subprocess.Popen[bytes]", pipe: IO[bytes]) -> bytes:
    """Return what arrives; nothing at the end, which may not come while others hold the pipe."""
    while not select.select([pipe], [], [], _LAST)[0]:
        if process.poll() is not None:
            return b""  # processes that mpirun has started live on
    return os.read(pipe.fileno(), 1 << 16)


# Starting again


def run_again(
    what: Job,
    program: Sequence[str],
    mpirun: Mpirun,
    most: int,
    read_job: Callable[[], Job],
    machines: Optional[int] = None,
    given_input: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Run a job, and run it again after losses, on the hosts that can be reached.

    Return the exit code of the last run. SIGINT, SIGTERM and SIGHUP prevent further runs.

    Parameters
    ----------
    what : Job
        The job at first.
    program : list of str
        What each machine runs.
    mpirun : Mpirun
        The mpirun to use.
    most : int
        How often the job is started again.
    read_job : callable
        Returns the job with all hosts that are named now.
    machines : int, optional
        The largest number of machines. By default, all hosts are used.
    given_input : dict, optional
        What `tasks.own_input` has returned. After a restart, the input is empty.
    """
    identity, signals, count = os.urandom(8).hex(), SignalsOfUser(), 0
    while True:
        own = {job.JOB: identity, job.RESTARTS: str(count)}
        own.update({job.INPUT: os.devnull} if count else given_input)
        started = launcher.with_networks(what, mpirun.path)
        started = started._replace(environment={**what.environment, **own})
        survives = mpirun.survives_deaths
        line = launcher.command(started, program, mpirun.path, survives_deaths=survives)
        code, reports, ended_by = run(line, signals, reads_input=job.INPUT not in own)
        cause = reports.cause_of_loss(code, survives) if code else None
        if ended_by and not reports.machine:
            cause = f"mpirun was ended by {signal.Signals(ended_by).name}"
        if not code or signals.code or cause is None and (reports.is_started or count == most):
            return code
        if count == most:
            _tell(f"the job is not started again after {most} restarts: {cause}")
            return code
        ending.end_processes(f"{job.JOB}={identity}")  # here, which may be none of the hosts
        named = _read_hosts(read_job, what)
        again = _on_reached_hosts(named, mpirun, identity, signals, machines)
        if signals.code:
            return signals.code
        if cause is None:  # the script has not started
            lost = [host for host in what.hosts if again is None or host not in again.hosts]
            if not lost:
                return code
            cause = f"{', '.join(lost)} could not be reached at the start"
        if again is None:
            _tell(f"the job is not started again, as no host can be reached: {cause}")
            return code
        what, count = again, count + 1
        _tell(f"restart {count} of {most} on {', '.join(what.hosts) or _ALLOCATED}: {cause}")


def _tell(text: str) -> None:
    sys.stderr.write(f"python -m synkhronos launch: {text}\n")
    sys.stderr.flush()


def _read_hosts(read_job: Callable[[], Job], former: Job) -> Job:
    try:
        return read_job()
    except JobError as error:  # a file that was damaged meanwhile
        _tell(f"{error}; the hosts are those of before")
        return former


def _on_reached_hosts(
    what: Job, mpirun: Mpirun, identity: str, signals: SignalsOfUser, machines: Optional[int]
) -> Optional[Job]:
    """Return the job on those of its hosts that can be reached; None if there is none."""
    alone = {host: what._replace(hosts=[host], machines=1, by_host={}) for host in what.hosts}
    program = [sys.executable, "-SE", ending.__file__, f"{job.JOB}={identity}"]
    lines = {
        name: launcher.command(its_job, program, mpirun.path, is_script=False)
        for name, its_job in (alone or {_ALLOCATED: what}).items()
    }
    reached = find_reached(lines, signals)
    if not what.hosts:
        return what if reached else None
    hosts = reached[:machines]
    by_host = {host: what.by_host[host] for host in hosts if host in what.by_host}
    return what._replace(hosts=hosts, machines=len(hosts), by_host=by_host) if hosts else None


def find_reached(
    lines: Dict[str, List[str]], signals: SignalsOfUser, limit: float = _LIMIT
) -> List[str]:
    """Run a command line for each host at the same time; return the hosts for which it succeeds.

    Parameters
    ----------
    lines : dict
        The command line for each host.
    signals : SignalsOfUser
        The signals of this process, which end the commands.
    limit : float
        Seconds for all of them.
    """
    asked = {name: _ask(line) for name, line in lines.items()}
    until = time.monotonic() + limit
    late = list(asked)
    while late and not signals.code and time.monotonic() < until:
        time.sleep(_POLL_INTERVAL)
        late = [name for name in late if asked[name][0].poll() is None]
    _end([asked[name][0] for name in late])
    reached = []
    for name, (process, said) in asked.items():
        with said:
            said.seek(0)
            complaint = complaint_of(said.read().decode(errors="replace"))
        if name in late:
            complaint = f"no answer within {limit:.0f} seconds"
        if process.returncode == 0 and name not in late:
            reached.append(name)
        elif not signals.code:
            _tell(f"{name} cannot be reached: {complaint or f'mpirun returned {process.returncode}'}")
    return reached


def _ask(line: List[str]) -> "tuple[subprocess.Popen[bytes], IO[bytes]]":
    """Start a command; return its process, and what it says."""
    said, null = tempfile.TemporaryFile(), subprocess.DEVNULL
    process = subprocess.Popen(line, stdin=null, stdout=null, stderr=said, start_new_session=True)
    return process, said


def _end(processes: "List[subprocess.Popen[bytes]]") -> None:
    """End commands with the processes that they have started, such as ssh."""
    import psutil  # takes 6 ms, so not at import

    started = [child for process in processes for child in psutil.Process(process.pid).children(True)]
    for process in processes:
        process.terminate()
    psutil.wait_procs([psutil.Process(item.pid) for item in processes], _CLEANING)
    for item in started:
        if item.is_running():
            item.send_signal(signal.SIGKILL)
    for process in processes:
        process.kill()
        process.wait()
