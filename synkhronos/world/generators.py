"""The generators of Python's ``random`` and of ``numpy.random``, which each process has once.

A worker is forked with copies of the script's generators, and would draw the same numbers for its rows
as the script draws for other rows. So each worker gets states of its own, which follow from the script's
states and from its rank. Inside a program it has the script's states, as it has the values of the
script's variables.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import random
import threading
from typing import Any, Iterator

import numpy as np

from synkhronos.world.rank_state import RankState

_SEED_WORDS = 8


def states() -> tuple:
    """Return the states of the generators of this process."""
    return random.getstate(), np.random.get_state(legacy=False)


def fingerprints() -> tuple[int, int]:
    """Return a number for the state of ``random``, and a number for the state of ``numpy.random``."""
    of_python, of_numpy = map(_fingerprint, states())
    return of_python, of_numpy


def entropy(*others: int) -> list[int]:
    """Return a number that depends on the state of ``numpy.random``, followed by the given numbers."""
    return [fingerprints()[1], *others]


def seed(given: tuple[int, int], *others: int) -> None:
    """Seed the generators of this process; each depends on its fingerprint and on the other numbers."""
    of_python, of_numpy = (np.random.SeedSequence([item, *others]) for item in given)
    random.seed(of_python.generate_state(_SEED_WORDS).tobytes())
    # `np.random.seed` is for a single kind of generator, and scripts can choose another kind.
    kind = getattr(np.random, np.random.get_state(legacy=False)["bit_generator"], None)
    if kind is not None:  # it is NumPy's own
        np.random.set_state({**kind(of_numpy).state, "has_gauss": 0, "gauss": 0.0})


def seed_worker(rank_state: RankState, given: tuple[int, int]) -> None:
    """Give a worker states of its own."""
    if _has_own_process(rank_state):
        seed(given, rank_state.rank)


@contextlib.contextmanager
def states_of_script(rank_state: RankState, given: tuple[Any, Any]) -> Iterator[None]:
    """Let a worker have the script's states inside the block."""
    if not _has_own_process(rank_state):
        yield
        return
    own = states()
    restore(given)
    try:
        yield
    finally:
        restore(own)


def restore(given: tuple[Any, Any]) -> None:
    """Set the generators of this process to states that `states` has returned."""
    of_python, of_numpy = given
    random.setstate(of_python)
    kind = of_numpy["bit_generator"]
    if np.random.get_state(legacy=False)["bit_generator"] != kind:
        module: Any = np.random  # not all of it is in its types
        module.set_bit_generator(getattr(np.random, kind)())
    np.random.set_state(of_numpy)


def _fingerprint(state: Any) -> int:
    return int.from_bytes(hashlib.blake2b(pickle.dumps(state), digest_size=16).digest(), "little")


def _has_own_process(rank_state: RankState) -> bool:
    """Whether this rank is a worker in a process of its own, and not a thread of the script's."""
    return not rank_state.is_master and threading.current_thread() is threading.main_thread()
