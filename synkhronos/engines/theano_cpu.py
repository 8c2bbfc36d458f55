"""Theano on NumPy arrays."""

import copyreg
import io
import pickle
import sys
import threading
from collections import ChainMap, OrderedDict
from pathlib import Path

import numpy as np
import theano
from theano.compile.function_module import Function as TheanoFunction
from theano.compile.sharedvalue import SharedVariable
from theano.gof import compilelock, vm
from theano.gof.link import Container
from theano.sandbox.rng_mrg import MRG_RandomStreams, mrg_uniform_base
from theano.tensor import TensorType as TheanoTensorType
from theano.tensor.raw_random import RandomStateType
from theano.tensor.shared_randomstreams import RandomStreams

from synkhronos import _compile_cache
from synkhronos._errors import SynkhronosError
from synkhronos._operations import NUMPY
from synkhronos._partition import as_slice
from synkhronos._streams import jump_mrg, jump_random_state
from synkhronos.engines.base import Engine, TensorType
from synkhronos.engines.theano_modules import ModuleDiary, learn, make_cacheable

# Theano's pickles recurse once or more a node of the graph.
_DEEP_STACK = 512 << 20
_DEEP_RECURSION = 1_000_000
# The virtual machines that compute just the outputs that are asked for.
_LAZY = tuple(getattr(vm, name) for name in ("CVM", "Stack") if hasattr(vm, name))


class TheanoCpuEngine(Engine):
    """Theano 1.0.5 with its C code, on one core or more of this machine."""

    arithmetic = NUMPY
    forks_late = True
    reducers = {}  # how to pickle objects in graphs, by their type, beside what copyreg knows

    def __init__(self):
        self._modules = ModuleDiary()

    def setup(self, device, announce=True):
        if device != "cpu":
            raise ValueError(f"device: the engine of Theano on NumPy runs on 'cpu', got {device!r}")

    def before_fork(self):
        self._modules.mark()

    # Graphs

    def type_of(self, variable):
        kind = getattr(variable, "type", None)
        if not isinstance(variable, theano.gof.Variable) or not isinstance(kind, TheanoTensorType):
            raise TypeError(f"expected a Theano tensor variable, got {variable!r}")
        return TensorType(np.dtype(kind.dtype), kind.ndim, kind.broadcastable)

    def is_shared(self, variable):
        return isinstance(variable, SharedVariable) and isinstance(variable.type, TheanoTensorType)

    def build(self, inputs, outputs, updates, givens, sliceable, on_host, **kwargs):
        givens = list(givens.items() if hasattr(givens, "items") else givens or ())
        rows = [shared.type(f"{shared.name or 'shared'}_rows") for shared in sliceable]
        if sliceable:
            _check_used(sliceable, outputs, updates, givens)
            swap = OrderedDict(zip(sliceable, rows))
            outputs, updates, givens = _replace(swap, outputs, updates, givens)
        make_cacheable()
        compiled = _compile(
            [*inputs, *rows], outputs, updates=OrderedDict(updates), givens=givens, **kwargs
        )
        # Arguments are checked before they are scattered; a second check would cost 40% of a small
        # call. https://theano-pymc.readthedocs.io/en/latest/tutorial/faq_tutorial.html
        compiled.trust_input = True
        return compiled

    def shareds(self, compiled):
        return compiled.get_shared()

    def updated(self, compiled):
        return [one.variable for one in compiled.maker.inputs if one.update is not None]

    def reads(self, compiled, shared):
        return any(
            graph_input.clients and wrapped.variable is shared
            for wrapped, graph_input in zip(compiled.maker.inputs, compiled.maker.fgraph.inputs)
        )

    def dumps(self, objects, known):
        def work():
            buffer = io.BytesIO()
            pickle.dump(self._modules.tell(), buffer, pickle.HIGHEST_PROTOCOL)
            _GraphPickler(buffer, known, self.reducers).dump(objects)
            return buffer.getbuffer()

        return _with_deep_stack(work)

    def loads(self, payload, known):
        def work():
            buffer = io.BytesIO(payload)
            learn(pickle.load(buffer))
            make_cacheable()
            _check_cache()
            return _GraphUnpickler(buffer, known).load()

        return _with_deep_stack(work)

    # Calls

    def call(self, compiled, arguments, subset=None):
        if subset is None:
            return compiled(*arguments)
        if isinstance(compiled.fn, _LAZY):
            return compiled(*arguments, output_subset=subset)
        outputs = compiled(*arguments)  # this linker computes all there is
        return [outputs[index] for index in subset]

    # Shared variables

    def storage(self, shared):
        return shared.container.storage[0]

    def store(self, shared, array):
        shared.container.storage[0] = array

    def write(self, shared, value):
        storage = self.storage(shared)
        if storage.shape == value.shape and storage.flags.writeable:
            storage[...] = value
        else:
            self.store(shared, np.array(value))

    def take(self, array, rows):
        return array[as_slice(rows)] if isinstance(rows, range) else array.take(rows, axis=0)

    def to_host(self, array):
        return array

    def to_device(self, value):
        return np.array(value)

    def read(self, array, out):
        out[...] = array

    # Random streams

    def random_streams(self, compiled):
        states = [
            shared
            for shared in self.shareds(compiled)
            if isinstance(shared.type, RandomStateType) or getattr(shared.tag, "is_rng", False)
        ]
        for node in compiled.maker.fgraph.apply_nodes:
            if isinstance(node.op, mrg_uniform_base):
                states.extend(
                    shared
                    for shared in self.shareds(compiled)
                    if shared not in states
                    and _is_input(compiled, shared, self.origin(node.inputs[0]))
                )
        return states

    def origin(self, variable):
        """Return the variable of an optimised graph that another one is a plain copy of."""
        return variable

    def seed(self, streams, seed):
        if not isinstance(streams, (MRG_RandomStreams, RandomStreams)):
            raise TypeError(f"expected MRG_RandomStreams or RandomStreams, got {streams!r}")
        streams.seed(seed)
        return [state for state, *_ in streams.state_updates]

    def jump(self, shared, index):
        state = self.storage(shared)
        if isinstance(shared.type, RandomStateType):
            self.store(shared, jump_random_state(state, index))
        else:
            self.store(shared, jump_mrg(state, index))


def _compile(*args, **kwargs):
    _check_cache()
    try:
        return theano.function(*args, **kwargs)
    except BaseException as error:
        # Theano would keep its lock on the cache, and every other process would wait for it.
        while getattr(compilelock.get_lock, "n_lock", 0):
            compilelock.release_lock()
        said = _compile_cache.explain(error, Path(theano.config.compiledir))
        if said is None:
            raise
    raise SynkhronosError(f"function: {said}")  # not `from`: Theano's own is pages long


def _check_cache():
    said = _compile_cache.complaint(Path(theano.config.compiledir))
    if said is not None:
        raise SynkhronosError(f"function: {said}")


def _is_input(compiled, shared, variable):
    """Whether a variable of the optimised graph is the input that `shared` became in it."""
    return any(
        graph_input is variable and wrapped.variable is shared
        for wrapped, graph_input in zip(compiled.maker.inputs, compiled.maker.fgraph.inputs)
    )


def _check_used(sliceable, outputs, updates, givens):
    roots = [*outputs, *(new for _, new in updates), *(new for _, new in givens)]
    used = set(theano.gof.graph.inputs(roots))
    for shared in sliceable:
        if shared not in used:
            raise ValueError(
                f"sliceable_shareds: {shared} is not used by the outputs, updates or givens of the "
                f"function; used are {sorted(str(v) for v in used if isinstance(v, SharedVariable))}"
            )


def _replace(swap, outputs, updates, givens):
    """Put other variables in the place of some, wherever they stand in the graphs."""
    roots = [*outputs, *(new for _, new in updates), *(new for _, new in givens)]
    clones = iter(theano.clone(roots, replace=swap))
    return (
        [next(clones) for _ in outputs],
        [(shared, next(clones)) for shared, _ in updates],
        [(swap.get(old, old), next(clones)) for old, _ in givens],
    )


class _GraphPickler(pickle.Pickler):
    """Pickles compiled functions; shared variables that the receiver has travel by number."""

    def __init__(self, file, known, reducers):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.dispatch_table = ChainMap(reducers, copyreg.dispatch_table)
        self._known = known
        # A function wraps the storage of its shared variables in containers of its own.
        self._storages = {id(shared.container.storage): number for shared, number in known.items()}

    def persistent_id(self, item):
        if isinstance(item, SharedVariable) and item in self._known:
            return "shared", self._known[item]
        if isinstance(item, Container) and id(item.storage) in self._storages:
            return "container", self._storages[id(item.storage)]
        return None

    def reducer_override(self, item):
        # Theano's own way also sends every shared variable's array, by value.
        if isinstance(item, TheanoFunction):
            return _make_function, (item.maker, list(item.input_storage), item.trust_input)
        return NotImplemented


class _GraphUnpickler(pickle.Unpickler):
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


def _with_deep_stack(work):
    """Return ``work()``, called in a thread whose stack is deep enough for a deep graph."""
    outcome = []

    def target():
        try:
            outcome.append((work(), None))
        except BaseException as error:
            outcome.append((None, error))

    stack, recursion = threading.stack_size(_DEEP_STACK), sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(_DEEP_RECURSION)
        thread = threading.Thread(target=target, name="synkhronos-pickle")
        thread.start()
        thread.join()
    except RuntimeError as error:  # "can't start new thread"
        raise MemoryError(
            f"a deep stack, for functions that are made after the first distribute(), takes "
            f"{_DEEP_STACK} bytes of address space, and a thread, and the system refused one of these: "
            f"raise 'ulimit -v' or 'ulimit -u', or make all functions before the first distribute()"
        ) from error
    finally:
        threading.stack_size(stack)
        sys.setrecursionlimit(recursion)
    result, error = outcome[0]
    if error is not None:
        raise error
    return result
