"""The common parts of the operations in C++: their code, and their names in the keys of modules.

The code is in the files ``*.h`` of this folder. When a script first compiles something, Theano reads the
keys of all modules in its cache. They include operations. With operations of this library, every script
of the user would import the library, or delete the modules where it is not installed. So the files
contain a tuple in place of the operation. The two compare equal.
"""

from __future__ import annotations

import functools
import pickle
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from theano.gof import Op as _Base  # of the classes that come after `Keyed`
else:
    _Base = object

_FOLDER = Path(__file__).resolve().parent

#: Without traps for invalid operations, which nothing here enables, the compiler can vectorize
#: comparisons. No result changes.
COMPILE_ARGS = ["-fno-trapping-math", "-fno-math-errno"]


@functools.lru_cache(maxsize=None)
def read(*names: str) -> str:
    """Return the text of files, one after another."""
    return "\n".join((_FOLDER / f"{name}.h").read_text(encoding="utf-8") for name in names)


def call(expression: str, fail: str) -> str:
    """Return the code that evaluates an expression, which is false after it has set a Python error."""
    return f"""
    {{
        bool done = false;
        try {{
            done = {expression};
        }} catch (const std::bad_alloc &) {{
            PyErr_NoMemory();
        }}
        if (!done) {fail}
    }}
    """


@functools.lru_cache(maxsize=None)
def version(*names: str) -> tuple[int]:
    """Return a tuple that changes with the text, for ``c_code_cache_version``."""
    return (zlib.crc32(read(*names).encode()),)


class Keyed(_Base):
    """An operation that equals its name in a key.

    It comes before Theano's class in the bases of an operation.
    """

    def signature(self) -> tuple[Any, ...]:
        """Return a tuple of strings and numbers that identifies the operation."""
        return f"synkhronos.{type(self).__name__}", repr(self._props())

    def __eq__(self, other: object) -> bool:
        if type(other) is tuple:
            return other == self.signature()
        return type(self) is type(other) and self._props() == other._props()

    def __hash__(self) -> int:
        return hash(self.signature())


class KeyPickler(pickle.Pickler):
    """Writes the names of operations."""

    def reducer_override(self, value: Any) -> Any:
        """Return how to create a value when it is read."""
        return (tuple, (value.signature(),)) if isinstance(value, Keyed) else NotImplemented
