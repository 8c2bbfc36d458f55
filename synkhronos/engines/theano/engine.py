"""Theano on the arrays of any device, and on NumPy arrays: compilation, calls, random streams."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Sequence

import theano
from theano.gof import compilelock, vm
from theano.sandbox.rng_mrg import MRG_RandomStreams, mrg_uniform_base
from theano.sparse import SparseType
from theano.tensor.raw_random import RandomStateType
from theano.tensor.shared_randomstreams import RandomStreams

from synkhronos._errors import SynkhronosError
from synkhronos._text import shortened
from synkhronos.arithmetic.streams import jump_mrg
from synkhronos.engines.graph_engine import GraphEngine
from synkhronos.engines.pickles import GraphPickler
from synkhronos.engines.theano import precompiled_headers as precompiled_headers
from synkhronos.engines.theano.direct_call import DirectCall
from synkhronos.engines.theano.kernels import registration
from synkhronos.engines.theano.module_cache import ModuleLog, add_modules, make_cacheable
from synkhronos.host import compile_cache
from synkhronos.host.handler_errors import reraise_if_handlers

if TYPE_CHECKING:
    from synkhronos._typing import Array, Compiled
    from synkhronos.engines.names import SharedVariable, Variable, VariableType

# The linkers that can compute a subset of the outputs.
_LAZY = tuple(getattr(vm, name) for name in ("CVM", "Stack") if hasattr(vm, name))


class TheanoEngine(GraphEngine):
    """Theano 1.0.5 on the arrays of any device."""

    def __init__(self) -> None:
        super().__init__()
        self._modules = ModuleLog()

    def use_kernels(self, wanted: bool) -> None:
        # They need a compiler, and have one thread each.
        registration.use(wanted and bool(theano.config.cxx) and not theano.config.openmp)

    def before_fork(self, forks_all: bool = True) -> None:
        super().before_fork(forks_all)
        if forks_all:
            self._modules.mark_all_known()
        else:
            self._modules.mark_none_known()

    # Graphs

    def is_sparse(self, kind: VariableType) -> bool:
        return isinstance(kind, SparseType)

    def compile(
        self,
        inputs: Sequence[Variable],
        outputs: Sequence[Variable],
        updates: Sequence[tuple[SharedVariable, Variable]],
        givens: Sequence[tuple[Variable, Any]],
        **kwargs: Any,
    ) -> Compiled:
        make_cacheable()
        return _compile(inputs, outputs, updates=OrderedDict(updates), givens=givens, **kwargs)

    def before_compiling(self) -> None:
        make_cacheable()

    # Pickles

    def dump_code(self, buffer: io.BytesIO) -> None:
        pickle.dump(self._pickled_modules(), buffer, pickle.HIGHEST_PROTOCOL)

    def _pickled_modules(self) -> list[bytes]:
        """Return a list of pickles, one per module, as the key of a module contains operations."""
        pickled = []
        for item in self._modules.unknown().items():
            buffer = io.BytesIO()
            try:
                self.pickler(GraphPickler, buffer, {}).dump(item)
            except Exception as error:  # any that an operation raises; its function will report it
                reraise_if_handlers(error)
                continue
            pickled.append(buffer.getvalue())
        return pickled

    def load_code(self, buffer: io.BytesIO) -> None:
        add_modules(pickle.load(buffer))
        _check_cache()

    @staticmethod
    def make_function(maker: Any, input_storage: Any) -> Compiled:
        make_cacheable()  # including the operations that came with this function
        compiled = maker.create(input_storage, trustme=True)
        compiled.trust_input = True
        return compiled

    def after_replication(self) -> None:
        self._modules.mark_sent_known()

    # Calls

    def call(
        self, compiled: Compiled, arguments: Sequence[Array], subset: Sequence[int] | None = None
    ) -> list[Array]:
        if subset is None:
            try:
                direct = compiled.synkhronos_direct
            except AttributeError:
                direct = DirectCall(compiled) if DirectCall.is_possible(compiled) else None
                compiled.synkhronos_direct = direct
            return compiled(*arguments) if direct is None else direct(arguments)
        if isinstance(compiled.fn, _LAZY):
            return compiled(*arguments, output_subset=subset)
        outputs = compiled(*arguments)  # other linkers always compute all outputs
        return [outputs[index] for index in subset]

    # Random streams

    def random_streams(self, compiled: Compiled) -> list[SharedVariable]:
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
                    if shared not in states and _is_input(compiled, shared, self.origin(node.inputs[0]))
                )
        return states

    def origin(self, variable: Variable) -> Variable:
        """Return the variable of an optimized graph of which a variable is only a copy."""
        return variable

    def seed(self, streams: Any, seed: int | None) -> list[SharedVariable]:
        if not isinstance(streams, (MRG_RandomStreams, RandomStreams)):
            raise TypeError(f"expected MRG_RandomStreams or RandomStreams, got {shortened(streams)}")
        streams.seed(seed)
        return [state for state, *_ in streams.state_updates]

    def jump(self, shared: SharedVariable, index: int) -> None:
        if isinstance(shared.type, RandomStateType):
            super().jump(shared, index)
        else:
            self.store(shared, jump_mrg(self.storage(shared), index))


class TheanoCpuEngine(TheanoEngine):
    """Theano 1.0.5 with its C code, on one or more cores of this machine."""

    survives_fork = True

    def setup(self, device: str, announce: bool = True) -> None:
        if device != "cpu":
            raise ValueError(f"device: the engine of Theano on NumPy runs on 'cpu', got {device!r}")


def _compile(*args: Any, **kwargs: Any) -> Compiled:
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


def _check_cache() -> None:
    complaint = compile_cache.complaint(Path(theano.config.compiledir))
    if complaint is not None:
        raise SynkhronosError(f"function: {complaint}")


def _is_input(compiled: Compiled, shared: SharedVariable, variable: Variable) -> bool:
    """Whether a variable of the optimized graph is the input that represents `shared`."""
    return any(
        graph_input is variable and wrapped.variable is shared
        for wrapped, graph_input in zip(compiled.maker.inputs, compiled.maker.fgraph.inputs)
    )
