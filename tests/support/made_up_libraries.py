"""Fixtures that create small shared libraries with the names of NVIDIA's, which the loader can load.

A test module imports the fixtures that it uses, and the fixtures that these depend on.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from synkhronos.host import nvidia

SOURCE = """
extern "C" int cuDriverGetVersion(int *version) { *version = DRIVER; return DRIVER ? 0 : 34; }
extern "C" int ncclGetVersion(int *version) { *version = 22809; return 0; }
"""


def compiled(folder, driver):
    """Compile a library that reports the given CUDA driver version."""
    source, library = folder / "library.cpp", folder / f"library-{driver}.so"
    source.write_text(SOURCE)
    command = ["g++", "-shared", "-fPIC", "-nostdlib", f"-DDRIVER={driver}", "-o", library, source]
    subprocess.run(command, check=True, timeout=60)
    return library


@pytest.fixture(scope="session", name="binaries")
def fixture_binaries(tmp_path_factory):
    """Dictionary of the libraries by driver version. Version 0 is not reported, as with stubs."""
    folder = tmp_path_factory.mktemp("binaries")
    return {driver: compiled(folder, driver) for driver in (0, 12040, 13000)}


@pytest.fixture(name="put")
def fixture_put(binaries, tmp_path):
    """Function that puts libraries into a folder, and returns the folder."""

    def put_it(folder, *names, driver=13000):
        folder = tmp_path / folder
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            shutil.copyfile(binaries[driver], folder / name)
        return folder

    return put_it


@pytest.fixture(name="bare_machine")
def fixture_bare_machine(monkeypatch, tmp_path):
    """Hide this machine's own libraries from the search in this process."""
    for name in ("OF_DRIVERS", "LOADERS_OWN", "RELEASES"):
        monkeypatch.setattr(nvidia, name, ())
    monkeypatch.setattr(nvidia, "loader_cache", lambda: [])
    monkeypatch.setattr(nvidia.sys, "path", [])
    for name in ("prefix", "base_prefix"):
        monkeypatch.setattr(nvidia.sys, name, str(tmp_path / "no-prefix"))
    for name in ("LD_LIBRARY_PATH", "CONDA_PREFIX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)


def all_are_visible():
    """Return whether the loader finds all libraries of this machine under their bare names."""
    return all(nvidia.visible(f"{name}.so") for name in nvidia.NAMES)


def path_of(*folders):
    """Return environment variables with these folders in ``LD_LIBRARY_PATH``."""
    return {"LD_LIBRARY_PATH": ":".join(map(str, folders))}


def wheels_of(put, major=13, minor=0):
    """Create the files that pip's wheels install; return the folder for ``sys.path``."""
    nvrtc = (f"libnvrtc.so.{major}", f"libnvrtc-builtins.so.{major}.{minor}")
    cublas = (f"libcublas.so.{major}", f"libcublasLt.so.{major}")
    folder = f"site-{major}.{minor}"
    put(f"{folder}/nvidia/cu{major}/lib", *nvrtc, *cublas)
    put(f"{folder}/nvidia/nccl/lib", "libnccl.so.2")
    return Path(put(folder))
