"""Tests of how NVIDIA libraries are chosen, and whether the loader finds them, with fake files."""

import ctypes
import os
import subprocess
import sys

import pytest
from made_up_libraries import fixture_bare_machine, fixture_binaries, fixture_put  # noqa: F401
from made_up_libraries import path_of, wheels_of
from processes import FOLDER

from synkhronos.host import nvidia

pytestmark = pytest.mark.usefixtures("bare_machine")
RELEASE_12 = ("libnvrtc.so.12", "libnvrtc-builtins.so.12.4", "libcublas.so.12", "libcublasLt.so.12")


def found(*folders, cache=(), **environ):
    return nvidia.find({**path_of(*folders), **environ}, list(cache))


def files(libraries_found):
    return {name: str(library.file) for name, library in libraries_found.items()}


# The choice of files


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


# The search path


def test_folders_are_looked_at_in_order(put, monkeypatch):
    listed = put("listed", "libcuda.so.1", "libnccl.so.2")
    site = wheels_of(put)
    wheels = site / "nvidia/nccl/lib"
    conda, toolkit = put("conda/lib", "libnccl.so.2"), put("toolkit/targets/x/lib", "libnccl.so.2")
    cached, system = put("cached", "libnccl.so.2"), put("system", "libnccl.so.2")
    old, new = put("cuda-9.2/lib64", "libnccl.so.2"), put("cuda-12.10/lib64", "libnccl.so.2")
    monkeypatch.setattr(nvidia.sys, "path", [str(site)])
    monkeypatch.setattr(nvidia, "OF_DRIVERS", (str(system),))
    monkeypatch.setattr(nvidia, "RELEASES", (f"{system.parent}/cuda-*",))
    environ = {"CONDA_PREFIX": str(conda.parent), "CUDA_HOME": str(toolkit.parent.parent.parent)}
    order = [listed, wheels, conda, toolkit, cached, system, new, old]
    for place in order:
        answer = found(listed, cache=[cached / "libnccl.so.2"], **environ)
        assert answer["libnccl"].file.parent == place
        (place / "libnccl.so.2").unlink()


# What the loader finds


def loaded(name, environ):
    """Return the file that the loader itself chooses for a name, in a new process, or None."""
    command = [sys.executable, "-S", FOLDER / "programs" / "load_library.py", name]
    done = subprocess.run(
        command, env={**os.environ, **environ}, capture_output=True, text=True, timeout=60
    )
    return done.stdout.strip() or None


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
        assert str(nvidia.visible(name, environ, [])) == str(expected), folders


# Explanations


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
