"""Walks, searches and rewrites graphs: what depends on what, equal expressions, seeds of gradients.

Nothing here is recursive, because graphs are deeper than Python's stack, except for loops in loops.
The seeds are where gradients begin: a compiler's ``grad`` starts with the derivative of the loss by
itself, 1.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any, Callable, Container, Hashable, Iterable, Iterator, Mapping, NamedTuple, Sequence

from synkhronos._text import listed
from synkhronos.engines import names
from synkhronos.engines.collectives import ALONE, Collective
from synkhronos.engines.names import Apply, Constant, SharedVariable, Variable, scalar

#: ``rule(node, having)`` returns the outputs that have a property if the variables `having` have it.
NodeRule = Callable[[Apply, "set[Variable]"], Sequence[Variable]]


def operands(variable: Variable) -> Sequence[Variable]:
    """Return the variables from which a variable is computed directly."""
    return () if variable.owner is None else variable.owner.inputs


def operands_with(givens: Mapping[Variable, Variable]) -> Callable[[Variable], Sequence[Variable]]:
    """Return a function like `operands`, for graphs in which the compiler will substitute `givens`."""

    def parents(variable: Variable) -> Sequence[Variable]:
        return (givens[variable],) if variable in givens else operands(variable)

    return parents


def operands_of_values(
    givens: Mapping[Variable, Variable], independent: Container[Variable] = ()
) -> Callable[[Variable], Sequence[Variable]]:
    """Return a function like the result of `operands_with`, without operands that only give a shape.

    Variables in `independent` have no operands.
    """

    def parents(variable: Variable) -> Sequence[Variable]:
        if variable in independent:
            return ()
        if variable in givens:
            return (givens[variable],)
        node = variable.owner
        if node is not None and is_fill_of_one_number(node):
            return node.inputs[1:]
        return operands(variable)

    return parents


def inputs_first(
    roots: Iterable[Variable],
    parents: Callable[[Variable], Sequence[Variable]] = operands,
    done: Container[Variable] = (),
) -> Iterator[Variable]:
    """Yield each variable that the roots are computed from, and the roots, after its parents.

    Variables in `done`, which may grow meanwhile, are not visited.
    """
    seen = set()
    for root in roots:
        stack = [(root, False)]
        while stack:
            variable, are_parents_done = stack.pop()
            if are_parents_done:
                yield variable
            elif variable not in seen and variable not in done:
                seen.add(variable)
                stack.append((variable, True))
                above = reversed(parents(variable))
                stack.extend([(parent, False) for parent in above if parent not in seen])


def nodes_of(variables: Iterable[Variable]) -> list[Apply]:
    """Return the nodes that compute variables, each once, in the order of the variables."""
    return list(dict.fromkeys(item.owner for item in variables if item.owner is not None))


def is_random_state(variable: Any) -> bool:
    """Whether this is a shared variable that holds the state of a random stream."""
    return isinstance(variable, SharedVariable) and (
        isinstance(variable.type, names.GeneratorType) or getattr(variable.tag, "is_rng", False)
    )


def draws_in(variables: Iterable[Variable]) -> list[Variable]:
    """Return those variables that are arrays of random numbers."""
    nodes = {item: item.owner for item in variables if item.owner is not None}
    return [
        item
        for item, node in nodes.items()
        if isinstance(node.op, names.RANDOM) and item is node.outputs[1]
    ]


def default_updates(
    roots: Iterable[Variable],
    excluded: Container[Variable],
    parents: Callable[[Variable], Sequence[Variable]] = operands,
) -> dict[SharedVariable, Variable]:
    """Return the default updates of shared variables that roots, or such updates, are computed from."""
    found: dict[SharedVariable, Variable] = {}
    done: set[Variable] = set()
    while roots:
        reached = list(inputs_first(roots, parents, done))
        done.update(reached)
        updates = [(item, getattr(item, "default_update", None)) for item in reached]
        new = {item: update for item, update in updates if update is not None and item not in excluded}
        found.update(new)
        roots = list(new.values())
    return found


def contain_collectives(
    roots: Iterable[Any], no_default_updates: bool | Container[SharedVariable] | None
) -> bool:
    """Whether expressions, or the default updates of their shared variables, contain collectives.

    Parameters
    ----------
    roots : list
        The expressions; other objects contain none.
    no_default_updates : bool or list of shared variables
        The same option as of the compiler's ``function``.
    """
    variables = [root for root in roots if isinstance(root, Variable)]
    if no_default_updates is not True:
        variables += default_updates(variables, no_default_updates or ()).values()
    return ALONE in set(names.ancestors(variables))


def label(variable: Variable) -> str:
    """Return how messages refer to an input or a shared variable."""
    kind = "shared variable" if isinstance(variable, SharedVariable) else "input"
    return f"{kind} {variable.name!r}" if variable.name else f"{kind} {variable}"


class Dependence:
    """Which of the `sources` each variable depends on, as a bit mask.

    Parameters
    ----------
    sources : list of variables
        The sources, in the order of their bits.
    givens : dict
        The compiler's substitutions: a variable depends on what replaces it.
    independent : container of variables
        Variables that count as independent, no matter what they are computed from.

    Attributes
    ----------
    sources : list of variables
        The sources, in the order of their bits.
    parents : callable
        ``parents(variable)`` returns the variables that the value of a variable depends on directly.
    """

    def __init__(
        self,
        sources: Iterable[Variable],
        givens: Mapping[Variable, Variable],
        independent: Container[Variable] = (),
    ) -> None:
        self.sources = list(dict.fromkeys(sources))
        self.parents = operands_of_values(givens, independent)
        self._bits = {source: 1 << position for position, source in enumerate(self.sources)}
        self._masks: dict[Variable, int] = {}

    def of(self, *variables: Variable) -> int:
        """Return the mask of some variables together."""
        together = 0
        for variable in variables:
            if variable not in self._masks:
                for item in inputs_first([variable], self.parents, done=self._masks):
                    mask = self._bits.get(item, 0)
                    for parent in self.parents(item):
                        mask |= self._masks[parent]
                    self._masks[item] = mask
            together |= self._masks[variable]
        return together

    def mask_of(self, sources: Iterable[Variable]) -> int:
        """Return the mask of some of the sources."""
        mask = 0
        for source in sources:
            mask |= self._bits[source]
        return mask

    def sources_in(self, mask: int) -> list[Variable]:
        """Return the sources in a mask."""
        return [source for source in self.sources if self._bits[source] & mask]

    def labels_in(self, mask: int) -> str:
        """Return the sources in a mask as text."""
        return listed(label(source) for source in self.sources_in(mask))


class Numbering:
    """Gives equal numbers to expressions that are equal in structure.

    A compiler's ``grad`` builds a new graph whenever it is called, so a gradient that an update rule has
    computed is not the same variable as the gradient of the same loss computed again. Each combination
    of an operation and the numbers of its operands gets a number, as in a compiler's value numbering.
    """

    def __init__(self) -> None:
        self._by_variable: dict[Variable, int] = {}
        self._by_structure: dict[Hashable, int] = {}

    def of(self, variable: Variable) -> int:
        """Return the number of a variable."""
        for item in inputs_first([variable], done=self._by_variable):
            number = self._by_structure.setdefault(self._structure(item), len(self._by_structure))
            self._by_variable[item] = number
        return self._by_variable[variable]

    def _structure(self, variable: Variable) -> Hashable:
        node = variable.owner
        if node is not None:
            numbers: list[Any] = [self._by_variable[item] for item in node.inputs]
            return (node.op, node.outputs.index(variable), variable.type, *numbers)
        if isinstance(variable, Constant):
            try:
                signature = variable.signature()
                hash(signature)
            except TypeError:  # its value has no hash; it is equal to itself only
                return variable
            return signature
        return variable


def fingerprints(
    inputs: Sequence[Variable], groups: Sequence[Sequence[Variable]]
) -> list[tuple[str, list[SharedVariable]]]:
    """Return a digest of each group of expressions, and its shared variables in the order of their use.

    Scripts whose groups differ only in their shared variables and in the values of constants have equal
    digests.
    """
    found: dict[Variable, tuple[bytes, tuple[int, ...]]] = {}
    arguments = {variable: place for place, variable in enumerate(inputs)}
    shareds: list[SharedVariable] = []
    for variable in inputs_first([item for group in groups for item in group]):
        node = variable.owner
        if node is not None:
            label = f"{_ADDRESS.sub('', str(node.op))} {node.outputs.index(variable)}"
            found[variable] = _fingerprint(label, [found[item] for item in node.inputs])
        elif isinstance(variable, SharedVariable):
            found[variable] = _fingerprint(f"shared {variable.type}", [(b"", (len(shareds),))])
            shareds.append(variable)
        else:  # constants have no place
            found[variable] = _fingerprint(f"argument {arguments.get(variable)}", [])
    made = [_fingerprint("group", [found[item] for item in group]) for group in groups]
    return [(digest.hex(), [shareds[number] for number in numbers]) for digest, numbers in made]


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def _fingerprint(
    label: str, operands: Iterable[tuple[bytes, tuple[int, ...]]]
) -> tuple[bytes, tuple[int, ...]]:
    """Return the digest of an operation, and the numbers of the shared variables of its operands."""
    made = hashlib.blake2b(label.encode(), digest_size=16)
    numbers: tuple[int, ...] = ()
    for digest, own in operands:
        made.update(digest)
        if not numbers:
            numbers = own
        elif own != numbers:  # the digest tells which of them are the same variables
            places = {number: place for place, number in enumerate(numbers)}
            made.update(repr([places.setdefault(number, len(places)) for number in own]).encode())
            numbers = tuple(places)
    return made.digest(), numbers


# Seeds of gradients


def is_fill_of_one_number(node: Apply) -> bool:
    """Whether a node fills the shape of its first input, a single number, with its second input.

    The result does not depend on the value of the first input. The gradient of every loss begins with
    such a node.
    """
    return (
        isinstance(node.op, names.Elemwise)
        and isinstance(node.op.scalar_op, scalar.Second)
        and all(node.inputs[0].type.broadcastable)
        and node.inputs[1].type == node.outputs[0].type
    )


def is_seed(variable: Variable) -> bool:
    """Whether a variable is the seed of the gradient of a loss, which is the first input of its node."""
    node = variable.owner
    if node is None or not is_fill_of_one_number(node) or variable.type.ndim:
        return False
    loss, value = node.inputs
    return loss.owner is not None and isinstance(value, Constant) and value.data == 1


def loss_ops(nodes: Iterable[Apply], results: Sequence[Variable]) -> list[frozenset[str]]:
    """Return, for each result, the set of the `loss_op` of the collectives that its gradients pass.

    Parameters
    ----------
    nodes : list of nodes
        Of the graph, in topological order.
    results : list of variables
    """
    found: dict[Variable, frozenset[str]] = {}  # of the variables that are computed from seeds
    for node in nodes:
        passed = [found[variable] for variable in node.inputs if variable in found]
        together = frozenset().union(*passed)
        outputs = node.outputs
        if isinstance(node.op, Collective):
            outputs = outputs[1:]  # without the peers
            if node.op.loss_op is not None:  # as of a `BucketReady`
                together |= {node.op.loss_op}
        found.update((output, together) for output in outputs if passed or is_seed(output))
    return [found.get(result, frozenset()) for result in results]


def gradient_seeds(
    expressions: Iterable[Variable], parents: Callable[[Variable], Sequence[Variable]] = operands
) -> dict[Variable, Variable]:
    """Return the seeds of the gradients that expressions are computed from, each with its loss.

    A loss may itself contain gradients, such as a penalty on them. Their seeds are not included.
    """

    def until_seeds(variable: Variable) -> Sequence[Variable]:
        return () if is_seed(variable) else parents(variable)

    reached = inputs_first(expressions, until_seeds)
    seeds = {item: item.owner.inputs[0] for item in reached if is_seed(item)}
    inner = set(inputs_first(seeds.values(), parents))
    return {seed: loss for seed, loss in seeds.items() if seed not in inner}


def rebuilt(
    variables: Sequence[Variable],
    replacements: Mapping[Variable, Variable],
    givens: Mapping[Variable, Variable],
    apply: Callable[[Apply, list[Variable]], Sequence[Variable]] | None = None,
    parents: Callable[[Variable], Sequence[Variable]] | None = None,
) -> list[Variable]:
    """Return expressions with variables replaced by others of the same type.

    By default, scalar variables whose shape is all that is used are left out: they do not count as a
    dependence, and may have no replacement. With `apply`, ``apply(node, inputs)`` returns the outputs of
    each node for its replaced inputs. With ``parents=operands``, no variables are left out.
    """
    copies, parents = dict(replacements), parents or operands_of_values(givens)
    for variable in inputs_first(variables, parents, done=copies):
        node = variable.owner
        if node is None or variable in givens:  # which the compiler replaces when it compiles
            copies[variable] = variable
        elif len(used := parents(variable)) < len(node.inputs):
            [copies[variable]] = [copies[item] for item in used]
        else:
            inputs = [copies[item] for item in node.inputs]
            outputs = (apply or with_inputs)(node, inputs)
            for old, new in zip(node.outputs, outputs):
                copies.setdefault(old, new)
    return [copies[variable] for variable in variables]


def with_inputs(node: Apply, inputs: Sequence[Variable]) -> list[Variable]:
    """Return the outputs of the same operation for other inputs."""
    is_same = all(new is old for new, old in zip(inputs, node.inputs))
    return node.outputs if is_same else node.clone_with_new_inputs(inputs).outputs


# A property of variables, also through the steps of loops


class Steps(NamedTuple):
    """The steps of a loop, and how their variables belong to those of the loop.

    Attributes
    ----------
    inputs, outputs : list of variables
        The variables of a step.
    sources : list of (variable, variable)
        The `inputs`, each with the input of the loop.
    ends : list of (variable, variable)
        The `outputs` that the loop returns, each with the output of the loop.
    states : list of (variable, variable)
        The outputs of a step that the next step gets, each with the input.
    """

    inputs: list[Variable]
    outputs: list[Variable]
    sources: list[tuple[Variable, Variable]]
    ends: list[tuple[Variable, Variable]]
    states: list[tuple[Variable, Variable]]


def steps_in(loop: Apply) -> Steps:
    """Return the steps of a loop."""
    inputs, outputs = names.steps_of(loop.op)
    places = loop.op.get_oinp_iinp_iout_oout_mappings()
    from_outer, to_outer = places["outer_inp_from_inner_inp"], places["outer_out_from_inner_out"]
    ends = [(output, to_outer.get(place, -1)) for place, output in enumerate(outputs)]
    return Steps(
        inputs,
        outputs,
        [(variable, loop.inputs[from_outer[place]]) for place, variable in enumerate(inputs)],
        [(output, loop.outputs[end]) for output, end in ends if end >= 0],
        [
            (output, inputs[to])
            for place, output in enumerate(outputs)
            for to in places["inner_inp_from_inner_out"].get(place, ())
        ],
    )


def nodes_having(
    variables: Iterable[Variable], having: set[Variable], rule: NodeRule
) -> Iterator[tuple[Apply, set[Variable]]]:
    """Yield the nodes of variables and of the steps of loops, each with the set having a property.

    The outputs with the property are added to `having`. Parents come before their children.
    """
    for node in nodes_of(variables):
        if not isinstance(node.op, names.Scan):
            if not having.isdisjoint(node.inputs):
                having.update(rule(node, having))
            yield node, having
            continue
        steps = steps_in(node)
        found = {variable for variable, source in steps.sources if source in having}
        order, inner, before = list(inputs_first(steps.outputs)), [], -1
        while len(found) > before:  # a step gets the states of the step before it
            before = len(found)
            inner = list(nodes_having(order, found, rule))
            found.update(later for item, later in steps.states if item in found)
        having.update(end for output, end in steps.ends if output in found)
        yield node, having
        yield from inner
