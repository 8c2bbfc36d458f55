"""Sharing Theano's cache of compiled C modules among ranks.

A rank that loads a function needs the modules that the master has just compiled. Two properties of
Theano 1.0.5 prevent that. First, an operation whose ``__props__`` is an empty tuple (``Dot22``, softmax
and others) is never cached, because ``theano/gof/cc.py`` tests whether any part of the version is empty;
so every process compiles it again. Second, a process that does not find a module in memory searches the
disk only while it holds the lock of the compile folder, and ranks poll that lock every five seconds.
Therefore the master sends the files of its new modules to the ranks.

Theano adds a key to a module's file of keys by rewriting the file. A process that starts meanwhile finds
a partial file, and deletes the module, although other processes use it. So importing this module makes
Theano replace such a file atomically.
"""

from __future__ import annotations

import atexit
import itertools
import os
import pickle
from typing import Any, Iterable

from theano.gof import Op, cmodule
from theano.gof.cc import get_module_cache

from synkhronos.engines.theano.kernels.cpp import KeyPickler
from synkhronos.host.handler_errors import suppress


class _NoProperties(tuple):
    """An empty ``__props__`` that does not count as a missing version. It equals (), also pickled."""

    __slots__ = ()

    def __bool__(self) -> bool:
        return True

    def __reduce__(self) -> tuple[type[tuple], tuple[()]]:
        return tuple, ()


def make_cacheable() -> None:
    """Let Theano cache all imported operations that have no properties."""
    kinds = [Op]
    while kinds:
        kind = kinds.pop()
        kinds.extend(kind.__subclasses__())
        if vars(kind).get("__props__") == ():
            kind.__props__ = _NoProperties()


def _save_keys(self: cmodule.KeyData) -> None:
    """Like `KeyData.save_pkl`, but other processes find either the former file or the new file."""
    new = f"{self.key_pkl}.{os.getpid()}"
    try:
        with open(new, "wb") as file:
            KeyPickler(file, pickle.HIGHEST_PROTOCOL).dump(self)
        os.replace(new, self.key_pkl)
    except BaseException as error:
        # Theano itself removes the file then, and compiles the module again in the next process.
        for path in [new, self.key_pkl] if isinstance(error, pickle.PicklingError) else [new]:
            with suppress(OSError):
                os.remove(path)
        raise


cmodule.KeyData.save_pkl = _save_keys


class ModuleLog:
    """Keeps track of the modules that this process has compiled or loaded and other ranks have not.

    Theano stores the files of modules by key, in the order in which it finds them. It removes none.
    """

    def __init__(self) -> None:
        # Numbers of modules; None if this process has not read the cache, and ranks read it from disk.
        self._known: int | None = None
        self._sent: int | None = None

    def mark_known(self, all_are: bool) -> None:
        """Record that the ranks know all present modules, because they were forked.

        Otherwise some of them know none, because they are on other machines.
        """
        self._known = self._sent = _count() if all_are else 0

    def unknown(self) -> dict[Any, str]:
        """Return the files, by key, of the modules to send to the ranks."""
        self._sent = _count()
        if self._known is None or self._sent is None:
            return {}
        known = get_module_cache().entry_from_key.items()
        return dict(itertools.islice(known, self._known, None))

    def mark_sent_known(self) -> None:
        """Record that the ranks know the modules last returned by `unknown`."""
        self._known = self._sent


def _count() -> int | None:
    """Return the number of modules that this process knows; None if it has not read the cache."""
    return None if cmodule._module_cache is None else len(get_module_cache().entry_from_key)


def add_modules(pickled: Iterable[bytes]) -> None:
    """Add the modules of another process, given as pickles of the key and the file of each."""
    cache = get_module_cache()
    for payload in pickled:
        try:
            key, file = pickle.loads(payload)
        except Exception:  # the key has an operation that this process cannot load
            continue
        if not os.path.exists(file):  # on another machine
            continue
        if not key[0] and key not in cache.entry_from_key:
            # It has no version, so Theano would delete its file when this process exits.
            atexit.register(cache.entry_from_key.pop, key, None)
        cache.entry_from_key.setdefault(key, file)
        cache.loaded_key_pkl.add(os.path.join(os.path.dirname(file), "key.pkl"))
