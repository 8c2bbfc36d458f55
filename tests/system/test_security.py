"""Tests that other users cannot access a world, and that planted links and pipes do no harm."""

import json
import os
import pstats
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import theano.tensor as tt
from prelude import restore_signals, run_file
from processes import FOLDER, ROOT, run_interpreter

import synkhronos as synk
from synkhronos.world import threads
from synkhronos.host import environment
from synkhronos.host.doctor import checks
from synkhronos.host.doctor.check import OK, WARNING
from synkhronos.host.compile_cache import folder as cache_folder, outsider

NOBODY = 65534
PROGRAMS = FOLDER / "programs"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as a second user")


def become_nobody():
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def run_as(become, code, *arguments, **keywords):
    """Run code in a new interpreter, as the user that `become` selects; return what it printed."""
    keywords = {"preexec_fn": become, "start_new_session": True, **keywords}
    return run_interpreter("-I", "-c", code, *arguments, **keywords).stdout


@pytest.fixture
def nobody():
    """Function with which a process becomes a second user. The test is skipped if it cannot work."""
    if os.geteuid() != 0:
        pytest.skip("only root can act as a second user")
    try:
        run_as(become_nobody, "pass", cwd="/")
    except (AssertionError, OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"a second user cannot run this Python: {error}")
    return become_nobody


@pytest.fixture
def open_folder():
    """Folder that a second user can access, unlike the folders of pytest."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def victim():
    """Process that runs ``victim.py``, connected by pipes. It ends with the test."""
    process = subprocess.Popen(
        [sys.executable, PROGRAMS / "victim.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, bufsize=1,
        preexec_fn=restore_signals,
    )  # fmt: skip
    yield process
    process.stdin.close()
    process.stdout.close()
    assert process.wait(100) == 0


def planted_modules(folder, marker):
    """Create modules in a folder that write to the file `marker` when they are imported."""
    for name in ("ctypes", "json", "multiprocessing", "numpy", "pygpu", "pwd", "secrets", "theano"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"open({str(marker)!r}, 'a').write({name!r})\n")


def test_a_second_user_can_neither_read_nor_write_nor_stop_a_rank(nobody, victim):
    attacker = (PROGRAMS / "attacker.py").read_text()  # the second user may not read the file
    told = json.loads(victim.stdout.readline())
    assert len(told["pids"]) == 2
    for pid in told["pids"]:
        # The same attacks as the victim's own user, for comparison.
        own = json.loads(run_as(None, attacker, pid, told["address"]))
        assert own["read memory"] == np.float64(123456.789).tobytes().hex()
        attacks = json.loads(run_as(nobody, attacker, pid, told["address"], cwd="/"))
        assert {"SIGKILL", "ptrace", "read memory"} < set(attacks)
        assert set(attacks.values()) <= {"EPERM", "EACCES"}, attacks
    victim.stdin.write("again\n")
    assert float(victim.stdout.readline()) == pytest.approx(123456.789 * 64 * 64)


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_a_world_creates_no_files_outside_the_cache_and_no_sockets_or_named_ipc_objects(tmp_path):
    trace = tmp_path / "trace"
    kinds = "trace=file,bind,connect,clone,clone3,fork,vfork,memfd_create,shmget,msgget,semget"
    strace = ["strace", "-f", "-qq", "-o", trace, "-e", kinds]
    done = run_file("traced_world.py", cwd=tmp_path, timeout=100, check=False, command=strace)
    if "ptrace" in done.stderr.lower():
        pytest.skip(f"strace may not trace here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    lines = trace.read_text().splitlines()
    begin = next(number for number, line in enumerate(lines) if '"/begin"' in line)
    end = next(number for number, line in enumerate(lines) if '"/end"' in line)
    during = lines[begin:end]
    made = [line for line in during if "O_CREAT" in line and "ENOENT" not in line]
    assert [line for line in during if re.search(r"clone|fork\(", line)]  # workers have started
    assert not [line for line in during if '"/dev/shm' in line]
    # The only files written are in Theano's cache. There are no sockets or named IPC objects either.
    cache = os.path.realpath(cache_folder(os.environ))
    for line in made:
        path = re.search('"([^"]+)"', line).group(1)
        assert path.startswith((cache, "/dev/null")), line
    doors = ("bind(", "connect(", "mknod", "shmget(", "msgget(", "semget(")
    assert not [line for line in during if any(f" {door}" in line for door in doors)]
    # Two files have no name: that whose bytes are locks, and the status. Other programs do not get them.
    unnamed = [line.partition("memfd_create(")[2] for line in during if "memfd_create(" in line]
    assert sorted(line.partition(")")[0] for line in unnamed) == [
        '"synkhronos-locks", MFD_CLOEXEC', '"synkhronos-status", MFD_CLOEXEC|MFD_ALLOW_SEALING',
    ]  # fmt: skip


@pytest.mark.slow
def test_nothing_is_imported_from_the_current_directory_but_by_python_itself(tmp_path):
    hostile, marker = tmp_path / "hostile", tmp_path / "marker"
    hostile.mkdir()
    planted_modules(hostile, marker)
    run_file("many_imports.py", cwd=hostile, timeout=100)
    assert not marker.exists(), marker.read_text()


def profile_workers():
    os.umask(0)
    synk.fork(2, use_gpu=False, profile_workers=True)
    synk.distribute()
    synk.close()


@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "file", "folder"])
def test_a_workers_profile_is_never_written_through_an_existing_file(programs, tmp_path, kind):
    planted, precious = tmp_path / "synk_worker_1.prof", tmp_path / "precious"
    if kind == "link":
        precious.write_text("precious")
    if kind.endswith("link"):
        planted.symlink_to(precious)
    elif kind == "pipe":
        os.mkfifo(planted)
    elif kind == "folder":
        planted.mkdir()
    else:
        planted.write_text("old")
        planted.chmod(0o666)
    done = programs.run(profile_workers, cwd=tmp_path).check()
    assert precious.exists() == (kind == "link")
    if kind == "link":
        assert precious.read_text() == "precious"
    if kind == "folder":
        assert "synk_worker_1.prof was not written" in done.stderr
    else:
        status = planted.lstat()
        assert stat.S_ISREG(status.st_mode) and stat.S_IMODE(status.st_mode) == 0o600
        assert pstats.Stats(str(planted)).total_calls > 0
    assert [path for path in os.listdir(tmp_path) if path.startswith("synk")] == [planted.name]


def test_a_profile_that_another_user_blocks_is_a_warning_and_not_an_error(nobody, open_folder):
    crowd = open_folder / "crowd"
    crowd.mkdir()
    crowd.chmod(0o1777)
    (crowd / "synk_worker_1.prof").write_text("root's")
    (open_folder / "cache").mkdir()
    os.chown(open_folder / "cache", NOBODY, NOBODY)
    script = shutil.copy(PROGRAMS / "profiled_world.py", open_folder)
    flags = f"cxx=,base_compiledir={open_folder}/cache"
    done = run_file(
        script,
        cwd=crowd,
        timeout=100,
        command=["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"],
        environment={"PYTHONPATH": str(ROOT), "THEANO_FLAGS": flags, "TMPDIR": str(crowd)},
    )
    assert done.stdout == "6.0\n"
    assert "synk_worker_1.prof was not written" in done.stderr
    assert (crowd / "synk_worker_1.prof").read_text() == "root's"
    assert os.listdir(crowd) == ["synk_worker_1.prof"]


@pytest.fixture
def summed(world_of):
    world_of(2)
    x = tt.dmatrix("x")
    f = synk.function([x], (x.sum(), "sum"))
    synk.distribute()
    f(np.ones((2, 2)))
    return f


@pytest.fixture
def path(tmp_path):
    np.save(tmp_path / "rows.npy", np.ones((8, 3)))
    np.save(tmp_path / "other.npy", np.full((8, 3), 2.0))
    return tmp_path / "rows.npy"


@pytest.mark.parametrize("kind", ["file", "pipe"])
def test_a_file_that_took_the_place_of_a_mapped_one_is_not_read(summed, path, kind):
    data = synk.data(np.load(path, mmap_mode="r"))
    if kind == "pipe":
        path.unlink()
        os.mkfifo(path)
    else:
        os.replace(path.with_name("other.npy"), path)
    with pytest.raises(OSError, match="rows.npy is no longer the file .*set_value"):
        summed(data)
    assert summed(np.ones((4, 3))) == 12
    np.save(path.with_name("third.npy"), np.full((8, 3), 3.0))
    os.replace(path.with_name("third.npy"), path)
    data.set_value(np.load(path, mmap_mode="r"))
    assert summed(data) == 72


def test_a_mapping_of_a_file_that_has_been_replaced_is_copied(summed, path):
    mapped = np.load(path, mmap_mode="r")
    os.replace(path.with_name("other.npy"), path)
    data = synk.data(mapped)
    assert data.data.sum() == 24
    assert summed(data) == 24


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="needs /proc")
def test_shared_memory_stays_out_of_core_dumps(two):
    address = synk.world.world.current_world().rank_state.store.memory.address
    entries = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)
    [entry] = [one for one in entries if one.startswith(f"{address:x}-")]
    assert " dd" in re.search("VmFlags:(.*)", entry).group(1)


@pytest.fixture
def cache(tmp_path):
    (tmp_path / "cache" / "compiledir_x" / "tmpabc").mkdir(parents=True)
    (tmp_path / "cache" / "compiledir_x" / "tmpabc" / "key.pkl").write_bytes(b"")
    for path in [tmp_path / "cache", *(tmp_path / "cache").rglob("*")]:
        path.chmod(0o700 if path.is_dir() else 0o600)
    return tmp_path / "cache"


def test_a_cache_of_ones_own_is_safe(cache):
    assert outsider(cache) is None
    assert outsider(cache / "not there yet") is None


PARTS = ["", "compiledir_x", "compiledir_x/tmpabc", "compiledir_x/tmpabc/key.pkl", ".."]


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_every_user_can_write_is_named(cache, part):
    path = (cache / part).resolve()
    path.chmod(0o777)
    assert outsider(cache) == f"{path} is writable by every user"
    path.chmod(0o1777)  # with the sticky bit, other users can still create files there
    assert (outsider(cache) is None) == (part == "..")


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_cache_that_another_can_make_first_is_named(cache, mode):
    cache.chmod(mode)
    missing = cache / "to be made"
    assert outsider(missing).startswith(f"{missing} does not exist yet")


@as_root
@pytest.mark.parametrize("part", ["compiledir_x", "compiledir_x/tmpabc/key.pkl", ".."])
def test_a_part_of_another_user_is_named(cache, part):
    path = (cache / part).resolve()
    os.chown(path, NOBODY, -1)
    assert re.fullmatch(f"{path} belongs to the user .*", outsider(cache))


@as_root
def test_a_link_of_another_user_is_named_and_one_of_ones_own_followed(cache, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(cache)
    assert outsider(link) is None
    (cache / "compiledir_x").chmod(0o777)
    assert "compiledir_x is writable by every user" in outsider(link)
    os.lchown(link, NOBODY, NOBODY)
    assert outsider(link).startswith(f"{link} belongs to")


@as_root
def test_a_group_counts_unless_it_has_no_other_member(cache):
    (cache / "compiledir_x").chmod(0o770)
    assert outsider(cache) is None  # root's own group
    os.chown(cache / "compiledir_x", -1, NOBODY)
    assert outsider(cache).endswith(f"is writable by the group {NOBODY}")


def test_the_doctor_warns_of_a_cache_that_others_can_change(cache, monkeypatch):
    monkeypatch.setenv("THEANO_FLAGS", f"base_compiledir={cache}")
    (check,) = (one for one in checks.OF_THEANO if one.name == "Theano's cache")
    assert check.run().state == OK
    cache.chmod(0o777)
    result = check.run()
    assert result.state == WARNING and str(cache) in result.found
    assert "base_compiledir" in result.remedy


def test_the_doctor_looks_at_the_cache_before_theano_loads_from_it():
    names = [one.name for one in checks.OF_THEANO]
    assert names.index("Theano's cache") < names.index("Theano")


@pytest.mark.parametrize(
    ("flags", "settings", "expected"),
    [
        ("", "", "~/.theano"),
        ("base_compiledir=/a", "", "/a"),
        ("base_compiledir=~/a", "", "~/a"),
        ("", "[global]\nbase_compiledir = /b", "/b"),
        ("base_compiledir=/a", "[global]\nbase_compiledir = /b", "/a"),
        ("base_compiledir=/a,compiledir=/c", "", "/c"),
    ],
)
def test_the_cache_is_looked_for_where_theano_has_it(tmp_path, flags, settings, expected):
    (tmp_path / "theanorc").write_text(settings)
    environ = {"THEANO_FLAGS": flags, "THEANORC": str(tmp_path / "theanorc")}
    assert cache_folder(environ) == Path(expected).expanduser()


def test_the_cache_is_where_theano_says_that_it_is():
    import theano

    folder = Path(os.path.realpath(cache_folder(os.environ)))
    assert folder in Path(theano.config.compiledir).parents


EVIL = ["__import__('os').system('touch marker')", "$(touch marker)", "`touch marker`", "; touch marker",
        "%(os)s", "²", "9" * 5000, "-1", "\\"]  # fmt: skip


@pytest.mark.parametrize("value", EVIL)
def test_numbers_in_the_environment_are_read_and_not_evaluated(monkeypatch, world_of, tmp_path, value):
    monkeypatch.chdir(tmp_path)
    for name in threads._VARIABLES.values():
        monkeypatch.setenv(name, value)
    world_of(2)
    synk.close()
    assert os.environ["OMP_NUM_THREADS"] == value
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("value", [one for one in EVIL if one.isascii()])
def test_flags_of_theano_are_read_and_not_evaluated(monkeypatch, tmp_path, value):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rc").write_text(f"[global]\nbase_compiledir = {value}\n")
    environ = {"THEANORC": str(tmp_path / "rc"), "THEANO_FLAGS": "floatX=float32"}
    assert environment.user_setting("base_compiledir", environ) == value.strip()
    if "'" not in value and "\\" not in value:
        environ["THEANO_FLAGS"] = f"base_compiledir={value}"
        assert environment.user_setting("base_compiledir", environ) == value
    assert os.listdir(tmp_path) == ["rc"]


@pytest.mark.parametrize("name", ["-c", "-cprint(6*7)", "-m", "--version"])
def test_run_takes_a_scripts_name_for_a_name_whatever_it_looks_like(tmp_path, name):
    command = [sys.executable, "-m", "synkhronos", "run", "--", name, "print(6*7)"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    keywords = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run(command, timeout=60, **keywords)
    assert (done.returncode, done.stdout) == (2, ""), done
    (tmp_path / name).write_text("import sys\nprint(sys.argv[1:])\n")
    assert subprocess.run(command, timeout=60, **keywords).stdout == "['print(6*7)']\n"
