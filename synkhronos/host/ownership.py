"""Who besides this user can change what lies in a folder, such as Theano's cache of compiled code."""

import os
import stat
from pathlib import Path
from typing import Iterator, Optional

_DEPTH = 3  # of Theano's cache: a folder a platform, in it one a module, in it files


def outsider(folder: Path) -> Optional[str]:
    """Say how another user can change what lies in a folder, or put something there.

    Root is no outsider, nor is a group that has no other member than this user.

    Parameters
    ----------
    folder : Path
        It need not exist: then whoever can make it counts.

    Returns
    -------
    str or None
        The first way that was found; None if there is none.
    """
    # As it is written, since a link on the way may be turned round; and where it leads to.
    for path in dict.fromkeys([Path(os.path.abspath(folder)), Path(os.path.realpath(folder))]):
        parts = [part for part in [*reversed(path.parents), path] if os.path.lexists(part)]
        for part in parts:
            # In a sticky folder others can add files, but not put one in the place of ours.
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
    """Say what is wrong with one file or folder; `spared` are bits of a mode that excuse it."""
    try:
        status = path.lstat()
    except OSError:  # not there, or not any more: the cache may be in use
        return None
    if status.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to {_user(status.st_uid)}"
    if stat.S_ISLNK(status.st_mode) or status.st_mode & spared:
        return None
    if status.st_mode & stat.S_IWOTH:
        return f"{path} can be written by every user"
    if status.st_mode & stat.S_IWGRP and status.st_gid and not _is_private(status.st_gid):
        return f"{path} can be written by the group {status.st_gid}"
    return None


def _entries(folder: Path, depth: int) -> Iterator[Path]:
    try:
        entries = sorted(folder.iterdir())
    except OSError:
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
    """Whether a group is that of this user alone, as Debian makes one for each."""
    import grp
    import pwd

    try:
        group, user = grp.getgrgid(number), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and not set(group.gr_mem) - {user.pw_name}
