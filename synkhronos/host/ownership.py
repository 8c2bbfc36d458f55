"""Which other users can change the contents of a folder, such as Theano's cache of compiled code."""

import os
import stat
from pathlib import Path
from typing import Iterator, Optional

_DEPTH = 3  # of Theano's cache: a folder per platform, in it one per module, in it files


def outsider(folder: Path) -> Optional[str]:
    """Say how another user can change a file in a folder, or add one.

    Root does not count as another user, nor does a group whose only member is this user.

    Parameters
    ----------
    folder : Path
        If it does not exist, those who can create it count.

    Returns
    -------
    str or None
        The first way that was found; None if there is none.
    """
    # Both the path as it is written, since a link in it may be changed, and the path it leads to.
    for path in dict.fromkeys([Path(os.path.abspath(folder)), Path(os.path.realpath(folder))]):
        parts = [part for part in [*reversed(path.parents), path] if os.path.lexists(part)]
        for part in parts:
            # In a sticky folder others can add files, but not replace ours.
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
    """Say who can change one file or folder; `spared` are bits of its mode that make it safe."""
    try:
        status = path.lstat()
    except OSError:  # it does not exist any more: the cache may be in use
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
    """Whether this user is the only member of a group, as Debian creates one for each user."""
    import grp
    import pwd

    try:
        group, user = grp.getgrgid(number), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and not set(group.gr_mem) - {user.pw_name}
