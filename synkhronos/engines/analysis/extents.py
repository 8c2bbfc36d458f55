"""Classes of extents that are equal, with the constants that are equal to them."""


class Extents:
    """Classes of axes ``(variable, axis)``, as disjoint sets."""

    def __init__(self):
        self._parents, self._constants = {}, {}

    def class_of(self, variable, axis):
        """Return a representative of the class of an axis."""
        return self._root((variable, axis))

    def constants_of(self, variable, axis):
        """Return the constants that are equal to an extent."""
        return self._constants.get(self._root((variable, axis)), set())

    def _root(self, key):
        path = []
        while key in self._parents:
            path.append(key)
            key = self._parents[key]
        for one in path[:-1]:
            self._parents[one] = key
        return key

    def join(self, *keys):
        """Put axes in one class."""
        first, *others = dict.fromkeys(map(self._root, keys))
        for other in others:
            self._parents[other] = first
            self._constants.setdefault(first, set()).update(self._constants.pop(other, ()))

    def join_all(self, one, other):
        """Put the axes of two variables of the same number of dimensions in the same classes."""
        if ndim_of(one) == ndim_of(other):
            for axis in range(ndim_of(one)):
                self.join((one, axis), (other, axis))

    def fix(self, key, number):
        """Note that an extent is equal to a constant."""
        self._constants.setdefault(self._root(key), set()).add(number)


def ndim_of(variable):
    """Return the number of dimensions; 0 for what is not a tensor."""
    return getattr(variable.type, "ndim", 0)
