"""Tests of the system's limits on memory, files, processes and disk space.

They use real limits: a control group, a resource limit, another user, or a file system that is small,
full or read-only and mounted only for the script.
"""

import ctypes
import functools
import gc
import os
import resource
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import theano
import theano.tensor as tt
from prelude import error_of, open_world, run_file
from processes import FOLDER, ROOT, Programs, own_process

import synkhronos as synk
from synkhronos.host import compile_cache, machine, preparation
from synkhronos.host.doctor import checks
from synkhronos.host.doctor.check import PROBLEM
from synkhronos.stores import memory as shm
from synkhronos.transports import limits
from synkhronos.world.rank_state import Command
from synkhronos.world.world import current_world

MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")  # version 1
UNIFIED_GROUPS = Path("/sys/fs/cgroup")  # version 2
MEGABYTE = 1 << 20
NEW_MOUNTS = 0x20000  # CLONE_NEWNS


def check_error(error, *words, kind=synk.SynkhronosError):
    """Check that the error is of this kind, and that its message contains these words."""
    assert isinstance(error, kind), repr(error)
    for word in words:
        assert word in str(error), (word, str(error))


def may_mount():
    command = ["unshare", "-m", "sh", "-c", "mount -t tmpfs -o size=64k tmpfs /dev/shm"]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


needs_mounts = pytest.mark.skipif(not may_mount(), reason="no mounts of one's own (unshare -m) here")
NO_DEV_SHM = (
    "mount -t tmpfs tmpfs /dev; mkdir /dev/pts; mknod -m 666 /dev/null c 1 3; "
    "mknod -m 666 /dev/urandom c 1 9"
)


def with_mounts(command):
    """Return the start of a command line that changes the mounts only for the rest of it."""
    return ["unshare", "-m", "sh", "-ec", f'{command}\nexec "$@"', "sh"]


@needs_mounts
@own_process
@pytest.mark.parametrize(
    "mounts",
    [
        "mount -t tmpfs -o size=4k tmpfs /dev/shm; head -c 4096 /dev/zero > /dev/shm/full",
        "mount -t tmpfs -o ro tmpfs /dev/shm",
        NO_DEV_SHM,
    ],
    ids=["full", "read-only", "missing"],
)
def test_dev_shm_is_not_needed(mounts):
    assert ctypes.CDLL(None).unshare(NEW_MOUNTS) == 0
    subprocess.run(["sh", "-ec", f"mount --make-rprivate /\n{mounts}"], check=True)
    world = open_world(3)
    data = synk.data(np.ones(8 << 20))  # 64 MB
    assert world.plain(data) == [(8 << 20) + 9]
    synk.broadcast(world.w, np.ones(4 << 20))
    synk.all_reduce(world.w)
    world.check_usable()
    synk.close()


@own_process
def test_a_limit_on_the_size_of_files_is_an_error_and_not_a_hang():
    synk.fork(2, use_gpu=False)
    x = tt.dvector("x")
    f = synk.function([x], (x.sum(), "sum"))
    synk.distribute()  # before the limit is set, so that it does not apply to the workers
    no_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, no_limit[1]))
    error = error_of(lambda: synk.function([x], (tt.exp(x).sum(), "sum")), 30)
    check_error(error, "ulimit -f")
    assert f(np.ones(4)) == 4
    resource.setrlimit(resource.RLIMIT_FSIZE, no_limit)
    assert synk.function([x], (tt.exp(x).sum(), "sum"))(np.zeros(4)) == 4
    synk.close()


@pytest.mark.slow
@needs_mounts
def test_a_full_disk_for_the_compile_cache_is_an_error_and_not_a_hang(tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    run_file(
        "full_compile_cache.py",
        cache,
        cwd=tmp_path,
        command=with_mounts(f"mount -t tmpfs -o size=32m tmpfs {cache}"),
        environment={"THEANO_FLAGS": f"base_compiledir={cache},gcc.cxxflags=-O0"},
        timeout=200,
    )


@needs_mounts
@pytest.mark.parametrize("option", ["ro", pytest.param("noexec", marks=pytest.mark.slow)])
def test_a_compile_cache_that_cannot_be_used_is_explained(tmp_path, option):
    cache = tmp_path / "cache"
    cache.mkdir()
    run_file(
        "unusable_compile_cache.py",
        cache,
        option,
        cwd=tmp_path,
        command=with_mounts(f"mount -t tmpfs tmpfs {cache}"),
        environment={"THEANO_FLAGS": f"base_compiledir={cache},gcc.cxxflags=-O0"},
        timeout=200,
    )


@needs_mounts
@own_process
@pytest.mark.parametrize(
    "mount, reason",
    [
        ("mount -t tmpfs -o ro tmpfs cache", "(cache: Read-only file system)"),
        ("mount -t tmpfs -o noexec tmpfs cache", "from which no code can be run"),
        ("rmdir cache; touch cache", "(cache: Not a directory)"),
    ],
    ids=["read-only", "noexec", "file"],
)
def test_the_doctor_explains_a_compile_cache_that_cannot_be_used(mount, reason):
    assert ctypes.CDLL(None).unshare(NEW_MOUNTS) == 0
    os.mkdir("cache")
    subprocess.run(["sh", "-ec", f"mount --make-rprivate /\n{mount}"], check=True)
    os.environ["THEANO_FLAGS"] = "base_compiledir=cache/theano"
    of_theano = {one.name: one for one in checks.OF_THEANO}
    result = of_theano["Theano's cache"].run()
    assert result.state == PROBLEM and reason in result.found, result
    assert result.remedy == "set another folder with THEANO_FLAGS=base_compiledir=FOLDER"
    assert preparation.complaint() == f"{result.found}: {result.remedy}"
    assert "Theano's cache" in of_theano["Theano"].run().remedy
    os.environ["THEANO_FLAGS"] = "cxx=,base_compiledir=cache/theano"
    assert (of_theano["Theano's cache"].run().state == PROBLEM) == ("code" not in reason)


def test_without_a_home_folder_a_compile_cache_has_to_be_set(monkeypatch):
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert compile_cache.folder({"THEANO_FLAGS": "base_compiledir=/a"}) == Path("/a")
    assert compile_cache.folder({"THEANORC": ""}) is None
    complaint = compile_cache.complaint(None)
    assert complaint.startswith("there is no home folder for Theano's cache")
    assert complaint.endswith("THEANO_FLAGS=base_compiledir=FOLDER")


@own_process
def test_more_processes_than_the_machine_can_have_are_refused_before_any_starts():
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    error = error_of(lambda: synk.fork(9999, use_gpu=False), 5)
    check_error(error, "fork(): 9999 processes are more than", "2 file descriptors", "ulimit -n")
    limits._most_by_files = lambda: 1 << 40
    reasons = "16 MB of shared memory", "processes and threads are limited"
    for name, reason in zip(("_most_by_processes", "most_ranks"), reasons):
        computed = getattr(limits, name)
        setattr(limits, name, lambda: 1 << 40)
        error = error_of(lambda: synk.fork(1 << 30, use_gpu=False), 5)
        check_error(error, f"fork(): {1 << 30} processes are more than", reason, "one for each core")
        setattr(limits, name, computed)
    assert not synk.is_forked()
    open_world().check_usable()


@own_process
def test_too_few_files_is_an_error_that_says_the_limit_and_leaves_a_usable_world():
    world = open_world(6, start=False)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_open = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (is_open + 4, hard))
    for _ in range(3):
        error = error_of(synk.distribute)
        check_error(error, "of 5 workers", "Too many open files", "2 file descriptors", "ulimit -n")
        assert psutil.Process().children() == []
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    world.check_usable()  # the same world
    synk.close()
    files = [open(os.devnull) for _ in range(3)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(one.fileno() for one in files) + 1, hard))
    error = error_of(lambda: synk.fork(6, use_gpu=False))
    check_error(error, "fork()", "files are open", "ulimit -n")
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    del files[:]
    open_world().check_usable()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_too_many_processes_is_an_error_that_says_the_limit_and_leaves_a_usable_world():
    """Run the program as another user, as the limit does not apply to root."""
    user = 54321
    # Other users may not have access to pytest's folders, or to the project's.
    folder = Path(tempfile.mkdtemp())
    try:
        shutil.copytree(ROOT / "synkhronos", folder / "synkhronos")
        helpers = [FOLDER / "support" / f"{name}.py" for name in ("prelude", "processes", "compilers")]
        for path in (*helpers, FOLDER / "programs" / "too_many_processes.py"):
            shutil.copy(path, folder)
        for path in (folder, *folder.rglob("*")):
            os.chown(path, user, user)
        run_file(
            folder / "too_many_processes.py",
            cwd=folder,
            command=["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"],
            environment={
                "PYTHONPATH": str(folder),
                "HOME": str(folder),
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
                "THEANO_FLAGS": f"base_compiledir={folder}/cache,cxx=",
            },
        )
    finally:
        shutil.rmtree(folder)


@own_process
@pytest.mark.parametrize("ranks", [2, 5])
def test_a_limit_on_address_space_leaves_a_third_of_it_to_the_script(ranks):
    process = psutil.Process()
    used = process.memory_info().vms
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (3 << 30), hard))
    world = open_world(ranks)
    world.check_usable()
    left = (3 << 30) - (process.memory_info().vms - used)
    assert left > 1 << 30, left
    late = synk.function([tt.dvector()], tt.constant(1.0), on_unused_input="ignore", mode="FAST_COMPILE")
    assert late(np.ones(ranks)) == 1
    error = error_of(lambda: synk.data(dtype="float64", shape=(1 << 30,)))
    check_error(error, kind=MemoryError)
    world.check_usable()
    synk.close()
    resource.setrlimit(resource.RLIMIT_AS, (process.memory_info().vms + (4 << 20), hard))
    error = error_of(lambda: synk.fork(ranks, use_gpu=False))
    check_error(error, "ulimit -v", kind=MemoryError)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    open_world(ranks).check_usable()


class LimitMemory(theano.Op):
    """Limits the rank's address space to its current size plus a number of bytes.

    A number of 0 leaves the limit unchanged, and -1 lifts it.
    """

    __props__ = ()

    def make_node(self, n):
        return theano.Apply(self, [n], [tt.dvector()])

    def perform(self, node, inputs, outputs):
        more, process = int(inputs[0][0]), psutil.Process()
        if more:
            _, hard = resource.getrlimit(resource.RLIMIT_AS)
            bound = hard if more < 0 else process.memory_info().vms + more
            resource.setrlimit(resource.RLIMIT_AS, (bound, hard))
        outputs[0][0] = np.zeros(1)


@own_process
@pytest.mark.parametrize("rank", [0, 1])
def test_out_of_memory_on_one_rank_is_an_error_and_the_world_goes_on(rank):
    """Memory runs out in Theano's C code, in an output, and in a step with a collective."""
    world = open_world(start=False)
    n = tt.lvector("n")
    zeros = tt.zeros((n[0], n[0]))
    allocate = synk.function([n], (tt.dot(zeros, zeros).sum(), "sum"))
    huge = synk.function([n], (tt.alloc(np.float64(1), n[0]), "gather"))
    limit = synk.function([n], LimitMemory()(n)[0], mode="FAST_COMPILE")
    synk.distribute()

    def check(call):
        error = error_of(call, 20)
        if rank == 0:
            assert isinstance(error, MemoryError), repr(error)
        else:
            assert type(error) is synk.WorkerError and error.rank == 1, repr(error)
            assert error.type_name == "MemoryError", error
        world.check_usable()

    def rows(other, own):
        return np.array([own, other] if rank == 0 else [other, own])

    def fused(numbers):
        with synk.fuse():
            allocate(numbers)
            synk.all_reduce(world.w)

    for side in (1 << 22, 1 << 18):  # 140 TB, 550 GB
        numbers = rows(2, side)
        check(functools.partial(allocate, numbers))
        check(functools.partial(huge, numbers**2))
        check(functools.partial(fused, numbers))
    limit(rows(0, 300 << 20))
    check(lambda: allocate(rows(2, 8000)))  # 512 MB: malloc itself refuses
    check(lambda: huge(rows(2, 64 << 20)))
    check(lambda: fused(rows(2, 8000)))
    limit(rows(0, -1))
    assert allocate(np.array([2, 2])) == 0
    assert len(huge(rows(2, 4 << 20))) == (4 << 20) + 2
    world.check_usable()


@own_process
def test_out_of_memory_for_a_replica_of_one_rank_is_an_error_that_names_it():
    open_world(start=False)
    n, rows = tt.lvector("n"), theano.shared(np.zeros((1, 8)), name="rows")
    synk.function([], rows.sum())
    limit = synk.function([n], LimitMemory()(n)[0], mode="FAST_COMPILE")
    synk.distribute()
    limit(np.array([0, 2 << 20]))
    large = np.ones((1 << 20, 8))  # 64 MB
    calls = {
        "set_value": lambda: synk.set_value(1, rows, large),
        "broadcast": lambda: (rows.set_value(large), synk.broadcast(rows)),
        "all_gather": lambda: synk.all_gather(rows),
    }
    for name, call in calls.items():
        error = error_of(call, 20)
        assert type(error) is synk.WorkerError and error.rank == 1, (name, error)
        assert error.type_name == "MemoryError"
    assert synk.get_shapes(rows)[1] == (1, 8)


class Echo(Command):
    """Carries `there` as its payload. Each worker returns `back` bytes."""

    def __init__(self, there, back):
        self.there, self.back = there, back

    def run(self, rank_state):
        return None if rank_state.is_master else bytes(self.back)


@own_process
def test_a_command_or_a_reply_too_large_for_memory_leaves_a_usable_world():
    world = open_world()
    assert current_world().run(Echo(bytes(30 << 20), 30 << 20))[1] == bytes(30 << 20)
    left, master = shm._memory_left, os.getpid()
    shm._memory_left = lambda: 20 << 20
    error = error_of(lambda: current_world().run(Echo(bytes(40 << 20), 0)))
    check_error(error, "shared memory", kind=MemoryError)
    world.check_usable()
    shm._memory_left = left
    synk.close()
    shm._memory_left = lambda: 20 << 20 if os.getpid() != master else left()
    world = open_world()
    error = error_of(lambda: current_world().run(Echo(b"", 30 << 20)))
    assert type(error) is synk.WorkerError and error.rank == 1 and error.type_name == "MemoryError"
    world.check_usable()


@pytest.fixture(scope="module")
def small_programs(tmp_path_factory):
    """`Programs` whose processes need little memory: Theano does not compile, nor read compile cache."""
    cache = tmp_path_factory.mktemp("cache")
    made = Programs(environment={"THEANO_FLAGS": f"cxx=,base_compiledir={cache}"})
    yield made
    made.close()


@pytest.fixture
def memory_group():
    """Function that creates a control group with a memory limit in bytes, and returns its folder."""
    made = []

    def make(nbytes):
        version_1 = (MEMORY_GROUPS / "cgroup.procs").exists()
        parent = MEMORY_GROUPS if version_1 else UNIFIED_GROUPS
        folder = parent / f"synkhronos-test-{os.getpid()}-{len(made)}"
        try:
            folder.mkdir()
            made.append(folder)
            name = "memory.limit_in_bytes" if version_1 else "memory.max"
            (folder / name).write_text(str(nbytes))
        except OSError as error:
            pytest.skip(f"no control group for memory can be made here: {error}")
        return folder

    yield make
    for folder in made:
        end = time.monotonic() + 10
        while time.monotonic() < end:  # until its last process has ended
            try:
                folder.rmdir()
                break
            except OSError:
                time.sleep(0.05)
        assert not folder.exists()


def enter(group):
    """Move this process to a control group. Its child processes inherit it."""
    Path(group, "cgroup.procs").write_text(str(os.getpid()))


class Take(Command):
    """Allocates 220 MB on every rank at the same time, and writes to them."""

    def run(self, rank_state):
        rank_state.transport.barrier()
        try:
            taken = rank_state.store.memory.allocate(220 << 20)
        except MemoryError:
            taken = None
        rank_state.transport.barrier()
        if taken is not None:
            taken[:] = 1
        return taken is not None


def take_more_than_a_container_may_have(group):
    enter(group)
    world = open_world(3)

    def refused(call):
        error = error_of(call, 60)
        assert isinstance(error, MemoryError) or error.type_name == "MemoryError", repr(error)
        for word in ("bytes were requested", "are left", "container", "--memory"):
            assert word in str(error), (word, str(error))
        world.check_usable()

    refused(lambda: synk.data(np.zeros((700, 1 << 17))))
    refused(lambda: synk.data(shape=(700, 1 << 17), dtype="float64"))
    kept = []

    def many():
        while True:
            kept.append(synk.data(shape=(1 << 20,), dtype="uint8"))

    refused(many)
    assert len(kept) > 100, len(kept)
    assert all(not one.data.any() for one in kept)
    del kept[:]
    gc.collect()
    store = current_world().rank_state.store
    store.trim()
    for _ in range(3):  # the limit allows one or two of the three allocations
        got = current_world().run(Take())
        assert sum(got) < 3, got
        world.check_usable()
    # A block that was allocated but not written to counts, too.
    first = store.memory.allocate(300 << 20)
    refused(lambda: store.memory.allocate(300 << 20))
    del first
    data = synk.data(np.ones(25 << 20, "float32"))
    for _ in range(5):  # pages that are kept for reuse are returned when memory is needed
        data.free_memory()
        data = synk.data(np.ones(25 << 20, "float32"))
    assert (data.data == 1).all()


@pytest.mark.slow
def test_more_than_a_container_may_have_is_a_memory_error_before_the_kernel_kills(
    memory_group, small_programs
):
    """Test large blocks, many small ones, several ranks at once, and blocks not written to yet."""
    group = memory_group(600 * MEGABYTE)
    small_programs.run(take_more_than_a_container_may_have, group, timeout=90).check()


def test_the_room_in_a_control_group_of_either_version(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
    (two / "memory.max").write_text("1000\n")
    (two / "memory.current").write_text("900\n")
    assert machine.memory_room([two]) == 100
    (two / "memory.stat").write_text("anon 10\nfile 700\ninactive_file 500\nactive_file 50\n")
    assert machine.memory_room([two]) == 650
    (one / "memory.limit_in_bytes").write_text("600\n")
    (one / "memory.usage_in_bytes").write_text("500\n")
    stat = "inactive_file 1\ntotal_inactive_file 100\ntotal_active_file 20\n"
    (one / "memory.stat").write_text(stat)
    assert machine.memory_room([one, two]) == 220
    (one / "memory.limit_in_bytes").write_text(str(2**63 - 4096))
    assert machine.memory_room([one]) is None
