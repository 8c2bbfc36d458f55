"""Tests of watching TCP connections, of the machines next to one, and of ending a job."""

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from checks.children import begin, child, end, wait_until
from namespaces import why_no_namespaces, _Namespaces

from synkhronos.machines.connections import enable_keepalive, seconds_silent
from synkhronos.machines import neighbours
from specifications.links import NaiveNetwork
from synkhronos.machines.neighbours import Neighbour, Neighbours

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


# The machines next to one


class Watched:
    """Neighbours whose connections to machine 0 have the silence, in seconds, that a test says."""

    def __init__(self, monkeypatch, pair, other_pair, leader):
        self.progress_process = self.leader = 0.0
        self.ends, self.network = 0, NaiveNetwork(3)
        monkeypatch.setattr(neighbours, "seconds_silent", self._seconds)
        monkeypatch.setattr(neighbours, "_DYING", 0)
        ends = [[addresses(one) for one in both] for both in (pair, other_pair)]
        (self._to_progress_process, progress_process), (to_leader, of_leader) = ends
        own = Neighbour(1, True, "here", [self._to_progress_process, to_leader])
        others = [Neighbour(0, False, "there", [of_leader]), Neighbour(0, True, "there",
        [progress_process]),
                  Neighbour(2, True, "far", [])]  # fmt: skip
        self.neighbours = Neighbours(own, others, leader, self.network.links()[1], self._end)

    def _seconds(self, descriptor, addresses):
        return self.progress_process if addresses == self._to_progress_process else self.leader

    def _end(self):
        self.ends += 1

    def check(self):
        self.neighbours._next = 0
        self.neighbours.check()

    def goodbyes(self):
        return len(self.network.queues[1, 0, neighbours._GOODBYE])


@pytest.fixture
def watched(monkeypatch, pair, other_pair):
    watched = Watched(monkeypatch, pair, other_pair, os.getpid())
    before = signal.getsignal(signal.SIGCONT), signal.getsignal(signal.SIGTERM)
    watched.neighbours.report_when_ended()
    yield watched
    watched.neighbours.stop()
    assert before == (signal.getsignal(signal.SIGCONT), signal.getsignal(signal.SIGTERM))


def test_a_silent_machine_is_named_once_and_the_job_is_ended(watched, capfd):
    watched.neighbours.name(["machine there (rank 0)", "machine here (ranks 1, 2)"])
    watched.progress_process = neighbours.LIMIT - 0.1
    watched.check()
    assert capfd.readouterr().err == "" and not watched.ends
    watched.progress_process = 4.2
    watched.check(), watched.check(), watched.neighbours.report()
    said = capfd.readouterr().err
    assert said == (
        "machine there (rank 0) was lost: it has not answered for 4 seconds, so it has no power, or the "
        "network to it is interrupted\n"
    )
    assert watched.ends == 1
    assert watched.goodbyes() == 1  # this process may be killed before it gets SIGTERM


def test_a_closed_connection_is_for_mpirun_to_see(watched, capfd):
    watched.progress_process = watched.leader = math.inf
    watched.check(), watched.neighbours.report()
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
    watched.progress_process, watched.leader = progress_process, leader
    os.kill(os.getpid(), signal.SIGCONT)
    assert capfd.readouterr().err == ""  # they may still be dying
    watched.check(), watched.check()
    assert capfd.readouterr().err == (said and f"machine there {said}\n")
    assert not watched.ends


def test_a_machine_that_has_said_goodbye_is_not_named(watched, capfd):
    watched.progress_process = watched.leader = math.inf
    watched.network.links()[0].send(1, neighbours._GOODBYE, b"\1")
    os.kill(os.getpid(), signal.SIGCONT)
    watched.check()
    assert capfd.readouterr().err == "" and not watched.ends


def test_a_machine_that_was_stopped_and_continued_before_it_died_is_named(watched, capfd):
    watched.progress_process = watched.leader = math.inf
    for leaves in b"\1\0\1\0":
        watched.network.links()[0].send(1, neighbours._GOODBYE, bytes([leaves]))
    os.kill(os.getpid(), signal.SIGCONT)
    watched.check()
    assert "machine there was lost: all its connections" in capfd.readouterr().err


def test_a_courier_says_goodbye_before_sigterm_and_stays_if_nothing_follows(watched, monkeypatch):
    os.kill(os.getpid(), signal.SIGCONT)
    assert not watched.goodbyes()  # MPI ends a process that sends to one that is dying
    watched.check(), watched.check()
    assert watched.goodbyes() == 1  # SIGKILL may follow SIGTERM at once
    monkeypatch.setattr(neighbours, "_ENDED", 0)
    watched.check(), watched.check()
    said = watched.network.queues[1, 0, neighbours._GOODBYE]
    assert [bytes(one) for one in said] == [b"\1", b"\0"]


def test_a_dead_courier_is_named_if_this_one_does_not_look_for_it(watched, capfd):
    watched.progress_process = math.inf
    os.kill(os.getpid(), signal.SIGCONT)
    said = []
    wait_until(lambda: said.append(capfd.readouterr().err) or said[-1])
    watched.check()
    said.append(capfd.readouterr().err)
    assert "".join(said) == "machine there was lost: its second process has died\n"


@pytest.mark.parametrize("leader, said", [(0.0, ""), (math.inf, "machine there was lost: all its")])
def test_with_ulfm_a_dead_courier_is_no_loss(watched, capfd, leader, said):
    watched.progress_process, watched.leader = math.inf, leader
    watched.network.lost.add(0)
    os.kill(os.getpid(), signal.SIGCONT)
    watched.check()
    assert capfd.readouterr().err[: len(said) or None] == said


def test_a_courier_that_gets_sigterm_says_goodbye_and_is_ended(watched):
    reader, writer = os.pipe()

    def be_ended():
        watched.neighbours._links.send = lambda to, tag, data: os.write(writer, b"goodbye %d" % to)
        os.kill(os.getpid(), signal.SIGTERM)

    assert end(begin(be_ended)) == signal.SIGTERM
    os.close(writer)
    assert os.read(reader, 100) == b"goodbye 0"
    os.close(reader)


def test_a_dead_leader_is_named_when_the_job_is_ended(monkeypatch, pair, other_pair, capfd):
    with child(time.sleep, 0) as pid:
        watched = Watched(monkeypatch, pair, other_pair, pid)
        watched.neighbours.report_when_ended()
        os.kill(os.getpid(), signal.SIGCONT)
        assert capfd.readouterr().err == ""
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: neighbours.has_ended(pid))
        os.kill(os.getpid(), signal.SIGCONT)
        watched.neighbours.stop()
    assert capfd.readouterr().err == "machine here was lost: its first process has died\n"
    assert watched.goodbyes() == 1


def test_a_leader_that_mpirun_ends_has_not_died_by_itself(monkeypatch, pair, other_pair, capfd):
    with child(time.sleep, 0) as pid:
        watched = Watched(monkeypatch, pair, other_pair, pid)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: neighbours.has_ended(pid))

        def be_ended():
            watched.neighbours.report_when_ended()
            os.kill(os.getpid(), signal.SIGTERM)

        assert end(begin(be_ended)) == signal.SIGTERM
    assert capfd.readouterr().err == ""


def test_nothing_is_named_at_the_end_of_the_job(watched, capfd):
    watched.progress_process = watched.leader = 60.0
    watched.neighbours.stop()
    watched.check(), watched.neighbours.report()
    watched.progress_process = watched.leader = math.inf
    watched.check()
    assert capfd.readouterr().err == "" and not watched.ends and not watched.goodbyes()


# Ending a job


MPIRUN = """import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"asked\\n"))
task = os.fork()
if not task:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    from synkhronos.machines.job import termination
    os.set_inheritable(1, False)
    termination.end_job(termination.find_starter(), [os.getpid()])
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
