"""Machines with GPUs, for processes to be started: `emulator.cpp` by the names of NVIDIA's libraries."""

import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("emulator.cpp")
BARE = ("libcuda.so", "libnvrtc.so", "libcublas.so", "libnccl.so")


class Emulator:
    """The compiled library, in a folder by the names that libgpuarray looks for."""

    def __init__(self, folder):
        self.library = folder / "emulator.so"
        command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-o", self.library, SOURCE, "-ldl"]
        subprocess.run(command, check=True, timeout=120)
        self.kernels = folder / "kernels"
        self.kernels.mkdir()
        self.bare = self.put(folder / "bare", *BARE)

    def put(self, folder, *names):
        """Put it into a folder by these names, and return the folder."""
        folder.mkdir(parents=True)
        for name in names:
            (folder / name).symlink_to(self.library)
        return folder

    def environment(self, gpus=2, **more):
        """Return variables for a process that is to have so many GPUs."""
        return {
            "LD_LIBRARY_PATH": str(self.bare),
            "EMULATED_GPUS": str(gpus),
            "EMULATED_KERNELS": str(self.kernels),
            **more,
        }


@pytest.fixture(scope="session", name="emulator")
def fixture_emulator(tmp_path_factory):
    return Emulator(tmp_path_factory.mktemp("emulator"))
