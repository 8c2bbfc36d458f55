"""Theano's cache of compiled code: where it is, and whether it has room on its disk.

Where it has none, Theano 1.0.5 cannot write its lock, takes the empty one that it leaves behind for that
of another process, and waits for it, ten times two minutes. So one has to look first.
"""

import errno
import os
import resource
import sys
import tempfile
from pathlib import Path
from typing import Mapping, Optional

from synkhronos.host import environment

LEAST = 1 << 20  # bytes; a module takes a tenth of it and more
_FULL = (errno.ENOSPC, errno.EDQUOT)


def check() -> None:
    """Raise `ImportError` if Theano, which is about to be imported, would wait for room in vain."""
    if "theano" not in sys.modules:
        said = complaint(folder(os.environ))
        if said:
            raise ImportError(said)


def folder(environ: Mapping[str, str]) -> Path:
    """Find where Theano will keep compiled code, without importing it, since that loads from there."""
    for name in ("compiledir", "base_compiledir"):
        setting = environment.user_setting(name, environ)
        if setting:
            return Path(setting).expanduser()
    return Path.home() / ".theano"


def complaint(cache: Path) -> Optional[str]:
    """Say that there is no room to compile anything; None if there is some.

    Parameters
    ----------
    cache : Path
        Theano's folder, which need not exist yet.
    """
    largest = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if 0 <= largest < LEAST:
        return (
            f"no file of this process may have more than {largest} bytes, too few for Theano's cache of "
            f"compiled code, {cache}: raise the limit with 'ulimit -f'"
        )
    free = _free(cache)
    if free is None or free >= LEAST:
        return None
    return _sentence(cache, free)


def explain(error: BaseException, cache: Path) -> Optional[str]:
    """Say that an error of the compiler is that of a full disk; None if it is not."""
    full = getattr(error, "errno", None) in _FULL
    for number in _FULL:
        full = full or os.strerror(number) in str(error)
    if not full:
        return None
    scratch = Path(tempfile.gettempdir())
    free, free_scratch = _free(cache), _free(scratch)
    if free is not None and free_scratch is not None and free_scratch < min(free, 16 << 20):
        return (
            f"the folder for temporary files, which the compiler needs, {scratch}, has {free_scratch} "
            f"bytes free, and that was not enough: make room, or name another folder in TMPDIR"
        )
    return _sentence(cache, free)


def _sentence(cache, free):
    return (
        f"Theano's cache of compiled code, {cache}, is on a disk with {free} bytes free, too few to "
        f"compile anything: make room (theano-cache purge empties the cache), or name another folder "
        f"with THEANO_FLAGS=base_compiledir=FOLDER"
    )


def _free(cache):
    for place in (cache, *cache.parents):
        try:
            status = os.statvfs(place)
        except FileNotFoundError:
            continue
        except OSError:
            return None
        blocks = status.f_bfree if os.geteuid() == 0 else status.f_bavail
        return blocks * status.f_frsize
    return None
