"""Calls whose updates of shared variables are undone."""

from __future__ import annotations

import contextlib
import copy
from typing import Iterator, Sequence

from synkhronos._typing import SharedVariable
from synkhronos.world import generators
from synkhronos.world.here import Here


@contextlib.contextmanager
def on_copies(here: Here, shareds: Sequence[SharedVariable]) -> Iterator[None]:
    """Let shared variables hold copies of their values inside the block, and the originals after it."""
    engine = here.engine
    olds = [engine.storage(shared) for shared in shareds]
    try:
        for shared, old in zip(shareds, olds):
            engine.store(shared, old.copy() if hasattr(old, "copy") else copy.deepcopy(old))
        yield
    finally:
        for shared, old in zip(shareds, olds):
            engine.store(shared, old)


@contextlib.contextmanager
def without_effects(here: Here, numbers: Sequence[int]) -> Iterator[None]:
    """Undo what calls in the block do to shared variables, generators and the numbers of rows."""
    states, rows = generators.states(), dict(here.rows)
    try:
        with on_copies(here, [here.shareds[number] for number in numbers]):
            yield
    finally:
        here.rows.clear()
        here.rows.update(rows)
        generators.restore(states)
