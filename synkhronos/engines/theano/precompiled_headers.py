"""Precompiled headers: what Theano's modules include is read once, not again for each module.

Reading the headers of Python, NumPy and the standard library is more than half of the work of compiling
a module. Importing this module makes Theano's compiler keep what it has read in the compile folder
(40 MB), for the next modules that are compiled with the same flags. Debug information, which Theano asks
for, is left out unless the user's own flags ask for it. The keys of the modules stay the same.

GCC uses such a file only if the same compiler has made it with the same flags, and reads the headers
otherwise. It does not notice that a header has changed, which is checked here.
"""

from __future__ import annotations

import collections
import hashlib
import inspect
import os
import re
from pathlib import Path
from typing import Any, Iterable, NamedTuple

from theano import config
from theano.gof import cmodule
from theano.misc.windows import output_subprocess_Popen

from synkhronos.host.handler_errors import reraise_if_handlers

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


class _Flags(NamedTuple):
    """What must be the same for all modules that use a file of headers."""

    preargs: tuple[str, ...]
    folders: tuple[str, ...]
    hides_symbols: bool

    def command(self) -> list[str]:
        """Return the command that compiles headers, without the names of files."""
        hidden = ["-fvisibility=hidden"] if self.hides_symbols else []
        folders = [f"-I{folder}" for folder in [*self.folders, *cmodule.std_include_dirs()]]
        return [config.cxx, "-g", *self.preargs, *hidden, *folders]


of_theano = cmodule.GCC_compiler.compile_str
_SIGNATURE = inspect.signature(of_theano)
# The headers for each set of flags: a path, or None if they cannot be made
_found: dict[_Flags, str | None] = {}
_n_modules: collections.Counter[_Flags] = collections.Counter()


def compile_str(*args: Any, **kwargs: Any) -> Any:
    """Compile as Theano's function of this name, in less time."""
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    preargs = given["preargs"] = list(given["preargs"] or ())
    if not any(flag.startswith("-g") for flag in preargs):
        preargs.append("-g0")
    if given["src_code"].startswith(_BEGINNING) and os.path.basename(config.cxx).startswith("g++"):
        without = ("-l", "-L", "-Wl", *(["-O"] if config.cmodule.remove_gxx_opt else []))
        relevant = tuple(flag for flag in preargs if not flag.startswith(without))
        folders = tuple(filter(None, given["include_dirs"] or ()))
        header = _headers(_Flags(relevant, folders, given["hide_symbols"]))
        if header is not None:
            preargs += ["-include", header]
    return of_theano(**given)


def _headers(flags: _Flags) -> str | None:
    """Return the path of headers that are precompiled with flags; None without such a file."""
    if flags not in _found:
        command = flags.command()
        text = _preamble() + _BEGINNING + _FURTHER
        digest = hashlib.sha256("\n".join([*command, text]).encode()).hexdigest()[:16]
        header = Path(config.compiledir, f"synkhronos_headers_{digest}", "headers.h")
        is_made = _is_current(header)
        if not is_made:
            _n_modules[flags] += 1
            if _n_modules[flags] <= _FEW:
                return None
            is_made = _make(header, text, command)
        _found[flags] = str(header) if is_made else None
    return _found[flags]


cmodule.GCC_compiler.compile_str = staticmethod(compile_str)


def _make(header: Path, text: str, command: Iterable[str]) -> bool:
    """Precompile the headers, if possible; return whether it was. Others find complete files only."""
    own = os.getpid()
    files = {suffix: header.with_name(f"headers.{own}{suffix}") for suffix in (".h", ".d", ".gch")}
    try:
        header.parent.mkdir(exist_ok=True)
        files[".h"].write_text(text)
        options = ["-x", "c++-header", files[".h"], "-MD", "-MF", files[".d"], "-o", files[".gch"]]
        _, _, status = output_subprocess_Popen([*command, *map(str, options)])
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
