"""`distribute`: functions, and their shared variables, to every rank.

Where workers can be forked late, the first call forks them: they inherit the compiled functions and
share the memory of the variables' values until one is written to. Functions that are built later travel
as one pickle, in which shared variables that the ranks already have are numbers.
"""

from __future__ import annotations

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
    """

    def __init__(self, first_function, first_shared, payload):
        self.first_function = first_function
        self.first_shared = first_shared
        self.payload = payload

    def run(self, here):
        if self.payload is not None and not here.is_master:
            pickled = here.memory.open(self.payload)
            functions, shareds = here.engine.loads(pickled, here.shareds)
            # In place of what an earlier try may have left, that failed on another rank.
            here.functions[self.first_function :] = functions
            here.shareds[self.first_shared :] = shareds
        self._separate_streams(here)

    def _separate_streams(self, here):
        index = stream_index(here)
        streams = []
        for function in here.functions[self.first_function :]:
            for shared in here.engine.random_streams(function.compiled):
                if shared not in streams:
                    streams.append(shared)
        for shared in streams:
            if index and shared in here.shareds[self.first_shared :]:
                here.engine.jump(shared, index)


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
        known = {shared: number for number, shared in enumerate(here.shareds[:first_shared])}
        pickled = here.engine.dumps((functions, shareds), known)
        payload = here.memory.allocate(len(pickled))
        payload[:] = memoryview(pickled)
        reference = here.memory.reference(payload)
        del pickled
    world.run(Replicate(first_function, first_shared, reference))
    if payload is not None:
        del payload
        here.memory.trim()
    world.replicated_functions += len(functions)
    world.replicated_shareds += len(shareds)


def distribute() -> None:
    """Replicate all functions that are not yet replicated, with their shared variables.

    A shared variable has one replica a rank, however many functions use it; one that the ranks already
    have keeps its values there. Random streams get an independent stream on each rank. May be called
    again after more functions were built.

    Raises
    ------
    NotForkedError
        Before ``fork()``.
    WorkerError
        If a worker cannot take a function over.
    """
    replicate(_world.current())
