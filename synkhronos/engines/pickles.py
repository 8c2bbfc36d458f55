"""Pickling compiled functions for ranks that already have some of the referenced objects.

A shared variable that the receiver has is replaced by a number. Classes and functions are pickled by
name, as usual, if the receiver finds them by name, and otherwise by value, with cloudpickle. The latter
are operations that a script or a notebook cell defines after the workers were forked, and functions
inside functions.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
import threading
import weakref
from collections import ChainMap
from types import FunctionType
from typing import IO, TYPE_CHECKING, Any, Callable, Iterator, Mapping

import cloudpickle

if TYPE_CHECKING:
    from synkhronos._typing import SharedVariable, T
    from synkhronos.engines.base import Engine

# Pickling a graph recurses at least once per node.
_DEEP_STACK = 512 << 20
_DEEP_RECURSION = 1_000_000
_lock = threading.Lock()


class MainNames:
    """The classes and functions of ``__main__`` that forked workers have by the same names.

    Running a notebook cell again creates a new class of the same name, which the workers do not have.
    """

    def __init__(self) -> None:
        self._inherited: dict[str, weakref.ref[Any]] = {}

    def mark_all_inherited(self) -> None:
        """Record that workers have the present names, because they were forked."""
        self._inherited = {
            name: weakref.ref(item)
            for name, item in list(vars(sys.modules["__main__"]).items())
            if isinstance(item, (type, FunctionType))
        }

    def __contains__(self, item: type | FunctionType) -> bool:
        """Whether workers find this class or function by its name."""
        outer, *inner = item.__qualname__.split(".")
        reference = self._inherited.get(outer)
        found = getattr(sys.modules["__main__"], outer, None)
        if found is None or reference is None or reference() is not found:
            return False
        for name in inner:
            found = getattr(found, name, None)
        return found is item


class _OfGraphs:
    """The part of the picklers of compiled functions that their base classes lack.

    Parameters
    ----------
    file : binary file
        The file that is written to.
    known : mapping
        The numbers of the shared variables that the receiver has.
    main : MainNames
        The names that the receiver has.
    engine : Engine
        Says how functions, and objects of further types, are pickled.
    """

    def __init__(
        self, file: IO[bytes], known: Mapping[SharedVariable, int], main: MainNames, engine: Engine
    ) -> None:
        # Set before the call, which reads it; a later change has no effect.
        self.dispatch_table: Mapping[type, Callable[[Any], Any]] = ChainMap(
            engine.reducers, cloudpickle.Pickler.dispatch_table
        )
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)  # type: ignore[call-arg]  # a pickler's
        self._main, self._engine = main, engine
        self.refer = engine.referrer(known)

    def persistent_id(self, item: Any) -> tuple[Any, ...] | None:
        return self.refer(item)

    def reducer_override(self, item: Any) -> Any:
        # Otherwise the compiler pickles the array of every shared variable.
        if self._engine.is_function(item):
            return self._engine.reduce(item)
        if not isinstance(item, (type, FunctionType)):
            return NotImplemented
        if item.__module__ == "__main__" and item in self._main:
            return NotImplemented  # by name
        return super().reducer_override(item)  # type: ignore[misc]  # a pickler's


class _PythonPickler(pickle._Pickler):
    """cloudpickle's pickler on Python's own code, which recurses without the C stack."""

    def __init__(self, file: IO[bytes], protocol: int) -> None:
        super().__init__(file, protocol)
        self.globals_ref: dict[Any, Any] = {}

        def save_reduce(func: Any, args: Any, *others: Any, obj: Any = None) -> None:
            save = pickle._Pickler.save_reduce  # type: ignore[attr-defined]  # private
            return save(self, func, args, *others, obj=obj)

        # Python calls a function with *args without the C stack, but not a method.
        self.save_reduce = save_reduce

    reducer_override = cloudpickle.Pickler.reducer_override
    _function_reduce = cloudpickle.Pickler._function_reduce
    _function_getnewargs = cloudpickle.Pickler._function_getnewargs
    _dynamic_function_reduce = cloudpickle.Pickler._dynamic_function_reduce


class GraphPickler(_OfGraphs, cloudpickle.Pickler):
    """Pickles compiled functions."""


class DeepGraphPickler(_OfGraphs, _PythonPickler):
    """Pickles compiled functions whose graphs are too deep for `GraphPickler`. It is slow.

    The limit of recursions in C is fixed in Python 3.12 and 3.13.
    """


class GraphUnpickler(pickle.Unpickler):
    """Unpickles compiled functions; ``resolve(reference)`` returns what a reference stands for."""

    def __init__(self, file: IO[bytes], resolve: Callable[[Any], Any]) -> None:
        super().__init__(file)
        self._resolve = resolve

    def persistent_load(self, reference: Any) -> Any:  # not an attribute: Python 3.13.0 refuses it
        return self._resolve(reference)


def dump(
    make_pickler: Callable[[type[_OfGraphs]], pickle._Pickler | pickle.Pickler],
    buffer: io.BytesIO,
    objects: Any,
) -> None:
    """Pickle objects into a buffer, also deep graphs.

    Parameters
    ----------
    make_pickler : function
        ``make_pickler(kind)`` returns a pickler of the class `kind` for the buffer.
    buffer : io.BytesIO
        The buffer.
    objects : object
        The objects, such as a list of functions.
    """
    start = buffer.tell()
    try:
        make_pickler(GraphPickler).dump(objects)
    except (RecursionError, pickle.PicklingError) as error:
        if not isinstance(error, RecursionError) and not isinstance(error.__cause__, RecursionError):
            raise
        buffer.seek(start)
        buffer.truncate()
        make_pickler(DeepGraphPickler).dump(objects)


def with_deep_stack(work: Callable[[], T]) -> T:
    """Return ``work()``, called in a thread whose stack is large enough for a deep graph."""
    outcome: list[tuple[Any, BaseException | None]] = []

    def target() -> None:
        try:
            outcome.append((work(), None))
        except BaseException as error:
            outcome.append((None, error))

    try:
        with _deep_limits():
            thread = threading.Thread(target=target, name="synkhronos-pickle")
            thread.start()
            thread.join()
    except RuntimeError as error:  # "can't start new thread"
        raise MemoryError(
            f"functions built after the first distribute() are pickled in a thread with a stack "
            f"of {_DEEP_STACK} bytes, and the system refused the address space or the thread: raise "
            f"'ulimit -v' or 'ulimit -u', or build all functions before the first distribute()"
        ) from error
    result, raised = outcome[0]
    if raised is not None:
        raise raised
    return result


@contextlib.contextmanager
def _deep_limits() -> Iterator[None]:
    """Raise the limits of new threads and of recursion, which apply to the whole process."""
    with _lock:  # because ranks may be threads
        stack, recursion = threading.stack_size(_DEEP_STACK), sys.getrecursionlimit()
        try:
            sys.setrecursionlimit(_DEEP_RECURSION)
            yield
        finally:
            threading.stack_size(stack)
            sys.setrecursionlimit(recursion)
