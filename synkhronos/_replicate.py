"""`distribute`: functions, and their shared variables, to every rank.

Where workers can be forked late, the first call forks them: they inherit the compiled functions and
share the memory of the variables' values until one is written to. Functions that are built later travel
as one pickle, in which shared variables that the ranks already have are numbers.
"""

from __future__ import annotations

from typing import Any

from synkhronos import _world
from synkhronos._here import Command, Here
from synkhronos._world import World


class Replicate(Command):
    """Take over functions and shared variables, and make the random streams this rank's own.

    Parameters
    ----------
    first_function, first_shared : int
        The numbers of the first new ones.
    payload : memory reference or None
        The pickled new ones; None if the rank inherited them.
    streams : list of int
        Which of the new shared variables are states of random streams.
    """

    def __init__(self, first_function, first_shared, payload, streams):
        self.first_function = first_function
        self.first_shared = first_shared
        self.payload = payload
        self.streams = streams

    def run(self, here):
        if self.payload is not None and not here.is_master:
            pickled = here.memory.open(self.payload)
            functions, shareds = here.engine.loads(pickled, here.shareds)
            # In place of what an earlier try may have left, that failed on another rank.
            here.functions[self.first_function :] = functions
            here.shareds[self.first_shared :] = shareds
        index = stream_index(here)
        for number in self.streams if index else ():
            here.engine.jump(here.shareds[number], index)


def stream_index(here: Here) -> int:
    """Return which of the independent random streams is this rank's; 0, the script's, the master's."""
    return (here.rank - here.master_rank) % here.size


def replicate(world: World) -> None:
    """Bring what is not replicated yet to the ranks; start them if they are not."""
    world.check_usable()
    with world.interrupts:
        _replicate(world)


def _replicate(world):
    here = world.here
    first_function, first_shared = world.replicated_functions, world.replicated_shareds
    functions, shareds = here.functions[first_function:], here.shareds[first_shared:]
    if world.started and not functions:
        return
    payload = reference = None
    if not world.started:
        world.start()
    elif world.size > 1:
        pickled = _pickle(world, functions, shareds)
        payload = here.memory.allocate(len(pickled))
        payload[:] = memoryview(pickled)
        reference = here.memory.reference(payload)
        del pickled
    streams = {
        world.shared_numbers[shared]
        for function in functions
        for shared in here.engine.random_streams(function.compiled)
    }
    new = sorted(number for number in streams if number >= first_shared)
    world.run(Replicate(first_function, first_shared, reference, new))
    if payload is not None:
        del payload
        here.memory.trim()
    world.replicated_functions += len(functions)
    world.replicated_shareds += len(shareds)


def _pickle(world, functions, shareds):
    """Return the pickle of functions and shared variables; None for functions that have none."""
    engine = world.here.engine
    known = {shared: world.shared_numbers[shared] for shared in world.here.shareds}
    for shared in shareds:
        del known[shared]
    try:
        return engine.dumps((functions, shareds), known)
    except MemoryError:
        raise
    except Exception:  # whatever an operation or a mode raises
        sent = [function if _can_be_sent(world, function, known) else None for function in functions]
        return engine.dumps((sent, shareds), known)


def _can_be_sent(world, function, known):
    try:
        world.here.engine.dumps(function, known)
    except Exception as error:
        world.unsent[function.number] = f"{type(error).__name__}: {error}"
        return False
    return True


def check_sent(world: World, function: Any) -> None:
    """Raise if the workers lack a function, which then can run in the master alone."""
    if function.number in world.unsent:
        remedy = "leave what it names out of the function"
        if world.here.engine.forks_late:
            remedy = "make it before the first distribute(), or call restart(): workers then inherit it"
        raise TypeError(
            f"{function!r}: it cannot be sent to workers that run already "
            f"({world.unsent[function.number]}); {remedy}"
        )


def distribute() -> None:
    """Replicate all functions that are not yet replicated, with their shared variables.

    A shared variable has one replica a rank, however many functions use it; one that the ranks already
    have keeps its values there. Random streams get an independent stream on each rank. May be called
    again after more functions were built.

    Raises
    ------
    NotForkedError
        Before ``fork()``.
    TypeError
        If a function cannot be sent to workers that run already. The others are replicated.
    WorkerError
        If a worker cannot take a function over.
    """
    world = _world.current()
    first = world.replicated_functions
    replicate(world)
    for function in world.here.functions[first:]:
        check_sent(world, function)
