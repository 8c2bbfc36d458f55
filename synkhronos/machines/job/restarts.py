"""``launch --restart``: starting a job again when it has ended because a machine or a task was lost.

Before each start but the first, a short ``mpirun`` on each host, with the options of the job, shows
which hosts can be reached in the same way as the job reaches them, and runs `end_processes` there.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from types import MappingProxyType
from typing import IO, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence

from synkhronos.host import job
from synkhronos.machines.job import end_processes, launcher, loss_messages
from synkhronos.machines.job.config import Job, JobError
from synkhronos.machines.job.doctor import complaint_of
from synkhronos.machines.job.launcher import Mpirun
from synkhronos.machines.job.signals_of_user import SignalsOfUser

_LIMIT = 15.0  # seconds for a host to answer
_POLL_INTERVAL = 0.05  # seconds
_ENDING = 1.0  # seconds for an mpirun to remove its files
_ALLOCATED = "the batch system's machines"


def run(
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
        What `launcher.own_input` has returned. After a restart, the input is empty.
    """
    identity, signals, count = os.urandom(8).hex(), SignalsOfUser(), 0
    while True:
        own = {job.JOB: identity, job.RESTARTS: str(count)}
        own.update({job.INPUT: os.devnull} if count else given_input)
        started = launcher.with_networks(what, mpirun.path)
        started = started._replace(environment={**what.environment, **own})
        survives = mpirun.survives_deaths
        line = launcher.command(started, program, mpirun.path, survives_deaths=survives)
        ending = launcher.run(line, signals=signals, reads_input=job.INPUT not in own, reads_output=True)
        cause = None
        if ending.code:
            cause = loss_messages.cause_of_loss(ending.said, survives, ending.code, ending.printed)
        if cause is None and ending.ended_by:
            cause = f"mpirun was ended by {signal.Signals(ending.ended_by).name}"
        if cause is None or signals.code:
            return ending.code
        if count == most:
            _tell(f"the job is not started again after {most} restarts: {cause}")
            return ending.code
        end_processes.end_processes(f"{job.JOB}={identity}")  # here, which may be none of the hosts
        again = _on_reached_hosts(_read(read_job, what), mpirun, identity, signals, machines)
        if signals.code:
            return signals.code
        if again is None:
            _tell(f"the job is not started again, as no host can be reached: {cause}")
            return ending.code
        what, count = again, count + 1
        _tell(f"restart {count} of {most} on {', '.join(what.hosts) or _ALLOCATED}: {cause}")


def _tell(text: str) -> None:
    sys.stderr.write(f"python -m synkhronos launch: {text}\n")
    sys.stderr.flush()


def _read(read_job: Callable[[], Job], former: Job) -> Job:
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
    program = [sys.executable, "-SE", end_processes.__file__, f"{job.JOB}={identity}"]
    lines = {
        name: launcher.command(one, program, mpirun.path, is_script=False)
        for name, one in (alone or {_ALLOCATED: what}).items()
    }
    reached = find_reached(lines, signals)
    if not what.hosts:
        return what if reached else None
    hosts = reached[:machines]
    by_host = {host: what.by_host[host] for host in hosts if host in what.by_host}
    return what._replace(hosts=hosts, machines=len(hosts), by_host=by_host) if hosts else None


class _Question(NamedTuple):
    """An ``mpirun`` on a host, and what it says."""

    process: "subprocess.Popen[bytes]"
    said: IO[bytes]


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
    while any(one.process.poll() is None for one in asked.values()) and not signals.code:
        if time.monotonic() > until:
            break
        time.sleep(_POLL_INTERVAL)
    late = [name for name, one in asked.items() if one.process.poll() is None]
    _end([asked[name].process for name in late])
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


def _ask(line: List[str]) -> _Question:
    said = tempfile.TemporaryFile()
    null = subprocess.DEVNULL
    process = subprocess.Popen(line, stdin=null, stdout=null, stderr=said, start_new_session=True)
    return _Question(process, said)


def _end(processes: "List[subprocess.Popen[bytes]]") -> None:
    """End commands with the processes that they have started, such as ssh."""
    import psutil  # takes 6 ms, so not at import

    started = [one for process in processes for one in psutil.Process(process.pid).children(True)]
    for process in processes:
        process.terminate()
    psutil.wait_procs([psutil.Process(one.pid) for one in processes], _ENDING)
    for one in started:
        if one.is_running():
            one.send_signal(signal.SIGKILL)
    for process in processes:
        process.kill()
        process.wait()
