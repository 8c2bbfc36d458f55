"""Jobs on machines made of namespaces, in which tests let ranks, machines and links die."""

import json
import signal
import time
from pathlib import Path

import pytest
from checks.children import wait_until
from namespaces import OPENMPI_5, Machines, why_no_mpi, why_no_namespaces, why_no_openmpi_5
from processes import FOLDER

_WHY_NOT = why_no_mpi() or why_no_namespaces()
needs_machines = pytest.mark.skipif(bool(_WHY_NOT), reason=f"no machines made of namespaces: {_WHY_NOT}")
needs_openmpi_5 = pytest.mark.skipif(bool(why_no_openmpi_5()), reason=why_no_openmpi_5())

SCRIPT = FOLDER / "programs" / "mortal.py"
SLOW = pytest.mark.slow
PROMISED = 5  # seconds from a death to the end of the job
#: Seconds to the end of a job that goes on by itself. Ranks that compute need a minute.
RECOVERED = 30
#: Options of a job with two tasks on each machine, a leader and a progress process, which mpirun starts
PROGRESS_PROCESSES = {"tasks": 2, "environment": {"SYNKHRONOS_SPARE_TASKS": "1"}}
#: Options of the same job, which ``launch`` starts
LAUNCHED = {"launch": ()}

_4 = pytest.param(None, id="4")
_5 = pytest.param(OPENMPI_5, id="5", marks=needs_openmpi_5)
_SLOW_5 = pytest.param(OPENMPI_5, id="5", marks=[needs_openmpi_5, SLOW])
#: For tests with the fixture ``machines``
with_openmpi_5 = pytest.mark.parametrize("machines", [_5], indirect=True)
with_each_openmpi = pytest.mark.parametrize("machines", [_4, _SLOW_5], indirect=True)


@pytest.fixture(name="machines")
def fixture_machines(request):
    """Two machines, with OpenMPI 4 if the test does not say otherwise."""
    with Machines(2, prefix=getattr(request, "param", None)) as made:
        yield made


def slow(*values):
    """Return parameters of a test, each of which is a value or a tuple, marked as slow."""
    return [pytest.param(*(one if type(one) is tuple else [one]), marks=SLOW) for one in values]


class Job:
    """A job with so many ranks on each machine, whose script has begun to do what `moment` says.

    `pids` are those of the ranks, as their machines see them.
    """

    def __init__(self, machines, folder, moment, ranks=(2, 2), **options):
        self.machines = machines
        self.job = begin(machines, SCRIPT, moment, folder, file=folder / "ranks", cwd=folder, **options)
        facts = json.loads((folder / "ranks").read_text())
        self.pids = [pid for pid, _ in facts]
        wanted = [host for host, count in zip(machines.hosts, ranks) for _ in range(count)]
        assert [host for _, host in facts] == wanted
        time.sleep(0.5)  # they are in the midst of it

    def signal(self, rank, number):
        """Send a signal to a rank, of two on each machine."""
        self.job.send(rank // 2, [self.pids[rank]], number)

    def kill(self, rank):
        """Let a rank die now."""
        self.now()
        self.signal(rank, signal.SIGKILL)

    def end(self, limit=PROMISED):
        """Wait for the end; check that nothing is left. Return the exit code and the output."""
        done = self.job.wait(90)
        left = self.machines.left(PROMISED)
        assert done.seconds - self._died < limit, (done.seconds - self._died, done.output)
        assert not left, (left, done.output)
        return done.returncode, done.output

    def now(self):
        """Note the time of the death."""
        self._died = self.job.seconds


def progress_processes(job, machine):
    """Return the process ids of the progress process of a job on a machine, in a list."""
    ranks = job.pids[2:] if machine else job.pids[:2]
    return [
        pid
        for pid, command in job.machines.processes(machine).items()
        if "python" in command.split()[0]
        and not {"keeper.py", "launch"} & {Path(word).name for word in command.split()}
        and pid not in ranks
    ]


def begin(machines, script, *arguments, file, limit=120, **options):
    """Start a job; return it when the script has written a file, for which it has `limit` seconds."""
    job = machines.start(script, *arguments, **options)
    try:
        wait_until(file.exists, limit)
    except AssertionError:
        job.wait(1)  # fails with what it has printed
    return job
