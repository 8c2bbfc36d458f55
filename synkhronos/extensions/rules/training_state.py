"""The state of training in a checkpoint: the rule's state on every rank, the position, the record."""

from __future__ import annotations

import functools
import json
import os
from typing import Any, Mapping, NamedTuple, Sequence

import numpy

import synkhronos as synk
from synkhronos._text import listed
from synkhronos._typing import PathLike
from synkhronos.extensions.rules.record import Record

_HEADER, _RECORD = "rules.train", "rules.record"


class Saved(NamedTuple):
    """The state of training between two programs.

    Attributes
    ----------
    steps : list of int
        How many steps each rank has taken.
    states : list of dict, or None
        The rule's state of each rank, its hyper-parameters included; None at the beginning.
    record : Record
        The record of the steps so far.
    seed : int
        The seed of the training.
    """

    steps: list[int]
    states: list[dict[str, Any]] | None
    record: Record
    seed: int


def save(path: PathLike, saved: Saved, settings: Mapping[str, Any]) -> None:
    """Write a checkpoint.

    Parameters
    ----------
    path : str or path-like
        The path of the file.
    saved : Saved
        The state of the training.
    settings : dict
        Settings that must be the same in the script that continues.
    """
    header: dict[str, Any] = {"settings": settings, "steps": saved.steps, "seed": saved.seed}
    arrays: dict[str, Any] = {}
    header["states"] = saved.states and [
        _packed(rank, state, saved.states, arrays) for rank, state in enumerate(saved.states)
    ]
    record = saved.record.to_json()
    synk.save(path, {_HEADER: json.dumps(header), _RECORD: record, **arrays})


def _packed(
    rank: int, state: Mapping[str, Any], states: Sequence[Mapping[str, Any]], arrays: dict[str, Any]
) -> dict[str, list[Any]]:
    """Return a state for JSON; its arrays are added to `arrays`, once if they are equal on all ranks."""
    packed: dict[str, list[Any]] = {}
    for name, value in state.items():
        if isinstance(value, (numpy.ndarray, numpy.generic)):
            everywhere = all(_same(one.get(name), value) for one in states)
            key = f"rules.{'all' if everywhere else rank}.{name}"
            arrays.setdefault(key, numpy.asarray(value))
            packed[name] = ["array", key]
        elif value is None or isinstance(value, (bool, int, float, str)):
            packed[name] = ["value", value]
        else:
            raise TypeError(
                f"rules.train: state of the rule: {name}: expected an array, a number, a string or "
                f"None, got {value!r}"
            )
    return packed


def _same(one: Any, value: Any) -> bool:
    if not isinstance(one, (numpy.ndarray, numpy.generic)):
        return False
    same_type = one.dtype == value.dtype and one.shape == value.shape
    return bool(same_type and one.tobytes() == value.tobytes())


def load(path: PathLike, settings: Mapping[str, Any], seed: int | None) -> Saved:
    """Restore the shared variables of all ranks from a checkpoint, and return the rest.

    Raises
    ------
    ValueError
        If it was not saved by `train`, or was saved with other settings. Nothing is changed then.
    """
    check = functools.partial(_saved, path, settings, seed)
    return check(synk.load(path, check=check))


def _saved(
    path: PathLike, settings: Mapping[str, Any], seed: int | None, extra: Mapping[str, Any]
) -> Saved:
    """Return the state in a checkpoint; raise if it is not a checkpoint of this training."""
    if _HEADER not in extra:
        raise ValueError(
            f"rules.train: checkpoint: {os.fspath(path)!r} was not saved by rules.train(); give another "
            f"path, or remove it to begin anew"
        )
    header = json.loads(extra[_HEADER])
    check_settings("rules.train", path, header["settings"], settings)
    if seed not in (None, header["seed"]):
        raise ValueError(
            f"rules.train: seed: the training in the checkpoint {os.fspath(path)!r} has the seed "
            f"{header['seed']}, got {seed}; leave it out, or remove the file to begin anew"
        )
    states = header["states"] and [_unpacked(state, extra) for state in header["states"]]
    return Saved(header["steps"], states, Record.from_json(extra[_RECORD]), header["seed"])


def _unpacked(state: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    return {name: extra[one] if kind == "array" else one for name, (kind, one) in state.items()}


def check_settings(
    what: str, path: PathLike, saved: Mapping[str, Any], settings: Mapping[str, Any]
) -> None:
    """Raise ``ValueError`` if a checkpoint was saved with other settings."""
    differing = [
        f"{name} was {saved.get(name)!r}, is {value!r}"
        for name, value in settings.items()
        if saved.get(name) != value
    ]
    if differing:
        raise ValueError(
            f"{what}: checkpoint: {os.fspath(path)!r} is of another training: "
            f"{listed(differing, '; ')}; use the same, or remove it to begin anew"
        )


def check_path(path: PathLike, what: str = "rules.train") -> None:
    """Raise an error that says why, unless a checkpoint can be written there."""
    try:
        text = os.path.abspath(os.fspath(path))
    except TypeError:
        raise TypeError(f"{what}: checkpoint: expected a path, got {path!r}") from None
    folder = os.path.dirname(text)
    if not os.path.isdir(folder):
        raise FileNotFoundError(
            f"{what}: checkpoint: there is no folder {folder!r}; create it, or give another path"
        )
    if os.path.isdir(text):
        raise IsADirectoryError(
            f"{what}: checkpoint: expected the path of a file, got the folder {text!r}"
        )
    if not os.access(folder, os.W_OK):
        raise PermissionError(
            f"{what}: checkpoint: cannot write to the folder {folder!r}; give another path"
        )
