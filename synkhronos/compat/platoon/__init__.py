"""Platoon's names: a controller process, and a worker process for each device, on one machine.

``channel`` has the classes of controllers and workers. ``param_sync`` has rules for parameters that all
workers share, and ``training`` has rules in which all workers meet. ``ops`` are reductions in graphs,
and ``launcher`` is the command ``platoon-launcher``, with the processes that it and a controller start.
``controller`` is for experiments without a script of their own for it, and ``configparser`` reads
``.platoonrc``.

A controller is a `synkhronos.Listener`, and a worker is attached to it, whoever has started it.
"""

from __future__ import annotations

from typing import Any

from synkhronos.host import imports

__all__ = ["Controller", "Worker", "install"]


def install() -> None:
    """Let ``import platoon`` import this package, if Platoon itself is not installed.

    ``python -m synkhronos run`` and ``platoon-launcher`` do it before a script starts.
    """
    imports.provide_aliases()


def __getattr__(name: str) -> Any:
    # The classes need the compiler, and the launcher must start without it.
    if name not in ("Controller", "Worker"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from synkhronos.compat.platoon import channel

    return getattr(channel, name)
