"""The engine as an executable specification: graphs of NumPy functions, evaluated node by node.

>>> x, w = Tensor("x", "float64", 1), Shared(np.ones(2), "w")
>>> engine = NaiveEngine()
>>> compiled = engine.build(Definition([x], [apply(np.dot, x, w)], [True], updates=[(w, w * 2)]))
>>> engine.call(compiled, [np.array([1.0, 2.0])]), engine.storage(w)
([array(3.)], array([2., 2.]))
"""

from __future__ import annotations

import copy
import io
import operator
import pickle
from collections import defaultdict
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any, Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from synkhronos.engines.base import (
    Analysis,
    Definition,
    Engine,
    Sources,
    TensorType,
    Timing,
    sum_by_operation,
)

if TYPE_CHECKING:
    from synkhronos._typing import Array, Buffer, DTypeLike


class Tensor:
    """A variable of a graph: an input, a shared variable, or an expression."""

    ndim: Any  # an int, or None for the state of a random stream

    def __init__(
        self,
        name: str | None,
        dtype: DTypeLike,
        ndim: int,
        extents: tuple[int | None, ...] | None = None,
    ) -> None:
        self.name = name
        self.dtype, self.ndim = np.dtype(dtype), ndim
        self.extents = extents or (None,) * ndim
        self.type = f"{self.dtype} tensor of {ndim} dimensions"

    def __repr__(self) -> str:
        return self.name or f"<{self.type}>"

    def __add__(self, other: Any) -> Apply:
        return apply(operator.add, self, other)

    def __sub__(self, other: Any) -> Apply:
        return apply(operator.sub, self, other)

    def __mul__(self, other: Any) -> Apply:
        return apply(operator.mul, self, other)

    def mean(self, axis: int | None = None) -> Apply:
        return apply(np.mean, self, axis=axis)

    def sum(self, axis: int | None = None) -> Apply:
        return apply(np.sum, self, axis=axis)


class Shared(Tensor):
    """A variable that holds a value: an array, or the state of a random stream."""

    def __init__(self, value: Any, name: str | None = None) -> None:
        value = value if isinstance(value, np.random.RandomState) else np.array(value)
        if isinstance(value, np.ndarray):
            super().__init__(name, value.dtype, value.ndim)
        else:
            self.name, self.type, self.ndim = name, "random state", None
        self.storage = value


class Apply(Tensor):
    """A NumPy function applied to other variables and constants."""

    def __init__(
        self,
        function: Callable[..., Any],
        inputs: Sequence[Any],
        keywords: Mapping[str, Any],
        dtype: DTypeLike,
        ndim: int,
    ) -> None:
        super().__init__(None, dtype, ndim)
        self.function, self.inputs, self.keywords = function, inputs, keywords


class Draw(Apply):
    """Uniform random numbers. Drawing them advances the state of a stream, by a default update."""


class Collective(Tensor):
    """A collective: a method of `synkhronos.engines.base.Peers`, applied to a variable."""

    def __init__(self, method: str, variable: Tensor, *options: Any) -> None:
        super().__init__(None, variable.dtype, variable.ndim)
        self.method, self.inputs, self.options = method, (variable,), options


def all_reduce(variable: Tensor, op: str) -> Collective:
    """Return the reduction of the values of all ranks."""
    return Collective("all_reduce", variable, op)


def all_gather(variable: Tensor) -> Collective:
    """Return the values of all ranks, concatenated along axis 0."""
    return Collective("all_gather", variable)


def broadcast(variable: Tensor) -> Collective:
    """Return the value of the master."""
    return Collective("broadcast", variable)


def apply(function: Callable[..., Any], *inputs: Any, **keywords: Any) -> Apply:
    """Return the expression ``function(*inputs, **keywords)``; an example call determines its type."""
    example = [np.ones((1,) * one.ndim, one.dtype) if isinstance(one, Tensor) else one for one in inputs]
    result = np.asarray(function(*example, **keywords))
    return Apply(function, inputs, keywords, result.dtype, result.ndim)


class Streams:
    """Creates random streams."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.states: list[Shared] = []

    def uniform(self, size: Sequence[int]) -> Draw:
        """Return an expression that draws new random numbers in [0, 1) at each call."""
        state = Shared(np.random.RandomState(self.seed + len(self.states)))
        self.states.append(state)
        return Draw(np.random.RandomState.uniform, (state,), {"size": size}, "float64", len(size))


class Graph:
    """A compiled function: variables, with substitutions for some of them."""

    def __init__(
        self,
        name: str | None,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        updates: Sequence[tuple[Shared, Any]],
        givens: Mapping[Any, Any],
        keeps_states: bool = False,
    ) -> None:
        self.name = name
        self.inputs, self.outputs, self.updates, self.givens = inputs, outputs, updates, givens
        self.keeps_states = keeps_states  # of random streams
        self.seconds: defaultdict[Apply, float] = defaultdict(float)  # of each variable

    def variables(self, own: bool = False) -> list[Tensor]:
        """Return all variables that are evaluated, without duplicates, in the order of first use.

        If `own`, variables that only enter collectives are left out.
        """
        found: dict[Tensor, None] = {}
        waiting = [*self.outputs, *(new for _, new in self.updates)]
        while waiting:
            one = waiting.pop(0)
            one = self.givens.get(one, one)
            if isinstance(one, Tensor) and one not in found:
                found[one] = None
                if not (own and isinstance(one, Collective)):
                    waiting.extend(getattr(one, "inputs", ()))
        return list(found)

    def collectives(self) -> list[Collective]:
        """Return the collectives, each after the collectives that it depends on."""
        found = []

        def visit(variable: Any) -> None:
            variable = self.givens.get(variable, variable)
            for one in getattr(variable, "inputs", ()):
                visit(one)
            if isinstance(variable, Collective) and variable not in found:
                found.append(variable)

        for one in [*self.outputs, *(new for _, new in self.updates)]:
            visit(one)
        return found


class NaiveEngine(Engine):
    """Graphs in NumPy."""

    survives_fork = True

    def setup(self, device: str, announce: bool = True) -> None:
        if device != "cpu":
            raise ValueError(f"device: the naive engine runs on 'cpu', got {device!r}")

    # Graphs

    def type_of(self, variable: Any) -> TensorType:
        if not isinstance(variable, Tensor) or variable.ndim is None:
            raise TypeError(f"expected a tensor variable, got {variable!r}")
        return TensorType(variable.dtype, variable.ndim, variable.extents)

    def is_shared(self, variable: Any) -> bool:
        return isinstance(variable, Shared)

    def is_function(self, item: Any) -> bool:
        return isinstance(item, Graph)

    def build(self, definition: Definition, name: str | None = None, **kwargs: Any) -> Graph:
        inputs, outputs, _, updates, given, sliceable = definition
        givens = dict(given or {})
        rows = [Tensor(f"{one.name}_rows", one.dtype, one.ndim) for one in sliceable]
        replaced = {**givens, **dict(zip(sliceable, rows))}
        compiled = Graph(name, [*inputs, *rows], outputs, updates, replaced)
        for shared, row in zip(sliceable, rows):
            if shared in givens or row not in compiled.variables():
                raise ValueError(f"sliceable_shareds: {shared} is unused, or replaced by givens")
        return compiled

    def has_collectives(self, compiled: Graph) -> bool:
        return bool(compiled.collectives())

    def uses_master(self, compiled: Graph) -> bool:
        return any(one.method == "broadcast" for one in compiled.collectives())

    def shareds(self, compiled: Graph) -> list[Any]:
        used = [one for one in compiled.variables() if isinstance(one, Shared)]
        return [*used, *(one for one, _ in compiled.updates if one not in used)]

    def updated(self, compiled: Graph) -> list[Any]:
        return [*(shared for shared, _ in compiled.updates), *self.random_streams(compiled)]

    def reads(self, compiled: Graph, shared: Any) -> bool:
        return shared in compiled.variables()

    def analyze(self, compiled: Graph, axes: Sequence[int | str | None]) -> Analysis:
        updates = [
            *compiled.updates,
            *((one.inputs[0], one) for one in compiled.variables() if isinstance(one, Draw)),
        ]
        return Analysis(
            outputs=[self._dependence(compiled, axes, one) for one in compiled.outputs],
            updates={shared: self._dependence(compiled, axes, new) for shared, new in updates},
            accumulated=frozenset(),
            extents=[None] * len(compiled.outputs),
            loss_ops=[frozenset()] * len(compiled.outputs),
        )

    def _dependence(self, compiled: Graph, axes: Sequence[int | str | None], variable: Any) -> Sources:
        graph = Graph(None, [], [variable], [], compiled.givens)
        used, own = graph.variables(False), graph.variables(True)
        rows = (one for one, axis in zip(compiled.inputs, axes) if axis is not None)
        shareds = (frozenset(one for one in each if isinstance(one, Shared)) for each in (used, own))
        return Sources(*shareds, any(one in own for one in rows))

    def copy(  # type: ignore[override]  # its only options
        self,
        compiled: Graph,
        swap: Mapping[Any, Any],
        delete_updates: bool = False,
        name: str | None = None,
        profile: Any = None,
    ) -> Graph:
        updates = [(swap.get(shared, shared), new) for shared, new in compiled.updates]
        givens = {old: swap.get(new, new) for old, new in compiled.givens.items()}
        return Graph(
            name,
            compiled.inputs,
            compiled.outputs,
            [] if delete_updates else updates,
            {**givens, **swap},
            delete_updates,
        )

    def duplicate(self, shared: Any) -> Any:
        return copy.deepcopy(shared)

    def dumps(self, objects: Any, known: Mapping[Any, int]) -> Buffer:
        buffer = io.BytesIO()

        class Pickler(pickle.Pickler):
            def persistent_id(self, item: Any) -> Any:
                return known.get(item) if isinstance(item, Shared) else None

        Pickler(buffer).dump(objects)
        return buffer.getvalue()

    def loads(self, payload: Buffer, known: Mapping[int, Any]) -> Any:
        file = io.BytesIO(payload)  # type: ignore[arg-type]  # an array is a buffer, too

        class Unpickler(pickle.Unpickler):
            def persistent_load(self, number: Any) -> Any:
                return known[number]

        return Unpickler(file).load()

    # Calls

    def call(
        self, compiled: Graph, arguments: Sequence[Array], subset: Sequence[int] | None = None
    ) -> list[Array]:
        values = dict(zip(compiled.inputs, arguments))
        collectives = compiled.collectives()
        peers = arguments[-1] if collectives else None

        def evaluate(variable: Any) -> Any:
            variable = compiled.givens.get(variable, variable)
            if not isinstance(variable, Tensor):
                return variable
            if variable not in values:
                if isinstance(variable, Shared):
                    values[variable] = variable.storage
                elif isinstance(variable, Collective):
                    own, number = evaluate(variable.inputs[0]), collectives.index(variable)
                    call = getattr(peers, variable.method, None)
                    values[variable] = call(own, *variable.options, number) if call else own.copy()
                elif isinstance(variable, Apply):
                    inputs = [evaluate(one) for one in variable.inputs]
                    if isinstance(variable, Draw) and compiled.keeps_states:
                        inputs = copy.deepcopy(inputs)
                    start = perf_counter()
                    values[variable] = variable.function(*inputs, **variable.keywords)
                    compiled.seconds[variable] += perf_counter() - start
            return values[variable]

        for one in collectives:  # in their order, for any subset
            evaluate(one)
        results = [(evaluate(one), one.dtype) for one in compiled.outputs]
        outputs = [None if value is None else np.array(value, dtype) for value, dtype in results]
        news = [np.array(evaluate(new), shared.dtype) for shared, new in compiled.updates]
        for (shared, _), new in zip(compiled.updates, news):
            shared.storage = new
        return outputs if subset is None else [outputs[index] for index in subset]

    @contextmanager
    def time_operations(self, compiled: Graph) -> Iterator[Timing]:
        nodes: list[Any] = [one for one in compiled.variables() if isinstance(one, Apply)]
        times = Timing(
            [one.function.__name__ for one in nodes],
            lambda: [compiled.seconds.get(one, 0.0) for one in nodes],
        )
        compiled.seconds.clear()
        yield times
        names = [(one.function.__name__, took) for one, took in compiled.seconds.items()]
        times += sum_by_operation((name, f"numpy.{name}", took) for name, took in names)

    # Shared variables

    def storage(self, shared: Any) -> Array:
        return shared.storage

    def store(self, shared: Any, array: Array) -> None:
        shared.storage = array

    def release(self, shareds: Sequence[Any], used: Iterable[Any]) -> None:
        for shared in shareds:
            shared.storage = None

    # Random streams

    def random_streams(self, compiled: Graph) -> list[Any]:
        return [one for one in self.shareds(compiled) if one.ndim is None]

    def seed(self, streams: Any, seed: int | None) -> list[Any]:
        if not isinstance(streams, Streams):
            raise TypeError(f"expected Streams, got {streams!r}")
        streams.seed = streams.seed if seed is None else seed
        for number, state in enumerate(streams.states):
            state.storage = np.random.RandomState(streams.seed + number)
        return list(streams.states)
