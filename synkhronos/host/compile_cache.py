"""A compiler's cache of compiled code: its location, whether it can be used, and who else can change it.

The compiler is Theano or PyTensor, by the name of its package.

On a full disk Theano 1.0.5 creates an empty lock file, mistakes it for the lock of another process, and
waits for that process ten times for two minutes. So the free space is checked first.
"""

import errno
import os
import resource
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Iterator, Mapping, Optional, Tuple

from synkhronos.host import environment
from synkhronos.host.compiler import TITLES
from synkhronos.host.handler_errors import reraise_if_handlers

LEAST = 1 << 20  # bytes; a module takes at least a tenth of this
_FULL = (errno.ENOSPC, errno.EDQUOT)
_DEPTH = 3  # of the cache: a folder per platform, in it one per module, in it files


def folder(environ: Mapping[str, str], compiler: str = "theano") -> Optional[Path]:
    """Find the folder where a compiler will keep compiled code, without importing the compiler.

    It is None if it would be in the home folder, and there is none.
    """
    found = os.path.expanduser(_setting(environ, compiler)[1] or f"~/.{compiler}")
    return None if found.startswith("~") else Path(found)


def _setting(environ: Mapping[str, str], compiler: str) -> Tuple[str, Optional[str]]:
    """Return the name and the value of the user's setting of the folder; the value may be None."""
    for name in ("compiledir", "base_compiledir"):
        setting = environment.user_setting(name, environ, compiler)
        if setting:
            break
    return name, setting


def complaint(cache: Optional[Path]) -> Optional[str]:
    """Return an error message if nothing can be compiled, else None; see `fault`."""
    found = fault(cache)
    return None if found is None else ": ".join(found)


def fault(cache: Optional[Path], compiler: str = "theano") -> Optional[Tuple[str, str]]:
    """Return why nothing can be compiled, and the remedy; or None.

    Parameters
    ----------
    cache : Path or None
        The folder, which need not exist; None if there is no home folder for it.
    compiler : str
        The name of the compiler's package.
    """
    title = _title(compiler)
    if cache is None:
        return f"there is no home folder for {title}", _other_folder(compiler)
    largest = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if 0 <= largest < LEAST:
        return (
            f"files of this process are limited to {largest} bytes, too few for {title}, {cache}",
            "raise the limit with 'ulimit -f'",
        )
    place = _existing(cache)
    reason = _why_not_writable(place)
    if reason:
        return f"{title}, {cache}, cannot be written to ({place}: {reason})", _other_folder(compiler)
    if os.statvfs(place).f_flag & os.ST_NOEXEC and _compiles(compiler):
        return (
            f"{title}, {cache}, is on a disk from which no code can be run (it is mounted with the "
            f"option noexec)",
            _other_folder(compiler),
        )
    free = _free(cache)
    return None if free is None or free >= LEAST else _no_room(cache, free, compiler)


def _title(compiler: str) -> str:
    return f"{TITLES[compiler]}'s cache of compiled code"


def _why_not_writable(place: Path) -> Optional[str]:
    if not os.path.isdir(place):
        return os.strerror(errno.ENOTDIR)
    if os.access(place, os.R_OK | os.W_OK | os.X_OK):
        return None
    is_read_only = os.statvfs(place).f_flag & os.ST_RDONLY
    return os.strerror(errno.EROFS if is_read_only else errno.EACCES)


def _compiles(compiler: str) -> bool:
    """Whether there is a compiler of C++. Without one, no code from the cache is run."""
    name = environment.user_setting("cxx", os.environ, compiler)
    return name != "" and shutil.which(name or "g++") is not None


def _other_folder(compiler: str) -> str:
    flag = _setting(os.environ, compiler)[0]
    return f"set another folder with {compiler.upper()}_FLAGS={flag}=FOLDER"


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
    return ": ".join(_no_room(cache, free, "theano"))


def _no_room(cache: Path, free: Optional[int], compiler: str) -> Tuple[str, str]:
    return (
        f"{_title(compiler)}, {cache}, is on a disk with {free} bytes free, too few to compile anything",
        f"make room ({compiler}-cache purge empties the cache), or {_other_folder(compiler)}",
    )


def _free(cache: Path) -> Optional[int]:
    try:
        status = os.statvfs(_existing(cache))
    except OSError as error:
        reraise_if_handlers(error)
        return None
    blocks = status.f_bfree if os.geteuid() == 0 else status.f_bavail
    return blocks * status.f_frsize


def _existing(cache: Path) -> Path:
    """Return the folder, or the nearest one above that exists."""
    return next(parent for parent in (cache, *cache.parents) if os.path.exists(parent))


# Other users


def outsider(folder: Path) -> Optional[str]:
    """Return how another user can change a file in a folder, or add one.

    Root does not count as another user, nor does a group whose only member is this user.

    Parameters
    ----------
    folder : Path
        The folder. If it does not exist, the users who can create it are considered.

    Returns
    -------
    str or None
        The first possibility that was found, or None.
    """
    # Check both the given path, in which a link may be changed, and the path that it leads to.
    for path in dict.fromkeys([Path(os.path.abspath(folder)), Path(os.path.realpath(folder))]):
        parts = [part for part in [*reversed(path.parents), path] if os.path.lexists(part)]
        for part in parts:
            # In a sticky folder others can add files, but cannot replace ours.
            complaint = _who_can_change(part, stat.S_ISVTX if part != parts[-1] else 0)
            if complaint:
                missing = part == parts[-1] != path
                return f"{path} does not exist yet, and {complaint}" if missing else complaint
    for entry in _entries(folder, _DEPTH):
        complaint = _who_can_change(entry)
        if complaint:
            return complaint
    return None


def _who_can_change(path: Path, spared: int = 0) -> Optional[str]:
    """Return who can change one file or folder; the bits `spared` of its mode make it safe."""
    try:
        status = path.lstat()
    except OSError as error:  # it no longer exists: the cache may be in use
        reraise_if_handlers(error)
        return None
    if status.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to {_user(status.st_uid)}"
    if stat.S_ISLNK(status.st_mode) or status.st_mode & spared:
        return None
    if status.st_mode & stat.S_IWOTH:
        return f"{path} is writable by every user"
    if status.st_mode & stat.S_IWGRP and status.st_gid and not _is_private(status.st_gid):
        return f"{path} is writable by the group {status.st_gid}"
    return None


def _entries(folder: Path, depth: int) -> Iterator[Path]:
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        reraise_if_handlers(error)
        return
    for entry in entries:
        yield entry
        if depth and entry.is_dir() and not entry.is_symlink():
            yield from _entries(entry, depth - 1)


def _user(number: int) -> str:
    import pwd

    try:
        return f"the user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"the user {number}"


def _is_private(number: int) -> bool:
    """Whether this user is the only member of a group, as Debian creates one for each user."""
    import grp
    import pwd

    try:
        group, user = grp.getgrgid(number), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and not set(group.gr_mem) - {user.pw_name}
