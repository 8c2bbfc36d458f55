"""Independent substreams of random generators: pure arithmetic on their states.

A rank uses the script's stream, advanced further than any program can draw, and further than the
distance between the streams that a seeded generator provides.
"""

from __future__ import annotations

import functools
from typing import Any, Mapping, NamedTuple, Tuple, Union

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
        The number of the substream.

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


#: NumPy's random generators, old and new
Generator = Union[np.random.RandomState, np.random.Generator]
GENERATORS = (np.random.RandomState, np.random.Generator)


class _Kind(NamedTuple):
    """A bit generator: its class, and its state as fields, each of a number of 64-bit words."""

    make: Any  # its class; None if this NumPy has none
    state: tuple[tuple[str, int], ...]  # the fields of the dictionary "state"
    rest: tuple[str, ...]  # fields beside it, of one word each
    buffered: int = 0  # the words of the field "buffer"


_REST = ("has_uint32", "uinteger")

#: The bit generators that have substreams. The numbers are in files, so they must not change.
_KINDS = {
    0: _Kind(np.random.MT19937, (("key", 624), ("pos", 1)), ()),
    1: _Kind(np.random.PCG64, (("state", 2), ("inc", 2)), _REST),
    2: _Kind(np.random.Philox, (("counter", 4), ("key", 2)), ("buffer_pos", *_REST), buffered=4),
    3: _Kind(getattr(np.random, "PCG64DXSM", None), (("state", 2), ("inc", 2)), _REST),
}
_WORD = 2**64 - 1
_ARRAYS = ("key", "counter")  # the fields of several numbers; others are one number of several words


def check_has_substreams(generator: Generator) -> None:
    """Raise ``TypeError`` if a generator cannot be advanced to substreams, as of SFC64."""
    if isinstance(generator, np.random.Generator):
        _number_of_kind(generator.bit_generator)


def jump_generator(generator: Generator, index: int) -> Generator:
    """Return a copy of a generator of NumPy, advanced to its `index`-th substream.

    Substreams of MT19937 and of Philox are ``2**128`` draws apart, and of PCG64 about ``2**127.3``
    (``numpy.random.PCG64.jumped``).
    """
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        copied = _KINDS[_number_of_kind(bits)].make(0)
        copied.state = bits.state
        return np.random.Generator(copied.jumped(index) if index else copied)
    mersenne = np.random.MT19937()
    moved = np.random.RandomState(mersenne)
    moved.set_state(generator.get_state())
    return np.random.RandomState(mersenne.jumped(index)) if index else moved


def reseeded(generator: np.random.Generator, seed: Any) -> np.random.Generator:
    """Return a new generator of the same kind; `seed` is an int or a ``SeedSequence``."""
    return np.random.Generator(_KINDS[_number_of_kind(generator.bit_generator)].make(seed))


def state_to_array(generator: Generator) -> np.ndarray:
    """Return the state of a generator of NumPy.

    Returns
    -------
    numpy.ndarray
        ``uint32`` of a ``RandomState``, else ``uint64``.
    """
    if isinstance(generator, np.random.RandomState):
        return _random_state_to_array(generator)
    state, number = generator.bit_generator.state, _number_of_kind(generator.bit_generator)
    kind = _KINDS[number]
    words = [number]
    for name, size in kind.state:
        value = state["state"][name]
        words += value.tolist() if name in _ARRAYS else [value >> 64 * i & _WORD for i in range(size)]
    words += [int(state[name]) for name in kind.rest]
    if kind.buffered:
        words += state["buffer"].tolist()
    return np.array(words, np.uint64)


def state_from_array(array: np.ndarray) -> Generator:
    """Return the generator from an array made by `state_to_array`.

    Raises
    ------
    ValueError
        If the array is not such a state.
    """
    if array.dtype == np.uint64:
        return _generator_from_array(array)
    if array.shape != (628,) or array.dtype != np.uint32 or array[624] > 624 or array[625] > 1:
        raise ValueError("expected the state of a random generator, got other numbers")
    state = np.random.RandomState(0)
    gauss = float(np.frombuffer(array[626:].tobytes(), np.float64)[0])
    state.set_state(("MT19937", array[:624], int(array[624]), int(array[625]), gauss))
    return state


def _number_of_kind(bits: Any) -> int:
    for number, kind in _KINDS.items():
        if type(bits) is kind.make:
            return number
    raise TypeError(
        f"expected a generator of MT19937, PCG64, PCG64DXSM or Philox, which have independent "
        f"substreams for the ranks, got one of {type(bits).__name__}"
    )


def _random_state_to_array(state: np.random.RandomState) -> np.ndarray:
    kind = state.get_state(legacy=False)["bit_generator"]
    if kind != "MT19937":
        raise TypeError(f"expected a RandomState of the generator MT19937, got {kind}")
    _, key, position, has_gauss, gauss = state.get_state()
    words = np.frombuffer(np.float64(gauss).tobytes(), np.uint32)
    return np.concatenate([key, np.array([position, has_gauss], np.uint32), words])


def _generator_from_array(array: np.ndarray) -> np.random.Generator:
    words = array.tolist() if array.ndim == 1 else []
    kind = _KINDS.get(words[0]) if words else None
    length = 0 if kind is None else sum(dict(kind.state).values()) + len(kind.rest) + kind.buffered
    if kind is None or len(words) != 1 + length:
        raise ValueError("expected the state of a random generator, got other numbers")
    words = iter(words[1:])
    bits = kind.make(0)
    state = bits.state
    for name, size in kind.state:
        numbers = [next(words) for _ in range(size)]
        if name in _ARRAYS:
            if max(numbers) > np.iinfo(state["state"][name].dtype).max:
                raise ValueError("expected the state of a random generator, got larger numbers")
            state["state"][name] = np.array(numbers, state["state"][name].dtype)
        else:
            state["state"][name] = sum(number << 64 * i for i, number in enumerate(numbers))
    state.update((name, next(words)) for name in kind.rest)
    if kind.buffered:
        state["buffer"] = np.array(list(words), np.uint64)
    _check_state(state)
    bits.state = state
    return np.random.Generator(bits)


def _check_state(state: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if a number is out of its range. Files are not trusted."""
    inside = state["state"]
    wrong = (
        inside.get("pos", 0) > 624
        or "inc" in inside
        and not inside["inc"] & 1
        or state.get("buffer_pos", 0) > 4
        or state.get("has_uint32", 0) > 1
        or state.get("uinteger", 0) >> 32
    )
    if wrong:
        raise ValueError("expected the state of a random generator, got other numbers")
