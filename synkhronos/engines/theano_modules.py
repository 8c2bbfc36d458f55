"""Theano's cache of compiled C modules, made to work between ranks.

A rank that takes over a function needs the modules that the master has just compiled. Theano 1.0.5
keeps them from it in two ways. An operation whose ``__props__`` is an empty tuple (``Dot22``, softmax,
...) counts as one that must not be cached (``theano/gof/cc.py`` asks each part of the version whether
it is empty), so every process compiles it anew. And a process that misses a module
in its memory looks for it on disk only while it holds the lock of the compile folder, for which ranks
queue up in steps of five seconds. So the master tells the ranks where its new modules are.
"""

import itertools
import os

from theano.gof import Op, cmodule
from theano.gof.cc import get_module_cache


class _NoProperties(tuple):
    """An empty ``__props__`` that does not count as a missing version; equal to, and pickled as, ()."""

    __slots__ = ()

    def __bool__(self):
        return True

    def __reduce__(self):
        return tuple, ()


def make_cacheable():
    """Let operations without properties be cached, all that are imported by now."""
    kinds = [Op]
    while kinds:
        kind = kinds.pop()
        kinds.extend(kind.__subclasses__())
        if vars(kind).get("__props__") == ():
            kind.__props__ = _NoProperties()


class ModuleDiary:
    """Which modules this process has come to know since it last told the ranks.

    Theano keeps the places of modules by key, in order of coming; they are only added to.
    """

    def __init__(self):
        self._told = None

    def mark(self):
        """All that is known now, the ranks know."""
        if cmodule._module_cache is not None:
            self._told = len(get_module_cache().entry_from_key)

    def tell(self):
        """Return the places, by key, of the modules that the ranks may not know; they do, then.

        Ranks that inherited no cache, as nothing was compiled by then, read all of it from disk.
        """
        news = {}
        if self._told is not None:
            known = get_module_cache().entry_from_key.items()
            news = dict(itertools.islice(known, self._told, None))
        self.mark()
        return news


def learn(news):
    """Take over places of modules that another process told."""
    cache = get_module_cache()
    for key, place in news.items():
        cache.entry_from_key.setdefault(key, place)
        cache.loaded_key_pkl.add(os.path.join(os.path.dirname(place), "key.pkl"))
