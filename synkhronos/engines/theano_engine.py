"""The common code of the Theano engines: graphs, compilation, pickles, random streams."""

import inspect
import io
import pickle
from collections import OrderedDict
from pathlib import Path

import numpy as np
import theano
from theano.compile.sharedvalue import SharedVariable
from theano.gof import compilelock, vm
from theano.gof.type import Generic
from theano.sandbox.rng_mrg import MRG_RandomStreams, mrg_uniform_base
from theano.sparse import SparseType
from theano.tensor import TensorType as TheanoTensorType
from theano.tensor.raw_random import RandomStateType
from theano.tensor.shared_randomstreams import RandomStreams

from synkhronos._errors import SynkhronosError
from synkhronos.arithmetic.streams import jump_mrg
from synkhronos.engines.base import Engine, InputType, TensorType, WrappedInput
from synkhronos.engines.theano_collectives import ALONE, PeersType
from synkhronos.engines.theano_dependence import analyze
from synkhronos.engines.theano_modules import ModuleLog, add_modules, make_cacheable
from synkhronos.engines.theano_order import (
    check_order,
    find_peers,
    in_order,
    takes_from_master,
    takes_peers,
)
from synkhronos.engines.theano_pickles import (
    GraphPickler,
    GraphUnpickler,
    MainNames,
    with_deep_stack,
)
from synkhronos.engines.theano_shared import report_assignments
from synkhronos.engines.theano_windows import cut_windows
from synkhronos.host import compile_cache

# The linkers that can compute a subset of the outputs.
_LAZY = tuple(getattr(vm, name) for name in ("CVM", "Stack") if hasattr(vm, name))


class TheanoEngine(Engine):
    """Theano 1.0.5 on the arrays of any device."""

    reducers = {}  # additional functions to pickle objects in graphs, by type

    def __init__(self):
        self._modules = ModuleLog()
        self._main = MainNames()

    def before_fork(self, forks_all=True):
        if forks_all:
            self._modules.mark_all_known()
            self._main.mark_all_inherited()
        else:
            self._modules.mark_none_known()

    # Graphs

    def type_of(self, variable):
        kind = getattr(variable, "type", None)
        if not isinstance(variable, theano.gof.Variable) or not isinstance(kind, TheanoTensorType):
            raise TypeError(f"expected a Theano tensor variable, got {variable!r}")
        return TensorType(np.dtype(kind.dtype), kind.ndim, kind.broadcastable)

    def input_type_of(self, variable):
        kind = getattr(variable, "type", None)
        if isinstance(kind, SparseType):
            return InputType(np.dtype(kind.dtype), 2, (False, False), kind.format)
        if isinstance(kind, Generic):
            return InputType(None, 0, (), "object")
        return super().input_type_of(variable)

    def unwrap_input(self, given):
        if not isinstance(given, theano.In):
            return None
        if given.update is not None or given.implicit:
            raise TypeError(
                f"the input {given.variable} keeps a value between calls (theano.In with update or "
                f"implicit); use a shared variable instead, whose replicas can be kept in step"
            )
        return WrappedInput(given.variable, given.name, given.value, bool(given.allow_downcast))

    def unwrap_output(self, given):
        return given.variable if isinstance(given, theano.Out) else given

    def pieces_of(self, shared):
        return getattr(shared.tag, "pieces", None)

    def is_shared(self, variable):
        return isinstance(variable, SharedVariable)

    def build(self, inputs, outputs, updates, givens, sliceable, on_host, **kwargs):
        _check_options(kwargs)
        givens = list(givens.items() if hasattr(givens, "items") else givens or ())
        rows = [shared.type(f"{shared.name or 'shared'}_rows") for shared in sliceable]
        _check_used(sliceable, outputs, updates, givens)
        # These come first: Theano then substitutes them everywhere, including other givens and the
        # default updates of shared variables, such as random streams.
        givens = [*zip(sliceable, rows), *givens]
        arguments = [*inputs, *rows]
        expressions = [*outputs, *(new for _, new in [*updates, *givens])]
        has_peers = find_peers(expressions, kwargs.get("no_default_updates"))
        if has_peers:
            arguments.append(PeersType()("peers"))
            givens.insert(0, (ALONE, arguments[-1]))
            kwargs["mode"] = in_order(kwargs.get("mode"))
        make_cacheable()
        compiled = _compile(arguments, outputs, updates=OrderedDict(updates), givens=givens, **kwargs)
        if has_peers:
            check_order(compiled)
        # Arguments have been checked before they were scattered. Checking again takes 40% of a small
        # call. https://theano-pymc.readthedocs.io/en/latest/tutorial/faq_tutorial.html
        compiled.trust_input = True
        return compiled

    def cut_windows(self, givens, inputs):
        return cut_windows(givens, inputs)

    def has_collectives(self, compiled):
        return takes_peers(compiled)

    def uses_master(self, compiled):
        return takes_from_master(compiled)

    def shareds(self, compiled):
        return compiled.get_shared()

    def updated(self, compiled):
        return [one.variable for one in compiled.maker.inputs if one.update is not None]

    def reads(self, compiled, shared):
        return any(
            graph_input.clients and wrapped.variable is shared
            for wrapped, graph_input in zip(compiled.maker.inputs, compiled.maker.fgraph.inputs)
        )

    def analyze(self, compiled, axes):
        return analyze(compiled, axes)

    def dumps(self, objects, known):
        def work():
            self.enter_thread()
            buffer = io.BytesIO()
            pickle.dump(self._pickled_modules(), buffer, pickle.HIGHEST_PROTOCOL)
            GraphPickler(buffer, known, self.reducers, self._main).dump(objects)
            return buffer.getbuffer()

        return with_deep_stack(work)

    def _pickled_modules(self):
        """Return a list of pickles, one per module, as the key of a module contains operations."""
        pickled = []
        for item in self._modules.unknown().items():
            buffer = io.BytesIO()
            try:
                GraphPickler(buffer, {}, self.reducers, self._main).dump(item)
            except Exception:  # any exception that an operation raises; its function will tell
                continue
            pickled.append(buffer.getvalue())
        return pickled

    def after_replication(self):
        self._modules.mark_sent_known()

    def loads(self, payload, known):
        def work():
            self.enter_thread()
            buffer = io.BytesIO(payload)
            add_modules(pickle.load(buffer))
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

    def release(self, shareds, used):
        # A clone of a variable may have the storage of the original.
        in_use = {id(one.container.storage) for one in used}
        for shared in shareds:
            if id(shared.container.storage) not in in_use:
                shared.container.storage[0] = None

    def notice_writes(self, shared, notify):
        report_assignments(shared.container, notify)

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


def _check_options(options):
    known = inspect.signature(theano.function).parameters
    for name in options:
        if name not in known:
            raise TypeError(
                f"function: expected options of theano.function, got {name!r}; an operation is given "
                f"with its output, as in (output, 'sum')"
            )


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
