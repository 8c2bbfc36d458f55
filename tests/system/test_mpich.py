"""Tests of jobs that MPICH's mpiexec starts, which knows nothing of this package.

The MPICH is that of ``tools/environment.sh --with-mpi``, beside the environment, where it does not hide
the mpirun of OpenMPI.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from namespaces import job_environment, why_no_mpi

MPICH = Path(sys.prefix) / "mpich"
WHY_NOT = why_no_mpi() or ("" if (MPICH / "bin" / "mpiexec").exists() else f"no MPICH in {MPICH}")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]

SCRIPT = """
import sys
import numpy as np
import synkhronos as synk
from compilers import compiler, tt


def send_to_the_other_machine(rank):
    other = (rank.rank + rank.size // 2) % rank.size
    assert rank.send(other, np.full(2, rank.rank))
    rank.barrier()
    return int(rank.receive()[1].sum())


ranks = synk.fork(use_gpu=False)
x, w = tt.dmatrix("x"), compiler.shared(np.zeros(3), "w")
f = synk.function([x], (x.sum(), "sum"), updates=[(w, w + x.sum(axis=0))])
synk.distribute()
print(ranks, f(np.arange(12.0).reshape(4, 3)))
synk.all_reduce(w, "max")
print([synk.get_value(rank, w).tolist() for rank in range(ranks)])
print(synk.spmd(send_to_the_other_machine), flush=True)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", [0, 3])
def test_two_machines_train_and_exchange_messages(tmp_path, code):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = job_environment({
        "PATH": os.environ["PATH"], "HOME": os.environ["HOME"],
        "MPI4PY_LIBMPI": str(MPICH / "lib" / "libmpi.so.12"),
        "SYNKHRONOS_TASKS_ARE_MACHINES": "2", "SYNKHRONOS_SPARE_TASKS": "1", "SYNKHRONOS_RANKS": "2",
    })  # fmt: skip
    line = [str(MPICH / "bin" / "mpiexec"), "-n", "4", sys.executable, "-m", "synkhronos", "run"]
    done = subprocess.run(
        [*line, str(script), str(code)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.splitlines() == [
        "4 66.0", str([[9.0, 10.0, 11.0]] * 4), "[4, 6, 0, 2]",
    ], done.stderr  # fmt: skip
    assert done.returncode == code, done.stderr
