"""The state of a model in a checkpoint: shared variables, numbers and random generators."""

from __future__ import annotations

import json
import random
import types
from typing import Any, Iterator, Mapping

import numpy

from synkhronos.engines.names import Apply, Function, In, Op, SharedVariable, Variable, package

_LEAVES = (
    str, bytes, int, float, complex, type(None), type, types.ModuleType, numpy.ndarray, numpy.generic,
    numpy.dtype, Variable, Apply, Op,
)  # fmt: skip
_MOST = 100_000  # objects that are visited
_PLAIN = (bool, int, float, str, type(None))
_GENERATORS = (numpy.random.RandomState, numpy.random.Generator)


def state_variables(model: Any) -> list[SharedVariable]:
    """Return the parameters, ``shared_lr``, and what the functions of a model update.

    Parameters
    ----------
    model : object
        The model. Functions are found in its attributes, in their attributes and items, and in what its
        methods and nested functions refer to.

    Returns
    -------
    list of shared variables
        In an order that depends on the model's source code only.
    """
    found = dict.fromkeys([*model.params, model.shared_lr])
    for function in compiled_functions(model):
        for one in function.maker.expanded_inputs:
            if (
                isinstance(one, In)
                and one.update is not None
                and isinstance(one.variable, SharedVariable)
            ):
                found.setdefault(one.variable)
    return list(found)


def compiled_functions(model: Any) -> Iterator[Any]:
    """Yield the compiled functions to which a model refers."""
    waiting, seen = [model], {id(model)}
    while waiting and len(seen) < _MOST:
        one = waiting.pop(0)
        if isinstance(one, Function):
            yield one
            continue
        for each in _referred(one):
            if id(each) not in seen and not isinstance(each, _LEAVES):
                seen.add(id(each))
                waiting.append(each)


def _referred(one: Any) -> list[Any]:
    """Return the objects to which an object refers by attributes, items or names in its code."""
    if isinstance(one, Mapping):
        return list(one.values())
    if isinstance(one, (list, tuple, set, frozenset)):
        return list(one)
    if isinstance(one, types.MethodType):
        return [one.__self__, one.__func__]
    if isinstance(one, types.FunctionType):
        cells = [cell.cell_contents for cell in one.__closure__ or () if _is_filled(cell)]
        return [*cells, *vars(one).values()]
    if type(one).__module__.partition(".")[0] in (package.__name__, "numpy"):
        return []
    try:
        return list(vars(one).values())
    except TypeError:
        return []


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


class ModelState:
    """What a checkpoint has of a model, on one rank.

    These are the values of `state_variables`; numbers, strings and lists of them among the attributes
    of the model and of its data, if they have changed since the model was built; their generators of
    random numbers; and the states of Python's and NumPy's own generators. If the model has the methods
    ``get_state()`` and ``set_state(state)``, also the dict of arrays, numbers and strings that the first
    returns.

    Parameters
    ----------
    model : object
        The model, built and compiled.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._variables = model, state_variables(model)
        self._built = self._plain()

    def _owners(self) -> dict[str, Any]:
        return {"model": self._model, "data": self._model.data}

    def _plain(self) -> dict[str, str]:
        """Return the attributes that are plain values, as JSON."""
        return {
            f"{owner}.{name}": json.dumps(value)
            for owner, one in self._owners().items()
            for name, value in getattr(one, "__dict__", {}).items()
            if _is_plain(value)
        }

    def _generators(self) -> dict[str, Any]:
        return {
            f"{owner}.{name}": value
            for owner, one in self._owners().items()
            for name, value in getattr(one, "__dict__", {}).items()
            if isinstance(value, (*_GENERATORS, random.Random))
        }

    def get(self) -> dict[str, Any]:
        """Return arrays, numbers, strings and generators by name."""
        changed = {name: text for name, text in self._plain().items() if self._built.get(name) != text}
        state: dict[str, Any] = {"attributes": json.dumps(changed)}
        for number, shared in enumerate(self._variables):
            state[f"variable {number}"] = shared.get_value(borrow=True)
        for name, value in {**self._generators(), "python": random, "numpy": numpy.random}.items():
            if isinstance(value, _GENERATORS):
                state[f"generator {name}"] = value
            elif value is numpy.random:
                state["generator numpy"] = _copy_of_numpys()
            else:
                state[f"generator {name}"] = json.dumps(value.getstate())
        if _has_own_state(self._model):
            own = dict(self._model.get_state())
            state.update({f"own {name}": value for name, value in own.items()})
        return state

    def check(self, state: Mapping[str, Any]) -> str | None:
        """Return why a state cannot be set, or None."""
        values = [shared.get_value(borrow=True) for shared in self._variables]
        there = [name for name in state if name.startswith("variable ")]
        if len(there) != len(values):
            return f"it has {len(there)} variables, the model has {len(values)}"
        for number, value in enumerate(values):
            saved = state[f"variable {number}"]
            if _spec(saved) != _spec(value):
                name = self._variables[number]
                return f"the variable {name} is {_spec(saved)} in it, and {_spec(value)} in the model"
        return None

    def set(self, state: Mapping[str, Any]) -> None:
        """Set a state that `get` has returned, in another process."""
        for number, shared in enumerate(self._variables):
            shared.set_value(state[f"variable {number}"])
        owners, generators = self._owners(), self._generators()
        for place, text in json.loads(state["attributes"]).items():
            owner, _, name = place.partition(".")
            setattr(owners[owner], name, json.loads(text))
        numpy.random.set_state(state["generator numpy"].get_state())
        random.setstate(_as_tuple(json.loads(state["generator python"])))
        for name, value in generators.items():
            if f"generator {name}" in state:
                _restore_generator(value, state[f"generator {name}"])
        if _has_own_state(self._model):
            own = {name[4:]: value for name, value in state.items() if name.startswith("own ")}
            self._model.set_state(own)


def _has_own_state(model: Any) -> bool:
    return callable(getattr(model, "get_state", None)) and callable(getattr(model, "set_state", None))


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN


def _copy_of_numpys() -> numpy.random.RandomState:
    copy = numpy.random.RandomState()
    copy.set_state(numpy.random.get_state())
    return copy


def _restore_generator(generator: Any, saved: Any) -> None:
    if isinstance(generator, numpy.random.RandomState):
        generator.set_state(saved.get_state())
    elif isinstance(generator, numpy.random.Generator):
        generator.bit_generator.state = saved.bit_generator.state
    else:
        generator.setstate(_as_tuple(json.loads(saved)))


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def _spec(value: Any) -> str:
    if isinstance(value, numpy.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    return type(value).__name__
