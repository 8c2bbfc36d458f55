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


def match(saved: Side, here: Side, strict: bool) -> dict[Key, Key]:
    """Return the key in the file of each variable here, by its key here.

    Raises
    ------
    ValueError
        If it is not certain which variable is which; or, if `strict`, unless all of them match.
    """
    are_equal = set(saved.kinds) == set(here.kinds)
    if saved.functions is None and are_equal:
        return {key: key for key in here.kinds}
    found = _distinguished(saved, here, strict)
    rest = [key for key in here.kinds if key not in found]
    left = set(saved.kinds) - set(found.values())
    in_doubt = {key: None for key in rest if key[0] in {name for name, _ in left}}
    if in_doubt and are_equal and saved.functions == here.functions:
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
            for key in saved.kinds
            if key in left and key[0] not in doubtful
        ]
        complaints += [f"{label(key)} is not in the file" for key in rest if key not in in_doubt]
    remedy = "build the same functions, with the same names, as in the script that saved it"
    if strict and not in_doubt:
        remedy += "; or load(path, strict=False) what both have"
    complain(complaints, remedy)
    return found


def _distinguished(saved: Side, here: Side, strict: bool) -> dict[Key, Key]:
    """Return the variables that can be distinguished from all others, as `match` does."""
    found: dict[Key, Key] = {}

    def add(pairs: Iterable[tuple[Key, Key]]) -> bool:
        before = len(found)
        found.update(pairs)
        return len(found) > before

    def marks(keys: Sequence[Key], is_saved: bool) -> tuple[Hashable, ...]:
        """Return what is known of variables on either side: the key in the file, or else the name."""
        known = {one: one for one in found.values()} if is_saved else found
        return tuple(known.get(key, key[0]) for key in keys)

    def by_functions(uses_kinds: bool) -> Iterator[tuple[Key, Key]]:
        sides = []
        for side in (here, saved):
            sides.append(
                [
                    tuple((key[0], side.kinds[key]) for key in keys)
                    if uses_kinds
                    else (name, marks(keys, side is saved))
                    for name, keys in side.functions or ()
                ]
            )
        for mine, theirs in _unique(*sides):
            keys, others = here.functions[mine][1], saved.functions[theirs][1]  # type: ignore[index]
            if marks(keys, False) == marks(others, True):
                yield from zip(keys, others)

    def by_variables(of_rest: bool, uses_kinds: bool) -> Iterator[tuple[Key, Key]]:
        mine = [key for key in here.kinds if not of_rest or key not in found]
        theirs = [key for key in saved.kinds if not of_rest or key not in found.values()]
        sides = [
            [(key[0], side.kinds[key] if uses_kinds else None) for key in keys]
            for side, keys in ((here, mine), (saved, theirs))
        ]
        for one, other in _unique(*sides):
            yield mine[one], theirs[other]

    add(list(by_variables(False, False)))
    while any(add(list(by_functions(uses_kinds))) for uses_kinds in (False, True)):
        pass
    if strict:  # otherwise the rest need not be the same variables
        add(list(by_variables(True, True)))
        add(list(by_variables(True, False)))
    return found


def _unique(mine: Sequence[Hashable], theirs: Sequence[Hashable]) -> Iterator[tuple[int, int]]:
    """Yield the positions of each item that occurs once in both lists."""
    counts = collections.Counter(mine), collections.Counter(theirs)
    for position, one in enumerate(mine):
        if counts[0][one] == counts[1][one] == 1:
            yield position, theirs.index(one)
