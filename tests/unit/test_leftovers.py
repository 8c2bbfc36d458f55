"""Tests of removing the files of killed MPI jobs."""

import mmap
import os
import socket
import time

import pytest

from synkhronos.machines.job import ending


@pytest.fixture
def make(tmp_path):
    """A function that makes a file in the folder, a minute old, and returns its name."""

    def make(host=None, user=None, form="vader_segment.{host}.{user}.59b10001.{task}", task=0, age=60):
        user = os.geteuid() if user is None else user
        path = tmp_path / form.format(host=host or socket.gethostname(), user=user, task=task)
        path.write_bytes(b"\0" * mmap.PAGESIZE)
        os.utime(path, (time.time() - age,) * 2)
        return path.name

    return make


def test_files_that_no_process_uses_are_removed(make, tmp_path):
    names = [make(), make(task=1), make(form="sm_segment.{host}.{user}.1.{task}")]
    assert sorted(ending.sweep(tmp_path)) == sorted(names)
    assert not list(tmp_path.iterdir()) and ending.sweep(tmp_path) == []


def test_a_file_that_a_process_has_mapped_is_kept(make, tmp_path):
    used, unused = make(), make(task=1)
    with open(tmp_path / used, "r+b") as file, mmap.mmap(file.fileno(), 0):
        file.close()
        assert ending.sweep(tmp_path) == [unused]
    assert ending.sweep(tmp_path) == [used]


@pytest.mark.parametrize(
    "facts",
    [
        {"age": 0},  # a job that starts
        {"host": "another"},
        {"user": os.geteuid() + 1},
        {"form": "my_segment.{host}.{user}.1.{task}"},
        {"form": "vader_segment.{host}.{user}.1.{task}.txt"},
    ],
)
def test_other_files_are_kept(make, tmp_path, facts):
    name = make(**facts)
    assert ending.sweep(tmp_path) == [] and os.listdir(tmp_path) == [name]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to a second user")
def test_a_file_of_another_user_is_kept(make, tmp_path):
    os.chown(tmp_path / make(), 65534, 65534)
    assert ending.sweep(tmp_path) == []


def test_a_missing_folder_has_nothing_to_remove(tmp_path):
    assert ending.sweep(tmp_path / "none") == []
