"""Finding NVIDIA's libraries, and whether libgpuarray finds them.

libgpuarray loads ``libcuda.so``, ``libnvrtc.so``, ``libcublas.so`` and ``libnccl.so`` by these bare
names. Drivers, pip's wheels and many packages install only names with a version, in folders that the
loader does not search. `find` returns suitable files, and `environment` gives them the bare names.

CUDA is not initialized: only the driver is loaded, to query its version.

NVIDIA's ``cuda-pathfinder`` cannot be used instead: it takes the first library that it finds without
comparing the versions of NVRTC, cuBLAS and the driver, supports only the two newest major versions of
CUDA, does not search ``sys.path``, loads the libraries into the process, and needs Python 3.11.

Files are chosen by these rules:

1. Folders in this order: ``LD_LIBRARY_PATH``, pip's wheels in ``sys.path``, the environment (conda's
   and Python's), ``CUDA_HOME`` and ``CUDA_PATH``, those in the loader's cache, the usual ones of
   drivers and of CUDA. In a folder the newest version comes first. Stubs, which are for linking only,
   empty files, which some containers contain, and libraries for another processor are left out.
2. The first driver. Without a driver nothing is found.
3. NVRTC needs its built-in functions in the same folder, and must not be newer than the driver, which
   compiles the output of NVRTC.
4. From CUDA 11 on cuBLAS needs cuBLASLt in the same folder, and no newer major version than the
   driver's.
5. Of these, the first NVRTC for which there is a cuBLAS of the same major version, and the first such
   cuBLAS. Without such a pair, the first of each.
6. The first NCCL.

The bare names are links in a private folder, which is added at the front of ``LD_LIBRARY_PATH``. The
loader reads this variable only when a process starts, so it affects only processes that are started
afterwards.

Code that is loaded from the folder runs as the user, so no other user may be able to change or replace
the folder. It and its parent folders must belong to the user or to the system. Only they may write
there; in a sticky folder such as ``/tmp``, others may only change their own files.

The folder's name is a digest of its links, so the same libraries use the same folder, and other
libraries use another folder. Each process creates the missing links, each in a single step. So no lock
is needed, and if a process is killed in between, the next process completes the folder.
"""

import ctypes
import functools
import glob
import hashlib
import os
import re
import secrets
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Tuple

NEEDED = ("libcuda", "libnvrtc", "libcublas")
NAMES = (*NEEDED, "libnccl")
BESIDE = {"libnvrtc": "libnvrtc-builtins", "libcublas": "libcublasLt"}
FIRST_WITH_CUBLASLT = (11,)
OF_CUDA = ("lib64", "lib", "targets/*/lib")
LOADERS_OWN = ("/lib/{0}", "/usr/lib/{0}", "/lib64", "/usr/lib64", "/lib", "/usr/lib")
OF_DRIVERS = (
    "/usr/lib/{0}/nvidia/current",
    "/usr/local/nvidia/lib64",
    "/usr/local/nvidia/lib",
    "/usr/lib/wsl/lib",
    "/run/nvidia/driver/usr/lib/{0}",
    "/run/nvidia/driver/usr/lib64",
    "/run/opengl-driver/lib",
)
PROGRAM = Path("/proc/self/exe")
RELEASES = ("/usr/local/cuda", "/usr/local/cuda-*", "/opt/cuda")
LINKS = re.compile(r"/synkhronos[^/]*/libraries-\w+$")  # the folders of `links_folder`
UNSAFE_IN_PATH = ":;$"  # characters with a special meaning to the loader

Version = Tuple[int, ...]


class Library(NamedTuple):
    """The file of a library, the version in its name, and the files that it loads from its folder."""

    file: Path
    version: Version
    beside: Tuple[Path, ...] = ()


def driver_is_visible() -> bool:
    """Whether this process can load the NVIDIA driver as libgpuarray does, by its bare name."""
    try:
        ctypes.CDLL("libcuda.so")
    except OSError:
        return False
    return True


def explain_missing() -> str:
    """Return why libgpuarray cannot use CUDA, and how to fix it; empty if it can."""
    found = find()
    if not found:
        return "" if driver_is_visible() else f"there is no NVIDIA driver here: {DRIVER_REMEDY}"
    lacking = [name for name in NEEDED if name not in found]
    if lacking:
        needed = " and ".join(f"{name}.so" for name in lacking)
        return (
            f"libgpuarray needs {needed}, and no version that fits the driver was found: "
            f"{remedy(lacking, driver_version(found['libcuda'].file))}"
        )
    hidden = [name for name in found if visible(f"{name}.so") is None]
    if not hidden:
        return ""
    return (
        f"libgpuarray looks for {', '.join(f'{name}.so' for name in hidden)}, and does not find "
        f"them by name, although there is {', '.join(str(found[name].file) for name in hidden)}: start "
        "the script with `python -m synkhronos run SCRIPT`"
    )


DRIVER_REMEDY = (
    "install it with its library for CUDA, libcuda.so.1 (on Debian: apt-get install nvidia-driver "
    "libcuda1); if it is in another folder, add that folder to LD_LIBRARY_PATH"
)


def remedy(names: Iterable[str], driver: Optional[Version]) -> str:
    """Return how to install libraries other than the driver, for a driver with this CUDA version."""
    major, minor = driver or (12, 0)
    suffix = f"-cu{major}" if major < 13 else ""
    wheels = {
        "libnvrtc": f'"nvidia-cuda-nvrtc{suffix}<{major}.{minor + 1}"',
        "libcublas": f'"nvidia-cublas{suffix}<{major + 1}"',
        "libnccl": f"nvidia-nccl-cu{major}",
    }
    conda = {"libnvrtc": "cuda-nvrtc", "libcublas": "libcublas", "libnccl": "nccl"}
    debian = {
        "libnvrtc": f"cuda-nvrtc-{major}-{minor}",
        "libcublas": f"libcublas-{major}-{minor}",
        "libnccl": "libnccl2",
    }
    names = [name for name in names if name in wheels]
    return (
        f"python -m pip install {' '.join(wheels[name] for name in names)}, or "
        f"conda install -c conda-forge {' '.join(conda[name] for name in names)} "
        f"cuda-version={major}.{minor}, or with NVIDIA's archive for Debian "
        f"apt-get install {' '.join(debian[name] for name in names)}"
    )


def find(environ: Mapping[str, str] = os.environ) -> Dict[str, Library]:
    """Find the libraries, by the rules above. Missing libraries are omitted.

    Parameters
    ----------
    environ : mapping
        Environment variables.
    """
    folders = list(search_folders(environ))
    found = {name: candidates(name, folders) for name in NAMES}
    if not found["libcuda"]:
        return {}
    driver = driver_version(found["libcuda"][0].file)
    if driver:
        found["libnvrtc"] = [item for item in found["libnvrtc"] if item.version[:2] <= driver]
        found["libcublas"] = [item for item in found["libcublas"] if item.version[:1] <= driver[:1]]
    for nvrtc in found["libnvrtc"]:
        fitting = [item for item in found["libcublas"] if item.version[:1] == nvrtc.version[:1]]
        if fitting:
            found["libnvrtc"], found["libcublas"] = [nvrtc], fitting
            break
    return {name: libraries[0] for name, libraries in found.items() if libraries}


def candidates(name: str, folders: Iterable[Path]) -> List[Library]:
    """List the usable files of a library, in the order of `folders`, newest first."""
    libraries, seen = [], set()
    for folder in folders:
        files = [file for file in folder.glob(f"{name}.so*") if is_usable(file)]
        for file in sorted(files, key=version, reverse=True):
            real = os.path.realpath(file)
            library = complete(name, file)
            if library is not None and real not in seen:
                seen.add(real)
                libraries.append(library)
    return libraries


def complete(name: str, file: Path) -> Optional[Library]:
    """Add the files that a library loads from its folder; return None if they are missing."""
    own = version(file)
    if name not in BESIDE or (name == "libcublas" and own < FIRST_WITH_CUBLASLT):
        return Library(file, own)
    files = [path for path in file.parent.glob(f"{BESIDE[name]}.so*") if is_usable(path)]
    beside = [item for item in files if version(item)[:1] == own[:1]]
    if not beside:
        return None
    if name == "libnvrtc" and len(own) < 3:
        # Names such as libnvrtc.so.12 and libnvrtc.so.11.2 are the same for many releases; the name
        # of the built-in functions contains the release.
        own = max(version(item) for item in beside)
    return Library(file, own, tuple(sorted(beside)))


def version(file: Path) -> Version:
    """Return a library's version from its name, or from the name of the file that it links to."""
    versions = [
        tuple(int(part) for part in name.partition(".so.")[2].split(".") if part.isdigit())
        for name in (file.name, os.path.basename(os.path.realpath(file)))
    ]
    return max(versions, key=len)


def is_usable(file: Path) -> bool:
    """Whether the loader can load a file into this process."""
    folders = {*file.parts, *Path(os.path.realpath(file)).parts}
    return "stubs" not in folders and kind(file) == kind(PROGRAM)


def kind(file: Path) -> bytes:
    """Return the word size, byte order and processor of an ELF file; empty for other files."""
    try:
        with file.open("rb") as opened:
            header = opened.read(20)
    except OSError:
        return b""
    return header[4:6] + header[18:20] if header[:4] == b"\x7fELF" else b""


def visible(name: str, environ: Mapping[str, str] = os.environ) -> Optional[Path]:
    """Return the file that the loader chooses for a name; None if there is no usable file.

    These are the loader's rules, except for folders that are built into programs, such as conda's
    Python.
    """
    cached = [file for file in loader_cache() if file.name == name]
    by_path = [folder / name for folder in listed_folders(environ)]
    for file in (*by_path, *cached, *(folder / name for folder in matching(LOADERS_OWN))):
        if file.exists() and kind(file) in (b"", kind(PROGRAM)):
            return file if is_usable(file) else None
    return None


@functools.lru_cache(maxsize=None)
def loader_cache() -> List[Path]:
    """List the files in the loader's cache, in its order. It is read once."""
    for command in ("ldconfig", "/sbin/ldconfig"):
        try:
            answer = subprocess.run([command, "-p"], capture_output=True, text=True, check=False)
        except OSError:
            continue
        return [Path(path) for path in re.findall(r" => (/.+)$", answer.stdout, re.MULTILINE)]
    return []


def driver_version(file: Path) -> Optional[Version]:
    """Return the version of CUDA that a driver supports, such as ``(13, 0)``; None on failure."""
    number = ctypes.c_int()
    try:
        status = ctypes.CDLL(str(file)).cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return None if status else (number.value // 1000, number.value % 1000 // 10)


def search_folders(environ: Mapping[str, str] = os.environ) -> Iterator[Path]:
    """List the folders to search, in order of preference."""
    yield from (folder for folder in listed_folders(environ) if not LINKS.search(str(folder)))
    for entry in sys.path:
        yield from wheel_folders(Path(entry).absolute() / "nvidia")
    prefixes = [environ.get("CONDA_PREFIX"), sys.prefix, sys.base_prefix]
    prefixes += [environ.get("CUDA_HOME"), environ.get("CUDA_PATH")]
    prefixes = [glob.escape(os.path.abspath(prefix)) for prefix in prefixes if prefix]
    yield from matching(f"{prefix}/{part}" for prefix in prefixes for part in OF_CUDA)
    names = re.compile(rf"({'|'.join(NAMES)})\.so")
    yield from dict.fromkeys(file.parent for file in loader_cache() if names.match(file.name))
    yield from matching((*OF_DRIVERS, *LOADERS_OWN))
    yield from matching(f"{release}/{part}" for release in RELEASES for part in OF_CUDA)


def wheel_folders(nvidia: Path) -> List[Path]:
    """List the folders of pip's wheels; folders of complete releases, such as cu13, come first."""
    releases = sorted(nvidia.glob("cu[0-9]*/lib"), key=numbers, reverse=True)
    return [*releases, *sorted(set(nvidia.glob("*/lib")) - set(releases))]


def listed_folders(environ: Mapping[str, str]) -> List[Path]:
    """List the folders in ``LD_LIBRARY_PATH``, as the loader reads it."""
    value = environ.get("LD_LIBRARY_PATH")
    return [Path(entry).absolute() for entry in re.split("[:;]", value)] if value else []


def matching(patterns: Iterable[str]) -> Iterator[Path]:
    """List the paths that match patterns, newest first; ``{0}`` is the machine's name in paths."""
    machine = getattr(sys.implementation, "_multiarch", f"{os.uname().machine}-linux-gnu")
    for pattern in patterns:
        found = glob.glob(pattern.replace("{0}", machine))
        yield from sorted(map(Path, found), key=numbers, reverse=True)


def numbers(path: Path) -> List[int]:
    """Return the numbers in a path, for sorting releases."""
    return [int(digits) for digits in re.findall(r"\d+", str(path))]


# Links


def environment(environ: Mapping[str, str] = os.environ) -> Dict[str, str]:
    """Return environment variables with which a new process finds the libraries by their bare names.

    Parameters
    ----------
    environ : mapping
        Environment variables.

    Returns
    -------
    dict
        Empty if there is no NVIDIA driver, or if the libraries are found without links.

    Raises
    ------
    OSError
        If there is no suitable place for the links.
    """
    found = find(environ)
    if all(visible(f"{name}.so", environ) for name in found):
        return {}
    folders = [str(links_folder(wanted_links(found), environ))]
    if environ.get("LD_LIBRARY_PATH"):
        folders.append(environ["LD_LIBRARY_PATH"])
    if not visible("libcuda.so.1", environ):
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
