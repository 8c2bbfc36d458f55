"""How the keys of compiled modules name operations.

When a script first compiles something, Theano reads the keys of all modules in its cache. They include
operations. With those of this library, every script of the user would import it, or where it is not
installed, delete the modules. So the files have a tuple in place of the operation, which equals it.
"""

import pickle


class Keyed:
    """An operation that equals its name in a key.

    It comes before Theano's class in the bases of an operation.
    """

    def signature(self):
        """Return a tuple of strings and numbers that identifies the operation."""
        return f"synkhronos.{type(self).__name__}", repr(self._props())

    def __eq__(self, other):
        if type(other) is tuple:
            return other == self.signature()
        return type(self) is type(other) and self._props() == other._props()

    def __hash__(self):
        return hash(self.signature())


class KeyPickler(pickle.Pickler):
    """Writes the names of operations."""

    def reducer_override(self, value):
        """Return how to make a value when it is read."""
        return (tuple, (value.signature(),)) if isinstance(value, Keyed) else NotImplemented
