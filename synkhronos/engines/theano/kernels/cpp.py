"""The common parts of the operations in C++: code, names in the keys of modules, and optimizations.

The code is in the files ``*.h`` of this folder. When a script first compiles something, Theano reads the
keys of all modules in its cache. They include operations. With operations of this library, every script
of the user would import the library, or delete the modules where it is not installed. So the files
contain a tuple in place of the operation; a repair of Theano takes it.
"""

from __future__ import annotations

import functools
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Sequence

from theano.gof import Apply, Op, Variable, local_optimizer
from theano.gof.opt import copy_stack_trace
from theano.tensor.opt import in2out

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
    """An operation for which a tuple stands in keys of modules.

    It comes before Theano's class in the bases of an operation.
    """

    @property
    def synkhronos_key(self) -> tuple[Any, ...]:
        """A tuple of strings and numbers that identifies the operation."""
        return f"synkhronos.{type(self).__name__}", repr(self._props())


# Optimizations that replace Theano's operations


class Optimization(NamedTuple):
    """An optimization of a graph.

    Attributes
    ----------
    name : str
        As in Theano's flag ``optimizer_excluding``.
    position : float
        When it is applied. Theano chooses its convolutions at 48.6, fuses elementwise operations at 49,
        and computes them inplace from 75 on.
    optimizer : theano.gof.Optimizer
        The optimizer of a whole graph.
    """

    name: str
    position: float
    optimizer: object


def with_traces(olds: Sequence[Variable], news: list[Variable]) -> list[Variable]:
    """Return new variables, with the lines of the script that created the old variables, for errors."""
    for old, new in zip(olds, news):
        copy_stack_trace(old, new)
    return news


def at_each_node(local: Any, position: float) -> Optimization:
    """Return an optimization that applies a local optimizer of Theano to each node."""
    return Optimization(local.__name__, position, in2out(local, name=local.__name__))


def replacing(
    name: str, position: float, kinds: list[type[Op]], replacement_of: Callable[[Apply], Op | None]
) -> Optimization:
    """Return an optimization that replaces single operations by operations with the same inputs.

    Parameters
    ----------
    name, position
        As in `Optimization`.
    kinds : list of type
        The operations that may be replaced, as instances of exactly these classes.
    replacement_of : callable
        ``replacement_of(node)`` returns an operation, or None to keep Theano's.
    """

    @local_optimizer(kinds)
    def local(node: Apply) -> list[Variable] | None:
        if type(node.op) not in kinds:
            return None
        op = replacement_of(node)
        return None if op is None else with_traces(node.outputs, op.make_node(*node.inputs).outputs)

    local.__name__ = name
    return at_each_node(local, position)
