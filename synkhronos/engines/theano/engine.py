"""Theano on the arrays of any device, and on NumPy arrays: compilation, calls, random streams."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Sequence

import theano
from theano.gof import compilelock, vm
from theano.gof.link import raise_with_op
from theano.sandbox.rng_mrg import MRG_RandomStreams, mrg_uniform_base
from theano.tensor.raw_random import RandomStateType
from theano.tensor.shared_randomstreams import RandomStreams

from synkhronos._errors import SynkhronosError
from synkhronos._text import shortened
from synkhronos.arithmetic.streams import jump_mrg
from synkhronos.engines.graph_engine import GraphEngine
from synkhronos.engines.pickles import GraphPickler
from synkhronos.engines.theano.kernels import registration
from synkhronos.engines.theano.module_cache import ModuleLog, add_modules
from synkhronos.host import compile_cache
from synkhronos.host.handler_errors import reraise_if_handlers

if TYPE_CHECKING:
    from synkhronos._typing import Array, Compiled
    from synkhronos.engines.base import Givens, Updates, Variables
    from synkhronos.engines.names import SharedVariable, Variable

# The linkers that can compute a subset of the outputs.
_LAZY = tuple(getattr(vm, name) for name in ("CVM", "Stack") if hasattr(vm, name))
_CVM = getattr(vm, "CVM", None)  # None without a C compiler


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
        self._modules.mark_known(all_are=forks_all)

    # Graphs

    def compile(
        self, inputs: Variables, outputs: Variables, updates: Updates, givens: Givens, **kwargs: Any
    ) -> Compiled:
        return _compile(inputs, outputs, updates=OrderedDict(updates), givens=givens, **kwargs)

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
        return maker.create(input_storage, trustme=True)

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
        graph = compiled.maker.fgraph
        inputs = {item: spec.variable for item, spec in zip(graph.inputs, compiled.maker.inputs)}
        for node in graph.apply_nodes:
            if isinstance(node.op, mrg_uniform_base):
                state = inputs.get(self.origin(node.inputs[0]))
                if self.is_shared(state) and state not in states:
                    states.append(state)
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


class DirectCall:
    """Computes the outputs of a compiled function for a list of arguments, without Theano's own method.

    With arguments that need no check, ``Function.__call__`` only stores them, starts the virtual machine
    and removes references; but it also keeps times for profiles and looks for keywords and default
    values. For a function of one number, this takes 1.4 of 1.8 microseconds (AMD EPYC).

    Parameters
    ----------
    compiled : theano function
        A function for which `is_possible` is true.
    """

    def __init__(self, compiled: Any) -> None:
        machine = compiled.fn
        self._machine, self._n_outputs = machine, compiled.n_returned_outputs
        self._inputs = [item.storage for item in compiled.input_storage if item.required]
        self._outputs: list[list] = []  # the references that the garbage collection removes
        if machine.allow_gc:
            pairs = zip(compiled.output_storage, compiled.maker.fgraph.outputs)
            self._outputs = [item.storage for item, variable in pairs if variable.owner is not None]

    @staticmethod
    def is_possible(compiled: Any) -> bool:
        """Whether a direct call of this function makes no difference, apart from the time."""
        needs_more = (
            not compiled.trust_input
            or compiled.profile
            or compiled.unpack_single
            or compiled.return_none
            or compiled.output_keys is not None
            or any(refeed for _, refeed, _ in compiled.defaults)
        )
        if type(compiled.fn) is not _CVM or compiled.fn.need_update_inputs or needs_more:
            return False
        required = [item.required for item in compiled.input_storage]
        return required == sorted(required, reverse=True)  # passed arguments come first

    def __call__(self, arguments: Sequence[Any]) -> list[Any]:
        for cell, argument in zip(self._inputs, arguments):
            cell[0] = argument
        try:
            outputs = self._machine()
        except Exception:
            self._raise_with_node()
        for cell in self._inputs:
            cell[0] = None
        for cell in self._outputs:
            cell[0] = None
        return outputs[: self._n_outputs]

    def _raise_with_node(self) -> None:
        """Raise the current exception again, with the node that has raised it, as Theano does."""
        machine = self._machine
        position = machine.position_of_error
        thunks = getattr(machine, "thunks", None)
        raise_with_op(
            node=machine.nodes[position],
            thunk=thunks[position] if thunks else None,
            storage_map=getattr(machine, "storage_map", None),
        )
