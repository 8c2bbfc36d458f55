"""Tests of the private folder of links to NVIDIA's libraries, with fake files."""

import multiprocessing
import multiprocessing.connection  # noqa: F401  # it cannot be found on the bare machine
import os
import stat
import time
from pathlib import Path

import pytest
from made_up_libraries import fixture_bare_machine, fixture_binaries, fixture_put  # noqa: F401
from made_up_libraries import path_of

from synkhronos.host import nvidia

pytestmark = pytest.mark.usefixtures("bare_machine")
NAMES = (
    "libcuda.so.1",
    "libnvrtc.so.13",
    "libnvrtc-builtins.so.13.0",
    "libcublas.so.13",
    "libcublasLt.so.13",
    "libnccl.so.2",
)


@pytest.fixture(autouse=True)
def temporary_folder(monkeypatch, tmp_path):
    """Replacement for the system's temporary folder, which is the last choice for the links."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr(nvidia.tempfile, "gettempdir", lambda: str(folder))
    return folder


@pytest.fixture
def environ(put, tmp_path):
    """Environment of a process that can find the libraries, but not under their bare names."""
    return {**path_of(put("libraries", *NAMES)), "XDG_CACHE_HOME": str(tmp_path / "cache")}


def folder_of(environ):
    """Create the links, and return their folder."""
    return Path(nvidia.environment(environ, [])["LD_LIBRARY_PATH"].split(":")[0])


def contents(folder):
    return {path.name: os.readlink(path) for path in folder.iterdir()}


def test_without_a_driver_nothing_changes(put, environ, tmp_path):
    environ = {**environ, **path_of(put("others", *NAMES[1:]))}
    assert nvidia.environment(environ, []) == {}
    assert not (tmp_path / "cache").exists()


def test_nothing_changes_where_all_that_is_there_is_visible(put, environ, tmp_path):
    put("libraries", "libcuda.so", "libnvrtc.so", "libcublas.so", "libnccl.so")
    assert nvidia.environment(environ, []) == {}
    assert not (tmp_path / "cache").exists()


def test_the_bare_names_and_what_is_loaded_with_them_have_links(environ):
    libraries = Path(environ["LD_LIBRARY_PATH"])
    bare = {"libcuda.so": 0, "libnvrtc.so": 1, "libcublas.so": 3, "libnccl.so": 5}
    expected = {name: str(libraries / name) for name in NAMES}
    expected.update((name, str(libraries / NAMES[index])) for name, index in bare.items())
    assert contents(folder_of(environ)) == expected


def test_a_process_that_has_the_links_needs_no_change(environ):
    again = {**environ, **nvidia.environment(environ, [])}
    assert nvidia.environment(again, []) == {}


def test_nobody_else_may_look_or_write(environ, tmp_path):
    old = os.umask(0)
    try:
        folder = folder_of(environ)
    finally:
        os.umask(old)
    while folder != tmp_path:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder
        folder = folder.parent


# One folder, no matter which process creates it


def test_the_folder_is_used_again(environ):
    folder = folder_of(environ)
    before = {path: path.lstat().st_ino for path in folder.iterdir()}
    assert folder_of(environ) == folder
    assert {path: path.lstat().st_ino for path in folder.iterdir()} == before


def test_processes_at_once_make_one_folder(environ, tmp_path):
    context = multiprocessing.get_context("fork")
    with context.Pool(8) as pool:
        folders = pool.map(folder_of, [environ] * 64, chunksize=1)
    assert len(set(folders)) == 1
    assert list((tmp_path / "cache" / "synkhronos").iterdir()) == [folders[0]]
    assert len(contents(folders[0])) == len(NAMES) + 4


def test_missing_and_wrong_links_are_repaired(environ):
    folder = folder_of(environ)
    whole = contents(folder)
    (folder / "libcuda.so").unlink()
    (folder / "libnccl.so").unlink()
    (folder / "libnccl.so").symlink_to("/elsewhere")
    assert contents(folder_of(environ)) == whole


def outdated(folder, days):
    (folder / "libgone.so").symlink_to("/nowhere/libgone.so")
    os.utime(folder, (time.time() - days * 86400,) * 2)


@pytest.mark.parametrize(("days", "stays"), [(31, False), (29, True)])
def test_links_to_what_has_gone_are_removed_when_long_unused(put, environ, days, stays):
    old = folder_of({**environ, **path_of(put("others", *NAMES))})
    outdated(old, days)
    assert folder_of(environ) != old
    assert old.exists() == stays


# Protection against other users


def test_a_folder_that_others_may_change_is_not_used(environ, tmp_path, temporary_folder):
    cache = tmp_path / "cache"
    cache.mkdir()
    for mode in (0o770, 0o707):
        cache.chmod(mode)
        assert folder_of(environ).parent == temporary_folder / f"synkhronos-{os.geteuid()}"
    cache.chmod(0o755)
    assert folder_of(environ).parent == cache / "synkhronos"


def test_a_folder_that_others_have_made_is_not_used(environ, temporary_folder):
    (temporary_folder / f"synkhronos-{os.geteuid()}").mkdir()
    (temporary_folder / f"synkhronos-{os.geteuid()}").chmod(0o777)
    with pytest.raises(OSError, match="others may write in .*temporary/synkhronos-"):
        folder_of({"LD_LIBRARY_PATH": environ["LD_LIBRARY_PATH"]})


def test_a_folder_of_another_user_is_not_used(environ, monkeypatch):
    folder_of(environ)
    someone = os.geteuid() + 1
    monkeypatch.setattr(nvidia.os, "geteuid", lambda: someone)
    with pytest.raises(OSError, match="belongs to another user"):
        folder_of(environ)


def test_a_link_to_where_others_may_write_is_not_followed(environ, tmp_path, temporary_folder):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "cache").symlink_to("open")
    assert folder_of(environ).parent.parent == temporary_folder
    assert not list((tmp_path / "open").glob("*/*"))


def test_links_where_the_folder_should_be_are_not_followed_to_others(environ, tmp_path):
    folder = folder_of(environ)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    folder.symlink_to(tmp_path / "open")
    assert folder_of(environ).parent.parent != tmp_path / "cache"
    assert not list((tmp_path / "open").iterdir())


def test_without_any_place_it_says_where_it_tried(environ, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(nvidia.tempfile, "gettempdir", lambda: str(tmp_path / "file"))
    environ["XDG_CACHE_HOME"] = str(tmp_path / "file")
    with pytest.raises(OSError, match="file/synkhronos: File exists; .*XDG_CACHE_HOME"):
        folder_of(environ)
