"""Frees graphs from numbers of rows that a script gives as constants, such as the size of its minibatch.

A rank has part of the rows, so ``reshape((100, -1))`` or ``conv2d(input_shape=(100, ...))`` would give
other values there, or fail. In ``x * y`` both arrays have the same number of rows, and so have a product
and its first factor: no call could succeed otherwise. Each extent that the rules of operations show to
be equal is in one class, also with constants. Where the constant is in the class of the rows, the number
of the rank's rows takes its place. The other constants are listed, for the errors of calls.
"""

from __future__ import annotations

import copy
import logging
import math
from typing import Any, Container, Mapping, NamedTuple, Sequence, Tuple

from synkhronos.engines import names
from synkhronos.engines.analysis.graphs import default_updates, operands, rebuilt, steps_in
from synkhronos.engines.analysis.rules import Rule, ndim, rule_of
from synkhronos.engines.analysis.shapes import Extent, dims
from synkhronos.engines.base import HardcodedRowCount
from synkhronos.engines.names import Apply, Constant, Op, SharedVariable, Variable
from synkhronos.engines.names import tensor as tt


class Site(NamedTuple):
    """A place where a script gives an extent as a constant.

    Attributes
    ----------
    node : Apply
    axis : int
        The axis of the shape.
    number : int
    extent : (variable, int)
        A variable, and its axis that has this extent.
    """

    node: Apply
    axis: int
    number: int
    extent: Extent


class EqualAxes:
    """The classes of equal extents of a graph: of axes ``(variable, axis)``, as disjoint sets.

    Attributes
    ----------
    sites : list of Site
    regrouped : list of Apply
        Reshapes whose first extent is a constant, and whose operand has dimensions.
    """

    def __init__(self) -> None:
        self.sites: list[Site] = []
        self.regrouped: list[Apply] = []
        self._parents: dict[Extent, Extent] = {}
        self._constants: dict[Extent, set[int]] = {}
        self._done: set[names.Scan] = set()

    def add(self, inputs: Sequence[Variable], outputs: Sequence[Variable]) -> None:
        """Add the operations between some variables."""
        for node in names.io_toposort(inputs, outputs):
            rule = rule_of(node)
            if rule is not None:
                self._add(node, rule)
            elif isinstance(node.op, names.Scan):
                self._loop(node)

    def _add(self, node: Apply, rule: Rule) -> None:
        """Join the axes with the same label, and note the constants among the extents."""
        together: dict[object, list[Extent]] = {}
        sides = [*zip(node.inputs, rule.inputs), *zip(node.outputs, rule.outputs)]
        for variable, labels in sides:
            for axis, label in enumerate(labels or ()):
                if label is not None:
                    together.setdefault(label, []).append((variable, axis))
        for keys in together.values():
            self.join(*keys)
        for place, number, key in rule.numbers:
            if not isinstance(number, int):
                self.join(number, key)
                continue
            self._constants.setdefault(self.class_of(key), set()).add(number)
            if number > 1:
                self.sites.append(Site(node, place, number, key))
        if isinstance(node.op, names.Reshape) and ndim(node.inputs[0]):
            first = (dims(node.inputs[1]) or [None])[0]
            if isinstance(first, int) and first > 1:
                self.regrouped.append(node)

    def settle(self) -> None:
        """Find the reshapes that keep the first axis, as its extent is the same constant before."""
        found = True
        while found:
            found = False
            for node in self.regrouped:
                before, after = (node.inputs[0], 0), (node.outputs[0], 0)
                equal = self.constants_of(before) & self.constants_of(after)
                if equal and self.class_of(before) != self.class_of(after):
                    self.join(before, after)
                    found = True

    # Classes

    def constants_of(self, key: Extent) -> set[int]:
        """Return the constants that are equal to an extent."""
        return self._constants.get(self.class_of(key), set())

    def class_of(self, key: Extent) -> Extent:
        """Return a representative of the class of an axis."""
        path = []
        while key in self._parents:
            path.append(key)
            key = self._parents[key]
        for item in path[:-1]:
            self._parents[item] = key
        return key

    def join(self, *keys: Extent) -> None:
        """Put axes in one class."""
        first, *others = dict.fromkeys(map(self.class_of, keys))
        for other in others:
            self._parents[other] = first
            self._constants.setdefault(first, set()).update(self._constants.pop(other, ()))

    def join_all(self, first: Variable, second: Variable) -> None:
        """Put the axes of two variables of the same number of dimensions in the same classes."""
        if ndim(first) == ndim(second):
            for axis in range(ndim(first)):
                self.join((first, axis), (second, axis))

    def _loop(self, node: Apply) -> None:
        if node.op in self._done:  # another loop has the same steps
            return
        self._done.add(node.op)
        steps = steps_in(node)
        self.add(steps.inputs, steps.outputs)
        for inner, outer in [*steps.sources, *steps.ends]:
            self._step(inner, outer)
        for item, later in steps.states:
            self.join_all(item, later)

    def _step(self, inner: Variable, outer: Variable) -> None:
        """Join the axes of a variable of the steps with the axes of the loop's, except for its steps."""
        ahead = ndim(outer) - ndim(inner)
        if ahead in (0, 1):
            for axis in range(ndim(inner)):
                self.join((inner, axis), (outer, axis + ahead))


_logger = logging.getLogger(__name__)

#: The sites of a convolution
_IMAGES, _CHANNELS, _FILTERS = range(3)

#: Outputs, updates and givens
_Parts = Tuple[
    Sequence[Variable], Sequence[Tuple[SharedVariable, Variable]], Sequence[Tuple[Variable, Any]]
]


def free_rows(
    outputs: Sequence[Variable],
    updates: Sequence[tuple[SharedVariable, Variable]],
    givens: Sequence[tuple[Variable, Any]],
    rows: Mapping[Variable, int],
    no_default_updates: bool | Sequence[SharedVariable] | None,
) -> tuple[Any, Any, Any, list[HardcodedRowCount]]:
    """See `synkhronos.engines.base.Engine.free_rows`."""
    graph = _Graph(outputs, updates, givens, no_default_updates)
    if not rows or not any(isinstance(node.op, _FIXING) for node in graph.nodes):
        return outputs, updates, givens, []
    graph.find(rows)
    try:
        freed = graph.rebuilt()
        is_free = not graph.are_in_types(freed)
    except Exception as error:  # any exception; an operation may refuse an input of another type
        _logger.debug("the graph cannot be built with other numbers of rows: %s", error)
        is_free = False
    if not is_free:
        graph.drop()
        freed = outputs, updates, givens
    return (*freed, graph.fixed())


def _roots(outputs: Sequence[Any], updates: Sequence[Any], givens: Sequence[Any]) -> list[Variable]:
    every = [*outputs, *(new for _, new in [*updates, *givens])]
    return [root for root in every if isinstance(root, Variable)]


class _Graph:
    """The variables of a function, with the default updates of shared variables.

    Constants in it that are numbers of rows are replaced.
    """

    def __init__(
        self,
        outputs: Sequence[Variable],
        updates: Sequence[tuple[SharedVariable, Variable]],
        givens: Sequence[tuple[Variable, Any]],
        no_default_updates: bool | Sequence[SharedVariable] | None,
    ) -> None:
        self._outputs, self._updates, self._givens = list(outputs), list(updates), list(givens)
        self._roots = _roots(outputs, updates, givens)
        if no_default_updates is not True:
            excluded = {*(shared for shared, _ in updates), *(no_default_updates or ())}
            found = default_updates(self._roots, excluded)
            self._updates.extend(found.items())
            self._roots.extend(found.values())
        self.nodes = names.io_toposort([], self._roots)
        self._n_given = len(updates)
        self._axes = EqualAxes()
        self._replaced: dict[Apply, dict[int, Variable]] = {}
        self._lengths: dict[Extent, Variable] = {}
        self._is_dropped = False

    def rebuilt(self) -> _Parts:
        """Return the outputs, updates and givens with the replacements."""
        made = rebuilt(self._roots, {}, {}, self._apply, operands)
        copies = dict(zip(self._roots, made))

        def copy_of(new: Any) -> Any:
            return copies.get(new, new) if isinstance(new, Variable) else new

        outputs = [copy_of(output) for output in self._outputs]
        givens = [(old, copy_of(new)) for old, new in self._givens]
        updates = [(shared, copy_of(new)) for shared, new in self._updates[: self._n_given]]
        for shared, new in self._updates[self._n_given :]:
            if copy_of(new) is not new:
                updates.append((shared, copy_of(new)))
        return outputs, updates, givens

    def find(self, rows: Mapping[Variable, int]) -> None:
        """Find the constants to replace, given the variables that hold rows, and the axis of each."""
        axes = self._axes
        axes.add([], self._roots)
        axes.join(*rows.items())
        for old, new in self._givens:
            if isinstance(new, Variable):
                axes.join_all(old, new)
        axes.settle()
        variable, axis = next(iter(rows.items()))
        self._class, self._count = axes.class_of((variable, axis)), variable.shape[axis]
        self._lengths[self._class] = self._count
        for node in axes.regrouped:
            self._add_condition(node)
        nodes = set(self.nodes)  # without the nodes inside loops
        for site in axes.sites:
            length = self._lengths.get(axes.class_of(site.extent))
            if length is not None and site.node in nodes and not _needs_numbers(site.node.op):
                self._replaced.setdefault(site.node, {})[site.axis] = length

    def _add_condition(self, node: Apply) -> None:
        """Note that a reshape keeps the rows if its other extents give the size of a row."""
        operand, items = node.inputs[0], _numbers(node.inputs[1])
        after = self._axes.class_of((node.outputs[0], 0))
        if not self._has_rows(operand) or after in self._lengths or items is None or -1 in items:
            return
        before = [operand.shape[axis] for axis in range(1, operand.ndim)]
        is_kept = tt.eq(math.prod(items[1:]), math.prod(before))
        self._lengths[after] = tt.switch(is_kept, self._count, items[0])

    def _has_rows(self, operand: Variable) -> bool:
        return self._axes.class_of((operand, 0)) == self._class

    def _apply(self, node: Apply, inputs: list[Variable]) -> list[Variable]:
        """Return the outputs of a node for new inputs."""
        op, lengths = node.op, self._replaced.get(node, {})
        if isinstance(op, names.ANY_CONVOLUTIONS) and (lengths or op.imshp[0] is not None):
            return _remade(node, _of_any_images(op, _FILTERS in lengths), inputs)
        if lengths and isinstance(op, names.OLD_CONVOLUTIONS):
            return _remade(node, _of_any_numbers(op, lengths), inputs)
        if lengths:
            return _remade(node, op, _with_lengths(node, inputs, lengths))
        if all(new is old for new, old in zip(inputs, node.inputs)):
            return node.outputs
        return node.clone_with_new_inputs(inputs, strict=False).outputs

    def are_in_types(self, freed: _Parts) -> bool:
        """Whether operations of a rebuilt graph still check the constants, as types of PyTensor do."""
        replaced = {
            site.number for site in self._axes.sites if site.axis in self._replaced.get(site.node, {})
        }
        checks = [
            node
            for node in names.io_toposort([], _roots(*freed))
            if isinstance(node.op, names.SpecifyShape) and isinstance(node.op, names.WITH_EXTENTS)
        ]
        return any(
            isinstance(variable, Constant) and variable.data in replaced
            for node in checks
            for variable in node.inputs[1:]
        )

    def drop(self) -> None:
        """Leave the constants where they are."""
        self._replaced.clear()
        self._is_dropped = True

    def fixed(self) -> list[HardcodedRowCount]:
        """Return the constants that are not replaced, as a list of `Fixed`."""
        left = [
            HardcodedRowCount(site.number, str(site.node), *self._kind(site))
            for site in self._axes.sites
            if self._replaced.get(site.node, {}).get(site.axis) is not self._count
            if self._is_dropped or not isinstance(site.node.op, names.ANY_CONVOLUTIONS)
        ]
        for node in self.nodes:
            cuts = isinstance(node.op, names.Scan) and any(
                self._has_rows(_uncut(outer_seq)) for outer_seq in node.op.outer_seqs(node.inputs)
            )
            first = node.inputs[0] if isinstance(node.op, names.COUNTING) else None
            if isinstance(first, Constant) and first.data > 1:  # as the number of steps of a loop
                left.append(HardcodedRowCount(int(first.data), str(node), cuts=cuts))
        return list(dict.fromkeys(left))

    def _kind(self, site: Site) -> tuple[bool, bool]:
        """Return whether a constant remains in a reshape of rows, and whether it is in any reshape."""
        node = site.node
        is_left = site.axis == 0 and not self._replaced.get(node)
        regroups = is_left and node in self._axes.regrouped and self._has_rows(node.inputs[0])
        return regroups, isinstance(node.op, names.Reshape)


def _uncut(sequence: Variable) -> Variable:
    """Return the array of which a sequence of a loop has as many items as there are steps."""
    while sequence.owner is not None and isinstance(sequence.owner.op, names.Subtensor):
        sequence = sequence.owner.inputs[0]
    return sequence


def _with_lengths(
    node: Apply, inputs: list[Variable], lengths: Mapping[int, Variable]
) -> list[Variable]:
    """Return the inputs of a node with other numbers in place of items of its shape."""
    op = node.op
    if isinstance(op, names.WITH_EXTENTS):
        items = [lengths.get(axis, variable) for axis, variable in enumerate(inputs[1:])]
        return [inputs[0], *(_as_index(number) for number in items)]
    if isinstance(op, names.ARange):
        return [inputs[0], _as_index(lengths[0]), inputs[2]]
    shape, known = inputs[1], _numbers(inputs[1])
    count = node.outputs[-1].ndim if known is None else len(known)
    items = [shape[axis] for axis in range(count)] if known is None else known
    items = [lengths.get(axis, item) for axis, item in enumerate(items)]
    return [inputs[0], tt.stack([_as_index(number) for number in items]), *inputs[2:]]


def _as_index(number: Any) -> Variable:
    if isinstance(number, Variable) and not hasattr(number.type, "dtype"):
        return number  # None, for any extent
    return tt.cast(number, "int64")


def _remade(node: Apply, op: Op, inputs: list[Variable]) -> list[Variable]:
    """Return the outputs of an operation, with the broadcast patterns of the outputs of a node."""
    outputs = op.make_node(*inputs).outputs
    return [
        names.with_pattern(new, old.type.broadcastable)
        if hasattr(old.type, "broadcastable") and old.type.broadcastable != new.type.broadcastable
        else new
        for new, old in zip(outputs, node.outputs)
    ]


def _of_any_images(op: Op, with_filters: bool) -> Op:
    """Return a convolution of any number of images, and perhaps of filters."""
    free = copy.copy(op)
    free.imshp = (None, *op.imshp[1:])
    if with_filters:
        free.kshp = (None, *op.kshp[1:])
    return free


def _of_any_numbers(op: Op, places: Container[int]) -> Op:
    """Return an old convolution of any number of images, of channels or of filters."""
    channels = None if _CHANNELS in places else op.imshp[0]
    return type(op)(
        (channels, *op.imshp[1:]),
        op.kshp,
        None if _FILTERS in places else op.nkern,
        None if _IMAGES in places else op.bsize,
        op.dx,
        op.dy,
        op.out_mode,
        direction_hint=op.direction_hint,
    )


def _needs_numbers(op: Op) -> bool:
    """Whether this is the gradient of an old convolution with strides, whose code has all numbers."""
    is_old = isinstance(op, names.OLD_CONVOLUTIONS)
    return is_old and (op.imshp, op.kshp) != (op.imshp_logical, op.kshp_logical)


def _numbers(shape: Variable) -> list[Any] | None:
    """Return the items of a shape, ints where they are constants; None if they are not known."""
    items = dims(shape)
    if items is None:
        return None
    return [item[0].shape[item[1]] if isinstance(item, tuple) else item for item in items]


_FIXING = (
    names.Alloc, names.Reshape, names.SpecifyShape, names.ARange, *names.RANDOM, *names.ANY_CONVOLUTIONS,
    *names.COUNTING, *names.OLD_CONVOLUTIONS,
)  # fmt: skip
