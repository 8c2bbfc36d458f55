"""Tests of watching TCP connections, of the machines next to one, and of ending a job."""

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from checks.children import child, wait_until
from namespaces import Machines, why_no_namespaces, _Namespaces

from synkhronos.machines import neighbours
from synkhronos.machines.neighbours import Neighbour, Neighbours, enable_keepalive, seconds_silent

LOOPBACK = "ip link set lo up; echo ready; exec sleep infinity"


@pytest.fixture
def pair():
    with connected() as both:
        yield both


@pytest.fixture
def other_pair():
    with connected() as both:
        yield both


@contextlib.contextmanager
def connected():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other = listener.accept()[0]
    with one, other:
        yield one, other


def addresses(one):
    return one.getsockname(), one.getpeername()


@pytest.mark.slow
def test_a_side_that_does_not_read_is_not_silent(pair):
    one, _ = pair
    enable_keepalive(one.fileno())
    one.setblocking(False)
    with pytest.raises(BlockingIOError):
        while True:
            one.send(b"." * 65536)
    until = time.monotonic() + 7  # then the kernel waits for more than three seconds
    while time.monotonic() < until:
        assert seconds_silent(one.fileno(), addresses(one)) < 2.5
        time.sleep(0.05)


def test_a_closed_connection_is_silent_for_ever(pair):
    one, other = pair
    names = addresses(one)
    assert seconds_silent(one.fileno(), names) == 0
    other.close()
    wait_until(lambda: seconds_silent(one.fileno(), names) == math.inf)
    assert seconds_silent(one.fileno(), ((), ())) == math.inf  # the number belongs to another connection
    with open(os.devnull) as file:
        assert seconds_silent(file.fileno(), names) == math.inf


@pytest.mark.skipif(bool(why_no_namespaces()), reason=why_no_namespaces())
def test_a_connection_without_a_network_is_silent():
    """In a network of its own, whose only link is cut."""
    code = (
        "import subprocess, time\n"
        "from test_connections import *\n"
        "listener = socket.create_server(('127.0.0.1', 0))\n"
        "one = socket.create_connection(listener.getsockname())\n"
        "enable_keepalive(one.fileno())\n"
        "subprocess.run(['ip', 'link', 'set', 'lo', 'down'], check=True)\n"
        "wait_until(lambda: 2 < seconds_silent(one.fileno(), addresses(one)) < 30)\n"
    )
    namespaces = _Namespaces(LOOPBACK)
    try:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        entered = ["nsenter", "-t", str(namespaces.pid), "-n", sys.executable, "-c", code]
        subprocess.run(entered, check=True, env=environment, timeout=60)
    finally:
        namespaces.close()


class Watched:
    """Neighbours whose connections to machine 0 have the silence, in seconds, that a test says."""

    def __init__(self, monkeypatch, pair, other_pair, leader, is_beside_mpirun=False):
        self.progress_process = self.leader = 0.0
        self.ends = 0
        monkeypatch.setattr(neighbours, "seconds_silent", self._seconds)
        monkeypatch.setattr(neighbours, "_CHECK_INTERVAL", 0.02)
        ends = [[addresses(one) for one in both] for both in (pair, other_pair)]
        (self._to_progress_process, progress_process), (to_leader, of_leader) = ends
        own = Neighbour(1, True, "here", [self._to_progress_process, to_leader])
        others = [Neighbour(0, False, "there", [of_leader]), Neighbour(0, True, "there",
        [progress_process], is_beside_mpirun),
                  Neighbour(2, True, "far", [])]  # fmt: skip
        self.neighbours = Neighbours(own, others, leader, self._end)

    def _seconds(self, descriptor, addresses):
        return self.progress_process if addresses == self._to_progress_process else self.leader

    def _end(self):
        self.ends += 1


@pytest.fixture
def watched(monkeypatch, pair, other_pair):
    watched = Watched(monkeypatch, pair, other_pair, os.getpid())
    before = signal.getsignal(signal.SIGCONT)
    watched.neighbours.start()
    yield watched
    watched.neighbours.stop()
    assert before == signal.getsignal(signal.SIGCONT)
    wait_until(lambda: threading.active_count() == 1)


def continued(capfd, seconds=1.0):
    """Send SIGCONT, as mpirun does when it ends a job; return what is written soon after that."""
    os.kill(os.getpid(), signal.SIGCONT)
    time.sleep(seconds)
    return capfd.readouterr().err


def test_a_silent_machine_is_named_once_and_the_job_is_ended(watched, capfd):
    watched.neighbours.names = ["machine there (rank 0)", "machine here (ranks 1, 2)"]
    watched.progress_process = neighbours.LIMIT - 0.1
    time.sleep(0.2)
    assert capfd.readouterr().err == "" and not watched.ends
    watched.progress_process = 4.2
    wait_until(lambda: watched.ends)
    assert continued(capfd) == (
        "machine there (rank 0) was lost: it has not answered for 4 seconds, so it has no power, or the "
        "network to it is interrupted\n"
    )
    assert watched.ends == 1


def test_a_closed_connection_is_for_mpirun_to_see(watched, capfd):
    watched.progress_process = watched.leader = math.inf
    time.sleep(0.2)
    watched.neighbours.report()
    assert capfd.readouterr().err == "" and not watched.ends


@pytest.mark.parametrize(
    "progress_process, leader, said",
    [
        (math.inf, math.inf, "was lost: all its connections were closed, so its processes have died"),
        (math.inf, 0.0, "was lost: its second process has died"),
        (0.0, math.inf, ""),  # its own progress process reports it
    ],
)
def test_a_machine_whose_processes_have_died_is_named_when_the_job_is_ended(
    watched, capfd, progress_process, leader, said
):
    assert continued(capfd, 0.1) == ""  # they may still be dying
    watched.progress_process, watched.leader = progress_process, leader
    time.sleep(1.0)
    assert capfd.readouterr().err == (said and f"machine there {said}\n")
    assert not watched.ends


def test_a_machine_on_which_mpirun_runs_is_not_named(monkeypatch, pair, other_pair, capfd):
    """It ends the processes there first."""
    watched = Watched(monkeypatch, pair, other_pair, os.getpid(), is_beside_mpirun=True)
    watched.neighbours.start()
    watched.progress_process = watched.leader = math.inf
    said = continued(capfd)
    watched.neighbours.stop()
    assert said == ""


def test_a_machine_that_is_ended_with_the_job_is_not_named(watched, capfd):
    assert continued(capfd, 0.5) == ""
    watched.progress_process = watched.leader = math.inf
    time.sleep(0.2)
    assert capfd.readouterr().err == ""


def test_a_dead_leader_is_named_when_the_job_is_ended(monkeypatch, pair, other_pair, capfd):
    with child(time.sleep, 0) as pid:
        watched = Watched(monkeypatch, pair, other_pair, pid)
        watched.neighbours.start()
        assert continued(capfd) == ""
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: neighbours.has_ended(pid))
        said = continued(capfd)
        watched.neighbours.stop()
    assert said == "machine here was lost: its first process has died\n"


def test_nothing_is_named_at_the_end_of_the_job(watched, capfd):
    watched.neighbours.stop()
    watched.progress_process = watched.leader = 60.0
    watched.neighbours.report()
    assert continued(capfd, 0.3) == "" and not watched.ends
    watched.neighbours.start()  # which the fixture stops


MPIRUN = """import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"asked\\n"))
task = os.fork()
if not task:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    from synkhronos.machines.job import ending
    os.set_inheritable(1, False)
    ending.end_job(ending.find_starter(), [os.getpid()])
    time.sleep(60)
    os._exit(0)
os.write(1, f"{os.getpid()} {task}\\n".encode())
while True:
    time.sleep(1)
"""


@pytest.fixture
def start(tmp_path):
    """A function that starts a process of some name with a task, which ends the job."""
    processes = []

    def start(name):
        program = tmp_path / name
        program.symlink_to(sys.executable)
        prefix = os.path.dirname(os.path.dirname(sys.executable))
        process = subprocess.Popen(
            [program, "-c", MPIRUN], stdout=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "VIRTUAL_ENV": prefix},
        )  # fmt: skip
        processes.append(process)
        return process

    yield start
    for process in processes:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.communicate()


def test_an_mpirun_that_waits_is_ended_with_its_tasks(start):
    process = start("mpirun")
    lines = process.communicate(timeout=30)[0].splitlines()
    [(pid, task)] = [line.split() for line in lines if line != "asked"]
    assert lines.count("asked") == 2 and process.returncode == -signal.SIGKILL
    wait_until(lambda: neighbours.has_ended(int(task)))


@pytest.mark.skipif(bool(why_no_namespaces()), reason=why_no_namespaces())
def test_frames_between_machines_can_be_delayed():
    with Machines(2) as machines:
        without = machines.round_trip()
        machines.delay(2e-3)
        assert without < 2e-3 and 4e-3 <= machines.round_trip() < 4e-2
