"""Tests of jobs whose machines do not have the same packages."""

import sys

import numpy as np
import pytest
from mortal_jobs import SCRIPT, needs_machines, with_each_openmpi
from mortal_jobs import fixture_machines  # noqa: F401

pytestmark = needs_machines


@with_each_openmpi
def test_a_machine_with_another_version_is_refused_by_name(machines, tmp_path):
    on_second_machine(tmp_path, "import numpy; numpy.__version__ += '.post9'")
    done = machines.run(SCRIPT, "raise", tmp_path, before_path=tmp_path)
    version = f"{np.__version__}.post9"
    assert done.returncode != 0 and f"and {version} on machine-b" in done.output, done.output
    assert "install the same version on every machine" in done.output
    assert not machines.left()


@pytest.mark.slow
@with_each_openmpi
def test_a_machine_without_the_package_is_named(machines, tmp_path):
    on_second_machine(tmp_path, "import sys; sys.modules['synkhronos'] = None")
    done = machines.run(SCRIPT, "raise", tmp_path, before_path=tmp_path, launch=())
    host = machines.hosts[1]
    assert done.returncode != 0 and f"{host}: {sys.executable} cannot import" in done.output, done.output
    assert "install the same version on every machine" in done.output
    assert not machines.left(30)  # OpenMPI 5 leaves tasks that it has just started to themselves


@pytest.mark.slow
@with_each_openmpi
def test_a_module_that_a_machine_lacks_is_an_error_of_its_first_rank(machines, tmp_path):
    (tmp_path / "own_module.py").write_text("def program(rank):\n    return rank.rank\n")
    on_second_machine(tmp_path, "import sys; sys.modules['own_module'] = None")
    code = (
        "import synkhronos as synk\n"
        "def program(rank):\n"
        "    import own_module\n"
        "    return own_module.program(rank)\n"
        "if __name__ == '__main__':\n"
        "    synk.fork(4, use_gpu=False)\n"
        "    synk.spmd(program)\n"
    )
    done = machines.run("-c", code, before_path=tmp_path, launch=())
    error = "WorkerError: rank 2 raised ModuleNotFoundError: import of own_module"
    assert done.returncode != 0 and error in done.output, done.output
    assert not machines.left()


def on_second_machine(folder, code):
    """Let each Python on the second machine run this code at its start."""
    (folder / "sitecustomize.py").write_text(
        f"import socket\nif socket.gethostname().startswith('machine-b'):\n    {code}\n"
    )
