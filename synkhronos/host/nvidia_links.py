"""A private folder of links that give NVIDIA's libraries the names that libgpuarray expects.

The folder is added at the front of ``LD_LIBRARY_PATH``. The loader reads this variable only when a
process starts, so it affects only processes that are started afterwards.

Code that is loaded from the folder runs as the user, so no other user may be able to change or replace
the folder. It and its parent folders must belong to the user or to the system. Only they may write
there; in a sticky folder such as ``/tmp``, others may only change their own files.

The folder's name is a digest of its links, so the same libraries use the same folder, and other
libraries use another folder. Each process creates the missing links, each in a single step. So no lock
is needed, and if a process is killed in between, the next process completes the folder.
"""

import hashlib
import os
import secrets
import shutil
import stat
import tempfile
import time
from pathlib import Path
from typing import Dict, Iterator, Mapping, Optional, Sequence

from synkhronos.host.nvidia_libraries import Library, find, loader_cache, visible

OUTDATED = 30 * 24 * 3600.0  # seconds without use after which a folder of broken links is removed
UNSAFE_IN_PATH = ":;$"  # characters with a special meaning to the loader


def environment(
    environ: Mapping[str, str] = os.environ, cache: Optional[Sequence[Path]] = None
) -> Dict[str, str]:
    """Return environment variables with which a new process finds the libraries by their bare names.

    Parameters
    ----------
    environ : mapping
        Environment variables.
    cache : sequence of Path, optional
        The files in the loader's cache; by default this machine's.

    Returns
    -------
    dict
        Empty if there is no NVIDIA driver, or if the libraries are found without links.

    Raises
    ------
    OSError
        If there is no suitable place for the links.
    """
    cache = loader_cache() if cache is None else cache
    found = find(environ, cache)
    if all(visible(f"{name}.so", environ, cache) for name in found):
        return {}
    folders = [str(links_folder(wanted_links(found), environ))]
    if environ.get("LD_LIBRARY_PATH"):
        folders.append(environ["LD_LIBRARY_PATH"])
    if not visible("libcuda.so.1", environ, cache):
        # The driver loads more libraries from its folder, by their own names.
        folders.append(os.path.dirname(os.path.realpath(found["libcuda"].file)))
    return {"LD_LIBRARY_PATH": ":".join(folders)}


def wanted_links(found: Mapping[str, Library]) -> Dict[str, str]:
    """Return the names of the links and their targets.

    A library that is loaded through a link searches the folder of the link for other libraries. So these
    get links, too. Each library also gets a link with its version, the name by which others load it.
    """
    links = {}
    for name, library in found.items():
        links[f"{name}.so"] = library.file
        for file in (*library.file.parent.glob(f"{name}.so.*"), *library.beside):
            if file in library.beside or os.path.samefile(file, library.file):
                links[file.name] = file
    return {name: str(links[name]) for name in sorted(links)}


def links_folder(links: Mapping[str, str], environ: Mapping[str, str]) -> Path:
    """Create or find the folder of these links, in the first usable place."""
    digest = hashlib.sha256("\0".join(f"{name}\0{links[name]}" for name in links).encode())
    complaints = []
    for place in places(environ):
        try:
            folder = private_folder(private_folder(place) / f"libraries-{digest.hexdigest()[:16]}")
            for name, file in links.items():
                link(folder / name, file)
            os.utime(folder)
            remove_outdated(folder)
            return folder
        except OSError as error:
            complaints.append(f"{place}: {error.strerror or error}")
    raise OSError(
        "there is no place for links to NVIDIA's libraries where nobody else can change them: "
        f"{'; '.join(complaints)}; set XDG_CACHE_HOME to a private folder"
    )


def places(environ: Mapping[str, str]) -> Iterator[Path]:
    """List the possible places of the folder, in order of preference.

    The folder of the login session is not the first, because a script may outlive the session.
    """
    cache, home = environ.get("XDG_CACHE_HOME", ""), environ.get("HOME", "")
    if os.path.isabs(cache):
        yield Path(cache, "synkhronos")
    elif os.path.isabs(home):
        yield Path(home, ".cache", "synkhronos")
    if os.path.isabs(environ.get("XDG_RUNTIME_DIR", "")):
        yield Path(environ["XDG_RUNTIME_DIR"], "synkhronos")
    yield Path(tempfile.gettempdir(), f"synkhronos-{os.geteuid()}")


def private_folder(path: Path) -> Path:
    """Create or find a folder that no other user can change; return its real path.

    Raises
    ------
    OSError
    """
    for folder in (path.parent, path):
        if not folder.is_dir():
            folder.mkdir(mode=0o700, exist_ok=True)
    path = Path(os.path.realpath(path))
    if set(UNSAFE_IN_PATH) & set(str(path)):
        raise OSError(f"its path contains one of the characters {UNSAFE_IN_PATH}")
    trusted = {0, os.geteuid(), os.stat("/").st_uid}  # in a container, root may be another user
    for folder in (path, *path.parents):
        status = os.stat(folder)
        others_may_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if others_may_write and (folder == path or not status.st_mode & stat.S_ISVTX):
            raise OSError(f"others may write in {folder}")
        if status.st_uid not in trusted or (folder == path and status.st_uid != os.geteuid()):
            raise OSError(f"{folder} belongs to another user")
    return path


def link(path: Path, file: str) -> None:
    """Create or replace a symbolic link at `path` to `file`, in a single step."""
    if path.is_symlink() and os.readlink(path) == file:
        return
    new = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    os.symlink(file, new)
    os.replace(new, path)


def remove_outdated(used: Path) -> None:
    """Remove outdated folders with broken links, except the folder in use."""
    for folder in used.parent.glob("libraries-*"):
        try:
            idle = time.time() - folder.stat().st_mtime
            if idle > OUTDATED and not all(path.exists() for path in folder.iterdir()):
                shutil.rmtree(folder)
        except OSError:  # another process is removing it
            continue
