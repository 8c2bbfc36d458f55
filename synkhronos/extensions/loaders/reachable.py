"""What the source and the transforms of a loader use: the objects that their code can reach.

The walk follows attributes, containers, closures and, for code of the script and not of libraries, the
global names that it uses. It ends after `_MOST` objects, the nearest of which come first.
"""

from __future__ import annotations

import array
import functools
import gc
import random
import sys
import sysconfig
import types
import zlib
from collections import deque
from pathlib import Path
from typing import Any, Iterable, Iterator

import numpy as np

_MOST = 10_000
_LARGE = 16 << 20  # bytes of an array; of a larger one, some blocks are compared
_BLOCK = 64 << 10  # bytes

_ATOMS = (type(None), bool, int, float, complex, str, bytes, np.number, np.bool_)
_CONTAINERS = (dict, list, tuple, set, frozenset)
_SKIPPED = (types.ModuleType, types.FrameType, types.GeneratorType)
_GENERATORS = (random.Random, np.random.RandomState, np.random.Generator, np.random.BitGenerator)
#: How the files of libraries begin
_OF_LIBRARIES = (
    "<frozen", "<__array_function__",
    f"{Path(__file__).parents[2]}/", f"{sysconfig.get_path('stdlib')}/",
)  # fmt: skip


def walk(roots: Iterable[Any]) -> Iterator[tuple[Any, tuple[Any, ...], list[Any]]]:
    """Yield each object that can be reached, once, with the atoms and the objects that it refers to."""
    todo: deque[Any] = deque(roots)
    seen: set[int] = set()
    while todo and len(seen) < _MOST:
        one = todo.popleft()
        if id(one) in seen:
            continue
        seen.add(id(one))
        try:
            if isinstance(one, (*_ATOMS, *_SKIPPED)):
                continue
            atoms, others = _split(list(_children(one)))
        except Exception:  # such as of a weak reference to an object that is gone
            continue
        yield one, atoms, others
        todo.extend(others)


def _split(children: list[Any]) -> tuple[tuple[Any, ...], list[Any]]:
    if {*map(type, children)} <= {*_ATOMS}:  # such as a long list of names
        return tuple(children), []
    atoms = tuple(one for one in children if isinstance(one, _ATOMS))
    return atoms, [one for one in children if not isinstance(one, _ATOMS)]


def fingerprint(roots: Iterable[Any]) -> int:
    """Return a number that changes when what can be reached changes, apart from random generators."""
    found: list[Any] = []
    for one, atoms, others in walk(roots):
        if isinstance(one, np.ndarray):
            found += [one.shape, one.dtype.str, _checksum(one)]
        elif isinstance(one, (bytearray, array.array)):
            found += [len(one), zlib.crc32(one)]
        elif isinstance(one, types.FunctionType):
            found += [id(one.__code__), atoms]
        elif not isinstance(one, _GENERATORS):
            # What refers to nothing, such as a compiled pattern, is told by its identity.
            is_known = atoms or others or isinstance(one, _CONTAINERS)
            found += [type(one).__name__, atoms, len(others), 0 if is_known else id(one)]
    return hash(tuple(found))


def check_usable_in_copies(roots: Iterable[Any]) -> None:
    """Raise ValueError if a copy of this process cannot use what can be reached."""
    kind = getattr(sys.modules.get("lmdb"), "Environment", ())
    for one, *_ in walk(roots):
        if isinstance(one, kind) and one.flags()["lock"]:
            # Each transaction of a copy would use up a reader, also of this process.
            raise ValueError(
                f"Loader: expected no open lmdb environment with lock=True, got that of {one.path()}; "
                f"open it in Source.read, or with lock=False"
            )


def _children(one: Any) -> Iterable[Any]:
    if isinstance(one, dict):
        return [*one, *one.values()]
    if isinstance(one, _CONTAINERS):
        return one
    if isinstance(one, np.ndarray):
        return one.ravel().tolist() if one.dtype.hasobject else ()
    if isinstance(one, types.FunctionType):
        return _of_function(one)
    if isinstance(one, type):
        return (*one.__bases__, *vars(one).values()) if _is_scripts(_file_of(one)) else ()
    if type(one).__module__.startswith("synkhronos.") and ".loaders." not in type(one).__module__:
        return ()  # such as the loader
    own, kind = getattr(one, "__dict__", None), type(one)
    held = [*own.values()] if isinstance(own, dict) else []
    known = {id(own), *map(id, held)}
    held += [
        other
        for other in gc.get_referents(one)
        if id(other) not in known and not isinstance(other, type)
    ]
    return [*held, kind] if _is_scripts(_file_of(kind)) else held


def _of_function(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            pass  # not assigned yet
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    if hasattr(function, "__wrapped__"):
        yield function.__wrapped__
    if _is_scripts(function.__code__.co_filename):
        names = _names_in(function.__code__)
        for name in names:
            value = function.__globals__.get(name)
            if isinstance(value, types.ModuleType) and _is_scripts(getattr(value, "__file__", "<")):
                yield from (vars(value)[other] for other in names if other in vars(value))
            else:
                yield value


@functools.lru_cache(1024)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """Return the names of globals and attributes that a function uses, and those defined in it."""
    inner = (one for one in code.co_consts if isinstance(one, types.CodeType))
    return (*code.co_names, *(name for one in inner for name in _names_in(one)))


def _file_of(kind: type) -> str:
    if kind.__module__ == "builtins":
        return "<frozen"
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or ""


@functools.lru_cache(1024)
def _is_scripts(file: str) -> bool:
    """Whether a file is the script's own, and not that of a library."""
    is_installed = "/site-packages/" in file or "/dist-packages/" in file
    return not is_installed and not file.startswith(_OF_LIBRARIES)


def _checksum(values: np.ndarray) -> int:
    is_shared = isinstance(values, np.memmap) and values.mode != "c"
    if is_shared or values.dtype.hasobject or not values.size:
        return 0  # all processes see a change of a file, and the walk what objects hold
    if values.nbytes > _LARGE and not values.flags.c_contiguous:
        values = values[:: -(-values.nbytes // _LARGE)]
    flat: Any = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    if flat.nbytes <= _LARGE:
        return zlib.crc32(flat)
    starts = np.linspace(0, flat.nbytes - _BLOCK, 64, dtype=np.int64)
    return functools.reduce(lambda sum, at: zlib.crc32(flat[at : at + _BLOCK], sum), starts, 0)
