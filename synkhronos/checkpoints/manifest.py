"""The description of the arrays in a checkpoint.

The key of a variable is its name and the number of earlier variables of the same name. Variables
without a name are counted in the same way. A value that is the same on every rank is stored once, any
other value once per rank.

Which variable of a checkpoint is which variable here? A name that occurs once on both sides decides.
Lasagne, however, calls all weights ``W``. Such variables are distinguished by the functions that use
them and by their places in the expressions there, then by dtypes and shapes. The order in which
functions were built decides only if nothing else differs.
"""

from __future__ import annotations

import collections
import hashlib
import linecache
import os
from typing import (
    Any,
    Container,
    Hashable,
    Iterable,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

import numpy as np

from synkhronos._errors import warn
from synkhronos._text import listed
from synkhronos.arithmetic.conversion import as_array
from synkhronos.arithmetic.streams import GENERATORS, state_from_array, state_to_array

#: Files of version 1 have no digests of expressions.
FORMAT = ["synkhronos checkpoint", 2]

Key = Tuple[Optional[str], int]
#: The label of a function, and the digests and variables of its outputs, and of each of its updates.
#: Without digests, as in older files, it is an empty digest, and the variables of the whole function.
Use = Tuple[str, List[Tuple[str, List[Key]]]]


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
    functions : list of Use or None
        None in older files.
    """

    ranks: int
    master_rank: int
    entries: list[Entry]
    left_out: list[Key]
    kept: list[Feedback]
    functions: list[Use] | None

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


def describe(manifest: Manifest, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return a description of both for JSON; `interpret` and `unpack` read it."""
    return {"format": FORMAT, **manifest._asdict(), "extra": extra}


def interpret(description: Any) -> Manifest:
    """Return the manifest that `describe` was given. The file is not trusted: everything is checked."""
    if description["format"] not in (FORMAT, [FORMAT[0], 1]):
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
    known = {*left_out, *(entry.key for entry in entries)}
    functions = _functions(description.get("functions"), known)
    return Manifest(ranks, master_rank, entries, left_out, kept, functions)


def _functions(described: Any, known: set[Key]) -> list[Use] | None:
    if described is None:
        return None
    functions: list[Use] = []
    for name, items in described:
        if all(isinstance(used, int) for _, used in items):  # of an older file
            items = [("", items)]
        functions.append((name, [(digest, [(key, nth) for key, nth in used]) for digest, used in items]))
        for digest, used in functions[-1][1]:
            are_names = isinstance(name, str) and isinstance(digest, str)
            if not are_names or not known.issuperset(used) or len(set(used)) < len(used):
                raise ValueError(f"the function {name!r} uses {used}")
    return functions


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
            f"each rank had its own value of {listed(differing, '; ')}; use fork({manifest.ranks}); or "
            f"save when all ranks have the same value, after broadcast or all_reduce; or use "
            f"save(without=) and scatter again; nothing was changed"
        )
    return entries


def complain(complaints: Sequence[str], remedy: str) -> None:
    """Raise ``ValueError`` if there are complaints."""
    if complaints:
        raise ValueError(
            f"load: the file does not fit: {listed(complaints, '; ')}; {remedy}; nothing was changed"
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


class Side(NamedTuple):
    """The variables of a checkpoint, or of the functions here.

    Attributes
    ----------
    kinds : dict
        The dtype and shape of each variable, by its key; None if they are not known.
    functions : list of Use or None
        None in older files.
    """

    kinds: Mapping[Key, Any]
    functions: Sequence[Use] | None

    def mentions(
        self, known: Mapping[Key, Key], in_expressions: bool, uses_kinds: bool
    ) -> list[tuple[Hashable, Sequence[Key]]]:
        """Return a description and the variables of each expression, or of each function's outputs.

        The description has the label of the function, or the kinds of the variables. `known` are the
        keys in the file of the variables that were found before.
        """
        found: list[tuple[Hashable, Sequence[Key]]] = []
        for name, expressions in self.functions or ():
            # The order in a whole function would depend on the order in which updates are listed.
            for digest, keys in expressions if in_expressions else [("", expressions[0][1])]:
                kinds = tuple(self.kinds[key] for key in keys)
                marks = tuple(known.get(key, key[0]) for key in keys)
                found.append(((kinds if uses_kinds else name, digest, marks), keys))
        return found


def label_of(name: str) -> str:
    """Return the label of a function of this name, which is by default a file and the number of a line.

    Then it is a digest of the line's text, which stays the same when other lines are added.
    """
    path, _, number = name.rpartition(":")
    if not path or not number.isdecimal():
        return name
    text = linecache.getline(path, int(number)).strip()
    if not text:
        return os.path.basename(name)
    return f"line {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"


def match(saved: Side, state: Side, strict: bool) -> dict[Key, Key]:
    """Return the key in the file of each variable here, by its key here.

    Raises
    ------
    ValueError
        If it is not certain which variable is which; or, if `strict`, unless all of them match.
    """
    are_equal = set(saved.kinds) == set(state.kinds)
    if saved.functions is None and are_equal:
        return {key: key for key in state.kinds}
    found = _distinguished(saved, state, strict)
    rest = [key for key in state.kinds if key not in found]
    left = set(saved.kinds) - set(found.values())
    in_doubt = {key: None for key in rest if key[0] in {name for name, _ in left}}
    if in_doubt and are_equal and saved.functions == state.functions:
        names = dict.fromkeys("without a name" if name is None else repr(name) for name, _ in in_doubt)
        warn(
            f"load: the variables {listed(names)} are matched by the order in which the functions were "
            f"built, as nothing else distinguishes them: give them names before save(), or give the "
            f"functions names, by synk.function(..., name=)"
        )
        return {**found, **{key: key for key in rest}}
    complaints = [f"it is not certain which variable of the file is {label(key)}" for key in in_doubt]
    if strict or not found:
        doubtful = {name for name, _ in in_doubt}
        complaints += [
            f"{label(key)} is in the file, but no function here uses it"
            for key, kind in saved.kinds.items()
            if key in left and key[0] not in doubtful and kind is not None  # else save() left it out
        ]
        complaints += [f"{label(key)} is not in the file" for key in rest if key not in in_doubt]
    if complaints:  # other dtypes may be the cause
        kinds = [(key, state.kinds[key], saved.kinds[other]) for key, other in found.items()]
        complaints[:0] = [
            f"{label(key)} is {kind[0]}, in the file {other[0]}"
            for key, kind, other in kinds
            if kind and other and kind[0] != other[0]
        ]
    remedy = "build the same functions, with the same names, as in the script that saved it"
    if strict and not in_doubt:
        remedy += "; or load(path, strict=False) what both have"
    complain(complaints, remedy)
    return found


def _distinguished(saved: Side, state: Side, strict: bool) -> dict[Key, Key]:
    """Return the variables that can be distinguished from all others, as `match` does."""
    found: dict[Key, Key] = {}

    def add(pairs: Iterable[tuple[Key, Key]]) -> bool:
        before = len(found)
        differing = [label(key) for key, other in list(pairs) if found.setdefault(key, other) != other]
        complain(
            [f"functions have {name} in another place than those of the file" for name in differing],
            "build the same functions as in the script that saved it",
        )
        return len(found) > before

    add(_by_variables(saved.kinds, state.kinds, False))
    while any(add(_by_functions(saved, state, found, *evidence)) for evidence in _EVIDENCE):
        pass
    for uses_kinds in (True, False) if strict else ():  # otherwise the rest may be other variables
        rest = {key: kind for key, kind in state.kinds.items() if key not in found}
        left = {key: kind for key, kind in saved.kinds.items() if key not in found.values()}
        add(_by_variables(left, rest, uses_kinds))
    return found


def _by_variables(
    saved: Mapping[Key, Any], state: Mapping[Key, Any], uses_kinds: bool
) -> Iterator[tuple[Key, Key]]:
    """Yield the pairs of variables with unique names, or with unique names and kinds."""
    mine, theirs = (
        [(key[0], kind if uses_kinds else None) for key, kind in kinds.items()]
        for kinds in (state, saved)
    )
    for item, other in _unique(mine, theirs):
        yield list(state)[item], list(saved)[other]


#: Whether the functions are compared by expressions, and by kinds instead of labels; the best is first
_EVIDENCE = (True, False), (True, True), (False, False), (False, True)


def _by_functions(
    saved: Side, state: Side, found: Mapping[Key, Key], in_expressions: bool, uses_kinds: bool
) -> Iterator[tuple[Key, Key]]:
    """Yield the pairs of variables that are used alike."""
    mine = state.mentions(found, in_expressions, uses_kinds)
    theirs = saved.mentions({key: key for key in found.values()}, in_expressions, uses_kinds)
    for item, other in _unique([mark for mark, _ in mine], [mark for mark, _ in theirs]):
        yield from zip(mine[item][1], theirs[other][1])


def _unique(mine: Sequence[Hashable], theirs: Sequence[Hashable]) -> Iterator[tuple[int, int]]:
    """Yield the positions of each item that occurs once in both lists."""
    counts = collections.Counter(mine), collections.Counter(theirs)
    for position, item in enumerate(mine):
        if counts[0][item] == counts[1][item] == 1:
            yield position, theirs.index(item)
