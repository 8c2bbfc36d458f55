"""Tests of the doctor's checks for several machines."""

import importlib.util
import os
import re
import shutil
import sys

import pytest
from namespaces import KEEPER, Job, Machines, why_no_mpi, why_no_namespaces
from processes import PYTHONPATH, ROOT

from synkhronos.host.compiler import TITLE
from synkhronos.host.doctor.check import OK, PROBLEM, Check
from synkhronos.machines.job import doctor as doctor_mpi

ABOUT = {
    "Synkhronos": "1.0", "Python": "3.11.2", "NumPy": "1.23.5", TITLE: "1.0.5", "mpi4py": "4.1.2",
    "OpenMPI": "4.1.4", "package": "/here/synkhronos/__init__.py", "digest": "ab12",
}  # fmt: skip


def test_without_mpirun_several_machines_are_not_possible_which_is_no_problem(monkeypatch):
    about = {"mpi4py": "4.1.2", "library": "Open MPI v4.1.4", "path": "/nowhere/lib/libmpi.so.40"}
    monkeypatch.setattr(doctor_mpi.launcher, "find_mpi4py", lambda: about)
    monkeypatch.setenv("PATH", "/nowhere")
    result = doctor_mpi.MPI.run()
    assert result.state == OK and "found none in PATH or beside it" in result.found
    (of_hosts,) = doctor_mpi.check_hosts("a,b")
    assert of_hosts.state == PROBLEM and "openmpi-bin" in of_hosts.remedy


@pytest.mark.parametrize(
    ("change", "state", "remedy"),
    [
        ({}, OK, ""),
        ({"NumPy": "1.24.0"}, PROBLEM, "install there what a has: NumPy 1.23.5"),
        ({"mpi4py": "ModuleNotFoundError: No module named 'mpi4py'"}, PROBLEM, "install mpi4py there"),
        ({"OpenMPI": "5.0.3"}, PROBLEM, "install there what a has: OpenMPI 4.1.4"),
        ({"digest": "cd34"}, PROBLEM, "a has other source files, /here/synkhronos/__init__.py; copy"),
        ({"package": "/there/synkhronos/__init__.py"}, OK, ""),
    ],
)
def test_a_machine_must_have_what_the_first_one_has(change, state, remedy):
    about = {**ABOUT, **change}
    result = Check("b", lambda: doctor_mpi.judge_host(about, "a", ABOUT), is_required=True).run()
    assert result.state == state and remedy in result.remedy and bool(result.remedy) == bool(remedy)


@pytest.mark.skipif(
    shutil.which("mpirun") is None or importlib.util.find_spec("mpi4py") is None,
    reason="the test needs mpirun and mpi4py",
)
def test_this_machine_is_asked_by_mpirun():
    assert doctor_mpi.MPI.run().state == OK
    (result,) = doctor_mpi.check_hosts("localhost")
    assert (result.name, result.state) == ("localhost", OK), result


# Several hosts, each of which is a machine made of namespaces

WHY_NOT = why_no_mpi() or why_no_namespaces()
DOCTOR = "import sys, synkhronos.__main__ as main; main.CHECKS = (); sys.exit(main.doctor(sys.argv[1]))"


def ask_doctor(machines, hosts):
    """Run ``doctor --hosts`` on the first machine, without its other checks.

    Return the exit code, and the state and the text of each result by its name.
    """
    agent = f"{sys.executable} -SE {KEEPER} {machines.folder}"
    environment = {
        **os.environ, "PYTHONPATH": PYTHONPATH,
        "OMPI_MCA_plm_rsh_agent": agent, "OMPI_MCA_btl_tcp_if_include": "link0",
        "OMPI_MCA_oob_tcp_if_include": "link0", "OMPI_MCA_btl": "tcp,self",
    }  # fmt: skip
    command = [sys.executable, "-c", DOCTOR, ",".join(hosts)]
    done = Job(machines, command, environment, str(machines.folder)).wait(100)
    parts = re.split(r"^(ok|warning|problem) +(round trip|\S+) ", done.output, flags=re.MULTILINE)[1:]
    results = {name: (state, text) for state, name, text in zip(parts[::3], parts[1::3], parts[2::3])}
    return done.returncode, results, done.output


@pytest.mark.slow
@pytest.mark.skipif(bool(WHY_NOT), reason=f"no machines made of namespaces: {WHY_NOT}")
def test_hosts_are_compared_and_the_way_to_them_is_measured(tmp_path):
    with Machines(3) as machines:
        first, second, third = machines.hosts
        code, results, output = ask_doctor(machines, machines.hosts[:2])
        assert [results[one][0] for one in (first, second, "round trip")] == [OK] * 3, output
        assert code == 0 and len(results) == 3, output
        [time] = re.findall(rf"from {first}, median of 201: {second} (\d+) µs", output)
        assert 0 < int(time) < 1e6

        changed = tmp_path / "_html.py"
        changed.write_text((ROOT / "synkhronos" / "_html.py").read_text() + "# changed\n")
        machines.kill(2)
        with machines.mounted(1, ROOT / "synkhronos" / "_html.py", "--bind", changed):
            code, results, output = ask_doctor(machines, machines.hosts)
        states = {first: OK, second: PROBLEM, third: PROBLEM, "round trip": OK}
        assert code == 1 and {name: state for name, (state, _) in results.items()} == states, output
        assert f"{first} has other source files" in results[second][1], output
        assert "cannot be asked: " in results[third][1] and f"ssh {third} " in results[third][1]
        assert third not in results["round trip"][1]
