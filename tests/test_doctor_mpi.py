"""Tests of the doctor's checks for several machines."""

import importlib.util
import shutil

import pytest

from synkhronos.host import doctor_mpi
from synkhronos.host.compiler import TITLE
from synkhronos.host.probe import OK, PROBLEM, WARNING

ABOUT = {
    "Synkhronos": "1.0", "Python": "3.11.2", "NumPy": "1.23.5", TITLE: "1.0.5", "mpi4py": "4.1.2",
    "package": "/here/synkhronos/__init__.py",
}  # fmt: skip


def test_without_mpirun_several_machines_are_not_possible_which_is_no_problem(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    result = doctor_mpi.check_mpi()
    assert result.state == OK and "which is not in PATH" in result.found
    (of_hosts,) = doctor_mpi.check_hosts("a,b")
    assert of_hosts.state == PROBLEM and "openmpi-bin" in of_hosts.remedy


@pytest.mark.parametrize(
    ("library", "state"),
    [
        ("Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4, repo rev: v4.1.4", OK),
        ("Open MPI v5.0.3, package: another", WARNING),
        ("MPICH Version:      4.0.2\nMPICH Release date: ...", WARNING),
    ],
)
def test_mpirun_and_mpi4py_must_be_of_one_mpi(library, state):
    result = doctor_mpi.judge_mpi("4.1.4", {"mpi4py": "4.1.2", "library": library})
    assert result.state == state and "OpenMPI 4.1.4, mpi4py 4.1.2" in result.found
    assert bool(result.remedy) == (state != OK)


@pytest.mark.parametrize(
    ("change", "state", "remedy"),
    [
        ({}, OK, ""),
        ({"NumPy": "1.24.0"}, PROBLEM, "install there what a has: NumPy 1.23.5"),
        ({"mpi4py": "ModuleNotFoundError: No module named 'mpi4py'"}, PROBLEM, "install mpi4py there"),
        ({"package": "/there/synkhronos/__init__.py"}, WARNING, "a has it at /here/synkhronos"),
    ],
)
def test_a_machine_must_have_what_the_first_one_has(change, state, remedy):
    result = doctor_mpi.judge_host("b", {**ABOUT, **change}, "a", ABOUT)
    assert result.state == state and remedy in result.remedy and bool(result.remedy) == bool(remedy)


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ("[a:5] plm:rsh: Warning: x\nssh: no host b\n------\nORTE was unable\n", "ssh: no host b"),
        ("Traceback (most recent):\n  x\nValueError: two\n-----\nmpirun noticed", "ValueError: two"),
        ("", ""),
    ],
)
def test_the_reason_is_what_is_said_of_a_machine_that_does_not_answer(said, complaint):
    assert doctor_mpi.complaint_of(said) == complaint


@pytest.mark.skipif(
    shutil.which("mpirun") is None or importlib.util.find_spec("mpi4py") is None,
    reason="the test needs mpirun and mpi4py",
)
def test_this_machine_is_asked_by_mpirun():
    assert doctor_mpi.check_mpi().state == OK
    (result,) = doctor_mpi.check_hosts("localhost")
    assert (result.name, result.state) == ("localhost", OK), result
