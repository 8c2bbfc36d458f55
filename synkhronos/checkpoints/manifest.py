"""The description of the arrays in a checkpoint.

The key of a variable is its name and the number of earlier variables of the same name. Variables
without a name are counted in the same way. A value that is the same on every rank is stored once, any
other value once per rank.
"""

from __future__ import annotations

import collections
from typing import Any, Container, Iterable, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from synkhronos.arithmetic.conversion import as_array
from synkhronos.arithmetic.streams import GENERATORS, state_from_array, state_to_array

FORMAT = ["synkhronos checkpoint", 1]
_MANY = 6  # items listed in a message

Key = Tuple[Optional[str], int]


class Entry(NamedTuple):
    """The description of a variable in a checkpoint.

    Attributes
    ----------
    name, nth : str or None, int
        Its key.
    dtype : str
        The dtype of the values.
    shapes : list of tuple
        A single shape, or the shape on each rank.
    members : list of str
        The names of the arrays in the file, one for each shape.
    """

    name: str | None
    nth: int
    dtype: str
    shapes: list[tuple[int, ...]]
    members: list[str]

    @property
    def key(self) -> Key:
        return self.name, self.nth

    def of_rank(self, rank: int) -> Entry:
        """Return an entry in which every rank has the value of one rank."""
        if len(self.members) == 1:
            return self
        return self._replace(shapes=[self.shapes[rank]], members=[self.members[rank]])


class Feedback(NamedTuple):
    """The description of the state that machines keep for a variable and a wire format.

    Attributes
    ----------
    name, nth : str or None, int
        The key of the variable.
    wire : object
        The format, for JSON.
    in_buckets : bool
        Whether the progress processes keep it, for each bucket of a vector.
    counts : list of int
        How often the variable, or each bucket, was reduced in the format.
    members : list of str
        The arrays in the file with the parts that were not sent, one per machine.
    factors : str or None
        The array with the state that is the same on all machines.
    """

    name: str | None
    nth: int
    wire: Any
    in_buckets: bool
    counts: list[int]
    members: list[str]
    factors: str | None

    @property
    def key(self) -> Key:
        return self.name, self.nth


class Manifest(NamedTuple):
    """The description of a checkpoint.

    Attributes
    ----------
    ranks, master_rank : int
        The size and the master's rank of the world that was saved.
    entries : list of Entry
        The saved variables.
    left_out : list of keys
        The variables that were not saved.
    kept : list of Feedback
        Empty in older files, which do not contain it.
    functions : list of (str, list of keys) or None
        A label for each function, and its variables in the order of its graph; None in older files.
    """

    ranks: int
    master_rank: int
    entries: list[Entry]
    left_out: list[Key]
    kept: list[Feedback]
    functions: list[tuple[str, list[Key]]] | None

    def of(self, keys: Container[Key]) -> Manifest:
        """Return the manifest without the values of other variables."""
        return self._replace(
            entries=[entry for entry in self.entries if entry.key in keys],
            kept=[item for item in self.kept if item.key in keys],
        )


def keys(names: Iterable[str | None]) -> list[Key]:
    """Return the key of each variable of a list."""
    before: collections.Counter[str | None] = collections.Counter()
    found = []
    for name in names:
        found.append((name, before[name]))
        before[name] += 1
    return found


def label(key: Key) -> str:
    """Return how a message refers to a variable."""
    name, nth = key
    words = "a variable without a name" if name is None else repr(name)
    return f"{words} (number {nth + 1} of these)" if nth or name is None else words


def listed(items: Sequence[str]) -> str:
    """Return the first items, as one line."""
    more = [f"{len(items) - _MANY} more"] if len(items) > _MANY else []
    return "; ".join([*items[:_MANY], *more])


def describe(manifest: Manifest, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return a description of both for JSON; `interpret` and `unpack` read it."""
    return {"format": FORMAT, **manifest._asdict(), "extra": extra}


def interpret(description: Any) -> Manifest:
    """Return the manifest that `describe` was given. The file is not trusted: everything is checked."""
    if description["format"] != FORMAT:
        raise ValueError(f"expected the format {FORMAT}, got {description['format']}")
    ranks, master_rank = description["ranks"], description["master_rank"]
    if not 0 <= master_rank < ranks:
        raise ValueError(f"rank {master_rank} of {ranks}")
    entries = [
        Entry(name, nth, dtype, [tuple(shape) for shape in shapes], members)
        for name, nth, dtype, shapes, members in description["entries"]
    ]
    for entry in entries:
        if not isinstance(entry.nth, int) or not isinstance(entry.name, (str, int, type(None))):
            raise ValueError(f"a variable is called {entry.key}")
        if len(entry.shapes) != len(entry.members) or len(entry.members) not in (1, ranks):
            raise ValueError(f"{label(entry.key)}: {len(entry.members)} arrays of {ranks} ranks")
    left_out = [(name, nth) for name, nth in description["left_out"]]
    if len({*left_out, *(entry.key for entry in entries)}) < len(left_out) + len(entries):
        raise ValueError("a variable occurs twice")
    kept = [Feedback(*item) for item in description.get("kept", [])]
    for item in kept:
        are_counts = all(isinstance(count, int) and 0 <= count < 1 << 62 for count in item.counts)
        if item.key not in {entry.key for entry in entries}:
            raise ValueError(f"something is kept for {label(item.key)}, which is not in the file")
        if not item.members or not are_counts:
            raise ValueError(f"{label(item.key)}: {len(item.members)} arrays kept, counts {item.counts}")
    functions = description.get("functions")
    if functions is not None:
        functions = [(name, [(item, nth) for item, nth in used]) for name, used in functions]
        known = {*left_out, *(entry.key for entry in entries)}
        for name, used in functions:
            if not isinstance(name, str) or not known.issuperset(used) or len(set(used)) < len(used):
                raise ValueError(f"the function {name!r} uses {used}")
    return Manifest(ranks, master_rank, entries, left_out, kept, functions)


def for_other_ranks(manifest: Manifest, size: int, streams: Iterable[Key]) -> list[Entry]:
    """Return the entries for another number of ranks; all streams become the master's."""
    streams = set(streams)
    entries = [
        entry.of_rank(manifest.master_rank) if entry.key in streams else entry
        for entry in manifest.entries
    ]
    differing = [label(entry.key) for entry in entries if len(entry.members) > 1]
    if differing:
        raise ValueError(
            f"load: the file was saved by {manifest.ranks} ranks, but there are {size} ranks now, and "
            f"each rank had its own value of {listed(differing)}; use fork({manifest.ranks}); or save "
            f"when all ranks have the same value, after broadcast or all_reduce; or use save(without=) "
            f"and scatter again; nothing was changed"
        )
    return entries


def complain(complaints: Sequence[str], remedy: str) -> None:
    """Raise ``ValueError`` if there are complaints."""
    if complaints:
        raise ValueError(
            f"load: the file does not fit: {listed(complaints)}; {remedy}; nothing was changed"
        )


def pack(
    extra: Mapping[str, Any] | None, what: str = "save: extra"
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the description of `extra`, and the arrays that belong to it; errors begin with `what`."""
    if not isinstance(extra, (Mapping, type(None))):
        raise TypeError(f"{what}: expected a dict, got {extra!r}")
    described: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}
    for name, value in (extra or {}).items():
        if not isinstance(name, str):
            raise TypeError(f"{what}: expected names that are strings, got {name!r}")
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or isinstance(value, (bool, int, float, str)):
            described[name] = "value", value
            continue
        member = f"extra_{len(arrays)}"
        if isinstance(value, GENERATORS):
            described[name] = "random_state", member
            arrays[member] = state_to_array(value)
        else:
            described[name] = "array", member
            arrays[member] = as_array(value, None, f"{what}[{name!r}]")
    return described, arrays


def unpack(description: Any, read: Any) -> dict[str, Any]:
    """Return the `extra` that `pack` was given; ``read(member)`` returns an array."""
    extra = {}
    for name, (kind, value) in description["extra"].items():
        if kind == "value":
            extra[name] = value
        elif kind == "array":
            extra[name] = read(value)
        elif kind == "random_state":
            extra[name] = state_from_array(read(value))
        else:
            raise ValueError(f"extra {name!r} is {kind!r}")
    return extra
