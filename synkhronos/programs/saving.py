"""Files with values of every rank of a program. The master writes and reads them.

An array that several ranks have is in the file once. Only arrays that no lower rank has are sent, so
values that are equal on all ranks are compared, but not sent.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Callable, Iterator, Mapping, NamedTuple

import numpy as np

from synkhronos._typing import AnyArray, PathLike
from synkhronos.arithmetic.comparison import digest
from synkhronos.checkpoints import archive, manifest

if TYPE_CHECKING:
    from synkhronos.world.rank_state import RankState

FORMAT = ["synkhronos values of ranks", 1]

#: Waits for all ranks: ``meet(name, own=...)`` returns each rank's `own`.
Meet = Callable[..., "list[Any]"]


class _Place(NamedTuple):
    """An array of one rank: where it is, and what another rank needs to receive it."""

    rank: int
    name: str
    dtype: str
    shape: tuple[int, ...]


def save(state: RankState, meet: Meet, path: PathLike, values: Mapping[str, Any]) -> None:
    """Write the values of all ranks to a file on the master's machine. It is a collective."""
    described, arrays = manifest.pack(values, "rank.save: values")
    arrays = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    digests = {name: digest(array) for name, array in arrays.items()}
    own = [
        (digests[name], _Place(state.rank, name, array.dtype.str, array.shape))
        for name, array in arrays.items()
    ]
    by_rank = meet("save", own=(described, digests, own))
    places = {key: place for _, _, found in reversed(by_rank) for key, place in found}
    members = {key: f"array_{number}" for number, key in enumerate(places)}
    in_turn = _received_by_master(state, places, arrays)
    if state.is_master:
        by_name = [
            {
                name: [kind, value if kind == "value" else members[keys[value]]]
                for name, (kind, value) in there.items()
            }
            for there, keys, _ in by_rank
        ]
        description = {"format": FORMAT, "ranks": state.size, "values": by_name}
        archive.write(path, description, ((members[key], array) for key, array in in_turn))
    else:
        for _ in in_turn:
            pass
    meet("end of save")


def _received_by_master(
    state: RankState, places: Mapping[bytes, _Place], own: Mapping[str, AnyArray]
) -> Iterator[tuple[bytes, AnyArray]]:
    """Yield each array with its digest: in the master the array itself, elsewhere anything."""
    nothing = np.empty(0, "uint8")
    for key, place in places.items():
        array = own[place.name] if place.rank == state.rank else nothing
        if place.rank == state.master_rank:
            yield key, array
            continue
        gathered = state.comm.over_cpu.gather([array.reshape(-1).view("uint8")], state.master_rank)
        if gathered is not None:
            array = gathered[0][place.rank].view(place.dtype).reshape(place.shape)
        yield key, array


def load(state: RankState, meet: Meet, path: PathLike) -> dict[str, Any]:
    """Return the values of this rank from a file that `save` has written. It is a collective.

    The master sends the arrays to all ranks, one by one.
    """
    reader, found = None, None
    with contextlib.ExitStack() as opened:
        if state.is_master:
            reader = opened.enter_context(archive.Reader(path))
            with reader.interpreting():
                found = _checked(reader.description)
            if found[0]["ranks"] != state.size:
                raise ValueError(
                    f"rank.load: expected a file of {state.size} rank(s), got {found[0]['ranks']} in "
                    f"{path!r}; fork as many as when it was saved"
                )
        description, members = meet("load", own=found)[state.master_rank]
        own, arrays = description["values"][state.rank], {}
        needed = {item for kind, item in own.values() if kind != "value"}
        for name in members:
            array = None if reader is None else reader.read(name)
            spec = None if array is None else (array.dtype.str, array.shape)
            dtype, shape = meet("load an array", own=spec)[state.master_rank]
            given = np.empty(shape, dtype) if array is None else array
            (received,) = state.comm.over_cpu.broadcast([given], state.master_rank)
            if name in needed:
                arrays[name] = np.array(received)  # in memory that other ranks do not use
    return manifest.unpack({"extra": own}, arrays.__getitem__)


def _checked(description: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the description of a file, and its arrays; raise if `save` has not written it."""
    if description["format"] != FORMAT:
        raise ValueError(f"expected the format {FORMAT}, got {description['format']}")
    values = description["values"]
    if len(values) != description["ranks"]:
        raise ValueError(f"expected values of {description['ranks']} ranks, got {len(values)}")
    found = [item for there in values for kind, item in there.values() if kind != "value"]
    return description, list(dict.fromkeys(found))
