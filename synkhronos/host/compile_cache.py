"""Theano's cache of compiled code: its location, and whether Theano can write to it and run what it has.

On a full disk Theano 1.0.5 creates an empty lock file, mistakes it for the lock of another process, and
waits for that process ten times for two minutes. So the free space is checked first.
"""

import errno
import logging
import os
import resource
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Mapping, Optional, Tuple

from synkhronos.host import environment
from synkhronos.host.handlers import pass_on

LEAST = 1 << 20  # bytes; a module takes at least a tenth of this
_FULL = (errno.ENOSPC, errno.EDQUOT)
_CACHE = "Theano's cache of compiled code"
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
    """Raise `ImportError` if nothing can be compiled, before Theano is imported."""
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


def folder(environ: Mapping[str, str]) -> Optional[Path]:
    """Find the folder where Theano will keep compiled code, without importing Theano.

    It is None if it would be in the home folder, and there is none.
    """
    found = os.path.expanduser(_setting(environ)[1] or "~/.theano")
    return None if found.startswith("~") else Path(found)


def _setting(environ):
    """Return the name and the value of the user's setting of the folder; the value may be None."""
    for name in ("compiledir", "base_compiledir"):
        setting = environment.user_setting(name, environ)
        if setting:
            break
    return name, setting


def complaint(cache: Optional[Path]) -> Optional[str]:
    """Return an error message if nothing can be compiled, else None; see `fault`."""
    found = fault(cache)
    return None if found is None else ": ".join(found)


def fault(cache: Optional[Path]) -> Optional[Tuple[str, str]]:
    """Return why nothing can be compiled, and what to do; or None.

    Parameters
    ----------
    cache : Path or None
        Theano's folder, which need not exist; None if there is no home folder for it.
    """
    if cache is None:
        return f"there is no home folder for {_CACHE}", _other_folder()
    largest = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if 0 <= largest < LEAST:
        return (
            f"files of this process are limited to {largest} bytes, too few for {_CACHE}, {cache}",
            "raise the limit with 'ulimit -f'",
        )
    place = next(one for one in (cache, *cache.parents) if os.path.exists(one))
    reason = _why_not_writable(place)
    if reason:
        return f"{_CACHE}, {cache}, cannot be written to ({place}: {reason})", _other_folder()
    if os.statvfs(place).f_flag & os.ST_NOEXEC and _compiles():
        return (
            f"{_CACHE}, {cache}, is on a disk from which no code can be run (it is mounted with the "
            f"option noexec)",
            _other_folder(),
        )
    free = _free(cache)
    return None if free is None or free >= LEAST else _no_room(cache, free)


def _why_not_writable(place):
    if not os.path.isdir(place):
        return os.strerror(errno.ENOTDIR)
    if os.access(place, os.R_OK | os.W_OK | os.X_OK):
        return None
    is_read_only = os.statvfs(place).f_flag & os.ST_RDONLY
    return os.strerror(errno.EROFS if is_read_only else errno.EACCES)


def _compiles():
    """Whether Theano has a compiler. Without one, it runs no code from its cache."""
    name = environment.user_setting("cxx", os.environ)
    return name != "" and shutil.which(name or "g++") is not None


def _other_folder():
    return f"set another folder with THEANO_FLAGS={_setting(os.environ)[0]}=FOLDER"


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
    return ": ".join(_no_room(cache, free))


def _no_room(cache, free):
    return (
        f"{_CACHE}, {cache}, is on a disk with {free} bytes free, too few to compile anything",
        f"make room (theano-cache purge empties the cache), or {_other_folder()}",
    )


def _free(cache):
    for place in (cache, *cache.parents):
        try:
            status = os.statvfs(place)
        except FileNotFoundError:
            continue
        except OSError as error:
            pass_on(error)
            return None
        blocks = status.f_bfree if os.geteuid() == 0 else status.f_bavail
        return blocks * status.f_frsize
    return None
