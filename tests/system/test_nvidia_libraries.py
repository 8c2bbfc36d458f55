"""Tests of how NVIDIA libraries are chosen, and whether the loader finds them, with fake files."""

import ctypes
import multiprocessing
import multiprocessing.connection
import os
import stat
from pathlib import Path

import pytest
from made_up_libraries import fixture_bare_machine, fixture_binaries, fixture_put  # noqa: F401
from made_up_libraries import path_of, wheels_of
from processes import run_interpreter

from synkhronos.host import nvidia

pytestmark = pytest.mark.usefixtures("bare_machine")
RELEASE_12 = ("libnvrtc.so.12", "libnvrtc-builtins.so.12.4", "libcublas.so.12", "libcublasLt.so.12")


def found(*folders, **environ):
    return nvidia.find({**path_of(*folders), **environ})


def files(libraries_found):
    return {name: str(library.file) for name, library in libraries_found.items()}


def test_without_a_driver_nothing_is_found(put):
    assert found(put("a", *RELEASE_12)) == {}


def test_names_with_a_version_are_found(put):
    folder = put("a", "libcuda.so.1", "libnccl.so.2", *RELEASE_12)
    assert files(found(folder)) == {
        "libcuda": f"{folder}/libcuda.so.1",
        "libnvrtc": f"{folder}/libnvrtc.so.12",
        "libcublas": f"{folder}/libcublas.so.12",
        "libnccl": f"{folder}/libnccl.so.2",
    }


def test_what_a_library_loads_is_found_beside_it(put):
    folder = put("a", "libcuda.so.1", *RELEASE_12, "libcublasLt.so.11")
    answer = found(folder)
    assert answer["libcublas"].beside == (folder / "libcublasLt.so.12",)
    assert answer["libnvrtc"].beside == (folder / "libnvrtc-builtins.so.12.4",)


@pytest.mark.parametrize(
    ("missing", "name"), [("libnvrtc-builtins.so.12.4", "libnvrtc"), ("libcublasLt.so.12", "libcublas")]
)
def test_a_library_without_what_it_loads_is_not_taken(put, missing, name):
    folder = put("a", "libcuda.so.1", *(one for one in RELEASE_12 if one != missing))
    assert set(found(folder)) == {"libcuda", "libnvrtc", "libcublas"} - {name}


def test_nvrtc_is_no_newer_than_the_driver(put):
    driver = put("a", "libcuda.so.1", driver=12040)
    new = put("b", "libnvrtc.so.12", "libnvrtc-builtins.so.12.6", "libcublas.so.12", "libcublasLt.so.12")
    assert "libnvrtc" not in found(driver, new)
    fitting = put("c", *RELEASE_12)
    assert files(found(driver, new, fitting))["libnvrtc"] == f"{fitting}/libnvrtc.so.12"


def test_cublas_is_of_no_newer_major_version_than_the_driver(put):
    driver = put("a", "libcuda.so.1", driver=12040)
    new = put("b", "libcublas.so.13", "libcublasLt.so.13")
    assert "libcublas" not in found(driver, new)
    # All minor versions work with a driver of the same major version.
    fitting = put("c", "libcublas.so.12.9.1", "libcublasLt.so.12")
    assert files(found(driver, new, fitting))["libcublas"] == f"{fitting}/libcublas.so.12.9.1"


def test_a_pair_of_one_release_is_preferred(put):
    driver = put("a", "libcuda.so.1")
    old_nvrtc = put("b", "libnvrtc.so.11.2", "libnvrtc-builtins.so.11.8")
    release = put("c", *RELEASE_12)
    answer = files(found(driver, old_nvrtc, release))
    assert answer["libnvrtc"] == f"{release}/libnvrtc.so.12"
    assert answer["libcublas"] == f"{release}/libcublas.so.12"


def test_stubs_are_not_taken_not_even_by_a_link(put):
    stubs = put("cuda/stubs", "libcuda.so")
    folder = put("a")
    (folder / "libcuda.so.1").symlink_to(stubs / "libcuda.so")
    assert found(stubs, folder) == {}


def test_files_that_cannot_be_loaded_are_not_taken(put):
    folder = put("a", "libcuda.so.3")
    for name, content in [("libcuda.so.4", b""), ("libcuda.so.5", b"INPUT ( -lcuda )\n" * 9)]:
        (folder / name).write_bytes(content)
    foreign = bytearray((folder / "libcuda.so.3").read_bytes())
    foreign[4] ^= 3  # the word size: 1 is 32 bits, 2 is 64
    (folder / "libcuda.so.6").write_bytes(foreign)
    (folder / "libcuda.so.7").symlink_to("nowhere")
    for name in ("libcuda.so.4", "libcuda.so.5", "libcuda.so.6", "libcuda.so.7"):
        with pytest.raises(OSError):
            ctypes.CDLL(str(folder / name))
    assert files(found(folder)) == {"libcuda": f"{folder}/libcuda.so.3"}


def test_folders_are_looked_at_in_order(put, monkeypatch):
    listed = put("listed", "libcuda.so.1", "libnccl.so.2")
    site = wheels_of(put)
    wheels = site / "nvidia/nccl/lib"
    conda, toolkit = put("conda/lib", "libnccl.so.2"), put("toolkit/targets/x/lib", "libnccl.so.2")
    cached, system = put("cached", "libnccl.so.2"), put("system", "libnccl.so.2")
    old, new = put("cuda-9.2/lib64", "libnccl.so.2"), put("cuda-12.10/lib64", "libnccl.so.2")
    monkeypatch.setattr(nvidia.sys, "path", [str(site)])
    monkeypatch.setattr(nvidia, "loader_cache", lambda: [cached / "libnccl.so.2"])
    monkeypatch.setattr(nvidia, "OF_DRIVERS", (str(system),))
    monkeypatch.setattr(nvidia, "RELEASES", (f"{system.parent}/cuda-*",))
    environ = {"CONDA_PREFIX": str(conda.parent), "CUDA_HOME": str(toolkit.parent.parent.parent)}
    order = [listed, wheels, conda, toolkit, cached, system, new, old]
    for place in order:
        answer = found(listed, **environ)
        assert answer["libnccl"].file.parent == place
        (place / "libnccl.so.2").unlink()


def loaded(name, environ):
    """Return the file that the loader itself chooses for a name, in a new process, or None."""
    code = f"import ctypes; ctypes.CDLL({name!r}); print(open('/proc/self/maps').read())"
    maps = run_interpreter("-S", "-c", code, code=None, environment=environ).stdout.splitlines()
    return next((line.split()[-1] for line in maps if line.strip().endswith(name)), None)


def test_visible_is_what_the_loader_takes(put):
    name = "libmadeup.so"
    foreign, versioned, bare = put("a"), put("b", f"{name}.1"), put("c", name)
    content = bytearray((bare / name).read_bytes())
    content[4] ^= 3
    (foreign / name).write_bytes(content)
    later = put("d", name)
    for folders in ([versioned], [bare, later], [foreign, bare], [versioned, later], [foreign]):
        environ = path_of(*folders)
        expected = loaded(name, environ)
        assert str(nvidia.visible(name, environ)) == str(expected), folders


def explained(monkeypatch, *folders):
    monkeypatch.setenv("LD_LIBRARY_PATH", path_of(*folders)["LD_LIBRARY_PATH"])
    return nvidia.explain_missing()


def test_a_library_that_is_missing_is_named_with_the_remedy(put, monkeypatch):
    text = explained(monkeypatch, put("a", "libcuda.so", "libcublas.so.12", "libcublasLt.so.12"))
    assert text.startswith("libgpuarray needs libnvrtc.so, and no version that fits")
    assert 'pip install "nvidia-cuda-nvrtc<13.1", or' in text


def test_libraries_without_their_bare_names_are_named_with_the_remedy(put, monkeypatch):
    folder = put("a", "libcuda.so.1", *RELEASE_12, "libcublas.so")
    text = explained(monkeypatch, folder)
    assert text.startswith("libgpuarray looks for libcuda.so, libnvrtc.so, and does not find them")
    assert f"{folder}/libcuda.so.1" in text
    assert text.endswith("start the script with `python -m synkhronos run SCRIPT`")


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
    return Path(nvidia.environment(environ)["LD_LIBRARY_PATH"].split(":")[0])


def contents(folder):
    return {path.name: os.readlink(path) for path in folder.iterdir()}


def test_without_a_driver_nothing_changes(put, environ, tmp_path):
    environ = {**environ, **path_of(put("others", *NAMES[1:]))}
    assert nvidia.environment(environ) == {}
    assert not (tmp_path / "cache").exists()


def test_nothing_changes_where_all_that_is_there_is_visible(put, environ, tmp_path):
    put("libraries", "libcuda.so", "libnvrtc.so", "libcublas.so", "libnccl.so")
    assert nvidia.environment(environ) == {}
    assert not (tmp_path / "cache").exists()


def test_the_bare_names_and_what_is_loaded_with_them_have_links(environ):
    libraries = Path(environ["LD_LIBRARY_PATH"])
    bare = {"libcuda.so": 0, "libnvrtc.so": 1, "libcublas.so": 3, "libnccl.so": 5}
    expected = {name: str(libraries / name) for name in NAMES}
    expected.update((name, str(libraries / NAMES[index])) for name, index in bare.items())
    assert contents(folder_of(environ)) == expected


def test_a_process_that_has_the_links_needs_no_change(environ):
    again = {**environ, **nvidia.environment(environ)}
    assert nvidia.environment(again) == {}


def test_nobody_else_may_look_or_write(environ, tmp_path):
    old = os.umask(0)
    try:
        folder = folder_of(environ)
    finally:
        os.umask(old)
    while folder != tmp_path:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder
        folder = folder.parent


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
