"""The common code of the engines of Theano and PyTensor: graphs, pickles and shared variables."""

from __future__ import annotations

import contextlib
import copy
import copyreg
import functools
import inspect
import io
import pickle
import sys
from abc import abstractmethod
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    ContextManager,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    SupportsIndex,
)

import numpy as np

from synkhronos._text import listed, shortened
from synkhronos.engines import names
from synkhronos.engines.analysis.difference_causes import difference_causes
from synkhronos.engines.analysis.fixed_rows import free_rows
from synkhronos.engines.analysis.graphs import contain_collectives, fingerprints
from synkhronos.engines.analysis.result_dependence import analyze, arguments_and_results, recurrent
from synkhronos.engines.analysis.windows import cut_windows
from synkhronos.engines.base import (
    Analysis,
    Causes,
    Definition,
    Engine,
    TensorType,
    Timing,
    Windows,
    WrappedInput,
    sum_by_operation,
)
from synkhronos.engines.collectives import (
    ALONE,
    PeersType,
    check_order,
    ordering_mode,
    takes_peers,
)
from synkhronos.engines.names import Container, Mode, SharedVariable, Variable, VariableType
from synkhronos.engines.pickles import GraphUnpickler, MainNames, _OfGraphs, dump, with_deep_stack
from synkhronos.host import compiler

if TYPE_CHECKING:
    from synkhronos._typing import Array, Buffer, Compiled
    from synkhronos.arithmetic.partition import Buckets
    from synkhronos.engines.base import (
        Axes,
        Givens,
        RowAxes,
        SharedVariables,
        Swap,
        Updates,
        Variables,
    )


class GraphEngine(Engine):
    """A compiler that uses Theano's graphs."""

    def __init__(self) -> None:
        self._main = MainNames()

    def before_fork(self, forks_all: bool = True) -> None:
        if forks_all:
            self._main.mark_all_inherited()

    def setup(self, device: str, announce: bool = True) -> None:
        if device != "cpu":
            raise ValueError(
                f"device: the engine of {compiler.TITLE} on NumPy runs on 'cpu', got {device!r}"
            )

    # Graphs

    def type_of(self, variable: Variable) -> TensorType:
        kind: VariableType = getattr(variable, "type", None)
        is_tensor = isinstance(kind, names.TensorType) and not names.is_sparse(kind)
        if not isinstance(variable, Variable) or not is_tensor:
            raise TypeError(f"expected a {compiler.TITLE} tensor variable, got {shortened(variable)}")
        return TensorType(np.dtype(kind.dtype), kind.ndim, self.extents_of(kind))

    def extents_of(self, kind: VariableType) -> tuple[int | None, ...]:
        """Return, for each axis, the extent that a type of the compiler fixes, or None."""
        return tuple(1 if is_one else None for is_one in kind.broadcastable)

    def input_type_of(self, variable: Variable) -> TensorType:
        kind: VariableType = getattr(variable, "type", None)
        if names.is_sparse(kind):
            return TensorType(np.dtype(kind.dtype), 2, (None, None), kind.format)
        if isinstance(kind, names.Generic):
            return TensorType(None, 0, (), "object")
        return super().input_type_of(variable)

    def unwrap_input(self, given: Any) -> WrappedInput | None:
        if not isinstance(given, names.In):
            return None
        if given.update is not None or given.implicit:
            raise TypeError(
                f"the input {given.variable} keeps a value between calls ({compiler.NAME}.In with "
                f"update or implicit); use a shared variable instead, whose replicas can be kept in step"
            )
        return WrappedInput(given.variable, given.name, given.value, bool(given.allow_downcast))

    def unwrap_output(self, given: Any) -> Variable:
        return given.variable if isinstance(given, names.Out) else given

    def pieces_of(self, shared: SharedVariable) -> tuple[tuple[int, ...], ...] | None:
        return getattr(shared.tag, "pieces", None)

    def buckets_of(self, shared: SharedVariable) -> Buckets | None:
        return getattr(shared.tag, "buckets", None)

    def is_shared(self, variable: Variable) -> bool:
        return isinstance(variable, SharedVariable)

    def is_function(self, item: Any) -> bool:
        return issubclass(type(item), names.Function)  # __class__ of a synkhronos.Function differs

    def build(self, definition: Definition, **kwargs: Any) -> Compiled:
        _check_options(kwargs)
        inputs, outputs, _, updates, _, sliceable = definition
        given: Any = definition.givens or ()
        givens = list(given.items() if hasattr(given, "items") else given)
        rows = [self._rows_of(shared) for shared in sliceable]
        _check_used(sliceable, outputs, updates, givens)
        # These come first: the compiler then substitutes them everywhere, including other givens and the
        # default updates of shared variables, such as random streams.
        givens = [*zip(sliceable, rows), *givens]
        inputs = [*inputs, *rows]
        expressions = [*outputs, *(new for _, new in [*updates, *givens])]
        for variable in [*(old for old, _ in givens), *expressions]:
            if hasattr(variable, "owner") and not isinstance(variable, Variable):
                raise TypeError(f"expected variables of {compiler.TITLE}, got {shortened(variable)}")
        has_collectives = contain_collectives(expressions, kwargs.get("no_default_updates"))
        if has_collectives:
            peers = PeersType()("peers")
            peers.tag.test_value = None
            inputs, givens = [*inputs, peers], [(ALONE, peers), *givens]
            kwargs["mode"] = ordering_mode(self.mode_for_collectives(kwargs.get("mode")))
        with names.without_test_values():
            compiled = self.compile(inputs, outputs, updates, givens, **kwargs)
        return _finished(compiled)

    def _rows_of(self, shared: SharedVariable) -> Variable:
        """Return a variable for rows of a shared variable, with a test value if these are used."""
        rows = shared.type(f"{shared.name or 'shared'}_rows")
        settings = ("compute_test_value", "compute_test_value_opt")
        if any(getattr(names.package.config, name, "off") != "off" for name in settings):
            rows.tag.test_value = self.storage(shared)
        return rows

    def copy(
        self, compiled: Compiled, swap: Swap, delete_updates: bool = False, **options: Any
    ) -> Compiled:
        specifications, outputs = self.source(compiled)
        variables = [spec.variable for spec in specifications]
        updated = [] if delete_updates else [spec for spec in specifications if spec.update is not None]
        roots = [*outputs, *(item.update for item in updated)]
        copies = names.clone_get_equiv(variables, roots, False, False, dict(swap))
        copied = self.compile(
            [variable for variable in variables if not self.is_shared(variable)],
            [copies[output] for output in outputs],
            [(swap.get(spec.variable, spec.variable), copies[spec.update]) for spec in updated],
            [],
            mode=compiled.maker.mode,
            no_default_updates=True,
            on_unused_input="ignore",
            **options,
        )
        return _finished(copied)

    def from_parts(self, parts: Any) -> Compiled:
        return _finished(parts)

    def deepcopy(self, objects: Any, memo: dict[int, Any]) -> Any:
        return with_deep_stack(lambda: copy.deepcopy(objects, memo))

    def duplicate(self, shared: SharedVariable) -> SharedVariable:
        made = shared.clone()
        made.container = copy.deepcopy(shared.container)
        return made

    @abstractmethod
    def compile(
        self, inputs: Variables, outputs: Variables, updates: Updates, givens: Givens, **kwargs: Any
    ) -> Compiled:
        """Compile a function; `updates` and `givens` are lists of pairs."""

    def mode_for_collectives(self, mode: Mode) -> Mode:
        """Return the mode for a function with collectives, given the mode that the script chose."""
        return mode

    def has_collectives(self, compiled: Compiled) -> bool:
        return takes_peers(compiled)

    def uses_master(self, compiled: Compiled) -> bool:
        nodes = compiled.maker.fgraph.apply_nodes
        return any(getattr(node.op, "is_of_master", False) for node in nodes)

    free_rows = staticmethod(free_rows)

    def cut_windows(self, givens: Givens, index: Variables, divided: RowAxes) -> Windows:
        with names.without_test_values():  # as the bounds have none
            return cut_windows(givens, index, divided)

    def are_computed_from(self, results: Sequence[Any], variables: Variables) -> list[bool]:
        found = [set(names.ancestors([item])) if isinstance(item, Variable) else () for item in results]
        return [any(variable in each for variable in variables) for each in found]

    def shareds(self, compiled: Compiled) -> list[SharedVariable]:
        return compiled.get_shared()

    def fingerprints(self, compiled: Compiled) -> list[tuple[str, list[SharedVariable]]]:
        specifications, outputs = self.source(compiled)
        arguments = [spec.variable for spec in specifications]
        updates = [[spec.variable, spec.update] for spec in specifications if spec.update is not None]
        return fingerprints(arguments, [outputs, *updates])

    def updated(self, compiled: Compiled) -> list[SharedVariable]:
        return [spec.variable for spec in compiled.maker.inputs if spec.update is not None]

    def reads(self, compiled: Compiled, shared: SharedVariable) -> bool:
        return any(
            wrapped.variable is shared and names.is_read(compiled, graph_input)
            for wrapped, graph_input in zip(compiled.maker.inputs, compiled.maker.fgraph.inputs)
        )

    def analyze(self, compiled: Compiled, axes: Axes) -> Analysis:
        return analyze(*self.source(compiled), axes)

    def difference_causes(
        self, compiled: Compiled, axes: Axes
    ) -> tuple[list[Causes], dict[SharedVariable, Causes]]:
        specifications, outputs = self.source(compiled)
        arguments, results = arguments_and_results(specifications, outputs)
        causes = difference_causes(arguments, axes, results)
        updated = [spec.variable for spec in specifications if spec.update is not None]
        return causes[: len(outputs)], dict(zip(updated, causes[len(outputs) :]))

    def recurrent(self, compiled: Compiled, axes: Axes) -> list[int]:
        arguments, results = arguments_and_results(*self.source(compiled))
        return recurrent(arguments, axes, results)

    def source(self, compiled: Compiled) -> tuple[list[Any], list[Variable]]:
        """Return the graph before optimization: the specifications of inputs, and the outputs."""
        return compiled.maker.inputs, [spec.variable for spec in compiled.maker.outputs]

    # Pickles

    def dumps(self, objects: Any, known: Mapping[SharedVariable, int]) -> Buffer:
        def work() -> Buffer:
            self.enter_thread()
            buffer = io.BytesIO()
            self.dump_code(buffer)
            # Operations that are unpickled derive the dtypes of what they compute anew from it.
            pickle.dump(names.package.config.floatX, buffer)
            dump(lambda kind: self.pickler(kind, buffer, known), buffer, objects)
            return buffer.getvalue()  # Python 3.13 reports a buffer in garbage if it has views

        return with_deep_stack(work)

    def loads(self, payload: Buffer, known: Mapping[int, SharedVariable]) -> Any:
        def work() -> Any:
            self.enter_thread()
            buffer = io.BytesIO(payload)  # type: ignore[arg-type]  # an array is a buffer, too
            self.load_code(buffer)
            names.package.config.floatX = pickle.load(buffer)
            return GraphUnpickler(buffer, functools.partial(self.resolve, known=known)).load()

        return with_deep_stack(work)

    def referrer(self, known: Mapping[SharedVariable, int]) -> Callable[[Any], tuple[str, int] | None]:
        # A function wraps the storage of its shared variables in its own containers.
        storages = {id(shared.container.storage): number for shared, number in known.items()}

        def refer(item: Any) -> tuple[str, int] | None:
            if isinstance(item, SharedVariable) and item in known:
                return "shared", known[item]
            if isinstance(item, Container) and id(item.storage) in storages:
                return "container", storages[id(item.storage)]
            return None

        return refer

    def resolve(self, reference: tuple[str, int], known: Mapping[int, SharedVariable]) -> Any:
        kind, number = reference
        return known[number] if kind == "shared" else known[number].container

    def reduce(self, compiled: Compiled) -> tuple[Any, ...]:
        made = compiled.maker, list(compiled.input_storage)
        return _make_again, (self.make_function, compiled.trust_input, *made)

    def pickler(
        self, kind: type[_OfGraphs], buffer: io.BytesIO, known: Mapping[SharedVariable, int]
    ) -> Any:
        """Return a pickler of functions, of a class, for ranks with the shared variables in `known`."""
        return kind(buffer, known, self._main, self)

    @staticmethod
    @abstractmethod
    def make_function(maker: Any, input_storage: Any) -> Compiled:
        """Return the function of a maker of the compiler, whose storage is given."""

    def dump_code(self, buffer: io.BytesIO) -> None:  # noqa: B027
        """Write the data with which other processes find the code of functions."""

    def load_code(self, buffer: io.BytesIO) -> None:  # noqa: B027
        """Read the data that `dump_code` wrote."""

    # Calls

    def time_operations(self, compiled: Compiled) -> ContextManager[Timing]:
        # PyTensor calls it `vm`.
        return time_nodes(compiled, getattr(compiled, "vm", None) or compiled.fn)

    # Shared variables

    def storage(self, shared: SharedVariable) -> Array:
        return vars(shared.container)["storage"][0]  # without the property of a `_ReportingContainer`

    def store(self, shared: SharedVariable, array: Array) -> None:
        vars(shared.container)["storage"][0] = array

    def release(self, shareds: Sequence[SharedVariable], used: Iterable[SharedVariable]) -> None:
        # A clone of a variable may have the storage of the original.
        in_use = {id(item.container.storage) for item in used}
        for shared in shareds:
            if id(shared.container.storage) not in in_use:
                shared.container.storage[0] = None

    def notice_changes(self, shared: SharedVariable, notify: Callable[[str], None] | None) -> None:
        container = shared.container
        if notify is not None:
            _report_updates()
            if type(container) is Container:
                container.__class__ = _ReportingContainer
        if type(container) is _ReportingContainer:
            container.notify = notify
            if notify is None:
                del container.notify
                container.__class__ = Container

    def is_borrowed(self, shared: SharedVariable) -> bool:
        storage = shared.container.storage
        if not isinstance(storage[0], np.ndarray):  # such as a sparse matrix, which has arrays
            held = [*getattr(storage[0], "__dict__", {}).values()]
            return sys.getrefcount(storage[0]) > _NOT_BORROWED or any(
                sys.getrefcount(held[place]) > _NOT_BORROWED + 1
                for place in range(len(held))
                if isinstance(held[place], np.ndarray)
            )
        # A view refers to the memory at its base only.
        return is_referred_to(storage) or storage[0].base is not None


def is_referred_to(storage: list[Any]) -> bool:
    """Whether there are references to the array in the storage of a variable, by which it may change."""
    # A local name for the array would be one.
    return sys.getrefcount(storage[0]) > _NOT_BORROWED and storage[0].flags.writeable


_storage = [np.zeros(1)]
#: The number of references to an array that nothing but its storage has.
_NOT_BORROWED = sys.getrefcount(_storage[0])


class _ReportingContainer(Container):
    """A container that reports when a script sets, updates or gets the value of its shared variable.

    ``set_value`` and ``get_value`` use the attribute ``value`` of the variable's container. Compiled
    functions write to the list inside it, and so does the engine: this adds no cost to a call. A script
    that takes this list may write to it, too. Its copies are ordinary containers.
    """

    @property
    def storage(self) -> list[Any]:
        caller = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        if caller not in (compiler.NAME, "synkhronos"):
            self.notify("read")
        return vars(self)["storage"]

    @storage.setter
    def storage(self, items: list[Any]) -> None:
        self.__dict__["storage"] = items
        self.notify("set")

    def __get__(self) -> Any:
        self.notify("read")
        return Container.__get__(self)

    def __set__(self, value: Any) -> None:
        Container.__set__(self, value)
        self.notify("set")

    value = data = property(__get__, __set__)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        state = dict(vars(self))
        del state["notify"]
        make = copyreg._reconstructor  # type: ignore[attr-defined]  # private
        return make, (Container, object, None), state

    def __deepcopy__(self, memo: dict[int, Any]) -> Container:
        plain = Container.__new__(Container)
        vars(plain).update(self.__reduce_ex__(2)[2])
        return plain.__deepcopy__(memo)


def _report_updates() -> None:
    """Have the compiler's functions report the shared variables that they have updated."""
    call = names.Function.__call__
    if hasattr(call, "reports_updates"):
        return

    @functools.wraps(call)
    def call_and_report(self: Compiled, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(self, *args, **kwargs)
        finally:  # an error may come after some of the updates
            try:
                updated = self.maker.synkhronos_updated
            except AttributeError:
                updated = self.maker.synkhronos_updated = [
                    spec.variable
                    for spec in self.maker.inputs
                    if spec.update is not None and isinstance(spec.variable, SharedVariable)
                ]
            for shared in updated:
                if type(shared.container) is _ReportingContainer:
                    shared.container.notify("update")

    call_and_report.reports_updates = True  # type: ignore[attr-defined]
    names.Function.__call__ = call_and_report


def _make_again(
    make_function: Callable[..., Compiled], trust_input: bool, maker: Any, input_storage: list[Any]
) -> Compiled:
    compiled = make_function(maker, input_storage)
    compiled.trust_input = trust_input
    compiled.maker.synkhronos_updated = ()
    return compiled


def _finished(compiled: Compiled) -> Compiled:
    """Return a new compiled function, whose collectives are in order."""
    if takes_peers(compiled):
        check_order(compiled)
    # Arguments have been checked before they were scattered. Checking again takes 40% of a small call.
    # https://theano-pymc.readthedocs.io/en/latest/tutorial/faq_tutorial.html
    compiled.trust_input = True
    compiled.maker.synkhronos_updated = ()  # it is no function of the script
    return compiled


def _check_options(options: Mapping[str, Any]) -> None:
    known = inspect.signature(names.package.function).parameters
    for name in options:
        if name not in known:
            raise TypeError(
                f"function: expected options of {compiler.NAME}.function, got {name!r}; an operation is "
                f"given with its output, as in (output, 'sum')"
            )


def _check_used(
    sliceable: SharedVariables, outputs: Variables, updates: Updates, givens: Givens
) -> None:
    roots = [*outputs, *(new for _, new in updates), *(new for _, new in givens)]
    used = set(names.graph_inputs([root for root in roots if hasattr(root, "owner")]))
    names_of_used = sorted(str(variable) for variable in used if isinstance(variable, SharedVariable))
    for shared in sliceable:
        if shared not in used:
            raise ValueError(
                f"sliceable_shareds: {shared} is not used by the outputs, updates or givens of the "
                f"function; used are {listed(names_of_used) or 'none'}"
            )
        if any(old is shared for old, _ in givens):
            raise ValueError(
                f"sliceable_shareds: {shared} is replaced by givens; leave it out of one of the two"
            )


# Times of operations


@contextlib.contextmanager
def time_nodes(compiled: Compiled, machine: Any) -> Iterator[Timing]:
    """Let the virtual machine of a compiled function time its nodes in the block.

    The machine computes as usual, and reads a clock before and after each node.

    Parameters
    ----------
    compiled : compiled function
        The function whose nodes are timed.
    machine : object
        The object that runs the function, such as a virtual machine of Theano or PyTensor.

    Yields
    ------
    Timing

    Raises
    ------
    ValueError
        If `machine` cannot time its nodes.
    """
    if not hasattr(machine, "time_thunks"):
        raise ValueError(
            f"{compiled.name or 'function'}: expected a function that computes one operation after "
            f"another, to time each; got one that {type(compiled.maker.linker).__name__} has compiled. "
            f"Build it in a mode with the linker 'cvm', or leave out operations=True"
        )
    times = Timing(
        [str(node.op) for node in machine.nodes],
        lambda: [seconds for seconds, _ in _readings(compiled, machine)],
    )
    buffers, was_timing = _buffers(machine), machine.time_thunks
    before = _readings(compiled, machine)
    machine.time_thunks = True
    try:
        yield times
    finally:
        machine.time_thunks = was_timing
        after = _readings(compiled, machine)
        machine.call_times[:], machine.call_counts[:] = buffers
        times += sum_by_operation(
            (str(node.op), _name_of(type(node.op)), new[0] - old[0])
            for node, old, new in zip(machine.nodes, before, after)
            if new[1] > old[1]
        )


def _buffers(machine: Any) -> tuple[list[float], list[int]]:
    return machine.call_times[:], machine.call_counts[:]


def _readings(compiled: Compiled, machine: Any) -> list[tuple[float, int]]:
    """Return the seconds and the number of calls of each node so far."""
    pairs = zip(*_buffers(machine))
    if not compiled.profile:
        return list(pairs)
    # The script's own profile: each call moves the readings there.
    seconds, calls = compiled.profile.apply_time, compiled.profile.apply_callcount
    graph = getattr(machine, "fgraph", None)  # PyTensor's machines have it, and use it in the keys
    keys = [node if graph is None else (graph, node) for node in machine.nodes]
    return [(a + seconds.get(key, 0), b + calls.get(key, 0)) for (a, b), key in zip(pairs, keys)]


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
