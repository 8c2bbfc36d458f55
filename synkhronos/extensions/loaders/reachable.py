"""What the source and the transforms of a loader use: the objects that their code can reach.

The walk follows attributes, containers, closures and, for code of the script and not of libraries, the
global names that it uses. It ends after `_MOST` objects, the nearest of which come first.

The script may draw from other random generators than `Draws`.

Each process of a loader has copies of them, in the same state. So their numbers would be the same in
each process, or depend on the number of processes. `Generators` finds those that a call draws from. The
call is then repeated for each row by itself, with the generators seeded by the epoch and the row.
"""

from __future__ import annotations

import array
import ctypes
import functools
import gc
import os
import pickle
import random
import stat
import sys
import sysconfig
import types
import weakref
import zlib
from collections import deque
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, NamedTuple

import numpy as np

_MOST = 10_000
_LARGE = 16 << 20  # bytes of an array; of a larger one, some blocks are compared
_BLOCK = 64 << 10  # bytes
_MOST_FILES = 64  # of a container, or the attributes of an object
_UNASSIGNED = types.CellType()

_ATOMS = (type(None), bool, int, float, complex, str, bytes, np.number, np.bool_)
_PATHS = (str, os.PathLike)
_BUFFERS = (bytearray, array.array, ctypes._SimpleCData, ctypes.Array, ctypes.Structure)
_CONTAINERS = (dict, list, tuple, set, frozenset)
_SKIPPED = (types.ModuleType, types.FrameType, types.GeneratorType)
_GENERATORS = (random.Random, np.random.RandomState, np.random.Generator, np.random.BitGenerator)
#: How the files of libraries begin
_OF_LIBRARIES = (
    "<frozen", "<__array_function__",
    f"{Path(__file__).parents[2]}/", f"{sysconfig.get_path('stdlib')}/",
)  # fmt: skip


#: The generators of modules, by the name of the attribute. Others are found where they are used.
_OF_MODULES = {
    "random": "_inst",
    "numpy.random.mtrand": "_rand",
    "torch": "default_generator",
    "imgaug.random": "GLOBAL_RNG",
}
#: What generators without a seed are seeded with, once it is installed
_entropy = random.Random()


def walk(roots: Iterable[Any]) -> Iterator[tuple[Any, tuple[Any, ...], list[Any]]]:
    """Yield each object that can be reached, once, with the atoms and the objects that it refers to."""
    todo: deque[Any] = deque(roots)
    seen: set[int] = set()
    while todo and len(seen) < _MOST:
        item = todo.popleft()
        if id(item) in seen:
            continue
        seen.add(id(item))
        try:
            if isinstance(item, (*_ATOMS, *_SKIPPED)):
                continue
            atoms, others = _split(list(_children(item)))
        except Exception:  # such as of a weak reference to an object that is gone
            continue
        yield item, atoms, others
        todo.extend(others)


def _split(children: list[Any]) -> tuple[tuple[Any, ...], list[Any]]:
    if {*map(type, children)} <= {*_ATOMS}:  # such as a long list of names
        return tuple(children), []
    atoms = tuple(child for child in children if isinstance(child, _ATOMS))
    return atoms, [child for child in children if not isinstance(child, _ATOMS)]


def fingerprint(roots: Iterable[Any]) -> int:
    """Return a number that changes when what can be reached changes, apart from random generators."""
    found: list[Any] = [os.stat(".").st_ino]
    for item, atoms, others in walk([list(roots)]):
        paths = (each for each in (item, *atoms[:_MOST_FILES]) if issubclass(type(each), _PATHS))
        found += map(_version, paths)
        if isinstance(item, np.ndarray):
            found += [item.shape, item.dtype.str, _checksum(item)]
        elif isinstance(item, _BUFFERS):
            found += [memoryview(item).nbytes, zlib.crc32(item)]
        elif isinstance(item, types.FunctionType):
            found += [id(item.__code__), atoms]
        elif not isinstance(item, _GENERATORS):
            # What refers to nothing, such as a compiled pattern, is told by its identity.
            is_known = atoms or others or isinstance(item, _CONTAINERS)
            found += [type(item).__name__, atoms, len(others), 0 if is_known else id(item)]
    return hash(tuple(found))


def _version(path: Any) -> tuple[int, ...]:
    """Return what changes when a file is written; nothing if there is no file of this name."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # any text
        return ()
    # A folder changes with each file that a script writes to it.
    written = (status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else ()
    return status.st_ino, *written


def check_usable_in_copies(roots: Iterable[Any]) -> None:
    """Raise ValueError if a copy of this process cannot use what can be reached."""
    kind = getattr(sys.modules.get("lmdb"), "Environment", ())
    for item, *_ in walk(roots):
        if isinstance(item, kind) and item.flags()["lock"]:
            # Each transaction of a copy would use up a reader, also of this process.
            raise ValueError(
                f"Loader: expected no open lmdb environment with lock=True, got that of {item.path()}; "
                f"open it in Source.read, or with lock=False"
            )


def _children(item: Any) -> Iterable[Any]:
    if isinstance(item, dict):
        return [*item, *item.values()]
    if isinstance(item, _CONTAINERS):
        return item
    if isinstance(item, np.ndarray):
        return item.ravel().tolist() if item.dtype.hasobject else ()
    if isinstance(item, weakref.ref):
        return (item(),)
    if isinstance(item, types.FunctionType):
        return _of_function(item)
    if isinstance(item, type):
        return (*item.__bases__, *vars(item).values()) if _is_scripts(_file_of(item)) else ()
    if type(item).__module__.startswith("synkhronos.") and ".loaders." not in type(item).__module__:
        return ()  # such as the loader
    own, kind = getattr(item, "__dict__", None), type(item)
    held = [*own.values()] if isinstance(own, dict) else []
    known = {id(own), *map(id, held)}
    held += [
        other
        for other in gc.get_referents(item)
        if id(other) not in known and not isinstance(other, type)
    ]
    return [*held, kind] if _is_scripts(_file_of(kind)) else held


def _of_function(function: types.FunctionType) -> Iterator[Any]:
    yield from (cell.cell_contents for cell in function.__closure__ or () if cell != _UNASSIGNED)
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    if hasattr(function, "__wrapped__"):
        yield function.__wrapped__
    if _is_scripts(function.__code__.co_filename):
        yield from _texts_of(function.__code__)
        names = _names_in(function.__code__)
        for name in names:
            value = function.__globals__.get(name, sys.modules.get(name))  # imported by the function
            if isinstance(value, types.ModuleType) and _is_scripts(getattr(value, "__file__", "<")):
                yield from (vars(value)[other] for other in names if other in vars(value))
            else:
                yield value


def _texts_of(code: types.CodeType) -> Iterator[str]:
    """Yield texts in a function, such as names of files, or the environment variables of this name."""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _texts_of(constant)
        elif isinstance(constant, str):
            yield os.environ.get(constant, constant)


@functools.lru_cache(1024)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """Return the names of globals and attributes that a function uses, and those defined in it."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return (*code.co_names, *(name for item in inner for name in _names_in(item)))


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
    if values.dtype.hasobject or not values.size:
        return 0  # the walk finds what objects hold
    if values.nbytes > _LARGE and not values.flags.c_contiguous:
        values = values[:: -(-values.nbytes // _LARGE)]
    flat: Any = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    if flat.nbytes <= _LARGE:
        return zlib.crc32(flat)
    starts = np.linspace(0, flat.nbytes - _BLOCK, 64, dtype=np.int64)
    return functools.reduce(lambda sum, at: zlib.crc32(flat[at : at + _BLOCK], sum), starts, 0)


class _Generator(NamedTuple):
    """How a generator is seeded, and how it is found out whether it was drawn from.

    Attributes
    ----------
    seed : callable
        Called with an int of 31 bits.
    state : callable
        Returns what is equal as long as nothing was drawn since `watch` was called.
    watch : callable
        Called before a call; returns what `state` returns if nothing is drawn.
    """

    seed: Callable[[int], Any]
    state: Callable[[], Any]
    watch: Callable[[], Any]


class Generators:
    """The generators that a source and transforms can reach, and those of modules.

    Parameters
    ----------
    roots : iterable of object
        The source and the transforms.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self._roots = list(roots)
        self._kept: list[Any] = []  # so that no other objects get their ids
        self._found: dict[int, _Generator] = {}
        self._draws: dict[int, bool] = {}  # whether what is done draws from a generator
        self.find()

    def find(self) -> bool:
        """Find generators that did not exist before; return whether there are any."""
        modules = [getattr(sys.modules.get(name), of, None) for name, of in _OF_MODULES.items()]
        n_before = len(self._found)
        for module in [_entropy, sys.modules.get("cv2"), *modules]:
            self._add(module)
        for item, *_ in walk([*modules, *self._roots]):
            self._add(item)
        return len(self._found) > n_before

    def _add(self, item: Any) -> None:
        # Of NumPy's, several objects can have one generator of bits.
        shared = getattr(item, "_bit_generator", getattr(item, "bit_generator", item))
        made = None if item is None or id(shared) in self._found else _generator(item)
        if made is not None:
            self._kept += [item, shared]
            self._found[id(shared)] = made

    def call(
        self,
        purpose: int,
        function: Callable[[slice], Any],
        find_seeds: Callable[[], np.ndarray],
        as_whole: bool = False,
    ) -> list[Any]:
        """Call a function for all rows, or for each of them if it draws from a generator.

        Parameters
        ----------
        purpose : int
            What is done. Once it has drawn, it is called for each row.
        function : callable
            Called with a slice of the places of the rows.
        find_seeds : callable
            Returns a seed for each row.
        as_whole : bool
            Whether it is called for all rows in any case; then the first seed is used.

        Returns
        -------
        list
            One result of all rows, or the result of each row.
        """
        if not self._draws.get(purpose):
            while True:
                before = {key: item.watch() for key, item in self._found.items()}
                result = function(slice(None))
                if purpose in self._draws or not self.find():
                    break
                self._draws[purpose] = False  # once more, as it may have drawn from a new generator
            self._draws[purpose] = any(
                self._found[key].state() != state for key, state in before.items()
            )
            if not self._draws[purpose]:
                return [result]
        seeds = find_seeds()
        if as_whole:
            return [self._seeded(function, slice(None), int(seeds[0]))]
        return [self._seeded(function, slice(row, row + 1), int(seed)) for row, seed in enumerate(seeds)]

    def _seeded(self, function: Callable[[slice], Any], places: slice, seed: int) -> Any:
        for number, value in enumerate(self._found.values()):
            value.seed((seed + number * 0x9E3779B1) % 2**31)
        return function(places)


def seed_generators_without_seed() -> None:
    """In a process of a loader: seed ``default_rng()`` and ``random.Random()`` by the row as well."""
    np.random.bit_generator.randbits = _entropy.getrandbits  # type: ignore[attr-defined]
    seed_with = random.Random.seed

    def seed(self: random.Random, a: Any = None, version: int = 2) -> None:
        seed_with(self, _entropy.getrandbits(64) if a is None else a, version)

    random.Random.seed = seed  # type: ignore[method-assign]


def _generator(item: Any) -> _Generator | None:
    """Return how an object is seeded; None if it is not a generator."""
    if isinstance(item, random.SystemRandom):
        return None
    if isinstance(item, random.Random):
        return _Generator(item.seed, item.getstate, item.getstate)
    if isinstance(item, (np.random.RandomState, np.random.Generator, np.random.BitGenerator)):
        _seed(item, 0)  # a RandomState then keeps no normal number, which would be drawn without a trace
        bits: Any = getattr(item, "_bit_generator", getattr(item, "bit_generator", item))
        return _Generator(functools.partial(_seed, item), *[lambda: pickle.dumps(bits.state)] * 2)
    if type(item).__name__ == "Generator" and type(item).__module__.startswith("torch"):
        return _Generator(item.manual_seed, *[lambda: item.get_state().tolist()] * 2)
    if getattr(item, "__name__", "") == "cv2":
        return _of_opencv(item)
    return None


def _seed(item: Any, seed: int) -> None:
    if not isinstance(item, np.random.RandomState):
        bits = getattr(item, "bit_generator", item)
        bits.state = type(bits)(seed).state
    elif isinstance(item._bit_generator, np.random.MT19937):
        item.seed(seed)
    else:
        made: Any = type(item._bit_generator)(seed).state
        item.set_state({**made, "has_gauss": 0, "gauss": 0.0})


def _of_opencv(cv2: Any) -> _Generator:
    """Return the generator of OpenCV's functions in this thread, the state of which cannot be read."""

    def draw() -> float:
        return float(cv2.randu(np.zeros(1), 0, 1)[0])

    def watch() -> float:
        cv2.setRNGSeed(1)
        drawn = draw()
        cv2.setRNGSeed(1)
        return drawn

    return _Generator(cv2.setRNGSeed, draw, watch)
