"""Which axes of the arrays of a graph have the same extent, because no call could succeed otherwise.

In ``x * y`` both arrays have the same number of rows, and so have a product and its first factor. Each
extent that the operations show to be equal is in one class, also with constants that a script gives, as
in ``reshape((100, -1))`` or ``zeros((100, n))``. The results of operations that are not listed here have
extents of their own.
"""

from __future__ import annotations

from typing import NamedTuple, Sequence

from synkhronos.engines import names
from synkhronos.engines.analysis.rules import Rule, is_extent, ndim, rule_of
from synkhronos.engines.analysis.shapes import Extent, dims
from synkhronos.engines.names import Apply, Scan, Variable, io_toposort, steps_of


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
        self._done: set[Scan] = set()

    def add(self, inputs: Sequence[Variable], outputs: Sequence[Variable]) -> None:
        """Add the operations between some variables."""
        for node in io_toposort(inputs, outputs):
            rule = rule_of(node)
            if rule is not None:
                self._add(node, rule)
            elif isinstance(node.op, Scan):
                self._loop(node)

    def _add(self, node: Apply, rule: Rule) -> None:
        """Join the axes with the same label, and note the constants among the extents."""
        together: dict[object, list[Extent]] = {}
        sides = [*zip(node.inputs, rule.inputs), *zip(node.outputs, rule.outputs)]
        for variable, labels in sides:
            for axis, label in enumerate(labels or ()):
                if label is not None:
                    own = [label] if is_extent(label) else []
                    together.setdefault(label, own).append((variable, axis))  # type: ignore[arg-type]
        for keys in together.values():
            self.join(*keys)
        for place, number, key in rule.numbers:
            self._constants.setdefault(self._root(key), set()).add(number)
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
                equal = self.constants_of(*before) & self.constants_of(*after)
                if equal and self.class_of(*before) != self.class_of(*after):
                    self.join(before, after)
                    found = True

    # Classes

    def class_of(self, variable: Variable, axis: int) -> Extent:
        """Return a representative of the class of an axis."""
        return self._root((variable, axis))

    def constants_of(self, variable: Variable, axis: int) -> set[int]:
        """Return the constants that are equal to an extent."""
        return self._constants.get(self._root((variable, axis)), set())

    def _root(self, key: Extent) -> Extent:
        path = []
        while key in self._parents:
            path.append(key)
            key = self._parents[key]
        for one in path[:-1]:
            self._parents[one] = key
        return key

    def join(self, *keys: Extent) -> None:
        """Put axes in one class."""
        first, *others = dict.fromkeys(map(self._root, keys))
        for other in others:
            self._parents[other] = first
            self._constants.setdefault(first, set()).update(self._constants.pop(other, ()))

    def join_all(self, one: Variable, other: Variable) -> None:
        """Put the axes of two variables of the same number of dimensions in the same classes."""
        if ndim(one) == ndim(other):
            for axis in range(ndim(one)):
                self.join((one, axis), (other, axis))

    def _loop(self, node: Apply) -> None:
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
                for axis in range(1, ndim(output) if ndim(node.inputs[position]) else 0):
                    self.join((output, axis), (node.inputs[position], axis))

    def _step(self, inner: Variable, outer: Variable) -> None:
        """Join the axes of a variable of the steps with the axes of the loop's, except for its steps."""
        ahead = ndim(outer) - ndim(inner)
        if ahead in (0, 1):
            for axis in range(ndim(inner)):
                self.join((inner, axis), (outer, axis + ahead))
