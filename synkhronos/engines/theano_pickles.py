"""Pickling compiled Theano functions without the shared variables that the receiver already has."""

import contextlib
import copyreg
import pickle
import sys
import threading
from collections import ChainMap

from theano.compile.function_module import Function as TheanoFunction
from theano.compile.sharedvalue import SharedVariable
from theano.gof.link import Container

# Pickling a graph recurses at least once per node.
_DEEP_STACK = 512 << 20
_DEEP_RECURSION = 1_000_000
_lock = threading.Lock()


class GraphPickler(pickle.Pickler):
    """Pickles compiled functions; shared variables that the receiver has are replaced by numbers."""

    def __init__(self, file, known, reducers):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.dispatch_table = ChainMap(reducers, copyreg.dispatch_table)
        self._known = known
        # A function wraps the storage of its shared variables in its own containers.
        self._storages = {id(shared.container.storage): number for shared, number in known.items()}

    def persistent_id(self, item):
        if isinstance(item, SharedVariable) and item in self._known:
            return "shared", self._known[item]
        if isinstance(item, Container) and id(item.storage) in self._storages:
            return "container", self._storages[id(item.storage)]
        return None

    def reducer_override(self, item):
        # Otherwise Theano pickles the array of every shared variable.
        if isinstance(item, TheanoFunction):
            return _make_function, (item.maker, list(item.input_storage), item.trust_input)
        return NotImplemented


class GraphUnpickler(pickle.Unpickler):
    """Unpickles compiled functions; `known` lists the shared variables by number."""

    def __init__(self, file, known):
        super().__init__(file)
        self._known = known

    def persistent_load(self, reference):
        kind, number = reference
        shared = self._known[number]
        return shared if kind == "shared" else shared.container


def _make_function(maker, input_storage, trust_input):
    compiled = maker.create(input_storage, trustme=True)
    compiled.trust_input = trust_input
    return compiled


def with_deep_stack(work):
    """Return ``work()``, called in a thread whose stack is large enough for a deep graph."""
    outcome = []

    def target():
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
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


@contextlib.contextmanager
def _deep_limits():
    """Raise the limits of new threads and of recursion, which apply to the whole process."""
    with _lock:  # because ranks may be threads
        stack, recursion = threading.stack_size(_DEEP_STACK), sys.getrecursionlimit()
        try:
            sys.setrecursionlimit(_DEEP_RECURSION)
            yield
        finally:
            threading.stack_size(stack)
            sys.setrecursionlimit(recursion)
