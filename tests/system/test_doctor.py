"""Tests of the doctor's checks, each with and without a problem."""

import sys

import pytest

from synkhronos.host.doctor import checks
from synkhronos.host.doctor.check import OK, PROBLEM, WARNING, Check

CHECKS = {one.name: one for one in (*checks.OF_PYTENSOR, *checks.OF_THEANO, *checks.CHECKS)}


def result_of(examine, *arguments):
    return Check("this", lambda: examine(*arguments), is_required=True).run()


FOUND = {
    "version": "1.0.5",
    "compiler": "/usr/bin/g++",
    "ldflags": "-lopenblas",
    "theano": 0.010,
    "numpy": 0.010,
    "libraries": [
        {
            "user_api": "blas", "internal_api": "openblas",
            "filepath": "/usr/lib/x86_64-linux-gnu/openblas-pthread/libopenblasp-r0.3.29.so",
            "version": "0.3.29", "threading_layer": "pthreads", "architecture": "Haswell",
        }
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    "change, state",
    [({}, OK), ({"pytensor": 0.030}, WARNING), ({"ldflags": ""}, WARNING), ({"compiler": ""}, WARNING)],
)
def test_pytensors_product_is_judged(change, state):
    found = {**FOUND, "version": "3.0.7", "pytensor": 0.010}
    assert result_of(checks.judge_pytensor, {**found, **change}).state == state


def test_pytensor_without_numpy_2_is_a_problem(monkeypatch):
    monkeypatch.setattr("numpy.__version__", "1.23.5")
    for check in checks.OF_PYTENSOR[1], checks.OF_PYTENSOR[-1]:
        assert check.run().state == PROBLEM and "NumPy 2" in check.run().remedy


def test_another_python_is_a_problem(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 15, 0, "final", 0))
    assert CHECKS["Python"].run().state == PROBLEM


def test_missing_modules_are_named_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    result = CHECKS["packages"].run()
    assert result.state == PROBLEM
    assert result.remedy == "python -m pip install psutil"


def test_no_compiler_is_a_problem(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert "g++" in CHECKS["compiler"].run().remedy


def test_a_compiler_that_fails_is_a_problem_with_its_own_message(monkeypatch, tmp_path):
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho 'In file x:' >&2; echo 'error: no cc1plus' >&2; exit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    result = CHECKS["compiler"].run()
    assert result.state == PROBLEM
    assert result.found == f"{compiler} does not compile: error: no cc1plus"


@pytest.mark.parametrize(
    ("change", "state"),
    [
        ({}, OK), ({"theano": 0.019}, OK), ({"theano": 0.030}, WARNING), ({"ldflags": ""}, WARNING),
        ({"compiler": ""}, PROBLEM), ({"version": "0.9.0"}, PROBLEM),
    ],
)  # fmt: skip
def test_theano_is_judged_by_its_product_and_its_settings(change, state):
    result = result_of(checks.judge_theano, {**FOUND, **change})
    assert result.state == state
    assert bool(result.remedy) == (state != OK)


def test_theano_that_fails_is_a_problem(monkeypatch):
    monkeypatch.setattr(checks, "PRODUCT_PROBE", "raise OSError('disk full')")
    result = CHECKS["Theano"].run()
    assert (result.state, result.found) == (PROBLEM, "OSError: disk full")


def test_one_core_is_a_warning(monkeypatch):
    monkeypatch.setattr(checks, "cores", lambda: 1)
    assert CHECKS["cores"].run().state == WARNING


def test_little_memory_is_a_warning(monkeypatch):
    monkeypatch.setattr(checks, "memory_room", lambda: 2**20)
    assert CHECKS["memory"].run().state == WARNING
