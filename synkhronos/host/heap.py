"""Making malloc keep freed memory for later allocations.

By default glibc maps each large block separately, unmaps it when it is freed, and returns the end of the
heap to the system. Then the arrays of every training step get new pages: the kernel zeroes them, and
each page, or huge page, causes a page fault. `keep` makes glibc allocate from its heap and keep freed
memory there. glibc reads the setting for huge pages when the process starts, so `tunables` provides it
for ``python -m synkhronos run``.

Both settings apply to the whole process. If the C library is not glibc, nothing is changed.
"""

import ctypes
import os
from pathlib import Path
from typing import Any, Dict, Mapping, Optional

from synkhronos.host.handler_errors import suppress

#: An environment variable. If it is 0, malloc is not changed.
SWITCH = "SYNKHRONOS_KEEP_MEMORY"

SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
TUNABLES, HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # mallopt's M_TRIM_THRESHOLD and M_MMAP_MAX


def why_not_kept(environ: Mapping[str, str] = os.environ) -> Optional[str]:
    """Return the reason if memory is not kept, else None."""
    if environ.get(SWITCH) == "0":
        return f"{SWITCH}=0 is set"
    if _glibc() is None:
        return "the C library is not glibc"
    return None


def keep() -> None:
    """Make malloc keep freed memory, unless the user has turned this off."""
    if why_not_kept() is None:
        _glibc().mallopt(_MMAP_MAX, 0)
        _glibc().mallopt(_TRIM_THRESHOLD, -1)


def trim() -> None:
    """Return the memory that malloc keeps to the system."""
    if _glibc() is not None:
        _glibc().malloc_trim(0)


def tunables(environ: Mapping[str, str] = os.environ) -> Dict[str, str]:
    """Return the environment variables that make a new process use huge pages for its heap.

    They are empty if the user has set this tunable, or if memory is not kept.
    """
    present = environ.get(TUNABLES, "")
    if why_not_kept(environ) is not None or HUGE_PAGES in present:
        return {}
    return {TUNABLES: ":".join(filter(None, [present, f"{HUGE_PAGES}=1"]))}


def huge_pages(name: str, folder: Path = SETTINGS) -> str:
    """Return the kernel's setting ``"enabled"`` or ``"shmem_enabled"``; ``"never"`` if there is none."""
    with suppress(OSError, IndexError):
        return (folder / name).read_text().split("[")[1].split("]")[0]
    return "never"


def _glibc() -> Any:
    """Return glibc, or None if there is another C library."""
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") and hasattr(libc, "mallopt") else None
