"""The main loop of a worker: it runs one command after another."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import warnings
from typing import Any

from synkhronos.world.rank_state import RankState
from synkhronos.world.threads import ThreadLimits


def work(state: RankState, threads: ThreadLimits, profile: bool = False) -> None:
    """Run the master's commands until it sends an empty command.

    Parameters
    ----------
    state : RankState
        This worker's state.
    threads : ThreadLimits
        The thread limits of this process.
    profile : bool
        Whether to write a cProfile file at the end.
    """
    if not profile:
        return _run_commands(state, threads)
    import cProfile

    profiler = cProfile.Profile()
    try:
        profiler.runcall(_run_commands, state, threads)
    finally:
        _write_profile(profiler, f"synk_worker_{state.rank}.prof")


def _run_commands(state: RankState, threads: ThreadLimits) -> None:
    threads.limit(state.transport.ranks_here)
    if threading.current_thread() is threading.main_thread():  # this process is the rank's own
        gc.freeze()  # garbage collection then neither scans nor copies the master's objects
    while True:
        payload = state.transport.receive(state.warm_caches)
        if payload == b"":
            return
        reply = state.execute(payload)
        try:
            state.transport.reply(reply)
        except MemoryError as error:  # no room for the reply
            if state.transport.posted:
                raise
            state.transport.reply(state.failure(error))
        state.store.collect()  # a rank that does not allocate would never do it otherwise


def _write_profile(profiler: Any, name: str) -> None:
    """Replace a file of this name; never write through it if it is a link or a pipe."""
    try:
        descriptor, unfinished = tempfile.mkstemp(prefix=f"{name}.", dir=os.curdir)
        os.close(descriptor)
        try:
            profiler.dump_stats(unfinished)
            os.replace(unfinished, name)
        except OSError:
            os.unlink(unfinished)
            raise
    except OSError as error:
        warnings.warn(f"profile_workers: {name} was not written: {error}", RuntimeWarning, stacklevel=2)
