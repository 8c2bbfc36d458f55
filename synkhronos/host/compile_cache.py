"""Theano's cache of compiled code: its location, and whether there is room on its disk.

On a full disk Theano 1.0.5 creates an empty lock file, mistakes it for the lock of another process, and
waits for that process ten times for two minutes. So the free space is checked first.
"""

import errno
import logging
import os
import resource
import sys
import tempfile
from pathlib import Path
from typing import Mapping, Optional

from synkhronos.host import environment

LEAST = 1 << 20  # bytes; a module takes at least a tenth of this
_FULL = (errno.ENOSPC, errno.EDQUOT)
_LOCK = "theano.gof.compilelock"

#: The beginnings of Theano's messages about its lock, and their replacements
_SENTENCES = {
    "Waiting for existing lock": "%s is compiling with Theano, and only one process at a time may "
    "change the cache of compiled code; process '%s', this one, waits until that one has finished",
    "To manually release": "if no other process is compiling, delete this folder, and the wait ends: %s",
    "Overriding existing lock by dead": "%s ended while it was compiling; process '%s', this one, "
    "removes its lock on the cache of compiled code",
    "Overriding existing lock by %s": "%s has kept the cache of compiled code locked for too long; "
    "process '%s', this one, removes the lock",
}


def check() -> None:
    """Raise `ImportError` if there is no room for compiled code, before Theano is imported."""
    if "theano" not in sys.modules:
        found = complaint(folder(os.environ))
        if found:
            raise ImportError(found)


def explain_lock() -> None:
    """Make Theano's messages about its lock on the cache say what is happening and what to do."""
    logging.getLogger(_LOCK).addFilter(_explain_record)


def _explain_record(record):
    for beginning, sentence in _SENTENCES.items():
        if str(record.msg).startswith(beginning):
            record.msg = sentence
            break
    return True


def folder(environ: Mapping[str, str]) -> Path:
    """Find the folder where Theano will keep compiled code, without importing Theano."""
    for name in ("compiledir", "base_compiledir"):
        setting = environment.user_setting(name, environ)
        if setting:
            return Path(setting).expanduser()
    return Path.home() / ".theano"


def complaint(cache: Path) -> Optional[str]:
    """Return an error message if there is no room to compile anything, else None.

    Parameters
    ----------
    cache : Path
        Theano's folder, which need not exist.
    """
    largest = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if 0 <= largest < LEAST:
        return (
            f"files of this process are limited to {largest} bytes, too few for Theano's cache of "
            f"compiled code, {cache}: raise the limit with 'ulimit -f'"
        )
    free = _free(cache)
    if free is None or free >= LEAST:
        return None
    return _sentence(cache, free)


def explain(error: BaseException, cache: Path) -> Optional[str]:
    """Return an error message if a full disk is the cause of a compiler error, else None."""
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
            f"bytes free, which is not enough: make room, or set TMPDIR to another folder"
        )
    return _sentence(cache, free)


def _sentence(cache, free):
    return (
        f"Theano's cache of compiled code, {cache}, is on a disk with {free} bytes free, too few to "
        f"compile anything: make room (theano-cache purge empties the cache), or set another folder "
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
