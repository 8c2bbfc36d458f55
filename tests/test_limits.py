"""What the system refuses: memory, files, processes, room on the disk.

Each is met with the real limit: a control group, a resource limit, another user, a file system that is
small, full or read-only, mounted for the script alone.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from conftest import ROOT
from test_failures import PRELUDE

from synkhronos.host import compile_cache, machine

MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")  # version 1
UNIFIED_GROUPS = Path("/sys/fs/cgroup")  # version 2
MEGABYTE = 1 << 20


@pytest.fixture
def run_script(run_python):
    def run(code, *arguments, **kwargs):
        return run_python(PRELUDE + code, *arguments, **{"timeout": 60, **kwargs})

    return run


# Mounts of one's own


def may_mount():
    command = ["unshare", "-m", "sh", "-c", "mount -t tmpfs -o size=64k tmpfs /dev/shm"]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


needs_mounts = pytest.mark.skipif(not may_mount(), reason="no mounts of one's own (unshare -m) here")


@pytest.fixture
def run_mounted(tmp_path):
    """A function that runs a script where some shell commands have changed the mounts, for it alone."""

    def run(mounts, code, *arguments, flags="", timeout=60):
        script = tmp_path / "script.py"
        script.write_text(
            f"import faulthandler; faulthandler.dump_traceback_later({timeout - 5}, exit=True)\n" + code
        )
        done = subprocess.run(
            ["unshare", "-m", "sh", "-ec", f'{mounts}\nexec "$@"', "sh",
             sys.executable, str(script), *map(str, arguments)],
            capture_output=True, text=True, timeout=timeout, cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT),
                 "THEANO_FLAGS": flags or os.environ.get("THEANO_FLAGS", "")},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    return run


@needs_mounts
@pytest.mark.parametrize(
    "mounts",
    [
        "mount -t tmpfs -o size=4k tmpfs /dev/shm; head -c 4096 /dev/zero > /dev/shm/full",
        "mount -t tmpfs -o ro tmpfs /dev/shm",
        "mount -t tmpfs tmpfs /dev; mkdir /dev/pts; mknod -m 666 /dev/null c 1 3; "
        "mknod -m 666 /dev/urandom c 1 9",
    ],
    ids=["full", "read-only", "missing"],
)
def test_dev_shm_is_not_needed(run_mounted, mounts):
    run_mounted(
        mounts,
        PRELUDE
        + """
open_world(3)
data = synk.data(np.ones(8 << 20))  # 64 MB
assert plain(data) == [(8 << 20) + 9]
synk.broadcast(w, np.ones(4 << 20))
synk.all_reduce(w)
check_usable(3)
synk.close()
""",
    )


FULL_DISK = """
import os, sys, time
cache = sys.argv[1]


def fill(keep=0):
    with open(cache + "/filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
    os.truncate(cache + "/filler", os.path.getsize(cache + "/filler") - keep)


def refused(call, *words):
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        for word in words:
            assert word in str(error), (word, str(error))
        assert time.monotonic() - began < 30 and len(str(error)) < 1000
        return error
    raise AssertionError("no error")


def import_it():
    import synkhronos


fill()
error = refused(import_it, "0 bytes free", cache, "theano-cache purge", "base_compiledir")
assert type(error) is ImportError
os.remove(cache + "/filler")
import numpy as np
import synkhronos as synk
import theano
import theano.gof.cmodule
import theano.tensor as T

synk.fork(2, use_gpu=False)
x = T.dvector("x")
f = synk.function([x], (x.sum(), "sum"))
assert f(np.ones(4)) == 4
for keep in (0, 100 << 10, 1200 << 10):
    fill(keep)
    if keep > 1 << 20:  # a file of another's takes the rest while the compiler runs
        compile_str = theano.gof.cmodule.GCC_compiler.compile_str

        def compile_on_full_disk(*args, **kwargs):
            fill()
            return compile_str(*args, **kwargs)

        theano.gof.cmodule.GCC_compiler.compile_str = staticmethod(compile_on_full_disk)
    error = refused(lambda: synk.function([x], (T.exp(x).sum(), "sum")),
                    "bytes free", cache, "theano-cache purge", "base_compiledir")
    assert isinstance(error, synk.SynkhronosError), repr(error)
    assert f(np.ones(6)) == 6
theano.gof.cmodule.GCC_compiler.compile_str = staticmethod(compile_str)
os.remove(cache + "/filler")
assert synk.function([x], (T.exp(x).sum(), "sum"))(np.zeros(4)) == 4
assert f(np.ones(6)) == 6
"""


def test_a_limit_on_the_size_of_files_is_a_sentence_and_not_a_wait(run_python, tmp_path):
    run_python("""
import resource
import numpy as np
import synkhronos as synk
import theano.tensor as T

synk.fork(2, use_gpu=False)
x = T.dvector("x")
f = synk.function([x], (x.sum(), "sum"))
synk.distribute()  # the workers are to be without the limit
no_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, no_limit[1]))
try:
    synk.function([x], (T.exp(x).sum(), "sum"))
except synk.SynkhronosError as error:
    assert "ulimit -f" in str(error), error
else:
    raise AssertionError("no error")
assert f(np.ones(4)) == 4
resource.setrlimit(resource.RLIMIT_FSIZE, no_limit)
assert synk.function([x], (T.exp(x).sum(), "sum"))(np.zeros(4)) == 4
synk.close()
""")


@needs_mounts
def test_a_full_disk_for_the_compile_cache_is_a_sentence_and_not_a_wait(run_mounted, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    run_mounted(
        f"mount -t tmpfs -o size=32m tmpfs {cache}",
        FULL_DISK,
        cache,
        flags=f"base_compiledir={cache},gcc.cxxflags=-O0",
        timeout=200,
    )


def test_what_the_user_has_set_is_where_theano_compiles(tmp_path):
    assert compile_cache.folder({"THEANO_FLAGS": "base_compiledir=/a,x=1"}) == Path("/a")
    assert compile_cache.folder({"THEANO_FLAGS": "base_compiledir=/a,compiledir=/b"}) == Path("/b")
    settings = tmp_path / "theanorc"
    settings.write_text("[global]\nbase_compiledir = ~/c\n")
    assert compile_cache.folder({"THEANORC": str(settings)}) == Path.home() / "c"
    assert compile_cache.folder({"THEANORC": ""}) == Path.home() / ".theano"


# Resource limits


def test_too_few_files_is_an_error_that_says_the_limit_and_leaves_a_usable_world(run_script):
    run_script("""
import resource
synk.fork(6, use_gpu=False)
x = T.dvector("x")
w = theano.shared(np.arange(3.0), name="w")
plain = synk.function([x], [(x.sum() + w.sum(), "sum")], mode="FAST_COMPILE")
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
is_open = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (is_open + 4, hard))
for _ in range(3):
    error = error_of(synk.distribute)
    assert isinstance(error, synk.SynkhronosError), repr(error)
    for word in ("of 5 workers", "Too many open files", "2 file descriptors", "ulimit -n"):
        assert word in str(error), (word, str(error))
    assert psutil.Process().children() == []
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
check_usable(6)  # the same world
synk.close()
files = [open(os.devnull) for _ in range(3)]
resource.setrlimit(resource.RLIMIT_NOFILE, (max(one.fileno() for one in files) + 1, hard))
error = error_of(lambda: synk.fork(6, use_gpu=False))
assert isinstance(error, synk.SynkhronosError), repr(error)
for word in ("fork()", "files are open", "ulimit -n"):
    assert word in str(error), (word, str(error))
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
del files[:]
open_world()
check_usable()
""")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_too_many_processes_is_an_error_that_says_the_limit_and_leaves_a_usable_world(tmp_path):
    """As another user: the limit does not bind root."""
    user = 54321
    folder = Path(tempfile.mkdtemp())  # pytest's own folders are for one user
    try:
        for name in ("synkhronos", "script.py"):
            if name == "synkhronos":
                shutil.copytree(ROOT / name, folder / name)
        (folder / "script.py").write_text(PRELUDE + """
import resource
synk.fork(4, use_gpu=False)
x = T.dvector("x")
w = theano.shared(np.arange(3.0), name="w")
plain = synk.function([x], [(x.sum() + w.sum(), "sum")], mode="FAST_COMPILE")
soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
mine = psutil.Process().num_threads()
resource.setrlimit(resource.RLIMIT_NPROC, (mine + 1, hard))
for _ in range(3):
    error = error_of(synk.distribute)
    assert isinstance(error, synk.SynkhronosError), repr(error)
    for word in ("only 1 of 3 workers", f"may have {mine + 1}", "ulimit -u", "pids-limit"):
        assert word in str(error), (word, str(error))
    assert psutil.Process().children() == []
resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))
check_usable(4)
# A late function needs a thread, to be pickled in.
resource.setrlimit(resource.RLIMIT_NPROC, (1, hard))
late = synk.function([x], (x.sum() * 2, "sum"), mode="FAST_COMPILE")
error = error_of(synk.distribute)
assert isinstance(error, MemoryError) and "ulimit -u" in str(error), repr(error)
resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))
assert late(np.ones(4)) == 8
check_usable(4)
""")  # fmt: skip
        for path in (folder, *folder.rglob("*")):
            os.chown(path, user, user)
        done = subprocess.run(
            ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups",
             sys.executable, str(folder / "script.py")],
            capture_output=True, text=True, timeout=60, cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder), "HOME": str(folder), "OMP_NUM_THREADS": "1",
                 "OPENBLAS_NUM_THREADS": "1",
                 "THEANO_FLAGS": f"base_compiledir={folder}/cache,cxx="},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("ranks", [2, 5])
def test_a_limit_on_address_space_leaves_half_of_it_to_the_script(run_script, ranks):
    run_script(
        """
import resource
ranks = int(sys.argv[1])
used = psutil.Process().memory_info().vms
soft, hard = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (used + (3 << 30), hard))
open_world(ranks)
check_usable(ranks)
left = (3 << 30) - (psutil.Process().memory_info().vms - used)
assert left > 1 << 30, left
late = synk.function([T.dvector()], T.constant(1.0), on_unused_input="ignore", mode="FAST_COMPILE")
assert late(np.ones(ranks)) == 1
error = error_of(lambda: synk.data(dtype="float64", shape=(1 << 30,)))
assert isinstance(error, MemoryError), repr(error)
check_usable(ranks)
synk.close()
resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (4 << 20), hard))
error = error_of(lambda: synk.fork(ranks, use_gpu=False))
assert isinstance(error, MemoryError) and "ulimit -v" in str(error), repr(error)
resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
open_world(ranks)
check_usable(ranks)
""",
        ranks,
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_out_of_memory_on_one_rank_is_an_error_and_the_world_goes_on(run_script, rank):
    """In Theano's C code, in a collective, in an output; before the others meet it, or after."""
    run_script(
        """
import resource
rank = int(sys.argv[1])
synk.fork(2, use_gpu=False)
n = T.lvector("n")
x = T.dvector("x")
w = theano.shared(np.arange(3.0), name="w")
plain = synk.function([x], [(x.sum() + w.sum(), "sum")], mode="FAST_COMPILE")
zeros = T.zeros((n[0], n[0]))
allocate = synk.function([n], (T.dot(zeros, zeros).sum(), "sum"))
huge = synk.function([n], (T.alloc(np.float64(1), n[0]), "gather"))
large = theano.shared(np.zeros(1), name="large")
grow = synk.function([n], updates=[(large, T.alloc(np.float64(1), n[0]))])
limit = synk.function([n], LimitMemory()(n)[0], mode="FAST_COMPILE")
synk.distribute()


def check(call):
    error = error_of(call, 20)
    if rank == 0:
        assert isinstance(error, MemoryError), repr(error)
    else:
        assert type(error) is synk.WorkerError and error.rank == 1, repr(error)
        assert error.type_name == "MemoryError", error
    check_usable()


def rows(other, own):
    return np.array([own, other] if rank == 0 else [other, own])


def fused(numbers):
    with synk.fuse():
        allocate(numbers)
        synk.all_reduce(w)


for numbers in (rows(2, 1 << 22), rows(2, 1 << 18)):  # 140 TB, 550 GB
    check(lambda: allocate(numbers))
    check(lambda: huge(numbers ** 2))
    check(lambda: fused(numbers))
limit(rows(0, 300 << 20))
check(lambda: allocate(rows(2, 8000)))  # 512 MB: malloc itself refuses
check(lambda: huge(rows(2, 64 << 20)))
check(lambda: fused(rows(2, 8000)))
limit(rows(0, -1))
assert allocate(np.array([2, 2])) == 0
assert len(huge(rows(2, 4 << 20))) == (4 << 20) + 2
check_usable()
""".replace(
            "synk.fork(2",
            '''
class LimitMemory(theano.Op):
    """Lets the rank have this many bytes more than it has; -1: any number."""

    __props__ = ()

    def make_node(self, n):
        return theano.Apply(self, [n], [T.dvector()])

    def perform(self, node, inputs, outputs):
        more, process = int(inputs[0][0]), psutil.Process()
        if more:
            _, hard = resource.getrlimit(resource.RLIMIT_AS)
            bound = hard if more < 0 else process.memory_info().vms + more
            resource.setrlimit(resource.RLIMIT_AS, (bound, hard))
        outputs[0][0] = np.zeros(1)


synk.fork(2''',
            1,
        ),
        rank,
    )


def test_a_command_or_a_reply_too_large_for_memory_leaves_a_usable_world(run_script):
    run_script("""
from synkhronos.stores import memory as shm
from synkhronos.world.here import Command


class Echo(Command):
    def __init__(self, there, back):
        self.there, self.back = there, back

    def run(self, here):
        return None if here.is_master else bytes(self.back)


open_world()
world = synk.world.world.current_world()
assert world.run(Echo(bytes(30 << 20), 30 << 20))[1] == bytes(30 << 20)
left = shm._memory_left
shm._memory_left = lambda: 20 << 20
error = error_of(lambda: world.run(Echo(bytes(40 << 20), 0)))
assert type(error) is MemoryError and "shared memory" in str(error), repr(error)
check_usable()
shm._memory_left = left
synk.close()
shm._memory_left = lambda: 20 << 20 if os.getpid() != MASTER else left()
open_world()
error = error_of(lambda: synk.world.world.current_world().run(Echo(b"", 30 << 20)))
assert type(error) is synk.WorkerError and error.rank == 1 and error.type_name == "MemoryError"
check_usable()
""")


# Control groups


@pytest.fixture
def memory_group():
    """A function that makes a control group of so many bytes; it returns the shell words to enter it."""
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
        while time.monotonic() < end:  # the last of its processes may be ending yet
            try:
                folder.rmdir()
                break
            except OSError:
                time.sleep(0.05)
        assert not folder.exists()


def run_in_group(folder, code, path, timeout=100):
    path.write_text("import faulthandler; faulthandler.dump_traceback_later(90, exit=True)\n" + code)
    return subprocess.run(
        ["sh", "-ec", f'echo $$ > {folder}/cgroup.procs\nexec "$@"', "sh", sys.executable, str(path)],
        capture_output=True, text=True, timeout=timeout, cwd=path.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def test_more_than_a_container_may_have_is_a_memory_error_before_the_kernel_kills(
    memory_group, tmp_path
):
    """Large blocks, many small ones, several ranks at once, and room that was taken but not written."""
    done = run_in_group(
        memory_group(600 * MEGABYTE),
        PRELUDE
        + """
from synkhronos.world.here import Command


class Take(Command):
    # Every rank takes 180 MB at once, and writes to what it got.

    def run(self, here):
        here.transport.barrier()
        try:
            taken = here.store.memory.allocate(180 << 20)
        except MemoryError:
            taken = None
        here.transport.barrier()
        if taken is not None:
            taken[:] = 1
        return taken is not None


open_world(3)


def refused(call):
    error = error_of(call, 60)
    assert isinstance(error, MemoryError) or error.type_name == "MemoryError", repr(error)
    for word in ("bytes were requested", "are left", "container", "--memory"):
        assert word in str(error), (word, str(error))
    check_usable(3)


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
synk.world.world.current_world().here.store.trim()
for _ in range(3):  # it would fit once or twice
    got = synk.world.world.current_world().run(Take())
    assert sum(got) < 3, got
    check_usable(3)
# What was taken last, and not yet written to, counts.
room = synk.world.world.current_world().here.store.memory
first = room.allocate(300 << 20)
refused(lambda: room.allocate(300 << 20))
del first
data = synk.data(np.ones(25 << 20, "float32"))
for _ in range(5):  # pages that are kept for the next block are given back where they are needed
    data.free_memory()
    data = synk.data(np.ones(25 << 20, "float32"))
assert (data.data == 1).all()
""",
        tmp_path / "script.py",
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stdout}{done.stderr}"


def test_files_that_are_only_cached_leave_a_container_its_room(memory_group, tmp_path):
    folder = memory_group(400 * MEGABYTE)
    (tmp_path / "file").write_bytes(b"")
    done = run_in_group(
        folder,
        PRELUDE
        + f"""
from synkhronos.host.machine import memory_room
folder = Path({str(folder)!r})
with open("file", "wb") as file:
    for _ in range(500):
        file.write(bytes(1 << 20))
    os.fsync(file.fileno())
with open("file", "rb") as file:
    while file.read(1 << 20):
        pass
open_world(2)
data = synk.data(np.ones(10 << 20))
assert plain(data) == [(10 << 20) + 6]
""",
        tmp_path / "script.py",
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stdout}{done.stderr}"


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


def test_the_number_of_processes_in_a_control_group(tmp_path):
    (tmp_path / "pids.max").write_text("max\n")
    assert machine.process_limit([tmp_path]) is None
    (tmp_path / "pids.max").write_text("70\n")
    assert machine.process_limit([tmp_path]) == 70
