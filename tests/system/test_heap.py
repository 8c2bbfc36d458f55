"""Tests of the memory that malloc keeps between steps: page faults, its return, and the switch."""

import resource

import numpy as np
import psutil
import pytest
import theano
from processes import PYTHONPATH, ROOT, own_process, run_interpreter

import synkhronos as synk
from synkhronos.host import heap

MEBIBYTE = 1 << 20
needs_glibc = pytest.mark.skipif(heap.why_not_kept({}) is not None, reason="the C library is not glibc")


def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def resident():
    return psutil.Process().memory_info().rss


def allocate_and_free():
    """Allocate and free arrays like the intermediate ones of a step.

    Some are larger than any of malloc's thresholds.
    """
    arrays = [np.ones(size * MEBIBYTE, np.uint8) for size in (48, 1, 20, 5)]
    arrays.append(np.zeros(30 * MEBIBYTE, np.uint8))
    arrays[-1][:] = 1


def faults_of_rounds():
    for _ in range(3):
        allocate_and_free()
    before = faults()
    for _ in range(10):
        allocate_and_free()
    return faults() - before


@pytest.mark.parametrize("switch, is_kept", [("0", False), ("1", True), (None, True)])
def test_the_switch_determines_whether_malloc_keeps_memory(switch, is_kept):
    is_kept = is_kept and heap.why_not_kept({}) is None
    code = "import synkhronos, test_heap; print(test_heap.faults_of_rounds())"
    done = run_interpreter("-c", code, environment={"PYTHONPATH": PYTHONPATH, heap.SWITCH: switch})
    assert (int(done.stdout) < 100) == is_kept


@needs_glibc
@own_process
def test_what_a_script_has_freed_is_returned_before_workers_start():
    array = np.ones(200 * MEBIBYTE, np.uint8)
    above = np.ones(1000)
    synk.fork(2, use_gpu=False)
    before = resident()
    del array
    synk.distribute()
    assert before - resident() > 190 * MEBIBYTE
    assert above.all()


@needs_glibc
@pytest.mark.parametrize("chosen, expected", [(None, "glibc.malloc.hugetlb=1"), ("x=y", None)])
def test_run_has_the_heap_of_a_script_use_huge_pages(tmp_path, chosen, expected):
    script = tmp_path / "script.py"
    script.write_text("import os\nprint(os.environ['GLIBC_TUNABLES'])\n")
    environment = {"PYTHONPATH": str(ROOT), "GLIBC_TUNABLES": chosen}
    done = run_interpreter("-m", "synkhronos", "run", script, environment=environment)
    assert done.stdout.strip() == (expected or "x=y:glibc.malloc.hugetlb=1")


def resident_without_files(pid):
    """Return the resident memory of a process without what it maps from files, in bytes.

    Unlike the proportional set size, it does not depend on which other processes share a page.
    """
    with open(f"/proc/{pid}/status") as status:
        fields = dict(line.split(":", 1) for line in status)
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


def resident_of_the_world():
    own = psutil.Process()
    return sum(resident_without_files(process.pid) for process in (own, *own.children()))


@own_process
def test_replication_leaves_one_copy_per_worker_and_no_pickle():
    synk.fork(2, use_gpu=False)
    synk.distribute()
    large = theano.shared(np.ones(6 * MEBIBYTE))
    synk.function([], (large.sum(), "sum"), mode="FAST_COMPILE")
    before = resident_of_the_world()
    synk.distribute()
    copies = (resident_of_the_world() - before) / large.get_value(borrow=True).nbytes
    assert 0.7 < copies < 1.5, copies
