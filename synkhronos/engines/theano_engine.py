"""The common code of the Theano engines: graphs, compilation, pickles, random streams."""

import io
import pickle
from collections import OrderedDict
from pathlib import Path

import numpy as np
import theano
from theano.compile.sharedvalue import SharedVariable
from theano.gof import compilelock, vm
from theano.sandbox.rng_mrg import MRG_RandomStreams, mrg_uniform_base
from theano.tensor import TensorType as TheanoTensorType
from theano.tensor.raw_random import RandomStateType
from theano.tensor.shared_randomstreams import RandomStreams

from synkhronos._errors import SynkhronosError
from synkhronos.arithmetic.streams import jump_mrg
from synkhronos.engines.base import Engine, TensorType
from synkhronos.engines.theano_modules import ModuleLog, add_modules, make_cacheable
from synkhronos.engines.theano_pickles import GraphPickler, GraphUnpickler, with_deep_stack
from synkhronos.host import compile_cache

# The linkers that can compute a subset of the outputs.
_LAZY = tuple(getattr(vm, name) for name in ("CVM", "Stack") if hasattr(vm, name))


class TheanoEngine(Engine):
    """Theano 1.0.5 on the arrays of any device."""

    reducers = {}  # additional functions to pickle objects in graphs, by type

    def __init__(self):
        self._modules = ModuleLog()

    def before_fork(self):
        self._modules.mark_all_known()

    # Graphs

    def type_of(self, variable):
        kind = getattr(variable, "type", None)
        if not isinstance(variable, theano.gof.Variable) or not isinstance(kind, TheanoTensorType):
            raise TypeError(f"expected a Theano tensor variable, got {variable!r}")
        return TensorType(np.dtype(kind.dtype), kind.ndim, kind.broadcastable)

    def is_shared(self, variable):
        return isinstance(variable, SharedVariable)

    def build(self, inputs, outputs, updates, givens, sliceable, on_host, **kwargs):
        givens = list(givens.items() if hasattr(givens, "items") else givens or ())
        rows = [shared.type(f"{shared.name or 'shared'}_rows") for shared in sliceable]
        _check_used(sliceable, outputs, updates, givens)
        # These come first: Theano then substitutes them everywhere, including other givens and the
        # default updates of shared variables, such as random streams.
        givens = [*zip(sliceable, rows), *givens]
        make_cacheable()
        compiled = _compile(
            [*inputs, *rows], outputs, updates=OrderedDict(updates), givens=givens, **kwargs
        )
        # Arguments have been checked before they were scattered. Checking again takes 40% of a small
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
            self.enter_thread()
            buffer = io.BytesIO()
            pickle.dump(self._modules.unknown(), buffer, pickle.HIGHEST_PROTOCOL)
            GraphPickler(buffer, known, self.reducers).dump(objects)
            return buffer.getbuffer()

        return with_deep_stack(work)

    def after_replication(self):
        self._modules.mark_sent_known()

    def loads(self, payload, known):
        def work():
            self.enter_thread()
            buffer = io.BytesIO(payload)
            add_modules(pickle.load(buffer))
            make_cacheable()
            _check_cache()
            return GraphUnpickler(buffer, known).load()

        return with_deep_stack(work)

    # Calls

    def call(self, compiled, arguments, subset=None):
        if subset is None:
            return compiled(*arguments)
        if isinstance(compiled.fn, _LAZY):
            return compiled(*arguments, output_subset=subset)
        outputs = compiled(*arguments)  # other linkers always compute all outputs
        return [outputs[index] for index in subset]

    # Shared variables

    def storage(self, shared):
        return shared.container.storage[0]

    def store(self, shared, array):
        shared.container.storage[0] = array

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
        """Return the variable of an optimized graph that another one is only a copy of."""
        return variable

    def seed(self, streams, seed):
        if not isinstance(streams, (MRG_RandomStreams, RandomStreams)):
            raise TypeError(f"expected MRG_RandomStreams or RandomStreams, got {streams!r}")
        streams.seed(seed)
        return [state for state, *_ in streams.state_updates]

    def jump(self, shared, index):
        if isinstance(shared.type, RandomStateType):
            super().jump(shared, index)
        else:
            self.store(shared, jump_mrg(self.storage(shared), index))


def _compile(*args, **kwargs):
    _check_cache()
    try:
        return theano.function(*args, **kwargs)
    except BaseException as error:
        # Otherwise Theano keeps its lock on the cache, and every other process waits for it.
        while getattr(compilelock.get_lock, "n_lock", 0):
            compilelock.release_lock()
        explanation = compile_cache.explain(error, Path(theano.config.compiledir))
        if explanation is None:
            raise
    raise SynkhronosError(f"function: {explanation}")  # not `from`: Theano's message is pages long


def _check_cache():
    complaint = compile_cache.complaint(Path(theano.config.compiledir))
    if complaint is not None:
        raise SynkhronosError(f"function: {complaint}")


def _is_input(compiled, shared, variable):
    """Whether a variable of the optimized graph is the input that represents `shared`."""
    return any(
        graph_input is variable and wrapped.variable is shared
        for wrapped, graph_input in zip(compiled.maker.inputs, compiled.maker.fgraph.inputs)
    )


def _check_used(sliceable, outputs, updates, givens):
    roots = [*outputs, *(new for _, new in updates), *(new for _, new in givens)]
    used = set(theano.gof.graph.inputs([one for one in roots if hasattr(one, "owner")]))
    for shared in sliceable:
        if shared not in used:
            raise ValueError(
                f"sliceable_shareds: {shared} is not used by the outputs, updates or givens of the "
                f"function; used are {sorted(str(v) for v in used if isinstance(v, SharedVariable))}"
            )
        if any(old is shared for old, _ in givens):
            raise ValueError(
                f"sliceable_shareds: {shared} is replaced by givens; leave it out of one of the two"
            )
