"""Theano's cache of compiled C modules, made to work between ranks.

A rank that loads a function needs the modules that the master has just compiled. In Theano 1.0.5 two
things prevent that. An operation whose ``__props__`` is an empty tuple (``Dot22``, softmax, ...) is
taken for one that must not be cached (``theano/gof/cc.py`` tests whether any part of the version is
empty), so every process compiles it again. And a process that does not find a module in its memory
looks for it on disk only while it holds the lock of the compile folder, which ranks poll every five
seconds. So the master sends the ranks the files of its new modules.
"""

import itertools
import os

from theano.gof import Op, cmodule
from theano.gof.cc import get_module_cache


class _NoProperties(tuple):
    """An empty ``__props__`` that is not taken for a missing version; equal to, and pickled as, ()."""

    __slots__ = ()

    def __bool__(self):
        return True

    def __reduce__(self):
        return tuple, ()


def make_cacheable():
    """Have Theano cache operations without properties, all that are imported by now."""
    kinds = [Op]
    while kinds:
        kind = kinds.pop()
        kinds.extend(kind.__subclasses__())
        if vars(kind).get("__props__") == ():
            kind.__props__ = _NoProperties()


class ModuleLog:
    """Which of the modules that this process has compiled or loaded are known to the other ranks.

    Theano keeps the files of modules by key, in the order in which it came to know them; it only adds.
    """

    def __init__(self):
        self._known = None  # how many; None: none, and the ranks read the whole cache from disk
        self._sent = None

    def mark_all_known(self):
        """Note that the ranks know all modules of this moment, as forked ones do."""
        self._known = self._sent = _count()

    def unknown(self):
        """Return the files, by key, of the modules that are to be sent to the ranks."""
        self._sent = _count()
        if self._known is None:
            return {}
        known = get_module_cache().entry_from_key.items()
        return dict(itertools.islice(known, self._known, None))

    def mark_sent_known(self):
        """Note that the ranks know what `unknown` has returned last."""
        self._known = self._sent


def _count():
    """Return how many modules this process knows; None if it has not looked at the cache yet."""
    return None if cmodule._module_cache is None else len(get_module_cache().entry_from_key)


def add_modules(files):
    """Add the modules of another process, files by key, to those that this one knows."""
    cache = get_module_cache()
    for key, file in files.items():
        cache.entry_from_key.setdefault(key, file)
        cache.loaded_key_pkl.add(os.path.join(os.path.dirname(file), "key.pkl"))
