"""Tests of files that are replaced in a single step: their modes, links to them, and their names."""

import errno
import os
import resource
import stat
from pathlib import Path

import pytest

from synkhronos.checkpoints.archive import replacing, target

OTHER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can create files of a second user")


def write(path, content=b"new"):
    with replacing(path) as file:
        file.write(content)


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def umask():
    """Function that sets the umask until the end of the test."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


@pytest.mark.parametrize("mask, mode", [(0o027, 0o640), (0o077, 0o600), (0, 0o666)])
def test_a_new_file_has_the_mode_of_the_umask(tmp_path, umask, mask, mode):
    umask(mask)
    write(tmp_path / "file")
    assert mode_of(tmp_path / "file") == mode


@pytest.mark.parametrize("mode", [0o600, 0o444, 0o664, 0o777])
@pytest.mark.parametrize("mask", [0, 0o077])
def test_a_file_that_is_replaced_keeps_its_mode(tmp_path, umask, mode, mask):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(mode)
    umask(mask)
    with replacing(path) as file:
        assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077 == 0  # nobody can read it early
        file.write(b"new")
    assert mode_of(path) == mode and path.read_bytes() == b"new"


@as_root
def test_a_file_that_is_replaced_keeps_its_owner_and_group(tmp_path):
    path = tmp_path / "file"
    path.touch(0o640)
    os.chown(path, OTHER, OTHER)
    write(path)
    assert (path.stat().st_uid, path.stat().st_gid, mode_of(path)) == (OTHER, OTHER, 0o640)


@as_root
def test_what_was_for_a_group_is_not_for_another_one(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.touch()
    os.chown(path, -1, OTHER)
    path.chmod(0o664)
    asked = []

    def fchown(descriptor, owner, group):
        asked.append((owner, group))
        raise PermissionError

    monkeypatch.setattr(os, "fchown", fchown)
    write(path)
    assert asked == [(os.geteuid(), OTHER), (-1, OTHER)]
    assert path.stat().st_gid != OTHER and mode_of(path) == 0o604


def test_links_of_the_same_user_are_followed(tmp_path):
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "to folder").symlink_to("folder/inner")
    (tmp_path / "to link").symlink_to(tmp_path / "to folder" / ".." / "file")
    os.symlink("to link", tmp_path / "link")
    write(tmp_path / "link")
    assert (tmp_path / "folder" / "file").read_bytes() == b"new"
    assert (tmp_path / "link").is_symlink() and (tmp_path / "to link").is_symlink()
    tmp_path.chmod(0o1777)
    write(tmp_path / "link")


def test_paths_are_what_the_system_makes_of_them(tmp_path, monkeypatch):
    folder = Path(os.path.realpath(tmp_path))
    (folder / "folder").mkdir()
    (folder / "link").symlink_to(folder / "folder")
    monkeypatch.chdir(folder / "folder")
    for path in ("file", "./file", b"file", "../folder//file", folder / "link" / "file", "../link/file"):
        assert target(path) == str(folder / "folder" / "file")
    assert target("../link/../file") == str(folder / "file")
    (folder / "loop").symlink_to("loop")
    with pytest.raises(OSError) as error:
        write(folder / "loop")
    assert error.value.errno == errno.ELOOP and (folder / "loop").is_symlink()
    with pytest.raises(NotADirectoryError):
        (folder / "file").touch()
        write(folder / "file" / "file")


@as_root
@pytest.mark.parametrize("kind", ["link", "chain", "link to a folder", "file"])
def test_what_another_user_has_planted_in_a_folder_for_everybody_is_refused(tmp_path, kind):
    crowd, own = tmp_path / "crowd", tmp_path / "own"
    crowd.mkdir()
    own.mkdir()
    precious, planted = own / "precious", crowd / "planted"
    precious.write_bytes(b"precious")
    path = planted
    if kind == "file":
        planted.write_bytes(b"theirs")
    elif kind == "link to a folder":
        planted.symlink_to(own)
        path = planted / "precious"
    else:
        planted.symlink_to(precious)
    if kind == "chain":
        path = own / "chain"
        path.symlink_to(planted)
    os.lchown(planted, OTHER, OTHER)
    crowd.chmod(0o1777)
    before = sorted([*crowd.iterdir(), *own.iterdir()])
    what = "file" if kind == "file" else "link"
    refused = f"got the {what} '{planted}' of the user with the number {OTHER}"
    with pytest.raises(PermissionError, match=refused):
        write(path)
    assert precious.read_bytes() == b"precious"
    assert sorted([*crowd.iterdir(), *own.iterdir()]) == before
    os.chown(crowd, OTHER, -1)  # as in Linux, the owner of the folder may create links in it
    write(path)
    os.chown(crowd, 0, -1)
    crowd.chmod(0o755)  # only its owner can have created links here
    write(path)


@pytest.mark.parametrize("name", ["n" * 100, "n" * 101, "n" * 226, "n" * 227, "n" * 255, "ü" * 127])
def test_a_name_may_be_as_long_as_the_file_system_allows(tmp_path, name):
    with pytest.raises(InterruptedError), replacing(tmp_path / name):
        [unfinished] = os.listdir(tmp_path)
        raise InterruptedError
    (tmp_path / f"{unfinished[:-27]}{7:016x}.unfinished").touch()  # a leftover
    for content in (b"first", b"second"):
        write(tmp_path / name, content)
        assert os.listdir(tmp_path) == [name] and (tmp_path / name).read_bytes() == content


def test_a_name_that_is_too_long_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(OSError) as error, replacing(tmp_path / ("n" * 256)):
        pytest.fail("nothing can replace it")
    assert error.value.errno == errno.ENAMETOOLONG and not list(tmp_path.iterdir())


def test_it_is_on_disk_before_it_replaces_the_old_file_and_its_name_afterwards(tmp_path, monkeypatch):
    folder = os.path.realpath(tmp_path)
    path = os.path.join(folder, "file")
    done = []

    def note(name, call):
        def noting(*arguments):
            places = [os.readlink(f"/proc/self/fd/{one}") if isinstance(one, int) else one
                      for one in arguments]  # fmt: skip
            done.append((name, *places))
            if name == "fsync" and places[0] != folder:
                assert Path(places[0]).read_bytes() == b"new", "not all of it has been written"
            return call(*arguments)

        return noting

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, note(name, getattr(os, name)))
    for _ in range(2):
        write(path)
    written = [one[1] for one in done if one[0] == "replace"]
    assert len(set(written)) == 2 and all(os.path.dirname(one) == folder for one in written)
    assert done == [
        step for one in written for step in (("fsync", one), ("replace", one, path), ("fsync", folder))
    ]


@pytest.mark.parametrize("exists", [True, False])
def test_a_full_disk_leaves_the_old_file_and_says_so(tmp_path, exists):
    path = tmp_path / "file"
    if exists:
        path.write_bytes(b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    state = "the file there is unchanged" if exists else "no file is left there"
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(OSError, match=f"File too large; .* and {state}: '{path}'") as caught:
            with replacing(path) as file:
                file.write(bytes(1 << 17))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
    assert [one.read_bytes() for one in tmp_path.iterdir()] == [b"old"] * exists
