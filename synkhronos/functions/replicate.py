"""`distribute`: replicate functions and their shared variables on every rank.

If workers inherit the state of the master, the first call forks them. They then have the compiled
functions, and share the memory of the variables' values until it is written to. Functions that are
built later are sent as one pickle, in which a shared variable that the ranks already have is replaced
by its number.
"""

from __future__ import annotations

import contextlib
import pickle
from typing import Any, Iterator, Mapping

import numpy as np

from synkhronos._errors import SynkhronosError, WorldBrokenError
from synkhronos._typing import Buffer, SharedVariable
from synkhronos.functions.replica import Replica
from synkhronos.functions.replica_tracker import replica_tracker_of
from synkhronos.host import heap
from synkhronos.host.handler_errors import reraise_if_handlers
from synkhronos.host.log import logger
from synkhronos.host.progress import Progress
from synkhronos.stores.handle import Handle
from synkhronos.world import generators
from synkhronos.world.rank_state import Ask, RankState
from synkhronos.world.world import World, current_world, with_call_lock


def load_functions(
    state: RankState, payload: Handle | None, streams: list[int], fingerprints: tuple[int, int] | None
) -> None:
    """Load new functions and shared variables, and give this rank its own random streams.

    Parameters
    ----------
    payload : Handle or None
        A handle to the pickled functions and variables; None if the rank inherited them.
    streams : list of int
        The new shared variables that hold states of random streams.
    fingerprints : tuple or None
        In new workers, determines the states of Python's and NumPy's own generators.
    """
    if payload is not None and not state.is_master:
        replicas, shareds = state.engine.loads(state.store.get(payload), state.shareds)
        state.functions.update((replica.number, replica) for replica in replicas)
        state.shareds.update(shareds)
        heap.trim()
    if state.stream_index:
        for number in streams:
            state.engine.jump(state.shareds[number], state.stream_index)
    if fingerprints is not None:
        generators.seed_worker(state, fingerprints)


def replicate(world: World) -> None:
    """Replicate all new functions and variables; start the workers first if necessary."""
    world.check_usable()
    if world.registry.may_have_new or not world.started:
        with world.defer_interrupt:
            _replicate(world)


def _replicate(world: World) -> None:
    state, registry = world.rank_state, world.registry
    functions, shareds = registry.new_functions(), registry.new_shareds()
    if world.started and not functions and not shareds:
        return
    replicas = [function.replica for function in functions]
    streams = {
        registry.numbers[shared]
        for replica in replicas
        for shared in state.engine.random_streams(replica.compiled)
    }
    new = sorted(streams & shareds.keys())
    if world.started and world.size > 1:
        with world.part(Progress).show(
            f"sending {len(replicas)} function(s) to {world.size - 1} worker(s)"
        ):
            _send(world, replicas, shareds, new)
    else:
        world.start()
        _load(world, None, new)
    logger.info("replicated %d function(s), %d shared variable(s)", len(replicas), len(shareds))
    registry.mark_replicated([*shareds, *(replica.number for replica in replicas)])
    if world.size > 1:
        replica_tracker_of(world).begin(world, shareds)


def _load(world: World, payload: Handle | None, streams: list[int]) -> None:
    fingerprints = None if world.registry.replicated else generators.fingerprints()
    handles = [] if payload is None else [payload]
    world.run(Ask(load_functions, payload, streams, fingerprints, handles=handles))


def _send(
    world: World, replicas: list[Replica], shareds: Mapping[int, SharedVariable], streams: list[int]
) -> None:
    """Send functions to workers that are running, without functions that cannot be sent."""
    known = dict(world.registry.numbers)
    for shared in shareds.values():
        del known[shared]
    registry = world.registry
    registry.is_sending = True
    try:
        _send_pickle(world, replicas, shareds, known, streams)
    except (MemoryError, WorldBrokenError):
        raise
    except Exception as error:  # of a worker, or any that an operation or a mode raises
        reraise_if_handlers(error)
        if not _find_unsent(world, replicas, known):
            raise
        sent = [replica for replica in replicas if replica.number not in registry.unsent]
        _send_pickle(world, sent, shareds, known, streams)
    finally:
        registry.is_sending = False
    world.rank_state.engine.after_replication()


def _send_pickle(
    world: World,
    replicas: list[Replica],
    shareds: Mapping[int, SharedVariable],
    known: Mapping[SharedVariable, int],
    streams: list[int],
) -> None:
    pickled = world.rank_state.engine.dumps((replicas, shareds), known)
    with _stored(world, pickled) as payload:
        del pickled
        heap.trim()  # of the pickle, which may be large
        _load(world, payload, streams)


@contextlib.contextmanager
def _stored(world: World, pickled: Buffer) -> Iterator[Handle]:
    """Yield a handle to a copy of a pickle in the store, whose memory is returned after the block."""
    store = world.rank_state.store
    payload = store.put(np.frombuffer(pickled, np.uint8))
    del pickled
    try:
        yield payload
    finally:
        store.free(payload)
        store.trim()


def _try_to_load(state: RankState, payload: Handle) -> str | None:
    """Load a pickle of a function and discard it; return why this rank cannot load it, or None."""
    if state.is_master:
        return None
    try:
        state.engine.loads(state.store.get(payload), state.shareds)
    except (MemoryError, EOFError, SynkhronosError, pickle.UnpicklingError):
        raise  # not the function's fault; it can be tried again
    except Exception as error:  # any exception that an operation or a mode raises
        return f"{type(error).__name__}: {error}"
    return None


def _find_unsent(world: World, replicas: list[Replica], known: Mapping[SharedVariable, int]) -> bool:
    """Find the functions that cannot be pickled, or loaded by a worker; return whether there are any."""
    unsent = world.registry.unsent
    for replica in replicas:
        try:
            pickled = world.rank_state.engine.dumps(replica, known)
        except MemoryError:
            raise
        except Exception as error:  # any exception that an operation or a mode raises
            reraise_if_handlers(error)
            unsent[replica.number] = f"{type(error).__name__}: {error}"
            continue
        with _stored(world, pickled) as payload:
            reasons = world.run(Ask(_try_to_load, payload, handles=[payload]))
        unsent.update((replica.number, reason) for reason in reasons if reason is not None)
    return any(replica.number in unsent for replica in replicas)


def check_sent(world: World, function: Any) -> None:
    """Raise if a function could not be sent to the workers."""
    unsent = world.registry.unsent
    if function.replica.number in unsent:
        remedy = "build it without the object that the message names"
        if world.workers_inherit:
            remedy = "build it before the first distribute(), or call restart(): workers then inherit it"
        raise TypeError(
            f"{function!r}: it cannot be sent to workers that are running already "
            f"({unsent[function.replica.number]}); {remedy}"
        )


@with_call_lock
def distribute() -> None:
    """Replicate all functions that are not yet replicated, with their shared variables.

    Each rank has one replica of a shared variable, no matter how many functions use it. Variables that
    the ranks already have keep their values. Each rank gets independent random streams. Call it again
    after you have built more functions; otherwise the first call of a new function replicates it.

    On the CPU, the first call starts the workers.

    Raises
    ------
    NotForkedError, ClosedError, WorldBrokenError
        If there are no processes that can be used.
    TypeError
        If a function cannot be sent to workers that are already running. All others are replicated.
    WorkerError
        If a worker raised an exception, for example because memory ran out.
    MemoryError, SynkhronosError
        If the system does not allow the workers to start, or refuses the memory that is needed. The
        message says which limit was reached, and what to do.

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
    functions = world.registry.new_functions()
    replicate(world)
    for function in functions:
        check_sent(world, function)
