"""`spmd`: a program that every rank runs at its own pace.

The program is pickled by value, with the current values of its global variables, unless it belongs to an
imported module that the workers also have, because they were forked from the master or because it is a
module of this package. Some objects in it are replaced: shared variables and functions by the ranks' own
replicas, and `Data` and large arrays by handles, so that all ranks use the same memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import sys
from typing import Any, Callable, Iterator, List, Sequence

import cloudpickle
import numpy as np

from synkhronos._errors import FuseError, SynkhronosError
from synkhronos._typing import AnyArray
from synkhronos.arrays.data import Data, as_data
from synkhronos.engines.pickles import GraphPickler, GraphUnpickler, MainNames
from synkhronos.functions.function import Function
from synkhronos.functions.replica_tracker import replica_tracker_of
from synkhronos.functions.replicate import replicate
from synkhronos.host.handler_errors import reraise_if_handlers
from synkhronos.programs.rank import NO_NAMED_MEMORY, Rank
from synkhronos.programs.stopping import INTERRUPTED, Run, Stop, StopProgram
from synkhronos.services.controller import Answer, Controller
from synkhronos.services.registers import ENDED
from synkhronos.stores.handle import Handle, RequiredRows
from synkhronos.stores.named_memory import NamedMemory
from synkhronos.world import generators
from synkhronos.world.rank_state import Command, RankState
from synkhronos.world.restart import Replacing, replacing_dead
from synkhronos.world.world import World, current_world, with_call_lock

_LARGE = 1 << 16  # bytes; larger arrays are shared
_PACKAGE = __name__.partition(".")[0]


class Results(List[Any]):
    """The return values of a program by rank; None for a rank that was ended.

    Attributes
    ----------
    reports : list of list of dict
        The reports of each rank, by rank: each has the numbers by name, and ``"seconds"`` since the
        start of the program.
    stopped : bool
        Whether the ranks were asked to stop, by ``rank.stop()`` or by Ctrl-C.
    interrupted : bool
        Whether they were asked to stop by Ctrl-C.
    """

    reports: list[list[dict[str, float]]]
    stopped: bool
    interrupted: bool


@dataclasses.dataclass(eq=False, repr=False)
class Program(Command):
    """Runs a program on this rank.

    Parameters
    ----------
    handle : Handle or None
        A handle to the pickled program, for the workers.
    token : bytes
        Identifies the world.
    entropy : list of int
        Determines the generators of the ranks.
    states : tuple[Any, ...]
        The states of Python's and NumPy's own generators in the script.
    has_controller, may_meet : bool
        Whether ``rank.ask`` can be used, and whether collectives can be used.
    own : callable, optional
        The program itself, in the master.
    needed : list of Handle
        Handles to the arrays that the pickle refers to, in the master.
    on_death : Replacing, optional
        Called in the master if workers die; see `Transport.begin_program`.
    """

    handle: Handle | None
    token: bytes
    entropy: Sequence[int]
    states: tuple[Any, ...]
    has_controller: bool
    may_meet: bool
    own: Any = None
    needed: Sequence[Handle] = ()
    on_death: Replacing | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        of_script = self.entropy, self.states
        return Program, (self.handle, self.token, *of_script, self.has_controller, self.may_meet)

    def needs(self, ranks: range, size: int) -> list[RequiredRows]:
        handles = [] if self.handle is None else [self.handle, *self.needed]
        return [*map(RequiredRows, handles)]

    def run(self, state: RankState) -> Any:
        """Return ``(result, reports, ended)``, pickled in a worker."""
        world, named_memory = current_world(), state.store.named_memory
        named_memory.release_locks()  # left by an interrupt at the end of the last program
        state.disown()  # as a new rank has the variables of the master's program
        world.in_program = True
        try:
            with generators.states_of_script(state, self.states):
                outcome = self._run(state, world)
        finally:
            world.in_program = False
            state.transport.end_copy()
            state.restarts = 0
            state.disown()
            _ended(named_memory, state.size)[state.rank] = 1
            named_memory.release_locks()  # the locks of centers, and any left by an interrupt
        if state.is_master:
            return outcome
        try:
            return cloudpickle.dumps(outcome)
        except MemoryError:
            raise
        except Exception as error:  # any exception that a class of the script raises
            reraise_if_handlers(error)
            raise TypeError(
                f"spmd: what the program returned on rank {state.rank} cannot be pickled: {error}; "
                f"return arrays, numbers, or lists and dictionaries of these"
            ) from error

    def _run(self, state: RankState, world: World) -> tuple[Any, list[dict[str, float]], bool]:
        """Return the program's result and its reports, and whether it was ended."""
        named_memory, on_death = state.store.named_memory, self.on_death
        if not self.may_meet and not state.is_master:
            on_death = Replacing(world, _ended(named_memory, state.size))
        state.transport.begin_program(on_death)
        state.transport.relay()
        program, args, kwargs = self.own or unpack(state, world, self.handle)  # type: ignore[arg-type]  # a worker has it
        run = Run(state, world.defer_interrupt.announce)
        result, ended = None, False
        with named_memory.pausing(run.pause):
            rank = Rank(
                state, run, self.token, self.entropy, self.has_controller, self.may_meet,
                world.options.waits,
            )  # fmt: skip
            try:
                result = program(rank, *args, **kwargs)
            except StopProgram:
                ended = True
            finally:
                run.end()
        return result, rank._reports.own, ended

    def title(self, state: RankState) -> str:
        return "program"


@with_call_lock
def spmd(
    program: Callable[..., Any],
    *args: Any,
    controller: Answer | None = None,
    on_death: str = "raise",
    **kwargs: Any,
) -> Results:
    """Run a program on every rank, the master included, each at its own pace.

    Functions and shared variables are replicated first. Every rank calls
    ``program(rank, *args, **kwargs)``. A program uses the methods of ``rank``, a `Rank`, and of `Data`;
    other public functions of the package cannot be used inside.

    The program is sent to the workers by value, with the current values of its arguments and global
    variables, unless it belongs to an imported module (on several machines, even then). Shared variables
    and functions in it refer to each rank's own replicas. `Data`, and arrays of 64 kB or more, are not
    copied for each rank: all ranks use the same memory, and such arrays are read-only in the workers.

    The first Ctrl-C asks all ranks to stop, as ``rank.stop()`` does; a second Ctrl-C ends them. If the
    program raises an exception on a rank, the other ranks leave their programs with an error, and the
    processes can still be used.

    Parameters
    ----------
    program : callable
        The function that every rank calls.
    *args, **kwargs
        Further arguments of the program.
    controller : callable, optional
        ``controller(request, rank_number, info)`` returns the answer to ``rank.ask(request, info)``. It
        runs in a separate process, a copy of the script at this point, and answers one question at a
        time, in the order of arrival.
    on_death : {"raise", "continue"}
        What happens if a rank dies. By default all ranks are ended and a `WorldBrokenError` is raised.
        With ``"continue"``, for programs without collectives, the remaining ranks continue. On the CPU,
        a new rank replaces the dead rank and starts the program again, with the current values of the
        master's replicas; a rank that dies repeatedly breaks the world. The master itself is not
        replaced. On several machines, the first rank of each machine is not replaced, and a new rank
        starts with the values of the first rank of its machine.

    Returns
    -------
    Results
        A list of the program's return values by rank, with the attributes ``reports``, ``stopped`` and
        ``interrupted``; see `Results`.

    Raises
    ------
    FuseError
        Inside a ``fuse()`` block.
    TypeError, ValueError
        If an argument is wrong, or the program cannot be sent to the workers.

    Examples
    --------
    >>> import numpy as np
    >>> import synkhronos as synk
    >>> import theano
    >>> import theano.tensor as T
    >>> synk.fork(2, use_gpu=False)
    2
    >>> x, w = T.dvector("x"), theano.shared(0.0, name="w")
    >>> step = synk.function([x], updates=[(w, w + 0.1 * (x.mean() - w))])
    >>> def program(rank, data):
    ...     center = rank.center(w)
    ...     for rows in rank.minibatches(len(data), batch_size=10, epochs=20, seed=0):
    ...         rank.call(step, data, batch=rows)
    ...         center.elastic(0.5)
    ...     rank.barrier()
    ...     return float(center.value())
    >>> [round(value) for value in synk.spmd(program, np.full(100, 3.0))]
    [3, 3]
    >>> synk.close()
    """
    world = current_world()
    _check(world, program, controller, on_death)
    replicate(world)
    may_meet = on_death == "raise"
    handle: Handle | None = None
    needed: list[Handle] = []
    kept: list[Any] = []
    if world.size > 1:
        handle, needed, kept = pack(world, (program, args, kwargs))
    number = 1 + next(world.part(itertools.count))
    of_script = generators.entropy(number), generators.states()
    own = program, args, kwargs
    what = handle, world.registry.token, *of_script, controller is not None, may_meet, own, needed
    replica_tracker_of(world).local.update(world.registry.numbers.values())
    with world.defer_interrupt, _named_memory(world) as named_memory:
        stop = Stop(named_memory.array("stop", (1,), "int64"))
        ended = _ended(named_memory, world.size)
        surviving = contextlib.nullcontext() if may_meet else replacing_dead(world, ended)
        asked = world.defer_interrupt.calling(lambda: stop.ask(INTERRUPTED))
        with _answering(world, controller), asked, surviving as handle_deaths:
            outcomes = [_loaded(outcome) for outcome in world.run(Program(*what, handle_deaths))]
            del kept
        results = Results(result for result, _, _ in outcomes)
        results.reports = [reports for _, reports, _ in outcomes]
        results.stopped, results.interrupted = stop.is_asked, stop.is_interrupted
        # An interrupt that came later was not seen by the ranks, so it is raised.
        if results.interrupted and not any(was_ended for _, _, was_ended in outcomes):
            world.defer_interrupt.drop()
    return results


def _check(world: World, program: Any, controller: Any, on_death: str) -> None:
    """Raise if a program cannot run."""
    world.check_usable()
    if not callable(program):
        raise TypeError(f"spmd: expected a function as program, got {program!r}")
    if controller is not None and not callable(controller):
        raise TypeError(f"spmd: controller: expected a function or None, got {controller!r}")
    if on_death not in ("raise", "continue"):
        raise ValueError(f"spmd: on_death: expected 'raise' or 'continue', got {on_death!r}")
    if not world.transport.has_named_memory and controller is not None:
        raise SynkhronosError(f"spmd: controller: {NO_NAMED_MEMORY}")
    if not world.transport.has_named_memory and on_death == "continue":
        raise SynkhronosError(f"spmd: on_death='continue': {NO_NAMED_MEMORY}")
    if world.is_recording:
        raise FuseError("spmd(): not inside a fuse() block; call it before or after the block")


def _ended(named_memory: NamedMemory, size: int) -> AnyArray:
    """Return for each rank whether it has ended its program, or has died and is not replaced."""
    return named_memory.array(ENDED, (size,), "int64")


@contextlib.contextmanager
def _named_memory(world: World) -> Iterator[NamedMemory]:
    """Return the named memory; they are empty before and after the block."""
    named_memory = world.rank_state.store.named_memory
    try:
        named_memory.clear()  # an interrupt may have prevented the cleanup of the last program
        named_memory.release_locks()
        yield named_memory
    finally:
        named_memory.clear()


@contextlib.contextmanager
def _answering(world: World, controller: Answer | None) -> Iterator[None]:
    """Let a controller answer questions inside the block."""
    if controller is None:
        yield
        return
    answering = Controller(world.transport, controller)
    try:
        answering.start()
        yield
    finally:
        answering.end()


def _loaded(outcome: Any) -> tuple[Any, list[dict[str, float]], bool]:
    """Return ``(result, reports, was_ended)`` of a rank; it is None for a dead rank."""
    if outcome is None:
        return None, [], True
    return outcome if isinstance(outcome, tuple) else cloudpickle.loads(outcome)


# Sending a program to the workers


class _Pickler(GraphPickler):
    def __init__(self, file: io.BytesIO, world: World) -> None:
        # The receiver finds nothing of the script by its name.
        super().__init__(file, world.registry.numbers, MainNames(), world.rank_state.engine)
        self._world = world
        self.kept: list[Data] = []  # the handles refer to these

    def persistent_id(self, item: Any) -> tuple[Any, ...] | None:
        kind = type(item)
        if kind is Data:
            self.kept.append(item)
            return "data", item.handle(), item.minibatch, item.name
        if isinstance(item, np.ndarray) and item.nbytes >= _LARGE and not item.dtype.hasobject:
            data = as_data(self._world, item)
            self.kept.append(data)
            return "array", data.handle()
        if kind is Function:
            return "function", item.specification
        if kind in _PLAIN:
            return None
        found = self.refer(item)
        return found and ("variable", found)


_PLAIN = frozenset({str, bytes, int, float, bool, tuple, list, dict, type(None)})


def pack(world: World, program: Any) -> tuple[Handle, list[Handle], list[Any]]:
    """Return a handle to a pickle of the program in the store, the handles in it, and their objects.

    Raises
    ------
    TypeError
        If it cannot be pickled.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, world)
    try:
        with contextlib.nullcontext() if world.transport.forks_all else _by_value(program[0]):
            pickler.dump(program)
    except MemoryError:
        raise
    except Exception as error:  # any exception that a class of the script raises
        reraise_if_handlers(error)
        raise TypeError(
            f"spmd: the program, its arguments, or a global variable that it uses cannot be sent to the "
            f"workers: {error}; make such objects inside the program"
        ) from error
    handle = world.rank_state.store.put(np.frombuffer(file.getbuffer(), np.uint8))
    return handle, [data.handle() for data in pickler.kept], pickler.kept


@contextlib.contextmanager
def _by_value(program: Any) -> Iterator[None]:
    """Inside the block, pickle the definitions of a program's module by value."""
    module = sys.modules.get(getattr(program, "__module__", None) or "")
    name = getattr(module, "__name__", "__main__")
    known = {"__main__", *cloudpickle.list_registry_pickle_by_value()}
    if name in known or name.partition(".")[0] == _PACKAGE:
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def unpack(state: RankState, world: World, handle: Handle) -> Any:
    """Return the program, in a worker."""

    def resolve(reference: tuple[Any, ...]) -> Any:
        kind, *what = reference
        if kind == "variable":
            return state.engine.resolve(what[0], state.shareds)
        if kind == "function":
            return Function.copy_of(*what)
        array = state.store.get(what[0])
        if kind == "data":
            return Data.of_array(world, array, *what[1:])
        array.flags.writeable = False
        return array

    return GraphUnpickler(io.BytesIO(state.store.get(handle).tobytes()), resolve).load()
