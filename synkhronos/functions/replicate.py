"""`distribute`: functions and their shared variables on every rank.

Where workers inherit the state of the master, the first call forks them: they have the compiled
functions then, and share the memory of the variables' values until one is written to. Functions that
are built later are sent as one pickle, in which a number stands for a shared variable that the ranks
already have.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from synkhronos.stores.handle import Handle
from synkhronos.world.here import Command
from synkhronos.world.world import World, current_world


class Replicate(Command):
    """Load new functions and shared variables, and give this rank its own random streams.

    Parameters
    ----------
    first_function, first_shared : int
        The numbers of the first new ones.
    payload : Handle or None
        To the pickled new ones; None if the rank inherited them.
    streams : list of int
        Which of the new shared variables hold states of random streams.
    """

    def __init__(
        self, first_function: int, first_shared: int, payload: Handle | None, streams: list[int]
    ) -> None:
        self.first_function = first_function
        self.first_shared = first_shared
        self.payload = payload
        self.streams = streams

    def run(self, here):
        if self.payload is not None and not here.is_master:
            replicas, shareds = here.engine.loads(here.store.get(self.payload), here.shareds)
            # An earlier attempt, which failed on another rank, may have left some.
            here.functions[self.first_function :] = replicas
            here.shareds[self.first_shared :] = shareds
        if here.stream_index:
            for number in self.streams:
                here.engine.jump(here.shareds[number], here.stream_index)


def replicate(world: World) -> None:
    """Give the ranks what they do not have yet; start them if that has not been done."""
    world.check_usable()
    with world.defer_interrupt:
        _replicate(world)


def _replicate(world):
    here, registry = world.here, world.registry
    first_function, first_shared = registry.replicated_functions, registry.replicated_shareds
    replicas, shareds = registry.new_replicas(), registry.new_shareds()
    if world.started and not replicas:
        return
    payload = None
    if not world.started:
        world.start()
    elif world.size > 1:
        pickled = _pickle(world, replicas, shareds)
        payload = here.store.put(np.frombuffer(pickled, np.uint8))
        del pickled
    streams = {
        registry.numbers[shared]
        for replica in replicas
        for shared in here.engine.random_streams(replica.compiled)
    }
    new = sorted(number for number in streams if number >= first_shared)
    world.run(Replicate(first_function, first_shared, payload, new))
    if payload is not None:
        here.engine.after_replication()
        here.store.free(payload)
        here.store.trim()
    registry.mark_replicated(first_function + len(replicas), first_shared + len(shareds))


def _pickle(world, replicas, shareds):
    """Return the pickle of replicas and shared variables; None for replicas that have none."""
    engine = world.here.engine
    known = dict(world.registry.numbers)
    for shared in shareds:
        del known[shared]
    try:
        return engine.dumps((replicas, shareds), known)
    except MemoryError:
        raise
    except Exception:  # whatever an operation or a mode raises
        sent = [replica if _can_be_sent(world, replica, known) else None for replica in replicas]
        return engine.dumps((sent, shareds), known)


def _can_be_sent(world, replica, known):
    try:
        world.here.engine.dumps(replica, known)
    except Exception as error:
        world.registry.unsent[replica.number] = f"{type(error).__name__}: {error}"
        return False
    return True


def check_sent(world: World, function: Any) -> None:
    """Raise if the workers do not have a function, which then can run in the master alone."""
    unsent = world.registry.unsent
    if function.replica.number in unsent:
        remedy = "leave what it names out of the function"
        if world.workers_inherit:
            remedy = "make it before the first distribute(), or call restart(): workers then inherit it"
        raise TypeError(
            f"{function!r}: it cannot be sent to workers that are running already "
            f"({unsent[function.replica.number]}); {remedy}"
        )


def distribute() -> None:
    """Replicate all functions that are not yet replicated, with their shared variables.

    Each rank has one replica of a shared variable, however many functions use it; the values of a
    variable that the ranks already have are kept. Each rank gets independent random streams. It may be
    called again after more functions were made, and a call of a new function does it by itself.

    Raises
    ------
    NotForkedError
        Before ``fork()``.
    TypeError
        If a function cannot be sent to workers that are running already. The others are replicated.
    WorkerError
        If a worker cannot load a function.

    Examples
    --------
    >>> import numpy as np
    >>> import synkhronos as synk
    >>> import theano.tensor as T
    >>> synk.fork(2, use_gpu=False)
    2
    >>> x = T.dvector("x")
    >>> total = synk.function([x], (x.sum(), "sum"))
    >>> synk.distribute()
    >>> total(np.arange(4.0))
    array(6.)
    >>> synk.close()
    """
    world = current_world()
    first = world.registry.replicated_functions
    replicate(world)
    for function in world.registry.functions[first:]:
        check_sent(world, function)
