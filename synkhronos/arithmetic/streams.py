"""Independent substreams of random generators: pure arithmetic on their states.

A rank uses the script's stream, advanced further than any program can draw, and further than the
distance between the streams that a seeded generator provides.
"""

from __future__ import annotations

import functools
from typing import Tuple

import numpy as np

# MRG31k3p: L'Ecuyer and Touzin, "Fast combined multiple recursive generators with multipliers of the
# form a = +-2^q +-2^r", Winter Simulation Conference 2000. State: the last three values of each of
# two recurrences; period about 2^185.
_MODULI = (2**31 - 1, 2**31 - 21069)
_STEPS = (
    ((0, 2**22, 2**7 + 1), (1, 0, 0), (0, 1, 0)),
    ((2**15, 0, 2**15 + 1), (1, 0, 0), (0, 1, 0)),
)
# The streams of one seed are 2^134 draws apart, the generators within a stream 2^72.
_DISTANCE = 160

_Matrix = Tuple[Tuple[int, ...], ...]


def jump_mrg(states: np.ndarray, index: int) -> np.ndarray:
    """Advance states of MRG31k3p by ``index * 2**160`` draws.

    Parameters
    ----------
    states : numpy.ndarray
        int32, the last axis of length 6.
    index : int

    Returns
    -------
    numpy.ndarray
        New states of the same shape and dtype.
    """
    moved = np.array(states)
    flat = moved.reshape(-1, 6)
    for part, modulus in enumerate(_MODULI):
        matrix = np.array(_jump_matrix(part, index), dtype=object)
        columns = slice(3 * part, 3 * part + 3)
        flat[:, columns] = (flat[:, columns].astype(object) @ matrix.T) % modulus
    return moved


@functools.lru_cache(maxsize=None)
def _jump_matrix(part: int, index: int) -> _Matrix:
    modulus = _MODULI[part]
    matrix = np.array(_STEPS[part], dtype=object)
    for _ in range(_DISTANCE):
        matrix = matrix @ matrix % modulus
    result = np.array([[int(i == j) for j in range(3)] for i in range(3)], dtype=object)
    for _ in range(index):
        result = result @ matrix % modulus
    return tuple(map(tuple, result))


def jump_random_state(state: np.random.RandomState, index: int) -> np.random.RandomState:
    """Return a copy of a ``numpy.random.RandomState``, advanced by ``index * 2**128`` draws."""
    bits = np.random.MT19937()
    moved = np.random.RandomState(bits)
    moved.set_state(state.get_state())
    if index:
        moved = np.random.RandomState(bits.jumped(index))
    return moved


def random_state_to_array(state: np.random.RandomState) -> np.ndarray:
    """Return the state of a ``numpy.random.RandomState`` as an array of ``uint32``."""
    kind = state.get_state(legacy=False)["bit_generator"]  # type: ignore[call-overload]
    if kind != "MT19937":
        raise TypeError(f"expected a RandomState of the generator MT19937, got {kind}")
    _, key, position, has_gauss, gauss = state.get_state()  # type: ignore[misc]
    words = np.frombuffer(np.float64(gauss).tobytes(), np.uint32)
    return np.concatenate([key, np.array([position, has_gauss], np.uint32), words])


def random_state_from_array(array: np.ndarray) -> np.random.RandomState:
    """Return the ``numpy.random.RandomState`` from an array made by `random_state_to_array`.

    Raises
    ------
    ValueError
        If the array is not such a state.
    """
    if array.shape != (628,) or array.dtype != np.uint32 or array[624] > 624 or array[625] > 1:
        raise ValueError("expected the state of a RandomState, got other numbers")
    state = np.random.RandomState(0)
    gauss = float(np.frombuffer(array[626:].tobytes(), np.float64)[0])
    state.set_state(("MT19937", array[:624], int(array[624]), int(array[625]), gauss))
    return state
