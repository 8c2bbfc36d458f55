"""The time that the operations of a compiled function take."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Callable, Iterable, Iterator, List, NamedTuple, Sequence

from synkhronos.host.compiler import TITLES

if TYPE_CHECKING:
    from synkhronos._typing import Compiled

_FAST = "synkhronos.engines.theano.kernels"


class OperationTime(NamedTuple):
    """The nodes of a compiled function that have the same operation, and the time that they took.

    Attributes
    ----------
    name : str
        The operation as the compiler writes it.
    kind : str
        Its class, with the module.
    kernel : str
        ``"fast"`` for an operation of `synkhronos.engines.theano.kernels`, else whose operation it is.
    nodes : int
        The number of these nodes that were computed.
    seconds : float
        The time of all of them, in all calls.
    """

    name: str
    kind: str
    kernel: str
    nodes: int
    seconds: float


class Timing(List[OperationTime]):
    """The operations of a function, which are in the list when the timing has ended.

    Parameters
    ----------
    nodes : list of str
        The operation of each node of the function, in the order in which they are computed.
    read : callable
        Returns the seconds that each node has taken so far.
    """

    def __init__(self, nodes: Sequence[str], read: Callable[[], Sequence[float]]) -> None:
        super().__init__()
        self.nodes, self.read = nodes, read


def sum_by_operation(timed: Iterable[tuple[str, str, float]]) -> list[OperationTime]:
    """Return the sums over nodes, given the name, the class and the seconds of each."""
    sums: dict[tuple[str, str], list[float]] = {}
    for name, kind, seconds in timed:
        sums.setdefault((name, kind), []).append(seconds)
    return [
        OperationTime(name, kind, _kernel(kind), len(each), sum(each))
        for (name, kind), each in sums.items()
    ]


def _kernel(kind: str) -> str:
    if kind.startswith(f"{_FAST}."):
        return "fast"
    package = kind.partition(".")[0]
    return f"{TITLES.get(package, package)}'s own"


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
