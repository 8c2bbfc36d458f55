"""Tests of processes that are no ranks, and of the memory that they share with the ranks."""

import errno
import os
import signal
import time

import numpy as np
import psutil
import pytest
from processes import own_process
from test_children import wait_until

import synkhronos as synk
from synkhronos.services import background_processes
from synkhronos.services.background_processes import BackgroundProcesses, MappedMemory, map_memory
from synkhronos.stores import base
from synkhronos.stores import memory as memory_module
from synkhronos.transports.children import Children


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


def test_data_of_such_memory_is_not_copied(world_of, memory):
    world_of(2)
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
    assert background_processes.has_ended(started.pids[1]) and not background_processes.has_ended(
        started.pids[0]
    )
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
