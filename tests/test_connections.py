"""Tests of watching TCP connections, of the machines next to one, and of ending a job."""

import math
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from checks.children import child, wait_until
from namespaces import why_no_namespaces, _Namespaces

from synkhronos.host.connections import connections, enable_keepalive, seconds_silent
from synkhronos.transports.machines import neighbours
from synkhronos.transports.machines.neighbours import Neighbour, Neighbours

LOOPBACK = "ip link set lo up; echo ready; exec sleep infinity"


@pytest.fixture
def pair():
    """Both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other = listener.accept()[0]
    with one, other:
        yield one, other


def addresses(one):
    return one.getsockname(), one.getpeername()


def test_the_connections_of_this_process_are_found_whoever_opened_them(pair):
    found = connections()
    assert all(found[addresses(one)] == one.fileno() for one in pair)
    with socket.socket() as unconnected:
        assert unconnected.fileno() not in connections().values()


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


# The machines next to one


class Watched:
    """Neighbours whose connection has the silence that a test says.

    Attributes
    ----------
    seconds : float
    ends : int
        How often they have ended the job.
    """

    def __init__(self, monkeypatch, pair, leader):
        self.seconds, self.ends = 0.0, 0
        monkeypatch.setattr(neighbours, "seconds_silent", lambda descriptor, addresses: self.seconds)
        one, other = pair
        own = Neighbour(1, "here", [addresses(one)])
        others = [Neighbour(0, "there", [addresses(other)]), Neighbour(2, "far", [])]
        self.neighbours = Neighbours(own, others, leader, self._end)

    def _end(self):
        self.ends += 1

    def check(self):
        self.neighbours._next = 0
        self.neighbours.check()


@pytest.fixture
def watched(monkeypatch, pair):
    return Watched(monkeypatch, pair, os.getpid())


def test_a_silent_machine_is_named_once_and_the_job_is_ended(watched, capfd):
    watched.neighbours.names = ["machine there (rank 0)", "machine here (ranks 1, 2)"]
    watched.seconds = neighbours.LIMIT - 0.1
    watched.check()
    assert capfd.readouterr().err == "" and not watched.ends
    watched.seconds = 4.2
    watched.check(), watched.check(), watched.neighbours.report()
    said = capfd.readouterr().err
    assert said == (
        "machine there (rank 0) was lost: it has not answered for 4 seconds, so it has no power, or the "
        "network to it is interrupted\n"
    )
    assert watched.ends == 1


def test_a_closed_connection_is_for_mpirun_to_see(watched, capfd):
    watched.seconds = math.inf
    watched.check(), watched.neighbours.report()
    assert capfd.readouterr().err == "" and not watched.ends


def test_a_dead_leader_is_named_when_the_job_is_ended(monkeypatch, pair, capfd):
    with child(time.sleep, 0) as pid:
        watched = Watched(monkeypatch, pair, pid)
        before = signal.getsignal(signal.SIGCONT)
        try:
            watched.neighbours.report_when_ended()
            os.kill(os.getpid(), signal.SIGCONT)
            assert capfd.readouterr().err == ""
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: neighbours.has_ended(pid))
            os.kill(os.getpid(), signal.SIGCONT)
        finally:
            signal.signal(signal.SIGCONT, before)
    assert capfd.readouterr().err == "machine here was lost: its first process has died\n"


def test_nothing_is_named_at_the_end_of_the_job(watched, capfd):
    watched.seconds = 60.0
    watched.neighbours.stop()
    watched.check(), watched.neighbours.report()
    assert capfd.readouterr().err == "" and not watched.ends


# Ending a job


MPIRUN = """import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"asked\\n"))
task = os.fork()
if not task:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    from synkhronos.host import ending
    if sys.argv[1] == "end":
        os.set_inheritable(1, False)
        ending.end_job(ending.find_starter(), [os.getpid()])
    else:
        os.write(1, f"{ending.find_starter()}\\n".encode())
    time.sleep(60)
    os._exit(0)
os.write(1, f"{os.getpid()} {task}\\n".encode())
while True:
    time.sleep(1)
"""


@pytest.fixture
def start(tmp_path):
    """A function that starts a process with a task, which does what the argument says."""
    processes = []

    def start(name, what):
        program = tmp_path / name
        program.symlink_to(sys.executable)
        prefix = os.path.dirname(os.path.dirname(sys.executable))
        process = subprocess.Popen(
            [program, "-c", MPIRUN, what], stdout=subprocess.PIPE, text=True, start_new_session=True,
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
    process = start("mpirun", "end")
    lines = process.communicate(timeout=30)[0].splitlines()
    [(pid, task)] = [line.split() for line in lines if line != "asked"]
    assert lines.count("asked") == 2 and process.returncode == -signal.SIGKILL
    wait_until(lambda: neighbours.has_ended(int(task)))


@pytest.mark.parametrize("name, is_known", [("prted", True), ("slurmstepd", False)])
def test_the_starter_of_a_task_is_found_by_its_name(start, name, is_known):
    process = start(name, "say")
    said = {process.stdout.readline().strip() for _ in range(2)}
    assert str(process.pid if is_known else None) in said
