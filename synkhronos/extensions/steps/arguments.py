"""The arguments that describe a step, checked and converted to one form; and the data of its calls.

They are kept so that a copy of the step can be built from them.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Callable, NamedTuple, Sequence

import synkhronos as synk
from synkhronos._checks import check_pairs
from synkhronos._text import listed, shortened
from synkhronos.engines.analysis.graphs import inputs_first, is_random_state
from synkhronos.engines.base import check_swap
from synkhronos.engines.names import SharedVariable, Variable, clone, package
from synkhronos.extensions._parameters import check_loss
from synkhronos.extensions.steps.reduced_expressions import check_operation


class Update(NamedTuple):
    """An update of a shared variable; `op` combines the ranks' values if these differ."""

    target: SharedVariable
    new: Variable
    op: str | None = "avg"
    has_op: bool = False  # whether the user gave the operation

    @property
    def is_own(self) -> bool:
        """Whether each rank keeps its own value."""
        return is_random_state(self.target) or (self.has_op and self.op is None)


class Output(NamedTuple):
    """An output, the form in which the user gave it, and the operation if the user gave one."""

    given: Any
    variable: Variable
    has_op: bool
    where: str  # how messages refer to it
    op: Any = None


def parse_updates(updates: Any, what: str = "updates") -> list[Update]:
    """Return a list of `Update`."""
    if isinstance(updates, Mapping):
        updates = list(updates.items())
    if updates is None:
        return []
    if not isinstance(updates, (list, tuple)):
        raise TypeError(
            f"{what}: expected a dict, or a list of (shared, new) or (shared, new, op), got "
            f"{type(updates).__name__}"
        )
    parsed: list[Update] = []
    for position, entry in enumerate(updates):
        parsed.append(_parse_update(entry, f"{what}[{position}]"))
    return parsed


def _parse_update(entry: Any, where: str) -> Update:
    if not isinstance(entry, (tuple, list)) or len(entry) not in (2, 3):
        raise TypeError(f"{where}: expected (shared, new) or (shared, new, op), got {shortened(entry)}")
    target, new, *op = entry
    if not isinstance(target, SharedVariable):
        raise TypeError(f"{where}: expected a shared variable, got {shortened(target)}")
    if not isinstance(new, Variable):
        new = target.type.filter_variable(new)
    if op and op[0] is not None:
        dtype = getattr(target.type, "dtype", None)
        check_operation(op[0], where, f"op of {target}", dtype)
        if op[0] == "sum" and dtype == "bool":
            raise TypeError(f"{where}: changes of {target} cannot be added, as it is bool; use 'max'")
    return Update(target, new, op[0] if op else "avg", bool(op))


def check_distinct(updates: Sequence[Update]) -> None:
    """Raise an error if a variable has two updates."""
    seen = set()
    for update in updates:
        if update.target in seen:
            raise ValueError(f"updates: {update.target} is updated more than once; give one update")
        seen.add(update.target)


def parse_output(given: Any, where: str) -> Output:
    """Return an `Output`: of a variable, ``(variable, op)``, or a wrapper with a ``variable``."""
    variable, has_op, op = given, False, None
    if isinstance(given, tuple):
        if len(given) != 2:
            raise ValueError(
                f"{where}: expected (variable, op), got {len(given)} items; give several outputs as a "
                f"list"
            )
        (variable, op), has_op = given, True
    elif not isinstance(given, Variable):
        variable, has_op = getattr(given, "variable", given), hasattr(given, "op")
        op = getattr(given, "op", None)
    if not isinstance(variable, Variable):
        raise TypeError(f"{where}: expected a variable or (variable, op), got {shortened(given)}")
    return Output(given, variable, has_op, where, op)


def parse_outputs(outputs: Any) -> tuple[list[Output], bool | list[str]]:
    """Return the outputs, and the form of a result: whether it is a list, or the keys of a dict."""
    if outputs is None:
        return [], True
    if isinstance(outputs, Mapping):
        keys = sorted(outputs)
        return [parse_output(outputs[key], f"outputs[{key!r}]") for key in keys], keys
    is_list = isinstance(outputs, list)
    each = outputs if is_list else [outputs]
    return [parse_output(item, f"outputs[{i}]") for i, item in enumerate(each)], is_list


def parse_givens(givens: Any) -> dict[Variable, Variable]:
    """Return a dict from each variable to the variable that replaces it."""
    pairs = check_pairs([] if givens is None else givens, "givens", "(variable, value)")
    parsed = {}
    for position, (old, new) in enumerate(pairs):
        if not isinstance(old, Variable):
            raise TypeError(f"givens[{position}]: expected a variable, got {shortened(old)}")
        parsed[old] = new if isinstance(new, Variable) else package.shared(new)
    return parsed


def parse_losses(loss: Any) -> list[Variable]:
    """Return the losses that were given; raise an error if one is not a scalar float."""
    if loss is None:
        return []
    losses = list(loss) if isinstance(loss, (list, tuple)) else [loss]
    for item in losses:
        check_loss(item)
    return losses


def check_gradients(gradients: Any, params: Any) -> None:
    """Raise an error unless there is an expression of a gradient for each parameter."""
    if not isinstance(gradients, (list, tuple)) or params is None or len(gradients) != len(params):
        raise ValueError(
            "gradients: expected a list of gradient expressions, and as many params in the same order, "
            "as in gradients=grad(loss, params), params=params"
        )
    for position, gradient in enumerate(gradients):
        if not isinstance(gradient, Variable):
            raise TypeError(f"gradients[{position}]: expected an expression, got {gradient!r}")


def check_loss_op(loss_op: Any) -> None:
    """Raise an error unless losses can be combined with `loss_op`."""
    if loss_op not in ("avg", "sum"):
        raise ValueError(f"loss_op: expected 'avg' or 'sum', got {loss_op!r}")


def parse_wire(wire: Any) -> Any:
    """Return the wire format, which is checked further when it is used."""
    if wire is not None and not isinstance(wire, (str, synk.PowerSGD, synk.TopK)):
        raise TypeError(
            f"wire: expected the name of a format, synkhronos.PowerSGD(rank), synkhronos.TopK(fraction) "
            f"or None, got {wire!r}"
        )
    return wire


#: Stands for an input to which a call gives no data.
MISSING = object()


def variable_of(given: Any) -> Variable:
    """Return the variable of an input, which may have a wrapper such as ``synk.In``."""
    variable = given if isinstance(given, Variable) else getattr(given, "variable", None)
    if not isinstance(variable, Variable):
        raise TypeError(f"inputs: expected variables, got {shortened(given)}")
    return variable


class StepInputs:
    """The inputs of a step, in the order in which a call gives their data.

    Parameters
    ----------
    groups : list of (str or None, variable or list of variables)
        For each argument of a call: its keyword, and the input or the list of inputs.
    label : str
        How messages refer to the step.

    Attributes
    ----------
    given : list
        The inputs as the user gave them: variables, or wrappers of variables.
    variables : list of variables
        The variables of the inputs.
    names : list of str or None
        Their names.
    n_arguments : int
        The number of arguments that a call may give by position.
    """

    def __init__(self, groups: Sequence[tuple[str | None, Any]], label: str) -> None:
        self._keywords = [keyword for keyword, _ in groups]
        self._are_lists = [isinstance(inputs, (list, tuple)) for _, inputs in groups]
        pairs = zip(self._are_lists, groups)
        each = [list(inputs) if is_list else [inputs] for is_list, (_, inputs) in pairs]
        self.given = list(itertools.chain(*each))
        self.variables = [variable_of(item) for item in self.given]
        self.names = [
            getattr(item, "name", None) or variable.name
            for item, variable in zip(self.given, self.variables)
        ]
        self.n_arguments = len(groups)
        self._is_flat, self._label = not any(self._are_lists), label
        self._starts = [0, *itertools.accumulate(map(len, each))]

    def described(self) -> str:
        """Return the names of the inputs, in a few words."""
        return f"({listed([name or 'unnamed' for name in self.names])})"

    def match(self, args: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
        """Return the data of each input, or `MISSING`.

        Positional arguments belong to the groups. Keyword arguments name inputs or groups.
        """
        if self._is_flat and not named and len(args) == self.n_arguments:
            return list(args)
        if len(args) > self.n_arguments:
            raise TypeError(
                f"{self._label}: expected at most {self.n_arguments} arguments by position, got "
                f"{len(args)}"
            )
        values = [MISSING] * len(self.given)
        given: list[tuple[int | str, Any]] = [*enumerate(args), *named.items()]
        for key, data in given:
            for index, item in self._spread(key, data):
                if values[index] is not MISSING:
                    name = self.names[index] or index
                    raise TypeError(f"{self._label}: data for the input {name} is given twice")
                values[index] = item
        return values

    def _spread(self, key: int | str, data: Any) -> Iterable[tuple[int, Any]]:
        """Return the inputs, by number, and the data of each, of an argument by position or by name."""
        if isinstance(key, str):
            positions = [i for i, item in enumerate(self.names) if item == key]
            if len(positions) > 1:
                raise TypeError(
                    f"{self._label}: {len(positions)} inputs are named {key!r}; give these by position"
                )
            if positions:
                return [(positions[0], data)]
            if key not in self._keywords:
                names = listed(self.names)
                raise TypeError(f"{self._label}: no input is named {key!r}; inputs: {names}")
            key = self._keywords.index(key)
        start, stop = self._starts[key : key + 2]
        is_several = self._are_lists[key] and isinstance(data, (list, tuple))
        each = data if is_several else [data]
        if len(each) != stop - start:
            raise TypeError(
                f"{self._label}: expected a list of {stop - start} arrays for the inputs "
                f"{listed(self.names[start:stop])}, got "
                f"{len(each) if is_several else type(data).__name__}"
            )
        return zip(range(start, stop), each)

    def select(self, indices: Sequence[int], values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the data of some inputs as arguments of a function: by position, then by name."""
        chosen = [values[index] for index in indices]
        are_missing = [value is MISSING for value in chosen]
        if True not in are_missing:
            return chosen, {}
        count = are_missing.index(True)
        named = {}
        for index, value in zip(indices[count:], chosen[count:]):
            if value is not MISSING:
                if self.names[index] is None:
                    raise TypeError(
                        f"{self._label}: input {index} has no name, so all inputs before it have to be "
                        f"given as well"
                    )
                named[self.names[index]] = value
        return chosen[:count], named


#: The arguments of ``parallel_function``, by their names.
Arguments = Mapping[str, Any]


def without_iterators(arguments: Arguments) -> Arguments:
    """Return arguments that can be read more than once."""
    return {
        name: list(value) if isinstance(value, Iterator) else value for name, value in arguments.items()
    }


def name_in(arguments: Arguments) -> str | None:
    """Return the name of the function."""
    return arguments["function_options"].get("name")


def shareds_in(arguments: Arguments) -> list[SharedVariable]:
    """Return the shared variables that the function reads or updates."""
    return [item for item in inputs_first(_variables_in(arguments)) if isinstance(item, SharedVariable)]


def copied(
    arguments: Arguments, swap: Any, delete_updates: bool, name: str | None, profile: Any
) -> Arguments:
    """Return the arguments of a copy: with other shared variables, or without updates."""
    own, former = shareds_in(arguments), name_in(arguments)
    swap = check_swap(swap, former or "the parallel function", own, listed(own), _is_shared)
    if swap:
        # As one graph, so that gradients remain recognizable in updates.
        copies = iter(clone(_variables_in(arguments), replace=swap))
        arguments = _replaced(arguments, lambda _: next(copies))
    options = {**arguments["function_options"], "profile": profile}
    if name is not None or former is not None:
        options["name"] = name if name is not None else f"{former} copy"
    changed: dict[str, Any] = {"function_options": options}
    if delete_updates:
        drawn = [
            item for item in shareds_in(arguments) if getattr(item, "default_update", None) is not None
        ]
        changed["updates"] = [(item, item) for item in drawn]  # as they are
    return {**arguments, **changed}


def _is_shared(variable: Any) -> bool:
    return isinstance(variable, SharedVariable)


def _variables_in(arguments: Arguments) -> list[Variable]:
    found: list[Variable] = []
    _replaced(arguments, found.append)
    return found


def _replaced(item: Any, replace: Callable[[Variable], Any]) -> Any:
    """Return an argument of a script with each variable in it replaced, in a fixed order."""
    if isinstance(item, Variable):
        return replace(item)
    if isinstance(item, Mapping):
        return {_replaced(key, replace): _replaced(value, replace) for key, value in item.items()}
    if isinstance(item, (list, tuple)):
        made = [_replaced(entry, replace) for entry in item]
        return made if isinstance(item, list) else tuple(made)
    if isinstance(getattr(item, "variable", None), Variable):  # a wrapper
        wrapper = copy.copy(item)
        wrapper.variable = replace(item.variable)
        return wrapper
    return item
