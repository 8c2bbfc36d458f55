"""Dividing the threads of BLAS and OpenMP among the ranks of a machine.

Otherwise `n` ranks would run `n` times as many threads as there are cores.
"""

from __future__ import annotations

import os
from typing import Any

from synkhronos.host.handler_errors import reraise_if_handlers
from synkhronos.host.machine import cores

_VARIABLES = {  # by threadpoolctl's name of the library; read before OpenMP's own
    "openmp": "OMP_NUM_THREADS",
    "openblas": "OPENBLAS_NUM_THREADS",
    "mkl": "MKL_NUM_THREADS",
}


class ThreadLimits:
    """The thread limits of this process; the previous limits are restored at the end.

    Loaded libraries are limited with threadpoolctl. Libraries that are loaded later are limited by the
    environment variables that they read at that time.
    """

    def __init__(self) -> None:
        self._environment = {name: os.environ.get(name) for name in _VARIABLES.values()}
        self.before = {library.filepath: library.num_threads for library in _libraries()}

    def limit(self, ranks: int) -> None:
        """Limit each library to this process's share of the cores, with this number of ranks."""
        each = max(1, cores() // ranks)
        for library in _libraries():
            wanted = min(each, self._wanted(library))
            if library.num_threads != wanted:  # setting it makes OpenBLAS restart its threads
                library.set_num_threads(wanted)
        for name in _VARIABLES.values():
            os.environ[name] = str(min(each, self._requested(name)))

    def restore(self) -> None:
        """Undo `limit`."""
        for library in _libraries():
            library.set_num_threads(self._wanted(library))
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def _wanted(self, library: Any) -> int:
        """Return the number of threads that a library would use without our limits."""
        name = _VARIABLES.get(library.internal_api, "OMP_NUM_THREADS")
        return self.before.get(library.filepath, self._requested(name))

    def _requested(self, name: str) -> int:
        """Return the number of threads requested by this variable, else by OpenMP's variable."""
        for item in (name, "OMP_NUM_THREADS"):
            try:
                value = int(self._environment[item] or 0)
            except ValueError as error:
                reraise_if_handlers(error)
                value = 0
            if value > 0:
                return value
        return cores()


def use_more_cores(before: int) -> None:
    """Let the loaded libraries use all cores, if they have one thread for each of `before` cores."""
    requested = [os.environ.get(name) for name in _VARIABLES.values()]
    for library in _libraries():
        if library.num_threads == before and not any(requested):
            library.set_num_threads(cores())


def _libraries() -> list[Any]:
    """Return the loaded libraries of BLAS and OpenMP."""
    from threadpoolctl import ThreadpoolController  # takes 7 ms, so not at import

    return ThreadpoolController().lib_controllers
