"""The doctor's checks of GPUs: NVIDIA's libraries, pygpu, NCCL.

pygpu and NCCL are tried with the environment variables that ``python -m synkhronos run`` sets.
"""

import sys
from pathlib import Path
from typing import Dict, Iterable, List, Optional

from synkhronos.host import environment, nvidia
from synkhronos.host.doctor.check import Fault, Finding, ProbeError, probe
from synkhronos.host.nvidia import NAMES, NEEDED, Library, Version

DEVICES = Path("/dev")
OF_NVIDIA = "nvidia[0-9]*"
CUDNN_VERSIONS = ((5,), (8,))  # Theano 1.0.5 supports versions from the first, before the second

LOADING_PROBE = """
import ctypes, json

complaints = {{}}
for name in {names}:
    try:
        ctypes.CDLL(name)
    except OSError as error:
        complaints[name] = str(error)
print(json.dumps(complaints))
"""

PYGPU_PROBE = """
import json
import pygpu
from pygpu import gpuarray

def count(kind):
    try:
        return sum(gpuarray.count_devices(kind, i) for i in range(gpuarray.count_platforms(kind)))
    except Exception:
        return 0

print(json.dumps({
    "version": pygpu.__version__, "cuda": count("cuda"), "opencl": count("opencl"),
}))
"""

NCCL_PROBE = """
import ctypes, json

version = ctypes.c_int()
ctypes.CDLL("libnccl.so").ncclGetVersion(ctypes.byref(version))
print(json.dumps({"version": version.value}))
"""


def device_files() -> List[str]:
    """List the names of the device files of NVIDIA's GPUs."""
    return sorted(path.name for path in DEVICES.glob(OF_NVIDIA))


def examine_cuda() -> Finding:
    """Check that NVIDIA's libraries are installed, and that libgpuarray finds them."""
    present = device_files()
    found = nvidia.find()
    if not found and present:
        return f"no libcuda.so.1, though there is {', '.join(present)}", nvidia.DRIVER_REMEDY
    if not found:
        return "no NVIDIA driver, which is not required", ""
    driver = nvidia.driver_version(found["libcuda"].file)
    names = [f"{name}.so" for name in found]
    code = LOADING_PROBE.format(names=names)
    try:
        hidden = probe(code)
        failing = probe(code, **nvidia.environment()) if hidden else {}
    except (ProbeError, OSError) as error:
        raise Fault(listing(found, driver, []), str(error)) from None
    text = listing(found, driver, hidden)
    lacking = [name for name in NEEDED if name not in found]
    if lacking:
        return text, nvidia.remedy(lacking, driver)
    if failing:
        return text, f"fix this: {'; '.join(failing.values())}"
    if hidden:
        return text, "start scripts with: python -m synkhronos run SCRIPT"
    return text, ""


def listing(found: Dict[str, Library], driver: Optional[Version], hidden: Iterable[str]) -> str:
    """Return one line per library: its file and version, and whether its bare name is found."""
    lines = []
    for name in NAMES:
        if name not in found:
            lines.append(f"{name}.so: no suitable file")
            continue
        version = driver if name == "libcuda" else found[name].version
        text = f"{name}.so: {found[name].file} ({dotted(version)})"
        is_hidden = f"{name}.so" in hidden
        lines.append(f"{text}, not found under this name" if is_hidden else text)
    return "\n".join([*lines, cudnn()])


def cudnn() -> str:
    """Return a line about cuDNN, which no script requires."""
    found = nvidia.candidates("libcudnn", nvidia.search_folders())
    oldest, too_new = CUDNN_VERSIONS
    usable = [item for item in found if oldest <= item.version < too_new]
    if usable:
        return f"libcudnn.so: {usable[0].file} ({dotted(usable[0].version)}), with the flag dnn.enabled"
    there = f"{found[0].file} ({dotted(found[0].version)})" if found else "none"
    return (
        f"libcudnn.so: {there}; Theano 1.0.5 can use cuDNN 5 to 7 only, and works without it, with "
        "the flag dnn.enabled=False"
    )


def dotted(version: Optional[Version]) -> str:
    """Return a version with dots, or a text that it is not known."""
    return ".".join(map(str, version or ())) or "version unknown"


def as_run() -> Dict[str, str]:
    """Return the environment variables that ``run`` sets for NVIDIA's libraries."""
    try:
        return nvidia.environment()
    except OSError:  # `examine_cuda` reports it
        return {}


def examine_gpus() -> Finding:
    """Check pygpu, and count the GPUs that it can use."""
    present = device_files()
    try:
        found = probe(PYGPU_PROBE, **as_run())
    except ProbeError as error:
        return judge_missing_pygpu(str(error), present)
    text = f"pygpu {found['version']}: {found['cuda']} CUDA, {found['opencl']} OpenCL devices"
    if present and not found["cuda"]:
        remedy = nvidia.explain_missing() or (
            "libgpuarray finds its libraries but no device: check that nvidia-smi works, and the "
            "value of CUDA_VISIBLE_DEVICES"
        )
        return f"{text}, but {', '.join(present)} exist", remedy
    return text, ""


def judge_missing_pygpu(complaint: str, present: List[str]) -> Finding:
    """Judge that pygpu cannot be used: a warning if there are GPUs."""
    if not present:
        return f"none; not required ({complaint})", ""
    hidden = environment.hidden_folder("pygpu")
    if hidden is not None:
        remedy = (
            f"python3 -m venv --system-site-packages {sys.prefix}, which then sees pygpu in {hidden}"
        )
        return f"{', '.join(present)} cannot be used: {complaint}", remedy
    remedy = (
        "install pygpu, on Debian 12 with: apt-get install python3-pygpu libgpuarray-dev, and "
        "use an environment made with /usr/bin/python3 -m venv --system-site-packages"
    )
    return f"{', '.join(present)} cannot be used: {complaint}", remedy


def examine_nccl() -> Finding:
    """Check that NCCL can be loaded. It is only required for several GPUs."""
    several = len(device_files()) > 1
    try:
        number = probe(NCCL_PROBE, **as_run())["version"]
    except ProbeError as error:
        if not several:
            return "none; only required for several GPUs", ""
        found = nvidia.find()
        driver = nvidia.driver_version(found["libcuda"].file) if found else None
        return str(error), nvidia.remedy(["libnccl"], driver)
    return nccl_version(number), ""


def nccl_version(number: int) -> str:
    """Return NCCL's version with dots. The encoding of the number changed with 2.9."""
    unit = 10_000 if number >= 10_000 else 1_000
    return f"{number // unit}.{number % unit // 100}.{number % 100}"
