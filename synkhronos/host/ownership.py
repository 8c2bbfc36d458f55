"""Whether other users can change the contents of a folder, such as Theano's cache."""

import os
import stat
from pathlib import Path
from typing import Iterator, Optional

from synkhronos.host.handlers import pass_on

_DEPTH = 3  # of Theano's cache: a folder per platform, in it one per module, in it files


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
            complaint = _complaint(part, stat.S_ISVTX if part != parts[-1] else 0)
            if complaint:
                missing = part == parts[-1] != path
                return f"{path} does not exist yet, and {complaint}" if missing else complaint
    for entry in _entries(folder, _DEPTH):
        complaint = _complaint(entry)
        if complaint:
            return complaint
    return None


def _complaint(path: Path, spared: int = 0) -> Optional[str]:
    """Return who can change one file or folder; the bits `spared` of its mode make it safe."""
    try:
        status = path.lstat()
    except OSError as error:  # it no longer exists: the cache may be in use
        pass_on(error)
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
        pass_on(error)
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
