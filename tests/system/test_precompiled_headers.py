"""Tests of the headers that are precompiled for Theano's modules."""

import os
import shutil
from pathlib import Path

import pytest
from prelude import run_file

from synkhronos.engines.theano import precompiled_headers


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
    assert precompiled_headers._is_current(text)
    os.utime(header, ns=(0, 10**9))  # older than all that it was made from
    assert not precompiled_headers._is_current(text)
    for module in header.parent.parent.glob("tmp*"):
        shutil.rmtree(module)
    compiled("own")
    assert precompiled_headers._is_current(text)


@pytest.mark.slow
def test_modules_are_compiled_without_the_headers_if_those_cannot_be(compiled):
    folder, results = compiled("broken", "broken")
    assert results == compiled("broken", "plain")[1]
    assert not headers_in(folder) and not list(folder.rglob("headers.*"))
