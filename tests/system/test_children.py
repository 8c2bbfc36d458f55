"""Tests of child processes: how they end, how they are detected and terminated, and what they answer."""

import errno
import multiprocessing
import os
import signal
import sys
import time

import psutil
import pytest

from synkhronos.transports import children
import numpy as np
from compilers import Apply, Op, compiler, tt
from processes import exit_code, own_process
import synkhronos as synk
from synkhronos.services.background_processes import BackgroundProcesses
from synkhronos.stores.base import MappedMemory, map_memory
from synkhronos.stores import base, memory as memory_module
from synkhronos.transports.children import Children

CONTEXT = multiprocessing.get_context("fork")


def start(target=time.sleep, *args):
    process = CONTEXT.Process(target=target, args=args or (60,))
    process.start()
    return process


def wait_until(condition, seconds=5):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        time.sleep(0.001)
    raise AssertionError("it never comes")


def test_the_cause_is_known_as_soon_as_a_death_is_detected():
    """A process closes its files, including its sentinel, shortly before it has an exit code."""
    for _ in range(30):
        process = start()
        os.kill(process.pid, signal.SIGKILL)
        while not (found := children.find_dead({1: process})):
            pass
        assert found == {1: "killed by SIGKILL"}
        process.close()


@pytest.mark.parametrize("code", [0, 1, 7])
def test_the_exit_code_is_reported_and_a_living_process_is_not(code):
    living, dead = start(), start(os._exit, code)
    try:
        assert wait_until(lambda: children.find_dead({0: living, 2: dead})) == {2: f"exit code {code}"}
    finally:
        children.kill_and_join([living, dead])


def test_a_worker_is_seen_dead_while_a_process_of_its_own_lives():
    """A child of the worker has inherited the sentinel, so it stays open."""

    def fork_and_wait(pid):
        child = os.fork()
        if child:
            pid.value = child
        time.sleep(60)

    pid = CONTEXT.Value("i", 0)
    process = start(fork_and_wait, pid)
    wait_until(lambda: pid.value)
    try:
        os.kill(process.pid, signal.SIGKILL)
        assert wait_until(lambda: children.find_dead({1: process})) == {1: "killed by SIGKILL"}
    finally:
        os.kill(pid.value, signal.SIGKILL)
        process.close()


def test_a_script_that_ignores_the_end_of_children_sees_a_death_and_can_end_the_rest():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        dead, living = start(), start()
        os.kill(dead.pid, signal.SIGKILL)
        (cause,) = wait_until(lambda: children.find_dead({1: dead, 2: living})).values()
        assert "exit code unknown" in cause
        children.kill_and_join([dead, living])
        assert not psutil.pid_exists(living.pid)
    finally:
        signal.signal(signal.SIGCHLD, before)
        # multiprocessing cannot detect that they have ended.
        multiprocessing.process._children -= {dead, living}


def test_stopped_processes_are_found_and_ended():
    running, stopped, made = start(), start(), Children()
    os.kill(stopped.pid, signal.SIGSTOP)
    pid = stopped.pid
    made.workers.update({3: running, 5: stopped})
    assert wait_until(made.find_stopped) == [5]
    children.kill_and_join([running, stopped])
    assert not psutil.pid_exists(pid)


W = compiler.shared(0.0, "w")


def fork(rank, chosen, in_child):
    if rank.rank != chosen:
        return None
    pid = os.fork()
    if not pid:
        return in_child(rank)
    return exit_code(os.waitpid(pid, 0)[1])


def fail(rank):
    raise RuntimeError("the child fails")


def give_back(rank):
    return "as if it was the rank"


def leave(rank):
    sys.exit(7)


def leave_without_a_code(rank):
    sys.exit()


def meet(rank):
    rank.barrier()


def meet_and_catch(rank):
    try:
        rank.all_reduce(W)
    except synk.SynkhronosError as error:
        os._exit(3 if "forked from rank" in str(error) else 4)
    os._exit(5)


def read(rank):
    os._exit(9 if W.get_value() == 5 and rank.size == 2 else 8)


@pytest.mark.parametrize("chosen", [0, 1])
@pytest.mark.parametrize(
    "in_child, code, said",
    [
        (fail, 1, "RuntimeError: the child fails"), (give_back, 1, "it went on as that rank"),
        (leave, 7, ""), (leave_without_a_code, 0, ""), (meet, 1, "this process was forked from rank"),
        (meet_and_catch, 3, ""), (read, 9, ""),
    ],
)  # fmt: skip
def test_a_process_that_a_program_forks_is_no_rank(programs, chosen, in_child, code, said):
    done = programs.run(run_program, chosen, in_child)
    assert done.returncode == 0 and done.stdout.split() == ["None", str(code)], done
    assert said in done.stderr and (said or not done.stderr), done.stderr
    if code == 1:
        assert f"forked it on rank {chosen}" in done.stderr


def run_program(chosen, in_child):
    synk.fork(2, use_gpu=False)
    count = synk.function([], updates=[(W, W + 1)])
    synk.distribute()
    synk.broadcast(W, 5.0)
    found = synk.spmd(fork, chosen, in_child)
    assert synk.get_value(0, W) == synk.get_value(1, W) == 5
    for _ in range(20):
        count()
    assert synk.get_value(0, W) == synk.get_value(1, W) == 25
    synk.close()
    print(found[1 - chosen], found[chosen])


class ForkIn(Op):
    """The identity. On some ranks it forks a process, which fails."""

    __props__ = ("value",)

    def __init__(self, value):
        self.value = value

    def make_node(self, x):
        return Apply(self, [x], [x.type()])

    def perform(self, node, inputs, outputs):
        (x,) = inputs
        if x[0] == self.value:
            pid = os.fork()
            if not pid:
                raise RuntimeError("the child fails")
            assert exit_code(os.waitpid(pid, 0)[1]) == 1
        outputs[0][0] = x.copy()


@pytest.mark.parametrize("first", [0.0, 2.0])  # rows of the master, or of the worker
def test_a_process_that_an_operation_forks_is_no_rank(programs, first):
    done = programs.run(run_operation, first)
    assert done.returncode == 0 and done.stdout.split() == ["6.0", "6.0"], done
    assert "RuntimeError: the child fails" in done.stderr and "went on as that rank" in done.stderr


def run_operation(first):
    synk.fork(2, use_gpu=False, verify="off")
    x = tt.dvector("x")
    f = synk.function([x], (ForkIn(first)(x).sum(), "sum"))
    for _ in range(2):
        print(f(np.arange(4.0)))
    synk.close()


@pytest.fixture
def memory():
    made = MappedMemory(1 << 16, "test")
    yield made
    made.close()


def test_memory_is_zero_and_is_shared_with_processes_that_exist_already(memory):
    assert memory.array.shape == (1 << 16,) and not memory.array.any()

    def serve(number, connection):
        other = map_memory(connection.recv())
        other[number] = 7

    started = BackgroundProcesses("test", 2, serve)
    made = MappedMemory(4096, "later")
    started.send(made.path)
    wait_until(lambda: made.array[:2].tolist() == [7, 7])
    started.end()
    made.close()


def test_too_little_memory_is_an_error_before_anything_is_allocated(monkeypatch):
    files = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(memory_module, "_memory_left", lambda: 20 << 20)
    with pytest.raises(
        MemoryError, match="shared memory: 16777216 bytes were requested, 4194304 are left"
    ):
        MappedMemory(16 << 20, "test")
    monkeypatch.undo()

    def refuse(*args):
        raise OSError(errno.ENOSPC, "No space left")

    monkeypatch.setattr(base.os, "posix_fallocate", refuse)
    with pytest.raises(MemoryError, match="4096 bytes were requested: .*No space left"):
        MappedMemory(4096, "test")
    assert len(os.listdir("/proc/self/fd")) == files


def test_data_of_such_memory_is_not_copied(two, memory):
    data = synk.data(memory.array[:80].view("float64"))
    memory.array[:80].view("float64")[:] = np.arange(10)
    assert np.may_share_memory(data.data, memory.array)

    def program(rank, data):
        return data[rank.rank :: rank.size].tolist()

    assert synk.spmd(program, data) == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]


def test_a_death_is_reported_with_its_cause():
    started = BackgroundProcesses("test", 3, lambda number, connection: time.sleep(60))
    assert started.find_dead() == {} and len(set(started.pids)) == 3
    os.kill(started.pids[1], signal.SIGKILL)
    wait_until(started.find_dead)
    with pytest.raises(
        synk.SynkhronosError, match=r"test: process 1 of 3 has ended \(killed by SIGKILL\)"
    ):
        started.check()
    with pytest.raises(synk.SynkhronosError, match="process 1 of 3 has ended"):
        started.send("something")
    assert children.has_ended(started.pids[1]) and not children.has_ended(started.pids[0])
    started.end()
    started.end()
    assert not any(map(psutil.pid_exists, started.pids))


def test_none_is_left_if_the_system_refuses_one(monkeypatch):
    fork, pids = Children.fork_further, []

    def refuse_the_second(children, name, serve):
        if pids:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        process = fork(children, name, serve)
        pids.append(process.pid)
        return process

    monkeypatch.setattr(Children, "fork_further", refuse_the_second)
    files = len(os.listdir("/proc/self/fd"))
    expected = "test: only 1 of 2 processes could be started.*too many processes.*or use fewer processes"
    with pytest.raises(synk.SynkhronosError, match=expected):
        BackgroundProcesses("test", 2, lambda number, connection: time.sleep(60))
    assert not psutil.pid_exists(pids[0])
    assert len(os.listdir("/proc/self/fd")) == files


@own_process
def test_a_copy_of_the_script_does_not_end_them():
    started = BackgroundProcesses("test", 1, lambda number, connection: time.sleep(60))
    pid = os.fork()
    if not pid:
        started.end()
        os._exit(0)
    os.waitpid(pid, 0)
    assert started.find_dead() == {}
    started.end()
