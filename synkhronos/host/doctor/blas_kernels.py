"""The kernels that OpenBLAS has chosen, and whether they use the instructions of the processor.

OpenBLAS chooses its kernels when it is loaded, by the family and model of the processor. A version that
is older than the processor may not recognize it, and then takes kernels for a much older one, which need
several times as long. `remedy` names the cause.
"""

import os
import re
from typing import Any, Dict, List, Mapping, Optional, Sequence, Set

#: An environment variable of OpenBLAS: the kernels to use instead of those that it would choose
VARIABLE = "OPENBLAS_CORETYPE"

#: OpenBLAS's names of its kernels for x86-64, by the instructions that they use, the oldest first. The
#: first name of each works in all versions.
KERNELS = {
    "SSE": (
        "Prescott", "Katmai", "Coppermine", "Northwood", "Banias", "Atom", "Core2", "Penryn",
        "Dunnington", "Nehalem", "Athlon", "Opteron", "Opteron_SSE3", "Barcelona", "Bobcat", "Nano",
    ),
    "AVX": ("Sandybridge", "Bulldozer", "Piledriver", "Steamroller"),
    "AVX2": ("Haswell", "Zen", "Excavator"),
    "AVX-512": ("SkylakeX", "Cooperlake", "SapphireRapids"),
}  # fmt: skip

#: The flags of a processor on which kernels of this kind run. OpenBLAS does not use its AVX-512 kernels
#: on processors with avx512f alone, such as Knights Landing.
FLAGS: Dict[str, Set[str]] = {
    "SSE": set(),
    "AVX": {"avx"},
    "AVX2": {"avx2", "fma"},
    "AVX-512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
}

_ORDER = list(KERNELS)
_OF_KERNELS = {name.lower(): kind for kind, names in KERNELS.items() for name in names}
_NAMES = {"openblas": "OpenBLAS", "blis": "BLIS", "mkl": "MKL"}
_INSTALL = "apt-get install libopenblas-dev"

Library = Mapping[str, Any]  # as in `threadpoolctl.threadpool_info`


def instructions_of_processor(path: str = "/proc/cpuinfo") -> Optional[str]:
    """Return the newest of the `KERNELS` that the processor can run; None if it is not an x86-64."""
    try:
        with open(path) as file:
            line = next((line for line in file if line.startswith("flags")), None)
    except OSError:
        return None
    if line is None:
        return None
    flags = set(line.partition(":")[2].split())
    return next(kind for kind in reversed(_ORDER) if FLAGS[kind] <= flags)


def instructions_of_kernels(name: Optional[str]) -> Optional[str]:
    """Return the instructions that kernels of this name use; None if the name is unknown."""
    return _OF_KERNELS.get((name or "").lower())


def is_older(name: Optional[str], instructions: Optional[str]) -> bool:
    """Return whether kernels of this name use older instructions; False if one of them is unknown."""
    used = instructions_of_kernels(name)
    if used is None or instructions is None:
        return False
    return _ORDER.index(used) < _ORDER.index(instructions)


def loaded() -> List[Dict[str, Any]]:
    """Return the BLAS libraries that this process has loaded."""
    from threadpoolctl import threadpool_info  # takes 7 ms, so not at import

    return [item for item in threadpool_info() if item["user_api"] == "blas"]


def wheel(library: Library) -> str:
    """Return the package whose wheel contains this library, such as ``SciPy``; empty if none does."""
    found = re.search(r"/(numpy|scipy)(?:\.libs|/\.dylibs)/", library["filepath"])
    return {"numpy": "NumPy", "scipy": "SciPy"}[found.group(1)] if found else ""


def describe(library: Library) -> str:
    """Return the owner, name, version and kernels of a library in a few words."""
    name = _NAMES.get(library["internal_api"], library["internal_api"])
    owner, version = wheel(library), library.get("version") or "of unknown version"
    kernels = library.get("architecture")
    words = f"{owner}'s {name} {version}" if owner else f"{name} {version}"
    return f"{words} with {kernels} kernels" if kernels else words


def describe_all(libraries: Sequence[Library]) -> str:
    """Return the descriptions of libraries; those in the wheels of NumPy and SciPy are last."""
    return ", ".join(map(describe, sorted(libraries, key=wheel))) or "none"


def linked(ldflags: str, libraries: Sequence[Library]) -> Optional[Library]:
    """Return the loaded library that these linker's flags name, or None."""
    paths = {os.path.realpath(path) for path in re.findall(r"/[^\s,]+\.so[.\d]*", ldflags)}
    names = re.findall(r"(?:^|\s)-l([^\s,]+)", ldflags)
    for library in libraries:
        path = os.path.realpath(library["filepath"])
        if path in paths or os.path.basename(path) in {f"lib{name}.so" for name in names}:
            return library
    if not names:
        return None
    # The linker's name is a link to a file of another name, outside of the packages of Python.
    others = [library for library in libraries if not wheel(library)]
    beginnings = tuple(f"lib{name}" for name in names)
    by_name = (other for other in others if os.path.basename(other["filepath"]).startswith(beginnings))
    return next(by_name, others[0] if others else None)


def blas_name(ldflags: str) -> str:
    """Return a short name of the BLAS in these flags."""
    by_path = re.search(r"/([^/,]+\.so)\b", ldflags)
    return by_path.group(1) if by_path else ldflags or "no BLAS (blas.ldflags is empty)"


def remedy(
    ldflags: str,
    libraries: Sequence[Library],
    is_slow: bool,
    coretype: Optional[str],
    instructions: Optional[str],
) -> str:
    """Return how to make the BLAS faster; empty if it is as fast as it can be.

    Parameters
    ----------
    ldflags : str
        The graph compiler's flags for the linker.
    libraries : sequence
        The BLAS libraries that are loaded, including the linked library.
    is_slow : bool
        Whether a product takes much longer than NumPy's.
    coretype : str, optional
        The value of ``OPENBLAS_CORETYPE`` in the environment.
    instructions : str, optional
        The newest instructions of the processor.
    """
    if not ldflags:
        return f"install OpenBLAS, on Debian with: {_INSTALL}"
    library = linked(ldflags, libraries)
    if library and instructions and is_older(library.get("architecture"), instructions):
        return _of_old_kernels(library, coretype, instructions)
    if is_slow:
        return _of_slow_product(ldflags, library)
    return _of_copies(libraries, coretype, instructions)


def _of_old_kernels(library: Library, coretype: Optional[str], instructions: str) -> str:
    best = KERNELS[instructions][0]
    reason = f"the kernels do not use {instructions}, which the processor has"
    if coretype is not None and _is_cause(coretype, instructions):
        return f"{reason}: unset {VARIABLE}, which is {coretype!r}, or set it to {best}"
    by_hand = f"; or set {VARIABLE}={best}" if coretype is None else ""
    owner = wheel(library)
    if owner:
        return (
            f"{reason}: install the system's OpenBLAS, on Debian with: {_INSTALL}; or a newer {owner}"
            f"{by_hand}"
        )
    return f"{reason}: install a newer version of OpenBLAS{by_hand}"


def _is_cause(coretype: str, instructions: str) -> bool:
    # A name that OpenBLAS does not know makes some versions take their oldest kernels.
    return instructions_of_kernels(coretype) is None or is_older(coretype, instructions)


def _of_slow_product(ldflags: str, library: Optional[Library]) -> str:
    if library is None:
        is_openblas = "openblas" in ldflags
    else:
        is_openblas = library["internal_api"] == "openblas"
        owner = wheel(library)
        if owner:
            return f"{owner}'s copy is slow: install the system's, on Debian with: {_INSTALL}"
    if not is_openblas:
        return f"this BLAS is slow: install OpenBLAS, on Debian with: {_INSTALL}"
    if library and library.get("threading_layer") == "disabled":
        return (
            "this OpenBLAS has no threads: install the variant that has, on Debian with: apt-get "
            "install libopenblas0-pthread"
        )
    return (
        "this OpenBLAS is slower than NumPy's: run the doctor again while no other program runs; if it "
        "still is, install a newer version of OpenBLAS"
    )


def _of_copies(
    libraries: Sequence[Library], coretype: Optional[str], instructions: Optional[str]
) -> str:
    old = [
        item for item in libraries if wheel(item) and is_older(item.get("architecture"), instructions)
    ]
    if not old or not instructions or coretype == KERNELS[instructions][0]:
        return ""
    return (
        f"only functions of NumPy and SciPy are slower ({describe_all(old)}): set "
        f"{VARIABLE}={KERNELS[instructions][0]}"
    )
