"""What workers inherit of the script's files: no pipes, sockets, locks and positions."""

import errno
import fcntl
import logging
import os
import resource
import socket
import subprocess
import sys

import pytest
import theano.tensor as tt
from processes import own_process

import synkhronos as synk
from synkhronos.host import descriptors as descriptors_module
from synkhronos.host.descriptors import descriptors
from synkhronos.services.background_processes import BackgroundProcesses


def start(**kwargs):
    synk.fork(2, use_gpu=False, **kwargs)
    synk.function([], tt.constant(1.0) * 2)
    synk.distribute()


@own_process
def test_a_reader_sees_the_end_of_the_script_s_pipe():
    reader = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    start()
    reader.stdin.write(b"all")
    reader.stdin.close()
    assert reader.wait(20) == 0 and reader.stdout.read() == b"all"


@own_process
def test_a_port_is_free_when_the_script_has_closed_its_socket():
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    address = listening.getsockname()
    start()
    listening.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=20)
    with socket.socket() as again:
        again.bind(address)


def use(rank, reading, writing, number):
    """Return what a worker can do with descriptors of the script."""
    if rank.is_master:
        return None
    said = []
    for work in (lambda: os.write(writing, b"x"), lambda: os.read(number, 3)):
        try:
            said.append(work())
        except OSError as error:
            said.append(errno.errorcode[error.errno])
    opened = os.open(os.devnull, os.O_RDONLY)
    os.close(opened)
    return said, opened not in (reading, writing)


@own_process
def test_what_a_worker_has_given_up_cannot_be_written_to_and_other_files_can_be_read():
    reading, writing = os.pipe()
    with open("data", "w+b") as file:
        file.write(b"data")
        file.seek(0)
        start()
        assert synk.spmd(use, reading, writing, file.fileno())[1] == (["EBADF", b"dat"], True)
        synk.restart()  # so do the workers that take their places
        file.seek(0)
        assert synk.spmd(use, reading, writing, file.fileno())[1] == (["EBADF", b"dat"], True)
    os.close(writing)
    assert os.read(reading, 1) == b""


@own_process
def test_each_process_reads_the_script_s_files_at_a_position_of_its_own():
    with open("data", "wb") as file:
        file.write(b"abcdef")
    modes = ("rb", "rb", "r+b", "a+b")
    files = [open("data", mode, buffering=0) for mode in modes]
    for file in files:
        file.seek(1)
    fcntl.flock(files[0], fcntl.LOCK_SH)

    def serve(number, connection):
        connection.recv()
        connection.send([file.read(2) for file in files])

    loading = BackgroundProcesses("test", 2, serve)
    start()
    numbers = [file.fileno() for file in files[:2]]  # what is also written to has one position
    assert synk.spmd(read_two, numbers) == [[b"bc"] * 2] * 2
    assert synk.spmd(read_two, numbers) == [[b"de"] * 2] * 2
    for number in range(2):
        assert loading.ask(number, "read", lambda waited: None) == [b"bc"] * 4
    files[0].close()
    loading.end()
    with open("data") as again:
        fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)


@own_process
def test_a_file_that_cannot_be_opened_again_is_not_read_at_a_wrong_place(monkeypatch):
    original = os.open

    def refuse(path, *args):
        if str(path).startswith("/proc/self/fd/"):
            raise PermissionError(errno.EACCES, "not yours")
        return original(path, *args)

    def serve(number, connection):
        connection.recv()
        try:
            connection.send(file.read(1))
        except OSError as error:
            connection.send(errno.errorcode[error.errno])

    monkeypatch.setattr(descriptors_module.os, "open", refuse)
    with open(__file__, "rb", buffering=0) as file:
        processes = BackgroundProcesses("test", 1, serve)
        assert processes.ask(0, "read", lambda waited: None) == "EBADF"
        processes.end()


def read_two(rank, numbers):
    return [os.read(number, 2) for number in numbers]


@own_process
def test_files_that_are_named_are_kept_also_by_later_workers():
    reading, writing = os.pipe()
    start(pass_fds=[writing, os.fdopen(reading, "rb", closefd=False)])
    for _ in range(2):
        assert synk.spmd(use, reading, writing, reading)[1] == ([1, b"x"], True)
        synk.restart()


@own_process
def test_streams_and_logs_are_kept():
    reading, writing = os.pipe()
    other, log = os.pipe()
    sys.stdout = os.fdopen(writing, "w")
    logging.getLogger("of the script").addHandler(logging.StreamHandler(os.fdopen(log, "w")))
    start()
    synk.spmd(say)
    assert os.read(reading, 100) == b"printed" and os.read(other, 100) == b"logged\n"


def say(rank):
    if not rank.is_master:
        print("printed", end="", flush=True)
        logging.getLogger("of the script").warning("logged")


@own_process
def test_numbers_above_the_limit_are_closed():
    reading, _ = os.pipe()
    os.dup2(reading, 200)  # as a program may have opened it that has set the limit then
    resource.setrlimit(resource.RLIMIT_NOFILE, (150, 1000))
    start()
    assert synk.spmd(is_open, 200) == [True, False]


def is_open(rank, descriptor):
    return os.path.exists(f"/proc/self/fd/{descriptor}")


@own_process
def test_no_descriptor_is_left_open():
    before = {*descriptors()}
    for _ in range(3):
        start()
        synk.close()
    assert len({*descriptors()} - before) <= 1  # the listing of them


@pytest.mark.parametrize(
    "given, error",
    [("file", TypeError), ([1.5], ValueError), ([10**6], ValueError), ([True], TypeError)],
)
def test_the_option_is_checked(given, error):
    with pytest.raises(error, match="fork: pass_fds: expected"):
        synk.fork(2, use_gpu=False, pass_fds=given)
