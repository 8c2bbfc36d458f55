"""Slurm on several machines made of namespaces: the controller on the first, a daemon on each.

The daemons end with the machines. Nothing of an installed Slurm is changed: the settings, the key of
munge and all other files are in the machines' folder.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from keeper import Remote
from namespaces import LINK, Job, job_environment, why_no_mpi, why_no_namespaces

_COMMANDS = ("slurmctld", "slurmd", "sbatch", "munged")
_PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin", "/sbin"])
_SETTINGS = """\
ClusterName=test
SlurmctldHost={first}({address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
KillWait=5
PartitionName=all Nodes=ALL Default=YES
"""
_ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY"}


def why_no_slurm():
    """Return why Slurm cannot be tried here, in words; the empty string if it can."""
    missing = [command for command in _COMMANDS if not shutil.which(command, path=_PATH)]
    if missing:
        return f"not installed: {', '.join(missing)} (apt-get install slurm-wlm munge)"
    if os.geteuid():
        return "Slurm's daemons need root's rights"
    return why_no_mpi() or why_no_namespaces()


class Slurm:
    """Slurm on machines made of namespaces; a context manager."""

    def __init__(self, machines):
        self._machines = machines
        self._folder = machines.folder / "slurm"
        self._folder.mkdir()
        for name in ("state", *(f"spool-{host}" for host in machines.hosts)):
            (self._folder / name).mkdir()
        addresses = [machines.address(number) for number in range(machines.count)]
        text = _SETTINGS.format(first=machines.hosts[0], address=addresses[0], folder=self._folder)
        for host, address in zip(machines.hosts, addresses):
            text += f"NodeName={host} NodeAddr={address} CPUs={os.cpu_count()} State=UNKNOWN\n"
        settings = self._folder / "slurm.conf"
        settings.write_text(text)
        networks = {f"OMPI_MCA_{layer}_tcp_if_include": LINK for layer in ("btl", "oob")}
        own = {"SLURM_CONF": str(settings), "PATH": _PATH, "HOME": os.environ["HOME"]}
        self._environment = {**job_environment({**own, **networks}), "OMPI_MCA_btl": "tcp,self"}
        self._munge, self._daemons = None, []

    def __enter__(self):
        self._munge = self._start_munge()
        try:
            self._start_daemon(self._machines.hosts[0], "slurmctld", "-D")
            for host in self._machines.hosts:
                self._start_daemon(host, "slurmd", "-D", "-N", host)
            self._await_nodes(60)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """End munge. The daemons of Slurm end with the machines."""
        for daemon in self._daemons:
            daemon.close()
        self._munge.terminate()
        self._munge.wait(10)

    def _start_munge(self):
        key = self._folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = {"key-file": key, "socket": "munge.socket", "pid-file": "munge.pid",
                 "log-file": "munge.log", "seed-file": "munge.seed"}  # fmt: skip
        options = [f"--{name}={self._folder / file}" for name, file in files.items()]
        munged = shutil.which("munged", path=_PATH)
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "TERM", munged, "--foreground", "--force", *options],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        until = time.monotonic() + 30
        while not (self._folder / "munge.socket").exists():
            assert process.poll() is None and time.monotonic() < until, self._log("munge.log")
            time.sleep(0.05)
        return process

    def _start_daemon(self, host, *command):
        with open(os.devnull, "r+b") as null, open(self._folder / "daemons.log", "ab") as log:
            files = [null.fileno(), log.fileno(), log.fileno()]
            self._daemons.append(
                Remote(self._machines.folder, host, command, self._environment, files, str(self._folder))
            )

    def _await_nodes(self, seconds):
        until = time.monotonic() + seconds
        while True:
            states = self.run("sinfo", "--noheader", "--Node", "--format=%T").output.split()
            if states == ["idle"] * self._machines.count:
                return
            logs = "\n".join(self._log(path.name) for path in sorted(self._folder.glob("*.log")))
            assert time.monotonic() < until, f"the nodes are {states}\n{logs}"
            time.sleep(0.2)

    def _log(self, name):
        return f"{name}:\n{(self._folder / name).read_text()}"

    @property
    def hosts(self):
        """The names of the nodes."""
        return self._machines.hosts

    def processes(self):
        """Return the command lines of the processes on each node."""
        return [[*self._machines.processes(number).values()] for number in range(len(self.hosts))]

    # Jobs

    def run(self, *command, cwd="/", timeout=60):
        """Run a command of Slurm on the first machine; return a `namespaces.Done`."""
        return Job(self._machines, [*map(str, command)], self._environment, str(cwd)).wait(timeout)

    def submit(self, *arguments, cwd):
        """Submit a job with ``sbatch``; return its number."""
        return int(self.run("sbatch", "--parsable", *arguments, cwd=cwd).check().output)

    def state(self, number):
        """Return the state and the exit code of a job, as Slurm shows them."""
        shown = self.run("scontrol", "--oneliner", "show", "job", number).check().output
        fields = dict(word.split("=", 1) for word in shown.split() if "=" in word)
        return fields["JobState"], fields["ExitCode"]

    def wait(self, number, timeout):
        """Wait for the end of a job; return its state and its exit code."""
        until = time.monotonic() + timeout
        while (found := self.state(number))[0] not in _ENDED:
            assert time.monotonic() < until, f"after {timeout} s the job is {found}"
            time.sleep(0.5)
        return found
