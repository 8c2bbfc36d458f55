"""Prepares a script that ``python -m synkhronos run`` starts, before its first line.

The command puts this folder first in ``PYTHONPATH``, so Python runs this file when it starts. This file
removes the folder again, lets Python find the modules of ``host/imports``, and then runs the
``sitecustomize`` that Python would have run otherwise. The script, and the processes that it starts,
have the same paths as without the command.
"""

import os
import runpy
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))


def _leave_path() -> None:
    """Remove this folder from the path of this process and of its children."""
    sys.path[:] = [folder for folder in sys.path if folder != _FOLDER]
    first, _, others = os.environ.get("PYTHONPATH", "").partition(os.pathsep)
    if first == _FOLDER:
        if others:
            os.environ["PYTHONPATH"] = others
        else:
            del os.environ["PYTHONPATH"]


def _run_other() -> None:
    """Run the next ``sitecustomize``, if there is one, in place of this."""
    this = sys.modules.pop(__name__)
    try:
        import sitecustomize  # noqa: F401
    except ImportError as error:
        if error.name != __name__:
            raise
    finally:
        sys.modules.setdefault(__name__, this)  # Python looks for it


def _host(file: str) -> dict:
    """Run a file of the folder ``host``, without the package, and return its names."""
    return runpy.run_path(os.path.join(os.path.dirname(_FOLDER), "host", file))


def _end_job() -> None:
    """Let the other tasks of an MPI job end, also if the script has not imported the library."""
    import importlib

    importlib.import_module("synkhronos.world.job").end()


_leave_path()
_imports = _host("imports.py")
_imports["provide"]()
_imports["provide_aliases"]()
_host("job.py")["provide"](_end_job)
_run_other()
