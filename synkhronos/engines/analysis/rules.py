"""One rule for each operation, from which all properties of a graph are read.

A `Rule` says two things. The *labels* of the axes of operands and outputs: axes with the same label have
the same extent, and an item along one belongs to the same item along the other, as with the letters of
``einsum``. And how the *values* are combined: by a sum of terms, a product of powers, a choice, or in a
way that is not known. ``rows`` follows an axis of rows and the number by which rows that occur twice
multiply a value, ``fixed_rows`` finds extents that are equal, and ``difference_causes`` values that
parts of the rows do not give. Training steps find the terms of an expression, and operations that change
gradients. An operation without a rule is unknown to all of them.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Hashable, Iterable, NamedTuple, Sequence

from synkhronos.engines import names
from synkhronos.engines.analysis.shapes import Extent, dims, item, normalized_axes, numbers_along
from synkhronos.engines.names import Apply, Constant, Reciprocal, Variable, get_idx_list, scalar

#: Of each axis: the label; None for an extent of its own; or, in outputs, a `Part`.
Labels = Sequence[Hashable]

_MOST = 4  # a value with more degrees counts as unknown
_ONE = frozenset([0.0])


class Part(NamedTuple):
    """In place of a label: some of the items of axes with these labels, in some order."""

    labels: tuple[Hashable, ...]


class Terms(NamedTuple):
    """A sum of terms, each linear in one operand; or items of these operands, each as it is.

    Attributes
    ----------
    operands : tuple of int or None
        The positions of the operands; None for all.
    are_alike : bool
        Whether the operands are joined or chosen from, and so have to be of the same kind.
    shapes : tuple of int
        The positions of operands of which only the shape counts.
    """

    operands: tuple[int, ...] | None = None
    are_alike: bool = False
    shapes: tuple[int, ...] = ()


class Powers(NamedTuple):
    """A product of powers of the operands, with these exponents; 0 for operands without influence."""

    exponents: tuple[float, ...]


class Choice(NamedTuple):
    """One of the operands, or its absolute value: multiplied by a positive number if all of them are."""


class Invariant(NamedTuple):
    """The same value if all operands are multiplied by the same positive number."""


#: How an operation combines values: None if that is not known, as for any nonlinear function.
Values = Any


class Rule(NamedTuple):
    """What an operation does.

    Attributes
    ----------
    inputs : list of labels
        The labels of the axes of each operand; None for an operand of which only the shape counts.
    outputs : list of labels
        The labels of each output.
    values : Terms, Powers, Choice, Invariant or None
        How the values are combined.
    reduced : {"sum", "mean", None}
        What becomes of the items along an axis whose label no output has.
    mixed : container of labels
        The axes along which an item depends on all items.
    numbers : list of (int, int or Extent, Extent)
        Extents that are given as numbers: the place, the number or another axis of the same extent, and
        the axis.
    """

    inputs: Sequence[Labels | None]
    outputs: Sequence[Labels]
    values: Values = None
    reduced: str | None = None
    mixed: Iterable[Hashable] = ()
    numbers: Sequence[tuple[int, int | Extent, Extent]] = ()

    def degrees(self, degrees: Sequence[frozenset[float]]) -> frozenset[float] | None:
        """Return the degrees of the result, of operands with these degrees; None if not known.

        If operands are multiplied by a number, a value of degree `d` is by the `d`-th power of it. A
        value with several terms may have several degrees, and zero has none.
        """
        values = self.values
        if isinstance(values, Terms):
            places = self.operands(len(degrees))
            found = {degrees[place] for place in places if degrees[place]}
            others = {*range(len(degrees))}.difference(places, values.shapes)
            if (values.are_alike and len(found) > 1) or any(degrees[other] - _ONE for other in others):
                return None
            return _few(frozenset().union(*found))
        if isinstance(values, Powers):
            return product_of_powers(values.exponents, degrees)
        known = {degree for degree in degrees if degree}
        if known <= {_ONE}:
            return _ONE
        if len(known) == 1 and len(next(iter(known))) == 1:
            if isinstance(values, Choice):
                return next(iter(known))
            if isinstance(values, Invariant):
                return _ONE
        return None

    def operands(self, count: int) -> Sequence[int]:
        """Return the positions of the operands that are terms, or that are multiplied."""
        if isinstance(self.values, Terms):
            return range(count) if self.values.operands is None else self.values.operands
        if isinstance(self.values, Powers):
            return [place for place, exponent in enumerate(self.values.exponents) if exponent]
        return ()

    def is_linear_in(self, places: Sequence[int], count: int) -> bool:
        """Whether the result is linear in these of the operands together, if the others are constant."""
        if isinstance(self.values, Powers):
            return len(places) == 1 and self.values.exponents[places[0]] == 1
        return isinstance(self.values, Terms) and {*places} <= {*self.operands(count)}


def _few(degrees: frozenset[float]) -> frozenset[float] | None:
    return degrees if len(degrees) <= _MOST else None


def product_of_powers(
    exponents: Sequence[float], degrees: Sequence[frozenset[float]]
) -> frozenset[float] | None:
    """Return the degrees of a product of powers of values with these degrees; None if not known."""
    product = _ONE
    for exponent, each in zip(exponents, degrees):
        if exponent != int(exponent) or exponent < 0:
            if len(each) > 1:
                return None
            each, exponent = frozenset(exponent * item for item in each), 1
        for _ in range(int(exponent)):
            product = frozenset(item + two for item in product for two in each)
            if len(product) > _MOST:
                return None
    return product


def rule_of(node: Apply) -> Rule | None:
    """Return the rule of a node; None if there is none."""
    kind: Any = type(node.op)
    rule = _function_of(kind)
    return None if rule is None else rule(node)


@functools.lru_cache(maxsize=None)
def _function_of(kind: type) -> Callable[[Apply], Rule | None] | None:
    """Return the function that makes the rules of a kind of operation."""
    found = next((rule for kinds, rule in _RULES if issubclass(kind, kinds)), None)
    return _copied if found is None and kind.__name__ in names.TRANSFERS else found


def _labels(variable: Variable, first: int = 0) -> list[int]:
    return list(range(first, first + ndim(variable)))


def ndim(variable: Variable) -> int:
    """Return the number of dimensions; 0 if the variable is not a tensor."""
    return getattr(variable.type, "ndim", 0)


def _wide(variable: Variable, labels: Labels) -> Labels:
    """Return labels without those of axes that are broadcast."""
    pattern = getattr(variable.type, "broadcastable", ())
    return [None if is_one else label for label, is_one in zip(labels, pattern)]


# Element by element

_LINEAR = (scalar.Add, scalar.Sub, scalar.Neg, scalar.Cast, scalar.Identity)


@functools.lru_cache(maxsize=None)
def _values_of(kind: type) -> Values:
    """Return how a kind of scalar operation combines values, or a function of the node."""
    return next((values for kinds, values in _SCALARS if issubclass(kind, kinds)), None)


def _power(node: Apply) -> Values:
    exponent = node.inputs[1]
    is_known = isinstance(exponent, Constant) and exponent.data.size == 1
    return Powers((float(exponent.data.reshape(-1)[0]), 0)) if is_known else None


_SCALARS: list[tuple[Any, Any]] = [
    (_LINEAR, Terms()),
    (scalar.Second, Terms((1,), shapes=(0,))),
    (scalar.Switch, Terms((1, 2))),
    (scalar.Mul, lambda node: Powers((1,) * len(node.inputs))),
    (scalar.TrueDiv, Powers((1, -1))),
    (scalar.Sqr, Powers((2,))),
    (scalar.Sqrt, Powers((0.5,))),
    (Reciprocal, Powers((-1,))),
    (scalar.Pow, _power),
    ((scalar.Abs, scalar.Maximum, scalar.Minimum), Choice()),
    (scalar.LogicalComparison, Invariant()),
]


def _elementwise(node: Apply) -> Rule:
    inputs = [_wide(variable, _labels(variable)) for variable in node.inputs]
    kind: Any = type(node.op.scalar_op)
    values = _values_of(kind)
    values = values(node) if callable(values) else values
    return Rule(inputs, [_labels(output) for output in node.outputs], values)


# Axes that are moved, reduced or multiplied


def _copied(node: Apply) -> Rule:
    first, *others = node.inputs
    labels = _labels(first)
    outputs = [labels if ndim(item) == len(labels) else [None] * ndim(item) for item in node.outputs]
    return Rule([labels, *[None] * len(others)], outputs, Terms((0,)))


def _specified(node: Apply) -> Rule:
    rule = _copied(node)
    if isinstance(node.op, names.WITH_EXTENTS):
        given = [variable if hasattr(variable.type, "dtype") else None for variable in node.inputs[1:]]
        items = [None if number is None else item(number) for number in given]
    else:
        items = dims(node.inputs[1]) or []
    return rule._replace(numbers=_numbers(items, node.outputs[0]))


def _moved(node: Apply) -> Rule:
    order = [None if axis == "x" else axis for axis in node.op.new_order]
    return Rule([_labels(node.inputs[0])], [order], Terms())


def _without(labels: Labels, axes: Sequence[int]) -> Labels:
    return [label for axis, label in enumerate(labels) if axis not in axes]


def _reduction(node: Apply) -> Rule:
    labels, op = _labels(node.inputs[0]), node.op
    kept = _without(labels, normalized_axes(op.axis, len(labels)))
    rule = Rule([labels, *[None] * (len(node.inputs) - 1)], [kept] * len(node.outputs))
    if isinstance(getattr(op, "scalar_op", None), scalar.Add):
        kind = "mean" if isinstance(op, names.MEANS) else "sum"
        return rule._replace(values=Terms((0,)), reduced=kind)
    is_choice = isinstance(getattr(op, "scalar_op", None), (scalar.Maximum, scalar.Minimum))
    return rule._replace(values=Choice() if is_choice else None)


def _product_rule(a: Labels, b: Labels, output: Labels, *ignored: None) -> Rule:
    exponents = (1, 1) + (0,) * len(ignored)
    return Rule([a, b, *ignored], [output], Powers(exponents), "sum")


def _dot(node: Apply) -> Rule:
    left, right = (ndim(variable) for variable in node.inputs)
    a = ["i", "k"][2 - left :] if left else []
    b = ["k", "j"][:right]
    return _product_rule(a, b, [*a[:-1], *b[1:]])


def _batched_dot(node: Apply) -> Rule:
    left, right = (ndim(variable) for variable in node.inputs)
    a, b = ["n", "i", "k"] if left == 3 else ["n", "k"], ["n", "k", "j"][:right]
    return _product_rule(a, b, [*a[:-1], *b[2:]])


def _softmax(node: Apply) -> Rule:
    labels = _labels(node.inputs[0])
    return Rule([labels], [labels], mixed=normalized_axes(node.op.axis, len(labels)))


def _by_row(node: Apply) -> Rule:
    """Matrices, whose columns each row mixes, and vectors of a number for each row."""
    has_bias = isinstance(node.op, names.WITH_BIAS)

    def labels(variable: Variable) -> Labels:
        is_bias = ndim(variable) == 1 and has_bias and not variable.dtype.startswith(("int", "uint"))
        return ["column"] if is_bias else ["row", "column"][: ndim(variable)]

    is_linear = isinstance(node.op, names.LINEAR_BY_ROW)
    return Rule(
        [labels(variable) for variable in node.inputs],
        [labels(output) if not has_bias or ndim(output) != 1 else ["row"] for output in node.outputs],
        Terms((0,)) if is_linear else None,
        mixed=["column"],
    )


_IMAGES, _CHANNELS, _FILTERS = range(3)  # the places of the numbers of a convolution


def _convolution(node: Apply) -> Rule:
    (first, second, *others), (output, *_), op = node.inputs, node.outputs, node.op
    if isinstance(op, names.TO_IMAGES):
        images, filters, maps = output, first, second
    elif isinstance(op, (*names.FORWARD, *names.OLD_CONVOLUTIONS)):
        images, filters, maps = first, second, output
    else:
        images, filters, maps = first, output, second
    space, is_old = [None] * (ndim(images) - 2), isinstance(op, names.OLD_CONVOLUTIONS)
    channels = None if is_old or getattr(op, "num_groups", 1) > 1 else "c"
    labels = {
        images: ["n", channels, *space], filters: ["f", channels, *space], maps: ["n", "f", *space],
    }  # fmt: skip
    rule = _product_rule(labels[first], labels[second], labels[output], *[None] * len(others))
    if is_old:
        numbers = [op.bsize, None if op.imshp is None else op.imshp[0], op.nkern]
    else:
        numbers = [op.imshp[0], None, op.kshp[0]]
    keys = [(images, 0), (images, 1), (filters, 0)]
    given = [(place, int(item), key) for place, (item, key) in enumerate(zip(numbers, keys)) if item]
    return rule._replace(numbers=given)


def _pooling(node: Apply) -> Rule:
    """Windows of the trailing axes; the gradient is linear in the last array, the gradient above."""
    first = node.inputs[0]
    labels = [*range(ndim(first) - node.op.ndim), *[None] * node.op.ndim]
    arrays = [place for place, variable in enumerate(node.inputs) if ndim(variable) == ndim(first)]
    is_choice = len(arrays) == 1 and getattr(node.op, "mode", "max") == "max"
    return Rule(
        [labels if place in arrays else None for place in range(len(node.inputs))],
        [labels for _ in node.outputs],
        Choice() if is_choice else Terms((arrays[-1],)),
    )


# Indices


def _part_of(index: Sequence[Any], labels: Labels) -> list[Hashable]:
    """Return the labels of the items that the index of a `Subtensor` selects."""
    found: list[Hashable] = []
    for axis, label in enumerate(labels):
        chosen = index[axis] if axis < len(index) else slice(None)
        if isinstance(chosen, slice):
            found.append(label if chosen == slice(None) else Part((label,)))
    return found


def _scalars(variables: Sequence[Variable]) -> list[Labels]:
    return [[None] * ndim(variable) for variable in variables]


def _indexed(node: Apply) -> Rule:
    array, *numbers = node.inputs
    index = get_idx_list(node.inputs, node.op.idx_list)
    output = _part_of(index, _labels(array))
    return Rule([_labels(array), *_scalars(numbers)], [output], Terms((0,)))


def _written(node: Apply) -> Rule:
    """Items of an array are set or increased."""
    array, part, *numbers = node.inputs
    labels = _labels(array)
    index = get_idx_list([array, *numbers], node.op.idx_list)
    chosen = _part_of(index, labels)[-ndim(part) or len(labels) :]
    inner = [None if isinstance(item, Part) else item for item in chosen]
    written = [axis for axis, item in enumerate(index) if item != slice(None)]
    values = Terms((0, 1), are_alike=True)
    return Rule([labels, _wide(part, inner), *_scalars(numbers)], [labels], values, mixed=written)


def _looked_up_labels(
    node: Apply, array: Variable, numbers: Sequence[Variable]
) -> tuple[Labels, Labels, list[Labels]] | None:
    """Return the labels of an array, of items at numbers in it, and of the numbers; None if unknown."""
    labels: list[Hashable] = list(_labels(array))
    found = numbers_along(node, numbers)
    if found is not None:
        axis, chosen = found
        items = [*labels[:axis], "item", *labels[axis + 1 :]]
        return labels, items, [["item"] if number is chosen else None for number in numbers]  # type: ignore
    has_slices = any(isinstance(item, slice) for item in getattr(node.op, "idx_list", None) or ())
    if has_slices or any(ndim(number) != 1 or number.type.dtype == "bool" for number in numbers):
        return None  # a mask has other extents than the items that it selects
    vectors = [_wide(number, ["item"]) for number in numbers]
    return labels, ["item", *labels[len(numbers) :]], vectors


def _looked_up(node: Apply) -> Rule | None:
    array, *numbers = node.inputs
    found = _looked_up_labels(node, array, numbers)
    if found is None:
        return None
    labels, items, index = found
    return Rule([labels, *index], [items], Terms((0,)))


def _written_at(node: Apply) -> Rule | None:
    """Items of an array at numbers are increased, so that items with the same number are added up."""
    array, part, *numbers = node.inputs
    found = _looked_up_labels(node, array, numbers)
    if found is None or node.op.set_instead_of_inc:
        return None
    labels, items, index = found
    if ndim(part) < len(items):  # each item is increased by the same
        return None
    written = [label for label in labels if label not in items]
    values = Terms((0, 1), are_alike=True)
    return Rule([labels, _wide(part, items), *index], [labels], values, "sum", written)


def _joined(node: Apply) -> Rule | None:
    axis, parts = names.joined(node)
    if axis is None:
        return None
    labels = _labels(node.outputs[0])
    own = [(axis, place) for place in range(len(parts))]
    each = [[*labels[:axis], item, *labels[axis + 1 :]] for item in own]
    output = [*labels[:axis], Part(tuple(own)), *labels[axis + 1 :]]
    first: list[Labels | None] = [None] * (len(node.inputs) - len(parts))
    operands = tuple(range(len(first), len(node.inputs)))
    return Rule([*first, *each], [output], Terms(operands, are_alike=True))


def _stacked(node: Apply) -> Rule:
    return Rule([()] * len(node.inputs), [[None]], Terms(are_alike=True))


def _chosen(node: Apply) -> Rule | None:
    """One of two values, depending on a condition."""
    if len(node.outputs) > 1:
        return None
    labels = _labels(node.outputs[0])
    return Rule([(), labels, labels], [labels], Terms((1, 2), are_alike=True))


# Shapes that are computed


def _numbers(items: Sequence[Any] | None, output: Variable) -> list[tuple[int, int | Extent, Extent]]:
    """Return the extents of an output that are known, given the items of its shape."""
    return [
        (place, item, (output, place))
        for place, item in enumerate(items or ())
        if isinstance(item, tuple) or (isinstance(item, int) and item >= 0)
    ]


def _filled(node: Apply, items: Sequence[Any] | None, output: Variable, values: Values = None) -> Rule:
    """Return the rule of an operation whose output has a computed shape."""
    outputs = [_labels(item) for item in node.outputs]
    return Rule([None] * len(node.inputs), outputs, values, numbers=_numbers(items, output))


def _alloc(node: Apply) -> Rule:
    value, output = node.inputs[0], node.outputs[0]
    rule = _filled(node, [item(variable) for variable in node.inputs[1:]], output, Terms((0,)))
    labels = _labels(value, ndim(output) - ndim(value))
    return rule._replace(inputs=[_wide(value, labels), *rule.inputs[1:]])


def _emptied(node: Apply) -> Rule:
    return _filled(node, [item(variable) for variable in node.inputs], node.outputs[0])


def _reshaped(node: Apply) -> Rule:
    return _filled(node, dims(node.inputs[1]), node.outputs[0], Terms((0,)))


def _random(node: Apply) -> Rule:
    return _filled(node, dims(node.inputs[1]), node.outputs[-1])


def _counted(node: Apply) -> Rule:
    start, stop, step = map(item, node.inputs)
    items = [stop] if start == 0 and step == 1 else None
    return _filled(node, items, node.outputs[0])


def _cumulated(node: Apply) -> Rule:
    labels = _labels(node.inputs[0])
    mixed = normalized_axes(node.op.axis, len(labels))
    outputs = labels if node.op.axis is not None else [None]
    return Rule([labels], [outputs], Terms() if node.op.mode == "add" else None, mixed=mixed)


def _between(node: Apply) -> Rule:
    """Differences of neighbours along an axis, or the items that are not repeated."""
    labels = _labels(node.inputs[0])
    mixed = normalized_axes(node.op.axis, len(labels))
    part = Part(tuple(mixed))
    output = [part if label in mixed else label for label in labels]
    outputs = [[part] if node.op.axis is None else output, *[[None]] * (len(node.outputs) - 1)]
    return Rule(
        [labels], outputs, Terms() if isinstance(node.op, names.DIFFERENCES) else None, mixed=mixed
    )


def _sorted(node: Apply) -> Rule:
    labels = _labels(node.inputs[0])
    axis = item(node.inputs[1]) if len(node.inputs) > 1 else node.op.axis  # since PyTensor 3
    mixed = [axis % len(labels)] if isinstance(axis, int) else labels
    is_values = isinstance(node.op, names.SortOp)
    return Rule([labels, None], [labels], Choice() if is_values else Invariant(), mixed=mixed)


_RULES: list[tuple[Any, Callable[[Apply], Rule | None]]] = [
    (names.Elemwise, _elementwise),
    ((names.CAReduce, *names.LARGEST), _reduction),
    (names.DimShuffle, _moved),
    (names.SpecifyShape, _specified),
    (names.COPIES, _copied),
    (names.Dot, _dot),
    (names.BatchedDot, _batched_dot),
    (names.SOFTMAXES, _softmax),
    ((*names.BY_ROW, *names.LINEAR_BY_ROW), _by_row),
    ((*names.ANY_CONVOLUTIONS, *names.OLD_CONVOLUTIONS), _convolution),
    (names.ANY_POOLS, _pooling),
    (names.Subtensor, _indexed),
    (names.IncSubtensor, _written),
    ((names.AdvancedSubtensor1, names.AdvancedSubtensor), _looked_up),
    ((names.AdvancedIncSubtensor1, names.AdvancedIncSubtensor), _written_at),
    (names.Join, _joined),
    (names.MakeVector, _stacked),
    (names.IfElse, _chosen),
    (names.Reshape, _reshaped),
    (names.Alloc, _alloc),
    (names.AllocEmpty, _emptied),
    (names.RANDOM, _random),
    (names.ARange, _counted),
    (names.CumOp, _cumulated),
    ((*names.DIFFERENCES, names.Unique), _between),
    ((names.SortOp, names.ArgSortOp), _sorted),
]
