"""Which axes of the arrays of a graph have the same extent, because no call could succeed otherwise.

In ``x * y`` both arrays have the same number of rows, and so have a product and its first factor. Each
extent that the operations show to be equal is in one class, also with constants that a script gives, as
in ``reshape((100, -1))`` or ``zeros((100, n))``. The results of operations that are not listed here have
extents of their own.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence, Tuple

from synkhronos.engines import names
from synkhronos.engines.analysis.shapes import constant_index, dims, item, normalized_axes
from synkhronos.engines.names import (
    Apply,
    Elemwise,
    Scan,
    Subtensor,
    Variable,
    get_idx_list,
    io_toposort,
    scalar,
    steps_of,
)

Axis = Tuple[Variable, int]  # a variable, and one of its axes


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
    extent: Axis


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
        self._parents: dict[Axis, Axis] = {}
        self._constants: dict[Axis, set[int]] = {}
        self._done: set[Scan] = set()

    def add(self, inputs: Sequence[Variable], outputs: Sequence[Variable]) -> None:
        """Add the operations between some variables."""
        for node in io_toposort(inputs, outputs):
            for kinds, rule in _RULES:
                if isinstance(node.op, kinds):
                    rule(self, node)
                    break

    def settle(self) -> None:
        """Find the reshapes that keep the first axis, as its extent is the same constant before."""
        found = True
        while found:
            found = False
            for node in self.regrouped:
                before, after = (node.inputs[0], 0), (node.outputs[0], 0)
                equal = self.constants_of(*before) & self.constants_of(*after)
                if equal and self.class_of(*before) != self.class_of(*after):
                    self.join(before, after)
                    found = True

    # Classes

    def class_of(self, variable: Variable, axis: int) -> Axis:
        """Return a representative of the class of an axis."""
        return self._root((variable, axis))

    def constants_of(self, variable: Variable, axis: int) -> set[int]:
        """Return the constants that are equal to an extent."""
        return self._constants.get(self._root((variable, axis)), set())

    def _root(self, key: Axis) -> Axis:
        path = []
        while key in self._parents:
            path.append(key)
            key = self._parents[key]
        for one in path[:-1]:
            self._parents[one] = key
        return key

    def join(self, *keys: Axis) -> None:
        """Put axes in one class."""
        first, *others = dict.fromkeys(map(self._root, keys))
        for other in others:
            self._parents[other] = first
            self._constants.setdefault(first, set()).update(self._constants.pop(other, ()))

    def join_all(self, one: Variable, other: Variable) -> None:
        """Put the axes of two variables of the same number of dimensions in the same classes."""
        if _ndim(one) == _ndim(other):
            for axis in range(_ndim(one)):
                self.join((one, axis), (other, axis))

    def _fix(self, key: Axis, number: int) -> None:
        """Note that an extent is equal to a constant."""
        self._constants.setdefault(self._root(key), set()).add(number)

    # Rules: each joins the axes of the inputs and outputs of a node

    def elementwise(self, node: Apply) -> None:
        for output in node.outputs:
            for axis in range(output.ndim):
                extents = [one for one in node.inputs if not one.type.broadcastable[axis]]
                if extents:
                    self.join((output, axis), *((one, axis) for one in extents))

    def dimshuffle(self, node: Apply) -> None:
        for new, old in enumerate(node.op.new_order):
            if old != "x":
                self.join((node.outputs[0], new), (node.inputs[0], old))

    def reduction(self, node: Apply) -> None:
        operand = node.inputs[0]
        removed = normalized_axes(node.op.axis, operand.ndim)
        kept = [axis for axis in range(operand.ndim) if axis not in removed]
        for output in node.outputs:
            for new, old in enumerate(kept):
                self.join((output, new), (operand, old))

    def dot(self, node: Apply) -> None:
        (a, b), output = node.inputs, node.outputs[0]
        self.join((a, a.ndim - 1), (b, max(b.ndim - 2, 0)))
        if a.ndim == 2:
            self.join((output, 0), (a, 0))
        if b.ndim == 2:
            self.join((output, output.ndim - 1), (b, 1))

    def batched_dot(self, node: Apply) -> None:
        (a, b), output = node.inputs, node.outputs[0]
        self.join((output, 0), (a, 0), (b, 0))
        if a.ndim == 3:
            self.join((output, 1), (a, 1))
        if b.ndim == 3:
            self.join((output, output.ndim - 1), (b, 2))

    def same(self, node: Apply) -> None:
        for output in node.outputs:
            self.join_all(output, node.inputs[0])

    def by_row(self, node: Apply) -> None:
        """The output has the axes of the first matrix, or its rows; there is a label for each row."""
        matrices = [one for one in node.inputs if _ndim(one) == 2]
        vectors = [one for one in node.inputs if _ndim(one) == 1]
        labels = [one for one in vectors if one.dtype.startswith(("int", "uint"))]
        has_bias = isinstance(node.op, names.WITH_BIAS)
        rows = [*matrices, *labels, *([] if has_bias else vectors), *node.outputs]
        self.join(*((one, 0) for one in rows))
        for output in node.outputs:
            if _ndim(output) == 2:
                self.join(*((one, 1) for one in [*matrices, output]))

    def convolution(self, node: Apply) -> None:
        (first, second, *_), (output, *_) = node.inputs, node.outputs
        if isinstance(node.op, names.TO_IMAGES):
            images, filters, maps = output, first, second
        elif isinstance(node.op, names.FORWARD):
            images, filters, maps = first, second, output
        else:
            images, filters, maps = first, output, second
        self._convolve(node, images, filters, maps, [node.op.imshp[0], None, node.op.kshp[0]])

    def old_convolution(self, node: Apply) -> None:
        (images, filters), op = node.inputs, node.op
        channels = None if op.imshp is None else op.imshp[0]
        self._convolve(node, images, filters, node.outputs[0], [op.bsize, channels, op.nkern])

    def _convolve(
        self,
        node: Apply,
        images: Variable,
        filters: Variable,
        maps: Variable,
        numbers: Sequence[int | None],
    ) -> None:
        """Join axes, and note the numbers of images, of channels and of filters."""
        keys = [(images, 0), (images, 1), (filters, 0)]
        self.join(keys[0], (maps, 0))
        self.join(keys[2], (maps, 1))
        for place, (number, key) in enumerate(zip(numbers, keys)):
            if number is not None:
                self._site(node, place, int(number), key)

    def pooling(self, node: Apply) -> None:
        first = node.inputs[0]
        leading = range(first.ndim - node.op.ndim)
        for one in [*node.inputs[1:], *node.outputs]:
            if _ndim(one) == first.ndim:
                for axis in leading:
                    self.join((one, axis), (first, axis))

    def indexed(self, node: Apply) -> None:
        index = get_idx_list(node.inputs, node.op.idx_list)
        self._index(index, node.inputs[0], node.outputs[0])

    def replaced(self, node: Apply) -> None:
        array, part, *numbers = node.inputs
        self.join_all(node.outputs[0], array)
        self._index(get_idx_list([array, *numbers], node.op.idx_list), array, part)

    def _index(self, index: Sequence[Any], array: Variable, part: Variable) -> None:
        """Join the axes of a part that have all items of an array."""
        new = 0
        for old in range(array.ndim):
            chosen = index[old] if old < len(index) else slice(None)
            if isinstance(chosen, slice):
                is_whole = chosen == slice(None) and new < part.ndim
                if is_whole and not part.type.broadcastable[new]:
                    self.join((part, new), (array, old))
                new += 1

    def looked_up(self, node: Apply) -> None:
        array, *index = node.inputs
        vectors = [one for one in index if _ndim(one) == 1]
        if len(vectors) != len(index) or any(isinstance(one, slice) for one in _idx(node)):
            return
        output = node.outputs[0]
        self.join((output, 0), *((one, 0) for one in vectors if not one.type.broadcastable[0]))
        for axis in range(len(index), array.ndim):
            self.join((output, axis - len(index) + 1), (array, axis))

    def joined(self, node: Apply) -> None:
        axis, parts = names.joined(node)
        if axis is None:
            return
        output = node.outputs[0]
        for other in set(range(output.ndim)) - {axis}:
            self.join((output, other), *((one, other) for one in parts))

    def reshape(self, node: Apply) -> None:
        items = self._items(node.inputs[1])
        self._shape(node, items)
        if items and node.inputs[0].ndim and isinstance(items[0], int) and items[0] > 1:
            self.regrouped.append(node)

    def specified(self, node: Apply) -> None:
        self.same(node)
        if isinstance(node.op, names.WITH_EXTENTS):
            given = [one if hasattr(one.type, "dtype") else None for one in node.inputs[1:]]
            self._shape(node, [None if one is None else self._item(one) for one in given])
        else:
            self._shape(node, self._items(node.inputs[1]))

    def alloc(self, node: Apply) -> None:
        value, output = node.inputs[0], node.outputs[0]
        self._shape(node, [self._item(one) for one in node.inputs[1:]])
        for axis in range(value.ndim):
            if not value.type.broadcastable[axis]:
                self.join((value, axis), (output, axis + output.ndim - value.ndim))

    def random(self, node: Apply) -> None:
        self._shape(node, self._items(node.inputs[1]), node.outputs[-1])

    def counted(self, node: Apply) -> None:
        start, stop, step = map(self._item, node.inputs)
        if start == 0 and step == 1:
            self._shape(node, [stop])

    def loop(self, node: Apply) -> None:
        if node.op in self._done:  # another loop has the same steps
            return
        self._done.add(node.op)
        inputs, outputs = steps_of(node.op)
        self.add(inputs, outputs)
        places = node.op.get_oinp_iinp_iout_oout_mappings()
        for position, one in enumerate(inputs):
            self._step(one, node.inputs[places["outer_inp_from_inner_inp"][position]])
        for position, one in enumerate(outputs):
            place = places["outer_out_from_inner_out"].get(position, -1)
            if place >= 0:
                self._step(one, node.outputs[place])
        for place, position in places["outer_inp_from_outer_out"].items():
            if position >= 0:
                output = node.outputs[place]
                for axis in range(1, _ndim(output) if _ndim(node.inputs[position]) else 0):
                    self.join((output, axis), (node.inputs[position], axis))

    def _step(self, inner: Variable, outer: Variable) -> None:
        """Join the axes of a variable of the steps with the axes of the loop's, except for its steps."""
        ahead = _ndim(outer) - _ndim(inner)
        if ahead in (0, 1):
            for axis in range(_ndim(inner)):
                self.join((inner, axis), (outer, axis + ahead))

    # Extents as values

    def _shape(
        self, node: Apply, items: Sequence[int | Axis | None] | None, output: Variable | None = None
    ) -> None:
        """Join the axes of an output with the items of its shape."""
        output = node.outputs[0] if output is None else output
        for axis, one in enumerate(items or ()):
            if isinstance(one, tuple):
                self.join((output, axis), one)
            elif one is not None and one >= 0:
                self._site(node, axis, one, (output, axis))

    def _site(self, node: Apply, axis: int, number: int, key: Axis) -> None:
        self._fix(key, number)
        if number > 1:
            self.sites.append(Site(node, axis, number, key))

    def _items(self, shape: Variable) -> list[int | Axis | None] | None:
        """Return the items of a shape: ints, the axes ``(variable, axis)`` that they are of, or None."""
        return dims(shape, self._value, _extents)

    def _item(self, number: Variable) -> int | Axis | None:
        return item(number, self._value)

    def _value(self, number: Variable) -> int | Axis | None:
        node = number.owner
        if node is None:
            return None
        if isinstance(node.op, names.Shape_i):
            return node.inputs[0], node.op.i
        is_cast = isinstance(node.op, Elemwise) and isinstance(node.op.scalar_op, _CASTS)
        if is_cast or isinstance(node.op, (names.TensorFromScalar, names.ScalarFromTensor)):
            return self._item(node.inputs[0])
        if isinstance(node.op, Subtensor):
            items, index = self._items(node.inputs[0]), constant_index(node)
            if items and len(index) == 1 and type(index[0]) is int:
                return items[index[0]] if -len(items) <= index[0] < len(items) else None
        return None


def _ndim(variable: Variable) -> int:
    """Return the number of dimensions; 0 if the variable is not a tensor."""
    return getattr(variable.type, "ndim", 0)


def _idx(node: Apply) -> Sequence[Any]:
    return getattr(node.op, "idx_list", ())


def _extents(variable: Variable) -> list[Axis]:
    return [(variable, axis) for axis in range(_ndim(variable))]


_CASTS = (scalar.Cast, scalar.Identity)

_RULES = [
    (Elemwise, EqualAxes.elementwise),
    (names.DimShuffle, EqualAxes.dimshuffle),
    ((names.CAReduce, *names.LARGEST), EqualAxes.reduction),
    (names.Dot, EqualAxes.dot),
    (names.BatchedDot, EqualAxes.batched_dot),
    (names.SpecifyShape, EqualAxes.specified),
    (names.COPIES, EqualAxes.same),
    (names.SOFTMAXES, EqualAxes.same),
    ((*names.BY_ROW, *names.LINEAR_BY_ROW), EqualAxes.by_row),
    (names.ANY_CONVOLUTIONS, EqualAxes.convolution),
    (names.OLD_CONVOLUTIONS, EqualAxes.old_convolution),
    (names.ANY_POOLS, EqualAxes.pooling),
    (Subtensor, EqualAxes.indexed),
    (names.IncSubtensor, EqualAxes.replaced),
    ((names.AdvancedSubtensor1, names.AdvancedSubtensor), EqualAxes.looked_up),
    (names.Join, EqualAxes.joined),
    (names.Reshape, EqualAxes.reshape),
    (names.Alloc, EqualAxes.alloc),
    (names.RANDOM, EqualAxes.random),
    (names.ARange, EqualAxes.counted),
    (Scan, EqualAxes.loop),
]
