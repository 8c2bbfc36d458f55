"""Theano's cache of compiled C modules: it is shared among ranks, and filled in less time.

A rank that loads a function needs the modules that the master has just compiled. A process that does not
find a module in memory searches the disk only while it holds the lock of the compile folder, and ranks
poll that lock every five seconds. Therefore the master sends the files of its new modules to the ranks.

Reading the headers of Python, NumPy and the standard library is more than half of the work of compiling
a module. Importing this module makes Theano's compiler keep what it has read in the compile folder
(40 MB), for the next modules that are compiled with the same flags. Debug information, which Theano asks
for, is left out unless the user's own flags ask for it. The keys of the modules stay the same.

GCC uses such a file only if the same compiler has made it with the same flags, and reads the headers
otherwise. It does not notice that a header has changed, which is checked here.
"""

from __future__ import annotations

import atexit
import collections
import hashlib
import itertools
import os
import pickle
import re
from pathlib import Path
from typing import Any, Iterable, Sequence

from theano import config
from theano.gof import cmodule
from theano.gof.cc import get_module_cache

from synkhronos.host.handler_errors import reraise_if_handlers


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


# Precompiled headers

# All modules begin with these lines.
_BEGINNING = """\
#include <Python.h>
#include <iostream>
#include "theano_mod_helper.h"
#include <math.h>
#include <numpy/arrayobject.h>
#include <numpy/arrayscalars.h>
"""
# More than half of them include these afterwards.
_FURTHER = "#include <vector>\n#include <algorithm>\n"
# Making the file takes as long as it saves with about three modules.
_FEW = 2


_FOR_LINKING = ("-l", "-L", "-Wl")  # how flags begin that are not for reading headers

of_theano = cmodule.output_subprocess_Popen
# The headers for each set of flags: a path, or None if they cannot be made
_found: dict[tuple[str, ...], str | None] = {}
_n_modules: collections.Counter[tuple[str, ...]] = collections.Counter()


def run_compiler(command: Sequence[str], **options: Any) -> Any:
    """Run a command as Theano does; one that compiles a module takes less time."""
    if command[1:2] == ["-shared"]:  # not a program that it tries
        _, _, debug, *flags = command[: command.index("-o")]  # Theano asks for debug information
        rest = command[command.index("-o") :]
        if not any(flag.startswith("-g") for flag in flags):
            flags.append("-g0")
        relevant = [flag for flag in flags if not flag.startswith(_FOR_LINKING)]
        code = Path(rest[2]).read_text(errors="replace")
        if code.startswith(_preamble() + _BEGINNING) and os.path.basename(command[0]).startswith("g++"):
            header = _headers((command[0], debug, *relevant))
            flags += [] if header is None else ["-include", header]
        command = [*command[:3], *flags, *rest]
    return of_theano(command, **options)


def _headers(flags: tuple[str, ...]) -> str | None:
    """Return the path of headers that are precompiled with flags; None without such a file."""
    if flags not in _found:
        text = _preamble() + _BEGINNING + _FURTHER
        digest = hashlib.sha256("\n".join([*flags, text]).encode()).hexdigest()[:16]
        header = Path(config.compiledir, f"synkhronos_headers_{digest}", "headers.h")
        is_made = _is_current(header)
        if not is_made:
            _n_modules[flags] += 1
            if _n_modules[flags] <= _FEW:
                return None
            is_made = _make(header, text, flags)
        _found[flags] = str(header) if is_made else None
    return _found[flags]


cmodule.output_subprocess_Popen = run_compiler


def _make(header: Path, text: str, flags: Iterable[str]) -> bool:
    """Precompile the headers, if possible; return whether it was. Others find complete files only."""
    own = os.getpid()
    files = {suffix: header.with_name(f"headers.{own}{suffix}") for suffix in (".h", ".d", ".gch")}
    try:
        header.parent.mkdir(exist_ok=True)
        files[".h"].write_text(text)
        options = ["-x", "c++-header", files[".h"], "-MD", "-MF", files[".d"], "-o", files[".gch"]]
        _, _, status = of_theano([*flags, *map(str, options)])
        if status:
            return False
        files[".gch"].replace(header.with_name("headers.h.gch"))
        files[".d"].replace(header.with_name("headers.d"))
        files[".h"].replace(header)
    except OSError as error:  # as on a full disk
        reraise_if_handlers(error)
        return False
    finally:
        for file in files.values():
            file.unlink(missing_ok=True)
    return True


def _is_current(header: Path) -> bool:
    """Whether there are precompiled headers, and nothing has changed since that they were made from."""
    try:
        made = header.with_name("headers.h.gch").stat().st_mtime
        rule = header.with_name("headers.d").read_text()
        # "target: file file ...", a backslash before a space in a name; the first has been renamed
        names = re.split(r"(?<!\\)\s+", rule.partition(":")[2].replace("\\\n", " ").strip())[1:]
        # A package manager may restore the time of a file's content, not that of its replacement.
        return header.exists() and all(
            os.stat(name.replace("\\ ", " ")).st_ctime < made for name in names
        )
    except OSError as error:
        reraise_if_handlers(error)
        return False


def _preamble() -> str:
    """Return what is put before the code of modules for the version of NumPy."""
    try:
        from theano.compat.numpy_1_24 import PREAMBLE
    except ImportError:
        return ""
    return PREAMBLE
