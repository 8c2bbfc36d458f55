"""Theano on NumPy arrays."""

import io
import pickle
import sys
import threading
from collections import OrderedDict

import numpy as np
import theano
from theano.compile.function_module import Function as TheanoFunction
from theano.compile.sharedvalue import SharedVariable
from theano.gof import vm
from theano.gof.link import Container
from theano.sandbox.rng_mrg import mrg_uniform_base
from theano.tensor import TensorType as TheanoTensorType
from theano.tensor.raw_random import RandomStateType

from synkhronos._streams import (
    jump_mrg,
    jump_random_state,
    random_state_from_array,
    random_state_to_array,
)
from synkhronos.engines.base import Engine, TensorType
from synkhronos.engines.theano_modules import ModuleDiary, learn, make_cacheable

# Theano's pickles recurse once or more a node of the graph.
_DEEP_STACK = 512 << 20
_DEEP_RECURSION = 1_000_000
# The virtual machines that compute just the outputs that are asked for.
_LAZY = tuple(getattr(vm, name) for name in ("CVM", "Stack") if hasattr(vm, name))


class TheanoCpuEngine(Engine):
    """Theano 1.0.5 with its C code, on one core or more of this machine."""

    def __init__(self):
        self._modules = ModuleDiary()

    def setup(self, device):
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

    def build(self, inputs, outputs, updates, givens, sliceable, **kwargs):
        givens = list(givens.items() if hasattr(givens, "items") else givens or ())
        rows = [shared.type(f"{shared.name or 'shared'}_rows") for shared in sliceable]
        if sliceable:
            _check_used(sliceable, outputs, updates, givens)
            swap = OrderedDict(zip(sliceable, rows))
            outputs, updates, givens = _replace(swap, outputs, updates, givens)
        make_cacheable()
        compiled = theano.function(
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
            _GraphPickler(buffer, known).dump(objects)
            return buffer.getbuffer()

        return _with_deep_stack(work)

    def loads(self, payload, known):
        def work():
            buffer = io.BytesIO(payload)
            learn(pickle.load(buffer))
            make_cacheable()
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

    def export(self, shared):
        storage = self.storage(shared)
        if isinstance(shared.type, RandomStateType):
            return random_state_to_array(storage)
        return np.asarray(storage)

    def restore(self, shared, array):
        storage = self.storage(shared)
        if isinstance(shared.type, RandomStateType):
            self.store(shared, random_state_from_array(array))
        elif storage.shape == array.shape and storage.flags.writeable:
            storage[...] = array
        else:
            self.store(shared, np.array(array))

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
                    if shared not in states and _is_input(compiled, shared, node.inputs[0])
                )
        return states

    def jump(self, shared, index):
        state = self.storage(shared)
        if isinstance(shared.type, RandomStateType):
            self.store(shared, jump_random_state(state, index))
        else:
            self.store(shared, jump_mrg(state, index))


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

    def __init__(self, file, known):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
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
    finally:
        threading.stack_size(stack)
        sys.setrecursionlimit(recursion)
    result, error = outcome[0]
    if error is not None:
        raise error
    return result
