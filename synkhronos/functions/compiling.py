"""Showing that a function is being compiled."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Iterator

from synkhronos.host import compiler
from synkhronos.host.log import logger
from synkhronos.host.progress import Progress
from synkhronos.world.world import World


@contextlib.contextmanager
def compiling(world: World, name: str) -> Iterator[None]:
    """Show that a function is being compiled, if this takes long, and log the time it took."""
    called = f"function {world.registry.n_functions + 1} ({os.path.basename(name)})"
    remark = (
        f"the first time this can take minutes; later the code is taken from {compiler.TITLE}'s cache"
    )
    start = time.perf_counter()
    with world.part(Progress).show(f"compiling {called}", remark):
        yield
    logger.info("%s compiled in %.3f s", called, time.perf_counter() - start)
