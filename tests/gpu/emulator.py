"""Emulated GPUs for child processes: `emulator.cpp`, under the names of NVIDIA's libraries."""

import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("emulator.cpp")
# With which g++ compiles kernels, and the headers that they include.
FLAGS = ("-std=c++17", "-fpermissive", "-O1", "-fPIC")
HEADERS = "cmath", "cstddef", "cstdint", "cstdlib", "cstring", "ucontext.h", "utility", "vector"
BARE = ("libcuda.so", "libnvrtc.so", "libcublas.so", "libnccl.so")


class Emulator:
    """The compiled library, in a folder under the names that libgpuarray looks for."""

    def __init__(self, folder):
        self.library = folder / "emulator.so"
        command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-o", self.library, SOURCE, "-ldl"]
        subprocess.run(command, check=True, timeout=120)
        self.kernels = folder / "kernels"
        self.kernels.mkdir()
        headers = folder / "headers.h"
        headers.write_text("".join(f"#include <{name}>\n" for name in HEADERS))
        command = ["g++", *FLAGS, "-x", "c++-header", headers, "-o", f"{headers}.gch"]
        subprocess.run(command, check=True, timeout=120)
        self.flags = " ".join([*FLAGS, "-include", str(headers)])
        self.bare = self.put(folder / "bare", *BARE)

    def put(self, folder, *names):
        folder.mkdir(parents=True)
        for name in names:
            (folder / name).symlink_to(self.library)
        return folder

    def environment(self, gpus=2, **more):
        return {
            "LD_LIBRARY_PATH": str(self.bare),
            "EMULATED_GPUS": str(gpus),
            "EMULATED_KERNELS": str(self.kernels),
            "EMULATED_CXXFLAGS": self.flags,
            **more,
        }


@pytest.fixture(scope="session", name="emulator")
def fixture_emulator(tmp_path_factory):
    return Emulator(tmp_path_factory.mktemp("emulator"))
