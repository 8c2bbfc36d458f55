"""Models of Theano-MPI's kind: what they must have, their rate, velocities and state."""

from __future__ import annotations

import importlib
import inspect
import json
import random
import types
from typing import Any, Callable, Iterator, Mapping, Tuple

import numpy

import synkhronos as synk
from synkhronos._text import shortened
from synkhronos._typing import AnyArray
from synkhronos.engines.names import Apply, Function, Op, SharedVariable, Variable, package
from synkhronos.extensions.rules.rule import Params, Rule, updated_by

_LEAVES = (
    str, bytes, int, float, complex, type(None), type, types.ModuleType, numpy.ndarray, numpy.generic,
    numpy.dtype, Variable, Apply, Op,
)  # fmt: skip
_MOST = 100_000  # objects that are visited
_UNASSIGNED = types.CellType()
_PLAIN = (bool, int, float, str, type(None))
_GENERATORS = (numpy.random.RandomState, numpy.random.Generator)


def find_class(model: Callable[..., Any] | str) -> Callable[..., Any]:
    """Return the class of a model.

    Parameters
    ----------
    model : class, or str
        The class itself, or ``"package.module:ClassName"``.

    Raises
    ------
    TypeError, ValueError
        If it is neither, or there is no such class.
    """
    if not isinstance(model, str):
        if not callable(model):
            raise TypeError(
                f"Session: model: expected a class, or its place as 'models.modelfile:ModelClass', got "
                f"{model!r}"
            )
        return model
    module, colon, name = model.partition(":")
    if not (module and colon and name):
        raise ValueError(
            f"Session: model: expected a module and a class as 'models.modelfile:ModelClass', got "
            f"{model!r}"
        )
    found: Callable[..., Any] | None = getattr(importlib.import_module(module), name, None)
    if not callable(found):
        raise ValueError(
            f"Session: model: expected a class {name!r} in the module {module!r}, got {found!r}"
        )
    return found


def _fits_count(least: int) -> tuple[str, Callable[[Any], bool]]:
    """Return what is expected of a whole number, and a function that tells whether a value is one."""

    def fits(value: Any) -> bool:
        try:
            return not isinstance(value, bool) and bool(value == int(value) >= least)
        except (TypeError, ValueError):
            return False

    return f"a whole number of at least {least}", fits


def _is_shared(value: Any) -> bool:
    return isinstance(value, SharedVariable)


def _is_list_of_shared(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(map(_is_shared, value))


_Required = Mapping[str, Tuple[str, Callable[[Any], bool]]]

#: What a model and its data must have: of attributes, what is expected, and whether a value fits; of
#: methods, how they are called, and whether one can be called so.
_METHODS: _Required = {
    "compile_iter_fns": (
        "() or (sync_type=...)", lambda method: accepts(method) or accepts(method, sync_type="avg")
    ),
    "train_iter": ("(count, recorder)", lambda method: accepts(method, 0, None)),
    "val_iter": ("(count, recorder)", lambda method: accepts(method, 0, None)),
    "reset_iter": ("(mode)", lambda method: accepts(method, "train")),
    "adjust_hyperp": ("(epoch)", lambda method: accepts(method, 0)),
    "cleanup": ("()", lambda method: accepts(method)),
}  # fmt: skip
_ATTRIBUTES: _Required = {
    "params": ("a list of shared variables", _is_list_of_shared),
    "n_epochs": _fits_count(0), "n_subb": _fits_count(1), "epoch": ("", lambda value: True),
}  # fmt: skip
_OF_DATA: _Required = {"n_batch_train": _fits_count(1), "n_batch_val": _fits_count(0)}
_OF_DATA_IF_THERE: _Required = {
    "shuffle_data": (
        "(mode, common_seed)", lambda method: accepts(method, mode="train", common_seed=0)
    ),
    "shard_data": (
        "(mode, rank, size)", lambda method: accepts(method, mode="train", rank=0, size=1)
    ),
}  # fmt: skip
_LATE: _Required = {"shared_lr": ("a shared variable", _is_shared)}


def check(model: Any, is_compiled: bool) -> None:
    """Raise one error that lists everything that is missing or wrong.

    Before the functions are compiled, attributes that ``compile_iter_fns`` may create are listed only if
    something else is wrong.

    Parameters
    ----------
    model : object
        The model of this rank.
    is_compiled : bool
        Whether the model has compiled its functions.

    Raises
    ------
    TypeError
        If the model does not fulfil the contract.
    """
    complaints = [] if is_compiled else _complaints(model, _METHODS)
    complaints += _complaints(model, _ATTRIBUTES)
    if is_compiled or complaints:
        data = getattr(model, "data", None)
        there = {name: item for name, item in _OF_DATA_IF_THERE.items() if hasattr(data, name)}
        complaints += ["data is missing"] if data is None else []
        complaints += [] if data is None else _complaints(data, {**_OF_DATA, **there}, "data.")
        complaints += _complaints(model, _LATE)
    if complaints:
        when = "after compile_iter_fns()" if is_compiled else "before anything is compiled"
        raise TypeError(
            f"Session: model: expected what docs/sessions.rst lists, but in {type(model).__name__}, "
            f"{when}: {'; '.join(complaints)}"
        )


def _complaints(owner: Any, required: _Required, prefix: str = "") -> list[str]:
    """Return what is missing or wrong in a model or its data."""
    complaints = []
    for name, (what, fits) in required.items():
        value: Any = getattr(owner, name, None)
        is_method = what.startswith("(")
        if not hasattr(owner, name) or (is_method and not callable(value)):
            complaints.append(f"{prefix}{name}{what if is_method else ''} is missing")
        elif not fits(value) and is_method:
            given = inspect.signature(value)
            complaints.append(f"{prefix}{name}{given} cannot be called as {name}{what}")
        elif not fits(value):
            complaints.append(f"{prefix}{name} is {shortened(value)} instead of {what}")
    return complaints


def accepts(function: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Whether a function can be called with these arguments, as far as its signature says."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # a function in C, without a signature
        return True
    return True


class LearningRate:
    r"""Sets a model's ``shared_lr`` before each step.

    With linear scaling the rate is the model's own rate times the number of ranks :math:`k`. A warm-up
    begins with the target divided by :math:`k`, and adds a constant amount before each step, so that the
    target is reached after some epochs (Goyal et al. [1]_, section 2.2):

    .. math:: \eta_t = \eta \left(\frac{1}{k} + \Bigl(1 - \frac{1}{k}\Bigr) \frac{t}{T}\right),
              \qquad t < T

    with :math:`t` the number of steps before, and :math:`T` the steps of the warm-up. The model sees its
    own rate in ``adjust_hyperp``, neither scaled nor warmed up, so schedules that multiply the current
    rate and schedules that set a rate both work.

    Parameters
    ----------
    shared : shared variable
        The model's ``shared_lr``.
    scale : float
        The factor of linear scaling; 1 if the model has scaled its rate by itself.
    size : int
        The number of ranks.

    Attributes
    ----------
    own : numpy.ndarray
        The model's own rate.

    References
    ----------
    .. [1] Goyal, P., Dollár, P., Girshick, R., et al. (2017): Accurate, large minibatch SGD: training
           ImageNet in 1 hour. arXiv:1706.02677.
    """

    def __init__(self, shared: SharedVariable, scale: float, size: int) -> None:
        self._shared, self._scale, self._size = shared, scale, size
        self.own = numpy.array(shared.get_value())
        self._is_changed = False  # whether the shared variable has another value than `own`

    def before_step(self, done: int, warmup: int) -> float:
        """Set the rate for the next step, and return it.

        Parameters
        ----------
        done : int
            The number of steps before it.
        warmup : int
            The number of steps of the warm-up.
        """
        factor = self._scale
        if done < warmup:
            factor *= (1 + (self._size - 1) * done / warmup) / self._size
        if factor != 1:
            self._shared.set_value((self.own * factor).astype(self.own.dtype))
            self._is_changed = True
        elif self._is_changed:
            self.restore(self.own)
        return float(numpy.mean(self._shared.get_value(borrow=True)))

    def adjust(self, adjust_hyperp: Callable[[int], Any], epoch: int) -> None:
        """Let the model adjust its own rate after an epoch."""
        if self._is_changed:
            self.restore(self.own)
        adjust_hyperp(epoch)
        self.own = numpy.array(self._shared.get_value())

    def restore(self, own: AnyArray) -> None:
        """Set the model's own rate."""
        self.own = numpy.array(own)
        self._shared.set_value(self.own)
        self._is_changed = False


class SummedVelocities(Rule):
    r"""The ranks add up their velocities, and every rank takes the step with the sum.

    With :math:`v_i` the velocity that rank :math:`i` has computed, which includes the learning rate:

    .. math:: x \leftarrow x + \sum_i v_i

    on every rank. The model's ``train_iter`` computes :math:`v_i` in ``model.vels``. The sum is in
    ``model.vels2`` when ``model.descent_vel()`` adds it to the parameters. Models of Theano-MPI call it
    themselves as well, at the beginning of the next ``train_iter``; so ``vels2`` is zero by then, and no
    step is taken twice, or lost at the end.

    This is BSP of Theano-MPI with ``sync_type="cdd"``.
    """

    is_synchronous = True

    def prepare(self, step: Any) -> None:
        """Take the velocities of a model.

        Parameters
        ----------
        step : object
            The model of this rank.

        Raises
        ------
        TypeError
            If the model has none.
        """
        self._model = step
        wrong = [name for name in ("vels", "vels2") if not _fit(getattr(step, name, None), step.params)]
        if not callable(getattr(step, "descent_vel", None)):
            wrong.append("descent_vel")
        if wrong:
            raise TypeError(
                f"Session: sync_type='cdd': expected that compile_iter_fns() makes vels and vels2, "
                f"lists with a shared variable for each parameter, and descent_vel(), which adds vels2 "
                f"to the parameters; missing or wrong in {type(step).__name__}: {', '.join(wrong)}; "
                f"without them nothing would be trained; use sync_type='avg'"
            )

    def after_step(self, rank: synk.Rank, params: Params, step: int) -> None:
        for own, total in zip(self._model.vels, self._model.vels2):
            total.set_value(own.get_value(borrow=True))
        rank.all_reduce(list(self._model.vels2), "sum")
        self._model.descent_vel()
        for total in self._model.vels2:
            total.set_value(numpy.zeros_like(total.get_value(borrow=True)))


def _fit(velocities: Any, params: Params) -> bool:
    """Whether there is a velocity for each parameter."""
    return _is_list_of_shared(velocities) and _shapes_of(velocities) == _shapes_of(params)


def _shapes_of(variables: Params) -> list[tuple[int, ...]]:
    return [variable.get_value(borrow=True).shape for variable in variables]


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
        found.update(dict.fromkeys(filter(_is_shared, updated_by(function))))
    return list(found)


def compiled_functions(model: Any) -> Iterator[Any]:
    """Yield the compiled functions to which a model refers."""
    waiting, seen = [model], {id(model)}
    while waiting and len(seen) < _MOST:
        item = waiting.pop(0)
        if isinstance(item, Function):
            yield item
            continue
        for each in _referred(item):
            if id(each) not in seen and not isinstance(each, _LEAVES):
                seen.add(id(each))
                waiting.append(each)


def _referred(item: Any) -> list[Any]:
    """Return the objects to which an object refers by attributes, items or names in its code."""
    if isinstance(item, Mapping):
        return list(item.values())
    if isinstance(item, (list, tuple, set, frozenset)):
        return list(item)
    if isinstance(item, types.MethodType):
        return [item.__self__, item.__func__]
    if isinstance(item, types.FunctionType):
        cells = [cell.cell_contents for cell in item.__closure__ or () if cell != _UNASSIGNED]
        return [*cells, *vars(item).values()]
    if type(item).__module__.partition(".")[0] in (package.__name__, "numpy"):
        return []
    return list(getattr(item, "__dict__", {}).values())


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

    def _attributes(self) -> Iterator[tuple[str, Any]]:
        for owner, item in self._owners().items():
            for name, value in getattr(item, "__dict__", {}).items():
                yield f"{owner}.{name}", value

    def _plain(self) -> dict[str, str]:
        return {name: json.dumps(value) for name, value in self._attributes() if _is_plain(value)}

    def _generators(self) -> dict[str, Any]:
        kinds = (*_GENERATORS, random.Random)
        own = {name: value for name, value in self._attributes() if isinstance(value, kinds)}
        return {**own, "python": random, "numpy": numpy.random}

    def get(self) -> dict[str, Any]:
        """Return arrays, numbers, strings and generators by name."""
        changed = {name: text for name, text in self._plain().items() if self._built.get(name) != text}
        state: dict[str, Any] = {"attributes": json.dumps(changed)}
        for number, shared in enumerate(self._variables):
            state[f"variable {number}"] = shared.get_value(borrow=True)
        for name, value in self._generators().items():
            if value is numpy.random:
                value = numpy.random.RandomState()
                value.set_state(numpy.random.get_state())
            is_pythons = hasattr(value, "getstate")
            state[f"generator {name}"] = json.dumps(value.getstate()) if is_pythons else value
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


def _restore_generator(generator: Any, saved: Any) -> None:
    """Restore a generator of NumPy or Python, or the one of their module."""
    if hasattr(generator, "setstate"):
        generator.setstate(_as_tuple(json.loads(saved)))
    elif hasattr(generator, "set_state"):
        generator.set_state(saved.get_state())
    else:
        generator.bit_generator.state = saved.bit_generator.state


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def _spec(value: Any) -> str:
    if isinstance(value, numpy.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    return type(value).__name__
