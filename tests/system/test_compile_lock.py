"""Tests of Theano's cache of compiled code, its lock, and the headers that are precompiled for it."""

import logging
import os
import pickle
import shutil
import socket
from pathlib import Path

import pytest
from theano.gof import compilelock
from theano.gof.cmodule import KeyData

import synkhronos as synk  # noqa: F401
from prelude import run_file
from synkhronos.engines.theano import module_cache


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


def test_a_failure_to_write_the_keys_leaves_no_file(tmp_path):
    data = KeyData({"first"}, "hash", str(tmp_path / "key.pkl"), "entry")
    with pytest.raises(AttributeError):
        data.add_key(lambda: "which cannot be pickled")
    assert not list(tmp_path.iterdir())


def test_a_program_without_arguments_is_run():
    """Theano runs one that it has compiled, unless its flags name an architecture."""
    assert module_cache.run_compiler(["true"])[2] == 0


def modules_in(folder):
    """Return the names of compiled modules, which are digests of their code and flags."""
    return sorted(file.stem.partition(".")[0] for file in Path(folder).glob("*/*/m*.so"))


def headers_in(folder):
    return sorted(Path(folder).glob("*/synkhronos_headers_*/headers.h.gch"))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A function that compiles in a new process; returns the folder and what the functions return."""
    tmp_path = tmp_path_factory.mktemp("compiled")

    def compile_in(name, how="as usual"):
        done = run_file("compile_functions.py", tmp_path / name, how, cwd=tmp_path)
        return tmp_path / name, done.stdout

    return compile_in


def test_modules_are_those_of_theano(compiled):
    (own, results), (plain, expected) = compiled("own"), compiled("plain", "plain")
    assert results == expected
    assert modules_in(own) == modules_in(plain) != []
    assert len(headers_in(own)) == 1 and not headers_in(plain)
    code = {name: {file.read_text() for file in name.glob("*/*/mod.cpp")} for name in (own, plain)}
    assert code[own] == code[plain]
    assert not list(own.rglob("headers.[0-9]*"))  # unfinished files


@pytest.mark.slow
def test_the_headers_are_used_by_the_next_process_and_made_again_after_a_change(compiled):
    folder, _ = compiled("own")
    (header,) = headers_in(folder)
    made = header.stat().st_mtime_ns
    for module in header.parent.parent.glob("tmp*"):
        shutil.rmtree(module)
    compiled("own")
    assert headers_in(folder) == [header] and header.stat().st_mtime_ns == made
    text = header.with_name("headers.h")
    assert module_cache._is_current(text)
    os.utime(header, ns=(0, 10**9))  # older than all that it was made from
    assert not module_cache._is_current(text)
    for module in header.parent.parent.glob("tmp*"):
        shutil.rmtree(module)
    compiled("own")
    assert module_cache._is_current(text)


@pytest.mark.slow
def test_modules_are_compiled_without_the_headers_if_those_cannot_be(compiled):
    folder, results = compiled("broken", "broken")
    assert results == compiled("broken", "plain")[1]
    assert not headers_in(folder) and not list(folder.rglob("headers.*"))
