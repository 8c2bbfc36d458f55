"""Tests of the doctor's checks of GPUs, on machines with and without GPUs."""

import os
import sys

import pytest
from made_up_libraries import fixture_bare_machine, fixture_binaries, fixture_put  # noqa: F401
from made_up_libraries import all_are_visible, path_of

import synkhronos as synk
from synkhronos.host import environment
from synkhronos.host.doctor import checks, gpus
from synkhronos.host.doctor.check import OK, WARNING

pytestmark = pytest.mark.usefixtures("bare_machine")
NAMES = ("libnvrtc.so.13", "libnvrtc-builtins.so.13.0", "libcublas.so.13", "libcublasLt.so.13")
CHECKS = {one.name: one for one in checks.CHECKS}
BARE = ("libcuda.so", "libnvrtc.so", "libcublas.so", "libnccl.so")


@pytest.fixture
def devices(tmp_path, monkeypatch):
    folder = tmp_path / "dev"
    folder.mkdir()
    monkeypatch.setattr(gpus, "DEVICES", folder)
    return folder


@pytest.fixture
def gpu(devices):
    (devices / "nvidia0").touch()
    return devices


@pytest.fixture
def libraries(put, tmp_path, monkeypatch):
    """Function that creates libraries in a folder, and puts it into this process's search path."""

    def put_them(*names):
        folder = put("libraries", *names)
        monkeypatch.setenv("LD_LIBRARY_PATH", path_of(folder)["LD_LIBRARY_PATH"])
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        return folder

    return put_them


def test_without_a_gpu_neither_pygpu_nor_nccl_is_missed(monkeypatch, devices):
    monkeypatch.setattr(gpus, "PYGPU_PROBE", "import a_module_that_is_not_there")
    monkeypatch.setattr(gpus, "NCCL_PROBE", "raise OSError('no libnccl.so')")
    assert CHECKS["GPUs"].run().state == OK
    assert CHECKS["NCCL"].run().state == OK


def test_gpus_that_cannot_be_used_are_a_warning(monkeypatch, devices):
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (devices / name).touch()
    monkeypatch.setattr(gpus, "PYGPU_PROBE", "import a_module_that_is_not_there")
    monkeypatch.setattr(gpus, "NCCL_PROBE", "raise OSError('no libnccl.so')")
    assert "nvidia0, nvidia1 cannot be used" in CHECKS["GPUs"].run().found
    assert CHECKS["NCCL"].run().state == WARNING


def test_a_pygpu_that_a_virtual_environment_does_not_see_is_named(monkeypatch, tmp_path, devices):
    folder = tmp_path / "lib" / "python3" / "dist-packages"
    (folder / "pygpu").mkdir(parents=True)
    (folder / "pygpu" / "__init__.py").touch()
    (devices / "nvidia0").touch()
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    monkeypatch.setattr("synkhronos.world.devices.get_n_gpu", lambda: 0)
    assert environment.hidden_folder("pygpu") == folder
    found, remedy = gpus.judge_missing_pygpu("no pygpu", ["nvidia0"])
    assert remedy == (
        f"python3 -m venv --system-site-packages {sys.prefix}, which then sees pygpu in {folder}"
    )
    with pytest.raises(ValueError, match=f"does not see pygpu, which is in {folder}; make it with"):
        synk.fork(2, use_gpu=True)
    monkeypatch.setattr(sys, "base_prefix", sys.prefix)
    assert environment.hidden_folder("pygpu") is None


def test_a_gpu_without_the_drivers_library_is_a_warning(gpu):
    result = CHECKS["CUDA"].run()
    assert result.state == WARNING
    assert "nvidia0" in result.found
    assert "libcuda1" in result.remedy


def test_libraries_with_their_bare_names_are_well(libraries, gpu):
    folder = libraries(*BARE, *NAMES, "libnccl.so.2")
    result = CHECKS["CUDA"].run()
    assert (result.state, result.remedy) == (OK, "")
    assert result.found.splitlines()[:4] == [
        f"libcuda.so: {folder}/libcuda.so (13.0)",
        f"libnvrtc.so: {folder}/libnvrtc.so.13 (13.0)",
        f"libcublas.so: {folder}/libcublas.so.13 (13)",
        f"libnccl.so: {folder}/libnccl.so.2 (2)",
    ]


@pytest.mark.skipif(all_are_visible(), reason="no library is hidden on this machine")
def test_libraries_that_only_the_run_command_makes_visible_are_a_warning(libraries, gpu):
    folder = libraries("libcuda.so.1", *NAMES, "libcublas.so")
    result = CHECKS["CUDA"].run()
    assert result.state == WARNING
    lines = result.found.splitlines()
    assert lines[0] == f"libcuda.so: {folder}/libcuda.so.1 (13.0), not found under this name"
    assert lines[2] == f"libcublas.so: {folder}/libcublas.so.13 (13)"
    assert lines[3] == "libnccl.so: no suitable file"
    assert result.remedy == "start scripts with: python -m synkhronos run SCRIPT"


def test_a_missing_library_is_a_warning_with_the_remedy(libraries, gpu):
    libraries("libcuda.so.1", *NAMES[:2])
    result = CHECKS["CUDA"].run()
    assert result.state == WARNING
    assert "libcublas.so: no suitable file" in result.found
    assert '"nvidia-cublas<14"' in result.remedy


def test_nccl_is_loaded_as_the_run_command_would_make_it_visible(libraries, gpu):
    libraries("libcuda.so.1", *NAMES, "libnccl.so.2")
    assert CHECKS["NCCL"].run().found == "2.28.9"


def test_pygpu_is_probed_in_the_environment_of_the_run_command(libraries, monkeypatch):
    libraries("libcuda.so.1", *NAMES)
    monkeypatch.setattr(gpus, "PYGPU_PROBE", """
import ctypes, json
ctypes.CDLL("libcuda.so")
print(json.dumps({"version": "0.7.6", "cuda": 1, "opencl": 0}))
""")  # fmt: skip
    assert CHECKS["GPUs"].run().found == "pygpu 0.7.6: 1 CUDA, 0 OpenCL devices"
    assert "synkhronos" not in os.environ["LD_LIBRARY_PATH"]
