"""The data of a call of a training step, matched to the inputs of the step."""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple, Sequence

from synkhronos._text import listed, shortened
from synkhronos.engines.names import Variable

#: Stands for an input to which a call gives no data.
MISSING = object()


class Group(NamedTuple):
    """Inputs that a call gives in one argument: a list of arrays if `is_list`, else one array."""

    keyword: str | None
    inputs: list[Any]
    is_list: bool


def group_of(keyword: str | None, inputs: Any) -> Group:
    """Return a `Group` of a variable, or of a list of variables."""
    is_list = isinstance(inputs, (list, tuple))
    return Group(keyword, list(inputs) if is_list else [inputs], is_list)


def variable_of(given: Any) -> Variable:
    """Return the variable of an input, which may have a wrapper such as ``synk.In``."""
    variable = given if isinstance(given, Variable) else getattr(given, "variable", None)
    if not isinstance(variable, Variable):
        raise TypeError(f"inputs: expected variables, got {shortened(given)}")
    return variable


class StepInputs:
    """The inputs of a step, in the order in which a call gives their data.

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

    def __init__(self, groups: Sequence[Group], label: str) -> None:
        self.given = [item for group in groups for item in group.inputs]
        self.variables = [variable_of(item) for item in self.given]
        self.names = [
            getattr(item, "name", None) or variable.name
            for item, variable in zip(self.given, self.variables)
        ]
        self.n_arguments = len(groups)
        self._groups, self._label = groups, label
        self._is_flat = not any(group.is_list for group in groups)
        self._starts = [0]
        for group in groups:
            self._starts.append(self._starts[-1] + len(group.inputs))

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
        for position, data in enumerate(args):
            self._spread(position, data, values)
        for name, data in named.items():
            positions = [i for i, item in enumerate(self.names) if item == name]
            if len(positions) > 1:
                raise TypeError(
                    f"{self._label}: {len(positions)} inputs are named {name!r}; give these by position"
                )
            if positions:
                self._set(positions[0], data, values)
            else:
                self._spread(self._group_named(name), data, values)
        return values

    def _group_named(self, name: str) -> int:
        for position, group in enumerate(self._groups):
            if group.keyword == name:
                return position
        raise TypeError(f"{self._label}: no input is named {name!r}; inputs: {listed(self.names)}")

    def _spread(self, position: int, data: Any, values: list[Any]) -> None:
        """Give the data of an argument to the inputs of its group."""
        group, start = self._groups[position], self._starts[position]
        each = data if isinstance(data, (list, tuple)) else [data]
        if not group.is_list:
            each = [data]
        if len(each) != len(group.inputs):
            names = self.names[start : start + len(group.inputs)]
            got = f"{len(each)}" if isinstance(data, (list, tuple)) else type(data).__name__
            raise TypeError(
                f"{self._label}: expected a list of {len(group.inputs)} arrays for the inputs "
                f"{listed(names)}, "
                f"got {got}"
            )
        for offset, item in enumerate(each):
            self._set(start + offset, item, values)

    def _set(self, index: int, data: Any, values: list[Any]) -> None:
        if values[index] is not MISSING:
            name = self.names[index]
            raise TypeError(f"{self._label}: data for the input {name or index} is given twice")
        values[index] = data

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
