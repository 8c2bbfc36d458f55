"""Which variable of a checkpoint is which variable here.

A name that occurs once on both sides decides. Lasagne, however, calls all weights ``W``. Such variables
are distinguished by the functions that use them and by their places there, then by dtypes and shapes.
The order in which functions were built decides only if nothing else differs.
"""

from __future__ import annotations

import collections
import hashlib
import linecache
import os
from typing import Any, Hashable, Iterable, Iterator, Mapping, NamedTuple, Sequence

from synkhronos._errors import warn
from synkhronos._text import listed
from synkhronos.checkpoints.manifest import Key, complain, label


class Side(NamedTuple):
    """The variables of a checkpoint, or of the functions here.

    Attributes
    ----------
    kinds : dict
        The dtype and shape of each variable, by its key; None if they are not known.
    functions : list of (str, list of keys) or None
        A label for each function, and its variables in the order of its graph. None in older files.
    """

    kinds: Mapping[Key, Any]
    functions: Sequence[tuple[str, Sequence[Key]]] | None


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
            f"built, as nothing else distinguishes them: give the functions names, by "
            f"synk.function(..., name=), before save()"
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
        found.update(list(pairs))
        return len(found) > before

    add(_by_variables(saved.kinds, state.kinds, False))
    while add(_by_functions(saved, state, found, False)) or add(
        _by_functions(saved, state, found, True)
    ):
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


def _by_functions(
    saved: Side, state: Side, found: Mapping[Key, Key], uses_kinds: bool
) -> Iterator[tuple[Key, Key]]:
    """Yield the pairs of variables of functions with unique labels, or of unique names and kinds."""
    known = found, {key: key for key in found.values()}
    marks = [  # what is known of a function's variables on either side: the key in the file, or the name
        [tuple(keys.get(handle, handle[0]) for handle in used) for _, used in side.functions or ()]
        for keys, side in zip(known, (state, saved))
    ]
    mine, theirs = (
        [
            tuple((item[0], side.kinds[item]) for item in used) if uses_kinds else (name, mark)
            for mark, (name, used) in zip(each, side.functions or ())
        ]
        for each, side in zip(marks, (state, saved))
    )
    for item, other in _unique(mine, theirs):
        if marks[0][item] == marks[1][other]:
            yield from zip((state.functions or ())[item][1], (saved.functions or ())[other][1])


def _unique(mine: Sequence[Hashable], theirs: Sequence[Hashable]) -> Iterator[tuple[int, int]]:
    """Yield the positions of each item that occurs once in both lists."""
    counts = collections.Counter(mine), collections.Counter(theirs)
    for position, item in enumerate(mine):
        if counts[0][item] == counts[1][item] == 1:
            yield position, theirs.index(item)
