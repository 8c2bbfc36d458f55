"""The forms in which the outputs of a rank are sent to the master.

===========================  ====================================================
Output                       Form
===========================  ====================================================
the master's own             an array, not copied
a floating-point scalar      a float
an array of up to 4 kB       dtype, shape and bytes: pickling an array takes ten
                             times as long
a larger array               a handle to shared memory
None, instead of an array    `NO_ARRAY`
nothing is sent, as the      None
communicator has reduced it
===========================  ====================================================
"""

from __future__ import annotations

from typing import Any

import numpy as np

from synkhronos.stores.handle import Handle
from synkhronos.world.rank_state import RankState

_SMALL = 4096  # bytes


class _Named:
    """An object of this module that is the same on every rank."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name

    def __reduce__(self) -> str:
        return self._name


#: An operation has returned None in place of an array.
NO_ARRAY = _Named("NO_ARRAY")
#: In place of an output that the communicator has reduced to the master.
REDUCED = _Named("REDUCED")


def pack(state: RankState, mode: str | None, value: Any) -> Any:
    """Return an output of this rank as it is sent; None if there is nothing to send."""
    if value is REDUCED:
        return None
    if mode is None:
        return state.engine.to_host(value) if state.is_master else None
    if value is None:
        return NO_ARRAY
    if value.ndim == 0 and value.dtype.kind == "f":
        return value.item()
    if state.is_master:
        return state.engine.to_host(value)
    if value.size * value.dtype.itemsize > _SMALL:
        return state.send(value)
    array = state.engine.to_host(value)
    return array.dtype.str, array.shape, array.tobytes()


def unpack(state: RankState, packed: Any) -> Any:
    """Return an output as the rank computed it: an array, which may be read-only, or a number."""
    if type(packed) is tuple:
        dtype, shape, data = packed
        return np.ndarray(shape, dtype, data)
    return state.store.get(packed) if isinstance(packed, Handle) else packed


def shape_of(packed: Any) -> tuple[int, ...]:
    """Return the shape of an output that has been sent."""
    if type(packed) is tuple:
        return packed[1]
    return getattr(packed, "shape", ())
