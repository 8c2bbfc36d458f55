"""For extensions: functions for steps, and workers that stay in a function while the script goes on.

A step is several calls and collectives in a block of `fuse`. Workers that stay leave the function with
the next command of the world, so nothing else differs for the script. Scripts do not need this module.
Apart from it, extensions use the public names of the library only.
"""

from __future__ import annotations

from typing import Any, Callable, Iterable, Mapping, Sequence

from synkhronos._typing import Compiled, SharedVariable
from synkhronos.arrays.data import Data
from synkhronos.functions.arguments import check_indices as check_indices
from synkhronos.functions.call import CallFunction, in_form
from synkhronos.functions.comparing.serial_comparison import Comparison, check_call
from synkhronos.functions.function import Function
from synkhronos.functions.replica_tracker import replica_tracker_of
from synkhronos.functions.replicate import replicate
from synkhronos.stores.handle import Handle
from synkhronos.world.rank_state import Ask, Command, RankState
from synkhronos.world.schedule import RepeatedStep as RepeatedStep
from synkhronos.world.schedule import fuse
from synkhronos.world.world import World as World
from synkhronos.world.world import current_world, world_exists


def report_step(name: str, seconds: float, rows: int, outputs: Any) -> None:
    """Report a step of this process in a program to the functions of `on_step`, if it is the master's.

    Parameters
    ----------
    name : str
        The name of the step.
    seconds : float
        How long it has taken.
    rows : int
        The rows of this rank.
    outputs : float
        Its loss.
    """
    world = current_world() if world_exists() else None
    if world is not None and world.step_hooks is not None and world.rank_state.is_master:
        world.step_hooks.report(name, seconds, rows, outputs)


def reduces(
    function: Function, reduced: Mapping[SharedVariable, tuple[str, str]], is_doubtful: bool = False
) -> None:
    """Note the variables that a step reduces after each call of a function.

    Parameters
    ----------
    function : Function
        The function that computes their values.
    reduced : dict
        The name of each variable in messages, and the operation.
    is_doubtful : bool
        Whether a warning has already said that the step differs from the serial one.
    """
    world = function._world
    if world is None:  # a copy that programs use
        return
    numbers = world.registry.numbers
    function.reduced = {numbers[shared]: op for shared, (_, op) in reduced.items()}
    if function.verification is not None:
        named = {numbers[shared]: what for shared, (what, _) in reduced.items()}
        function.verification.add(named, is_doubtful)


def shares(functions: Iterable[Function], own: Iterable[SharedVariable] = ()) -> None:
    """Have what the script changes of the variables of functions reach all ranks before the next call.

    Parameters
    ----------
    functions : iterable of Function
        The functions of a step.
    own : iterable of shared variables
        Variables of which each rank keeps its own value.
    """
    for function in functions:
        world = function._world
        if world is not None and world.size > 1:  # else it may be a copy that programs use
            tracker, numbers = replica_tracker_of(world), world.registry.numbers
            tracker.carried.update(numbers[shared] for shared in function.get_shared())
            tracker.own.update(numbers[shared] for shared in own)


def operations_of(function: Function) -> Any:
    """Return the operations of the outputs of a function, in the form of its results."""
    return in_form(function, list(function.output_modes), None)


def verify_step(take_step: Callable[[], Any]) -> None:
    """Verify the calls of a step as first calls are verified, without running it.

    Parameters
    ----------
    take_step : callable
        Makes the calls of the step.
    """
    with fuse() as block:
        block.instead = block.notify
        take_step()


def compare_step(
    function: Function,
    take_step: Callable[[], Any],
    outputs: Mapping[str, tuple[int, int]],
    variables: Iterable[SharedVariable],
    rtol: float | None,
    atol: float | None,
) -> Comparison:
    """Compare a step with the same step on one rank. Nothing changes.

    Parameters
    ----------
    function : Function
        The function that messages name.
    take_step : callable
        Makes the calls of the step.
    outputs : dict
        For each output of the step by name: the number of the call that returns it, among the calls of
        functions, and the number of the output in this call.
    variables : iterable of shared variables
        The variables that the step updates.
    rtol, atol
        As for `Function.check`.

    Raises
    ------
    MismatchError
        If an output or a variable differs.
    """
    found: list[Comparison] = []

    def compare(commands: Sequence[Command]) -> None:
        calls = [place for place, item in enumerate(commands) if isinstance(item.plain, CallFunction)]
        placed = {name: (calls[call], number) for name, (call, number) in outputs.items()}
        world = function._usable_world()
        found.append(check_call(world, function, commands, placed, variables, rtol, atol))

    with function.call_lock, fuse() as block:
        block.instead = compare
        take_step()
    return found[0]


# Workers that stay in a function


def serve_script(
    state: RankState,
    serve: Callable[..., Any],
    uses: Sequence[tuple[int, list[Handle]]],
    arguments: tuple[Any, ...],
) -> None:
    """Call a function on a worker, which returns when it is told to; see `stay`.

    Parameters
    ----------
    uses : list of (int, list of Handle)
        The numbers of functions, and arrays.
    """
    opened = [
        (state.functions[number].compiled, [state.store.get(handle) for handle in handles])
        for number, handles in uses
    ]
    serve(state.rank, state.transport.check, opened, *arguments)


def stay(
    world: World,
    serve: Callable[..., Any],
    uses: Sequence[tuple[Function, Sequence[Data]]],
    arguments: tuple,
    leave: Callable[[], None],
) -> None:
    """Have each worker call ``serve(rank, check, uses, *arguments)``, and go on.

    Parameters
    ----------
    world : World
        The world, as of `world_to_stay`.
    serve : callable
        A function of a module. Instead of each function and its data, it gets the compiled function
        and arrays. It calls ``check()`` several times per second, which may raise, and returns soon
        after `leave` was called.
    uses : list of (Function, list of Data)
        The functions and their data.
    arguments : tuple
        Others, which are pickled.
    leave : callable
        Called once, before the next command or the end of the world.
    """
    replicate(world)
    sent = [(item.replica.number, [each.handle() for each in datas]) for item, datas in uses]
    handles = [handle for _, own in sent for handle in own]
    world.stay(Ask(serve_script, serve, sent, arguments, handles=handles), leave)


def world_to_stay(function: Function) -> World | None:
    """Return the world of a function, or None if its workers cannot stay in a command."""
    world = function._usable_world()
    return world if world.transport.can_stay else None


def call_on_change(
    function: Function, shareds: Iterable[SharedVariable], call: Callable[[], None]
) -> None:
    """Have a function called whenever the script has given one of some variables a new value.

    Parameters
    ----------
    function : Function
        A function of the world with whose engine the variables are used.
    shareds : iterable of shared variables
        Variables that the world's functions do not use.
    call : callable
        Called without arguments, after what was asked for before.
    """
    engine = function._usable_world().rank_state.engine
    for shared in shareds:
        container: Any = getattr(shared, "container", None)
        before = getattr(container, "notify", None)

        def notify(how: str, before: Callable[[str], None] | None = before) -> None:
            if before is not None:
                before(how)
            if how != "read":
                call()

        engine.notice_changes(shared, notify)


def compiled_of(function: Function) -> Compiled:
    """Return the compiled function of this rank, also in a program."""
    if function._world is None:
        _, number = function.specification.replica
        return current_world().rank_state.functions[number].compiled
    return function.replica.compiled
