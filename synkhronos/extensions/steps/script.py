"""What a script requests of a training step: its updates, outputs and substitutions, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Sequence

from synkhronos._text import shortened
from synkhronos.engines.names import Constant, SharedVariable, Variable, package
from synkhronos.extensions.steps.cuts import Cuts, is_float_scalar
from synkhronos.extensions.steps.graphs import inputs_first, is_random_state, operands_with
from synkhronos.extensions.steps.marks import check_operation
from synkhronos.extensions.steps.seeds import seeds_of


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


class Script(NamedTuple):
    """The arguments of a step.

    Attributes
    ----------
    rows : dict
        The inputs and shared variables whose rows are divided among the ranks, and the variables that
        are replaced by rows which an index selects; with the axis of the rows.
    grad_updates : list of Update
    grad_shared : list of shared variables
        From an update rule that keeps its gradients in shared variables: the updates that write them,
        and the variables.
    n_further : int
        The number of updates at the end that are not from the update rule.
    index : list of variables
        The inputs that may select rows in `givens`.
    whole : list of variables
        The variables that are replaced by what depends on an index, but has no rows.
    """

    rows: dict[Variable, int]
    outputs: list[Output]
    updates: list[Update]
    givens: dict[Variable, Variable]
    cuts: Cuts
    grad_updates: list[Update] = []
    grad_shared: list[SharedVariable] = []
    n_further: int = 0
    index: list[Variable] = []
    whole: list[Variable] = []


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


def _parse_update(entry, where):
    if not isinstance(entry, (tuple, list)) or len(entry) not in (2, 3):
        raise TypeError(f"{where}: expected (shared, new) or (shared, new, op), got {shortened(entry)}")
    target, new, *op = entry
    if not isinstance(target, SharedVariable):
        raise TypeError(f"{where}: expected a shared variable, got {target!r}")
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


def parse_givens(givens: Any) -> dict[Variable, Variable]:
    """Return a dict from each variable to the variable that replaces it."""
    if isinstance(givens, (str, Variable)):
        raise TypeError(f"givens: expected a dict or a list of pairs, got {shortened(givens)}")
    pairs = givens.items() if isinstance(givens, Mapping) else givens or ()
    parsed = {}
    for position, pair in enumerate(pairs):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], Variable):
            raise TypeError(f"givens[{position}]: expected (variable, value), got {shortened(pair)}")
        old, new = pair
        parsed[old] = new if isinstance(new, Variable) else package.shared(new)
    return parsed


def with_default_updates(
    updates: Sequence[Update],
    outputs: Sequence[Variable],
    givens: Mapping[Variable, Variable],
    excluded: bool | Sequence[SharedVariable],
) -> list[Update]:
    """Return the updates, and the default updates of shared variables that are used.

    Default updates of random streams are left to the compiler, because each rank has its own streams.
    """
    complete = list(updates)
    if excluded is True:
        return complete
    targets = {update.target for update in updates}
    parents = operands_with(givens)
    roots, done = [*outputs, *(update.new for update in updates)], set()
    while roots:
        found = []
        for variable in inputs_first(roots, parents, done):
            done.add(variable)
            if variable in targets or variable in (excluded or ()) or is_random_state(variable):
                continue
            default = getattr(variable, "default_update", None)
            if isinstance(variable, SharedVariable) and default is not None:
                found.append(variable)
        roots = [shared.default_update for shared in found]
        complete.extend([Update(shared, shared.default_update) for shared in found])
        targets.update(found)
    return complete


def is_only_an_update(script: Script) -> bool:
    """Whether a step applies what an earlier one has stored, such as gradients.

    It has no outputs, computes no gradient, and no input can select rows. Every rank computes it all.
    """
    news = [one.new for one in script.updates]
    leaves = [one for one in inputs_first(news, operands_with(script.givens)) if one.owner is None]
    inputs = [one for one in leaves if not isinstance(one, (Constant, SharedVariable))]
    return (
        bool(news)
        and not script.outputs
        and all(is_float_scalar(one) for one in inputs)
        and not seeds_of(news)
    )
