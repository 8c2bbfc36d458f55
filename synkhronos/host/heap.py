"""The memory of malloc, which the process keeps from step to step.

By default glibc maps each large block anew and unmaps it when it is freed, and it returns the end of the
heap to the system. So the arrays that a training step allocates and frees are new pages in every step:
the kernel zeroes them, and each page, or huge page, is a page fault. `keep` has glibc allocate them from
its heap and keep there what is freed. Huge pages for the heap are a setting that glibc reads when the
process starts: `tunables` gives it to ``python -m synkhronos run``.

Both hold for the whole process. Where the C library is not glibc nothing is changed.
"""

import contextlib
import ctypes
import mmap
import os
from pathlib import Path
from typing import Any, Dict, Mapping, Optional

#: An environment variable: 0 leaves malloc as it is.
SWITCH = "SYNKHRONOS_KEEP_MEMORY"

SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
TUNABLES, HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # mallopt's M_TRIM_THRESHOLD and M_MMAP_MAX
_HUGE = 2 << 20


def why_not_kept(environ: Mapping[str, str] = os.environ) -> Optional[str]:
    """Say why memory is not kept here; None if it is."""
    if environ.get(SWITCH) == "0":
        return f"{SWITCH}=0 is set"
    if _glibc() is None:
        return "the C library is not glibc"
    return None


def keep() -> None:
    """Have malloc keep memory that is freed, unless the user has switched that off."""
    if why_not_kept() is None:
        _glibc().mallopt(_MMAP_MAX, 0)
        _glibc().mallopt(_TRIM_THRESHOLD, -1)


def trim() -> None:
    """Return the memory that malloc keeps to the system."""
    if _glibc() is not None:
        _glibc().malloc_trim(0)


def tunables(environ: Mapping[str, str] = os.environ) -> Dict[str, str]:
    """Return the variables with which a new process uses huge pages for its heap.

    Empty if the user has set whether it does.
    """
    present = environ.get(TUNABLES, "")
    if why_not_kept(environ) is not None or HUGE_PAGES in present:
        return {}
    return {TUNABLES: ":".join(filter(None, [present, f"{HUGE_PAGES}=1"]))}


def advise_huge_pages(address: int, nbytes: int) -> None:
    """Have the kernel use huge pages for memory, as far as its settings allow."""
    start, stop = -(-address // _HUGE) * _HUGE, (address + nbytes) // _HUGE * _HUGE
    if start < stop and hasattr(mmap, "MADV_HUGEPAGE"):
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_HUGEPAGE
        )


def huge_pages(name: str, folder: Path = SETTINGS) -> str:
    """Return the kernel's setting ``"enabled"`` or ``"shmem_enabled"``; ``"never"`` without one."""
    with contextlib.suppress(OSError, IndexError):
        return (folder / name).read_text().split("[")[1].split("]")[0]
    return "never"


def _glibc() -> Any:
    """Return glibc, or None if the C library is another."""
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") and hasattr(libc, "mallopt") else None
