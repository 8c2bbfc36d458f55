"""PyTensor on NumPy arrays: compilation by its C code or by Numba, calls, and random generators."""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING, Any, Sequence

import numpy as np
import pytensor
from pytensor.compile.mode import get_mode
from pytensor.link.basic import JITLinker
from pytensor.link.numba.linker import NumbaLinker
from pytensor.tensor.random.type import RandomType
from pytensor.tensor.random.utils import RandomStream

from synkhronos._text import shortened
from synkhronos.arithmetic.streams import check_has_substreams, reseeded
from synkhronos.engines.base import TensorType
from synkhronos.engines.graph_engine import GraphEngine
from synkhronos.engines.names import Mode, SharedVariable, Variable, VariableType, ins_and_outs

if TYPE_CHECKING:
    from synkhronos._typing import Array, Compiled
    from synkhronos.engines.base import Givens, Swap, Updates, Variables


class PyTensorEngine(GraphEngine):
    """PyTensor, on one or more cores of this machine."""

    survives_fork = True

    def __init__(self) -> None:
        super().__init__()
        # By the maker of a function
        self._sources: weakref.WeakKeyDictionary[Any, tuple[list[Any], list[Variable]]]
        self._sources = weakref.WeakKeyDictionary()

    # Graphs

    def type_of(self, variable: Variable) -> TensorType:
        kind: VariableType = getattr(variable, "type", None)
        if hasattr(kind, "dims"):  # of xtensor; when a function runs, it is as that of a tensor
            return TensorType(np.dtype(kind.dtype), kind.ndim, kind.shape)
        return super().type_of(variable)

    def extents_of(self, kind: VariableType) -> tuple[int | None, ...]:
        return kind.shape

    def compile(
        self, inputs: Variables, outputs: Variables, updates: Updates, givens: Givens, **kwargs: Any
    ) -> Compiled:
        mode = self.mode(kwargs.get("mode"))
        givens = [(old, _as_variable(old, new)) for old, new in givens]
        news = {shared: _as_variable(shared, new) for shared, new in updates}
        options = {**kwargs, "mode": mode, "updates": news, "givens": givens}
        compiled = pytensor.function(inputs, outputs, **options)
        for shared in self.random_streams(compiled):
            self.check_stream(shared)
        # PyTensor optimizes the graph in place, so a copy of the original is kept.
        specifications, originals = ins_and_outs(
            inputs,
            outputs,
            updates=news,
            givens=givens,
            no_default_updates=kwargs.get("no_default_updates") or False,
            rebuild_strict=kwargs.get("rebuild_strict", True),
        )
        self._sources[compiled.maker] = specifications, originals
        return compiled

    def mode(self, given: Mode) -> Mode:
        """Return the mode in which a function is built, given the script's mode or None."""
        mode = get_mode(given)
        _check_mode(mode)
        return mode

    def check_stream(self, shared: SharedVariable) -> None:
        """Raise ``TypeError`` if a shared generator has no substreams for the ranks."""
        check_has_substreams(self.storage(shared))

    def mode_for_collectives(self, mode: Mode) -> Mode:
        if isinstance(get_mode(mode).linker, NumbaLinker):
            if mode is not None:
                raise ValueError(
                    "function: mode: collectives in graphs (synkhronos.ops) call the other ranks from "
                    "Python, which functions of Numba cannot; use mode='CVM', or leave out the mode"
                )
            return get_mode("CVM")
        return mode

    def source(self, compiled: Compiled) -> tuple[list[Any], list[Variable]]:
        return self._sources[compiled.maker]

    def copy(
        self, compiled: Compiled, swap: Swap, delete_updates: bool = False, **options: Any
    ) -> Compiled:
        with warnings.catch_warnings():
            # `no_default_updates` is deprecated, but nothing else leaves out default updates.
            warnings.simplefilter("ignore", DeprecationWarning)
            return super().copy(compiled, swap, delete_updates, **options)

    def to_parts(self, compiled: Compiled) -> Any:
        return compiled, self._sources[compiled.maker]

    def from_parts(self, parts: Any) -> Compiled:
        compiled, source = parts
        self._sources[compiled.maker] = source
        return super().from_parts(compiled)

    @staticmethod
    def make_function(maker: Any, input_storage: Any) -> Compiled:
        return maker.create(input_storage)

    # Calls

    def call(
        self, compiled: Compiled, arguments: Sequence[Array], subset: Sequence[int] | None = None
    ) -> list[Array]:
        if isinstance(compiled.maker.linker, NumbaLinker):
            # Numba compiles a function again for each layout of its arrays, which takes a long time.
            arguments = [_plain(argument) for argument in arguments]
            for container in compiled.input_storage:
                container.storage[0] = _plain(container.storage[0])
        origin: BaseException | None
        try:
            outputs, origin = compiled(*arguments), None
        except SystemError as error:  # by which Numba replaces what a signal handler raises
            origin = error.__cause__ or error.__context__ or error
        if origin is not None:
            raise origin
        return outputs if subset is None else [outputs[index] for index in subset]

    # Random streams

    def random_streams(self, compiled: Compiled) -> list[SharedVariable]:
        return [shared for shared in self.shareds(compiled) if is_generator(shared)]

    def seed(self, streams: Any, seed: int | None) -> list[SharedVariable]:
        if isinstance(streams, RandomStream):
            streams.seed(seed)
            return [state for state, _ in streams.state_updates]
        shareds = streams if isinstance(streams, (list, tuple)) else [streams]
        if not shareds or not all(is_generator(variable) for variable in shareds):
            raise TypeError(
                f"expected a RandomStream, or shared random generators, such as "
                f"pytensor.tensor.random.shared_rng() returns, got {shortened(streams)}"
            )
        if seed is None:
            raise TypeError("reseed: seed: expected an int, as shared generators do not keep theirs")
        seeds = [seed] if streams is not shareds else np.random.SeedSequence(seed).spawn(len(shareds))
        for shared, own in zip(shareds, seeds):
            self.store(shared, self.reseeded(shared, own))
        return list(shareds)

    def reseeded(self, shared: SharedVariable, seed: Any) -> np.random.Generator:
        """Return a new generator for a shared variable."""
        return reseeded(self.storage(shared), seed)


def _as_variable(old: Variable, new: Any) -> Variable:
    """Return a new value as a variable: a constant for numbers, which PyTensor would make shared."""
    return new if isinstance(new, Variable) else old.type.make_constant(old.type.filter(new))


def is_generator(variable: Variable) -> bool:
    """Whether this is a shared variable with a random generator."""
    return hasattr(variable, "container") and isinstance(variable.type, RandomType)


def _check_mode(mode: Mode) -> None:
    linker = mode.linker
    if isinstance(linker, JITLinker) and not isinstance(linker, NumbaLinker):
        name = type(linker).__name__.replace("Linker", "")
        raise ValueError(
            f"function: mode: {name} keeps threads and devices, which forked workers do not have, so "
            f"its functions can hang there; use mode='NUMBA' or mode='CVM', or JAX by "
            f"synk.fork(devices=['jax:cpu', 'jax:cpu'])"
        )


def _plain(argument: Any) -> Any:
    """Return an array in the layout for which Numba has compiled: contiguous, aligned and writeable."""
    if not isinstance(argument, np.ndarray):
        return argument
    return argument if argument.flags.carray else np.array(argument, order="C")
