"""Tests of Theano's cache of compiled code, which several processes use at once."""

import logging
import os
import pickle
import shutil
import socket

import pytest
from theano.gof import compilelock
from theano.gof.cmodule import KeyData

import synkhronos as synk  # noqa: F401


@pytest.fixture
def said():
    lines = []
    logger = logging.getLogger("theano.gof.compilelock")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def locked_by(folder, process):
    folder.mkdir()
    (folder / "lock").write_text(f"{process}_0000000000_{socket.gethostname()}\n")
    return str(folder)


def wait(folder, monkeypatch, **options):
    """Wait as Theano does for a lock, which is removed after some time."""
    sleeps = []

    def sleep(seconds):
        sleeps.append(seconds)
        if len(sleeps) == 3:
            shutil.rmtree(folder)

    monkeypatch.setattr(compilelock.time, "sleep", sleep)
    original = getattr(compilelock.lock, "func", compilelock.lock)  # without the settings of the tests
    original(folder, min_wait=0.1, **options)


def test_a_wait_for_another_process_says_what_happens_and_what_to_do(tmp_path, monkeypatch, said):
    folder = locked_by(tmp_path / "lock_dir", os.getppid())
    wait(folder, monkeypatch)
    waiting, remedy = said
    assert waiting.startswith(f"process '{os.getppid()}' is compiling with Theano, and only one process")
    assert f"process '{os.getpid()}', this one, waits until that one has finished" in waiting
    assert remedy == f"if no other process is compiling, delete this folder, and the wait ends: {folder}"


def test_a_lock_of_a_process_that_has_ended_says_so(tmp_path, monkeypatch, said):
    (dead, _) = os.waitpid(os.spawnlp(os.P_NOWAIT, "true", "true"), 0)
    folder = locked_by(tmp_path / "lock_dir", dead)
    removed = type("Unlocker", (), {"unlock": lambda self, force: shutil.rmtree(folder)})()
    monkeypatch.setattr(compilelock.get_lock, "unlocker", removed, raising=False)
    wait(folder, monkeypatch)
    (sentence,) = said
    assert sentence.startswith(f"process '{dead}' ended while it was compiling")


class Key:
    """A key of a module, whose pickling takes some time."""

    path = None  # the file to which it is written
    found = []  # the keys that are in the file meanwhile

    def __reduce__(self):
        if self.path is not None and self.path.exists():
            self.found.append(pickle.loads(self.path.read_bytes()).keys)
        return str, ("key",)


class Unpicklable:
    def __reduce__(self):
        raise pickle.PicklingError


def test_the_keys_of_a_module_are_never_incomplete_on_disk(tmp_path, monkeypatch):
    path = tmp_path / "key.pkl"
    monkeypatch.setattr(Key, "path", path)
    monkeypatch.setattr(Key, "found", [])
    data = KeyData({"first"}, "hash", str(path), "entry")
    data.save_pkl()
    data.add_key(Key())
    assert Key.found == [{"first"}]
    assert pickle.loads(path.read_bytes()).keys == {"first", "key"}
    with pytest.raises(pickle.PicklingError):
        data.add_key(Unpicklable())
    assert not list(tmp_path.iterdir())
