"""The steps of an evaluation that Numba compiles: signals between the ranks, and the master's choice.

Everything is at addresses, in words of 8 bytes. The *board* is shared memory: the number of the last
evaluation, and a line for each rank, in which it notes the last evaluation that it has finished. The
*record* of a sum is the master's own. A *table* says where a part of the rows, the parameters and the
outputs are. No Python is entered: a wait that lasts long returns `LATE`, and the caller looks why.
"""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

#: What `evaluate`, `serve` and waits return
DONE, OFF, LATE, FAILED, SAY, LEFT, CROWDED, SLEPT = range(8)

#: Words of the board: the number of the last evaluation, and its sum; `NONE` if the ranks have to leave
NUMBER, SUM = 0, 8
NONE = -1
#: The bytes of the board before the lines, and those of a line
LINE = 128
#: Words of a line: the evaluation that was finished last, its code, whether the rank sleeps,
#: whether it has left the loop, and its core
FINISHED, CODE, SLEEPS, GONE, CORE = range(0, 40, 8)
SEMAPHORE = 64

#: Words of a record. The first ones belong to all sums of a process.
(
    BOARD, SIZE, RANK, POLLS, HALVINGS, WAITING, SINCE, STARTED,
) = range(0, 64, 8)  # fmt: skip
MUTEX = 128
COMMON_BYTES = 256
(
    IS_ON, COMMON, INDEX, PART, TABLES, TABLE_BYTES, N_TABLES, PARAMETERS, N_BYTES, OUTPUTS, N_OUTPUTS,
    SHAPES, CHOICE, COUNT, TOTAL, WITH_RANKS, ALONE, UNTIL, SPAN, SAID, BUSY, STRIDE,
) = range(0, 176, 8)  # fmt: skip
RECORD_BYTES = 192

#: Words of a table, before the addresses of the rows
T_PARAMETERS, T_OUTPUTS, T_START, T_STOP, T_SLICES, T_ROWS = range(6)

#: Values of CHOICE
TRY_RANKS, TRY_ALONE, USE_RANKS, USE_ALONE, ONLY_ALONE = range(5)

_LATE = 200_000_000  # nanoseconds until Python looks whether the other ranks live
_SHORTEST, _LONGEST = 1_000_000, 40_000_000  # nanoseconds of polling; see `transports.waiting`
_MOST_HALVINGS = 6
#: Polls between two readings of the clock. There is no PAUSE: it may leave a virtual machine.
_POLLS = 1 << 14
_BLOCK, _BLOCK_TIME = 8, 1_000_000  # evaluations and nanoseconds that are compared
_USED_FOR, _USED_MOST = 50, 10_000_000_000  # times what the trial took, and nanoseconds
_TURN = 2_000_000  # nanoseconds after which a thread lets others evaluate

_word = ir.IntType(64)
_int, _long = types.int32, types.int64
_sched_yield = types.ExternalFunction("sched_yield", _int())
_usleep = types.ExternalFunction("usleep", _int(types.uint32))
_core = types.ExternalFunction("sched_getcpu", _int())
_sem_post = types.ExternalFunction("sem_post", _int(_long))
_sem_timedwait = types.ExternalFunction("sem_timedwait", _int(_long, _long))
_try_lock = types.ExternalFunction("pthread_mutex_trylock", _int(_long))
_timed_lock = types.ExternalFunction("pthread_mutex_timedlock", _int(_long, _long))
_memcpy = types.ExternalFunction("memcpy", _long(_long, _long, _long))
_memcmp = types.ExternalFunction("memcmp", _int(_long, _long, _long))
_unlock = types.ExternalFunction("pthread_mutex_unlock", _int(_long))


def _kept(compiler: Any) -> Any:
    """Have Numba compile a function, and keep the code for other processes, if it may write anywhere."""

    def compiled(function: Any) -> Any:
        try:
            return compiler(cache=True)(function)
        except RuntimeError:
            return compiler()(function)

    return compiled


_compiled = _kept(functools.partial(numba.njit, nogil=True))


@intrinsic
def pointer(context, address):  # type: ignore[no-untyped-def]
    """Return an address as a pointer, for ``numba.carray``."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@intrinsic
def load(context, address):  # type: ignore[no-untyped-def]
    """Return the word at an address, with all that its writer has written before."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        place = builder.inttoptr(arguments[0], _word.as_pointer())
        return builder.load_atomic(place, "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def store(context, address, value):  # type: ignore[no-untyped-def]
    """Write a word, after all that was written before."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        place = builder.inttoptr(arguments[0], _word.as_pointer())
        builder.store_atomic(arguments[1], place, "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def add(context, address, value):  # type: ignore[no-untyped-def]
    """Add to a word, and return what it was."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        place = builder.inttoptr(arguments[0], _word.as_pointer())
        return builder.atomic_rmw("add", place, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def call(context, function, words):  # type: ignore[no-untyped-def]
    """Call a function by its address, with a tuple of words."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        given = cgutils.unpack_tuple(builder, arguments[1], len(words))
        kind = ir.FunctionType(_word, [_word] * len(given))
        return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), given)

    return types.int64(types.int64, words), generate


@intrinsic
def _read_clock(context, kind, extra):  # type: ignore[no-untyped-def]
    """Return the nanoseconds of a clock, plus others."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        place = cgutils.alloca_once(builder, _word, size=2)
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.IntType(32), [ir.IntType(32), _word.as_pointer()]),
            "clock_gettime",
        )
        builder.call(function, [arguments[0], place])
        seconds = builder.load(place)
        rest = builder.load(builder.gep(place, [ir.IntType(32)(1)]))
        found = builder.add(builder.mul(seconds, _word(1_000_000_000)), rest)
        return builder.add(found, arguments[1])

    return types.int64(types.int32, types.int64), generate


@_compiled
def now():  # type: ignore[no-untyped-def]
    """Return the nanoseconds of a clock that is never set."""
    return _read_clock(np.int32(1), 0)


@_compiled
def _deadline():  # type: ignore[no-untyped-def]
    """Return when it will be late, as the functions of POSIX want it."""
    found = _read_clock(np.int32(0), _LATE)
    when = np.empty(2, np.int64)
    when[0], when[1] = found // 1_000_000_000, found % 1_000_000_000
    return when


# Numba frees an array after its last use, and the use of its address does not count. So these functions
# have it as an argument.


@_compiled
def _lock_until(place, when):  # type: ignore[no-untyped-def]
    return _timed_lock(place, when.ctypes.data)


@_compiled
def _wait_until(place, when):  # type: ignore[no-untyped-def]
    return _sem_timedwait(place, when.ctypes.data)


@_compiled
def lock(common):  # type: ignore[no-untyped-def]
    """Take the ranks for this thread; return whether that took too long."""
    if _try_lock(common + MUTEX) == 0:
        return False
    add(common + WAITING, 1)
    failed = _lock_until(common + MUTEX, _deadline()) != 0
    add(common + WAITING, -1)
    if not failed:
        store(common + SINCE, now())
    return failed


@_compiled
def unlock(common):  # type: ignore[no-untyped-def]
    """Give the ranks back, and let another thread that has waited for long have them."""
    _unlock(common + MUTEX)
    if load(common + WAITING) and now() - load(common + SINCE) > _TURN:
        store(common + SINCE, now())
        _usleep(np.uint32(100))


@_compiled
def _patience(halvings, worked):  # type: ignore[no-untyped-def]
    return min(max(worked // 4, _SHORTEST), _LONGEST) >> halvings


@_compiled
def _wait_for_change(place, old, line, halvings, polls, worked):  # type: ignore[no-untyped-def]
    """Wait until a word is no longer the old one: poll, and then sleep; see `transports.waiting`.

    Parameters
    ----------
    place, line, halvings : int
        The addresses of the word, of the line of this rank, and of the word in which it keeps how long
        to poll.
    polls : int
        Whether to poll at all.
    worked : int
        The nanoseconds of work before.

    Returns
    -------
    int
        `DONE`, `SLEPT` if it was not polling any more, or `LATE`.
    """
    polled, began, until, slept = 0, np.int64(0), np.int64(0), False
    while load(place) == old:
        polled += 1
        if polled % _POLLS:
            continue
        time = now()
        if not began:
            began, until = time, time + polls * _patience(load(halvings), worked)
        if time - began > _LATE:
            return LATE
        if time < until:
            _sched_yield()
            continue
        slept = True
        store(line + SLEEPS, 1)
        if load(place) == old:
            _wait_until(line + SEMAPHORE, _deadline())
        store(line + SLEEPS, 0)
    if slept and now() - began > _patience(0, worked):
        store(halvings, min(load(halvings) + 1, _MOST_HALVINGS))
    elif began:
        store(halvings, 0)
    return SLEPT if slept else DONE


@_compiled
def wait_for_ranks(common, worked):  # type: ignore[no-untyped-def]
    """Wait until the others have finished the last evaluation; return whether that took too long."""
    board, size, own = load(common + BOARD), load(common + SIZE), load(common + RANK)
    before, line = load(board + NUMBER) - 1, board + LINE * (1 + own)
    for rank in range(size):
        place, polls = board + LINE * (1 + rank) + FINISHED, load(common + POLLS)
        if rank != own:
            if _wait_for_change(place, before, line, common + HALVINGS, polls, worked) == LATE:
                return True
    return False


@_compiled
def wake(board, size, own):  # type: ignore[no-untyped-def]
    """Wake the other ranks that sleep."""
    for rank in range(size):
        line = board + LINE * (1 + rank)
        if rank != own and load(line + SLEEPS):
            _sem_post(line + SEMAPHORE)


def _serve(board, size, own, master, polls, parts, tables, halvings):  # type: ignore[no-untyped-def]
    """Compute this rank's part in evaluations; return `LEFT` when told to, or `LATE` when idle.

    It returns `CROWDED` if it was woken on the core of the master, which it has to leave.

    ``halvings`` is the address of a word in which it keeps how long to poll.
    """
    line, boss = board + LINE * (1 + own), board + LINE * (1 + master)
    worked = np.int64(0)
    while True:
        seen = load(line + FINISHED)
        how = _wait_for_change(board + NUMBER, seen, line, halvings, polls, worked)
        number = load(board + SUM)
        if number == NONE:
            return LEFT
        if how == LATE or how == SLEPT and polls and _core() == load(boss + CORE):
            return LATE if how == LATE else CROWDED
        seen, began = load(board + NUMBER), now()
        store(line + CODE, call(load(parts + 8 * number), (load(tables + 8 * number),)))
        worked = now() - began
        store(line + FINISHED, seen)
        if load(boss + SLEEPS):
            _sem_post(boss + SEMAPHORE)


@_compiled
def add_to(total, part, number):  # type: ignore[no-untyped-def]
    """Add a part to a total, or begin with it if its number is 0."""
    for index in range(total.size):
        total[index] = total[index] + part[index] if number else part[index]


@_compiled
def _with_ranks(record, parameters, result):  # type: ignore[no-untyped-def]
    """Evaluate with all ranks; the caller has them."""
    common = load(record + COMMON)
    board, size, own = load(common + BOARD), load(common + SIZE), load(common + RANK)
    state, n_bytes = load(record + PARAMETERS), load(record + N_BYTES)
    number, started = load(record + INDEX), load(common + STARTED)
    worked = np.int64(0)
    if started and wait_for_ranks(common, worked):
        return LATE
    # An evaluation that was late may be repeated, and has its outputs then.
    if started != number + 1 or _memcmp(state, parameters, n_bytes):
        store(common + STARTED, 0)
        _memcpy(state, parameters, n_bytes)
        store(board + LINE * (1 + own) + CORE, _core())
        store(board + SUM, number)
        add(board + NUMBER, 1)
        wake(board, size, own)
        began = now()
        table = load(record + TABLES) + own * load(record + TABLE_BYTES)
        code = call(load(record + PART), (table,))
        worked = now() - began
        store(board + LINE * (1 + own) + CODE, code)
        store(common + STARTED, number + 1)
        if wait_for_ranks(common, worked):
            return LATE
    store(common + STARTED, 0)
    n_outputs, outputs = load(record + N_OUTPUTS), load(record + OUTPUTS)
    total = numba.carray(pointer(result), n_outputs, np.float64)
    for rank in range(size):
        if load(board + LINE * (1 + rank) + CODE):
            return FAILED
        part = outputs + rank * load(record + STRIDE)
        add_to(total, numba.carray(pointer(part), n_outputs, np.float64), rank)
    return DONE


@_compiled
def _alone(record, parameters, result):  # type: ignore[no-untyped-def]
    """Evaluate in this thread: all rows, or the parts of the ranks one after another."""
    n_outputs, n_tables = load(record + N_OUTPUTS), load(record + N_TABLES)
    n_words = load(record + TABLE_BYTES) // 8
    table = np.empty(n_words, np.int64)
    total = numba.carray(pointer(result), n_outputs, np.float64)
    part = np.empty(n_outputs if n_tables > 1 else 0)
    for number in range(n_tables):
        place = load(record + TABLES) + (n_tables > 1) * number * 8 * n_words
        if n_tables == 1:  # the last one has all rows
            place += load(load(record + COMMON) + SIZE) * 8 * n_words
        _memcpy(table.ctypes.data, place, 8 * n_words)
        table[T_PARAMETERS] = parameters
        table[T_OUTPUTS] = part.ctypes.data if number else result
        if call(load(record + PART), (table.ctypes.data,)):
            return FAILED
        if number:
            add_to(total, part, number)
    return DONE


@_compiled
def _choose(record, took):  # type: ignore[no-untyped-def]
    """Note how long an evaluation has taken, and choose between the ranks and this process alone."""
    choice = load(record + CHOICE)
    if choice == ONLY_ALONE:
        return
    alone = choice == TRY_ALONE or choice == USE_ALONE
    count, total = load(record + COUNT) + 1, load(record + TOTAL) + took
    store(record + COUNT, count)
    store(record + TOTAL, total)
    mean, other = total // count, load(record + (WITH_RANKS if alone else ALONE))
    lost = other and count >= 3 and mean > 3 * other
    if (count < _BLOCK or total < _BLOCK_TIME) and not lost:
        return
    store(record + COUNT, 0)
    store(record + TOTAL, 0)
    store(record + (ALONE if alone else WITH_RANKS), mean)
    if choice == USE_RANKS or choice == USE_ALONE:
        if now() > load(record + UNTIL) or 2 * mean > 3 * other:
            store(record + CHOICE, TRY_RANKS if alone else TRY_ALONE)
    elif not other:
        store(record + CHOICE, TRY_RANKS if alone else TRY_ALONE)
    else:
        use = USE_ALONE if load(record + ALONE) <= load(record + WITH_RANKS) else USE_RANKS
        changes = alone == (use == USE_ALONE)  # to what was tried
        span = _USED_FOR * total if changes else max(2 * load(record + SPAN), _USED_FOR * total)
        store(record + SPAN, min(span, _USED_MOST))
        store(record + UNTIL, now() + min(span, _USED_MOST))
        store(record + CHOICE, use)
        if use == USE_ALONE and not load(record + SAID):
            store(record + SAID, 1)


@_compiled
def _fits(record, n_bytes, n_outputs):  # type: ignore[no-untyped-def]
    """Whether another thread has not changed the record meanwhile."""
    fits = n_bytes == load(record + N_BYTES) and n_outputs == load(record + N_OUTPUTS)
    return load(record + IS_ON) and fits


def _evaluate(record, parameters, n_bytes, result, n_outputs):  # type: ignore[no-untyped-def]
    """Evaluate a sum, and return a code.

    Parameters
    ----------
    record, parameters, result : int
        The addresses of its record, of the parameters and of the outputs.
    n_bytes, n_outputs : int
        The size of the parameters, and the number of the outputs, in float64.
    """
    if not load(record + IS_ON):
        return OFF
    common = load(record + COMMON)
    if load(record + SAID) == 1:
        store(record + SAID, 2)
        return SAY
    choice, began = load(record + CHOICE), now()
    if choice == TRY_ALONE or choice == USE_ALONE or choice == ONLY_ALONE:
        add(record + BUSY, 1)
        code = OFF
        if _fits(record, n_bytes, n_outputs):
            code = _alone(record, parameters, result)
        add(record + BUSY, -1)
        if code == DONE and choice != ONLY_ALONE and _try_lock(common + MUTEX) == 0:
            _choose(record, now() - began)
            _unlock(common + MUTEX)
        return code
    if lock(common):
        return LATE
    code = OFF
    if _fits(record, n_bytes, n_outputs):
        code = _with_ranks(record, parameters, result)
        if code == DONE:
            _choose(record, now() - began)
        else:
            store(record + TOTAL, load(record + TOTAL) + now() - began)
    unlock(common)
    return code


@functools.lru_cache(maxsize=None)
def function(name):  # type: ignore[no-untyped-def]
    """Return ``"evaluate"`` or ``"serve"``, compiled, which lets other threads run Python."""
    source, n_arguments = {"evaluate": (_evaluate, 5), "serve": (_serve, 8)}[name]
    kind = types.int64(*[types.int64] * n_arguments)
    return _kept(functools.partial(numba.cfunc, kind))(source)


@_compiled
def put(place, array):  # type: ignore[no-untyped-def]
    """Write an array to an address, in whole words, and return the address after it."""
    target = numba.carray(pointer(place), array.size, array.dtype)
    index = 0
    for item in array.flat:
        target[index] = item
        index += 1
    return place + (array.size * array.itemsize + 7) // 8 * 8


@_compiled
def taken(outputs, start, like):  # type: ignore[no-untyped-def]
    """Return some outputs in the shape of an array."""
    found = np.empty(like.shape, like.dtype)
    for index in range(found.size):
        found.flat[index] = outputs[start + index]
    return found


@_compiled
def call_evaluate(function, record, parameters, outputs):  # type: ignore[no-untyped-def]
    """Call ``evaluate``, with arrays for parameters and outputs."""
    places = parameters.ctypes.data, outputs.ctypes.data
    return call(function, (record, places[0], 8 * parameters.size, places[1], outputs.size))
