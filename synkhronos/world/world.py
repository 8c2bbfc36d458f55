"""The world: the master and its workers, the barriers around their commands, and failures.

There is one world at a time. It is the only mutable global of the package.
"""

from __future__ import annotations

import functools
import gc
import os
import signal
import tempfile
import threading
import warnings
from threading import get_ident
from typing import Any, Callable, NamedTuple, Sequence, TypeVar

from synkhronos._errors import (
    BUSY,
    IN_PROGRAM,
    REMEDY,
    ClosedError,
    CollectiveAbortedError,
    NotForkedError,
    SynkhronosError,
    WorldBrokenError,
)
from synkhronos._typing import Finish
from synkhronos.engines.base import Engine
from synkhronos.host import heap
from synkhronos.host.signals import DeferredSignal, DeferredSignals
from synkhronos.transports.base import Transport
from synkhronos.transports.fork_locks import warn_of_threads
from synkhronos.world.call_lock import CallLock
from synkhronos.world.rank_state import Ask, Command, FusedCommand, RankState, results_of
from synkhronos.world.registry import Registry, drop
from synkhronos.world.threads import ThreadLimits

#: The calls that are verified: the first; all; none; the first, with an error in place of a warning.
FIRST, ALWAYS, OFF, RAISE = MODES = ("first", "always", "off", "raise")


class Options(NamedTuple):
    """The options of a world.

    Attributes
    ----------
    profile_workers : bool
        Whether each worker writes a cProfile file.
    audits : bool
        Whether every call compares the replicas of shared variables.
    verify : str
        Which calls are compared with one rank: one of `MODES`.
    waits : bool
        Whether a call waits during a call of another thread; otherwise it is refused.
    pass_fds : sequence of int
        The file descriptors that workers inherit in any case.
    """

    profile_workers: bool = False
    audits: bool = False
    verify: str = FIRST
    waits: bool = False
    pass_fds: Sequence[int] = ()


_CLOSING = 2.0  # seconds for a worker to end by itself

_Callable = TypeVar("_Callable", bound=Callable[..., Any])
_Part = TypeVar("_Part")
_DEFAULTS = Options()

_current: World | None = None


class World:
    """The ranks of one ``fork()``, as the master sees them.

    Parameters
    ----------
    transport : Transport
        Connects the ranks.
    engine : Engine
        The master's engine.
    threads : ThreadLimits
        The thread limits of the script's process.
    options : Options
        The arguments of ``fork()``.

    Attributes
    ----------
    rank_state : RankState
        The master's own state.
    transport, size, master_rank
        As of this state.
    registry : Registry
        The functions and shared variables.
    started, closed : bool
        Whether the workers have been started, and whether the world has been closed.
    broken : str or None
        Why no command can run any more.
    call_lock : CallLock
        Whose call it is.
    in_program : bool
        Whether this rank is inside a program of `spmd`.
    defer_interrupt : DeferredSignal
        Defers Ctrl-C.
    recorder : object or None
        Inside `fuse`, `submit` calls ``recorder.add(command, finish, used)``, until `is_recording` finds
        that ``recorder.is_over()``. Its `observers` are called with the commands before these are run.
    step_hooks : Hooks or None
        The functions that are told of steps, once there was one.
    remarks : list of callable
        Each issues a warning. They are called when the world is closed.
    before_command, after_command : callable or None
        Called before the next command, or call of a function, and after each command.
    """

    before_command: Callable[[], None] | None = None
    after_command: Callable[[], None] | None = None

    def __init__(
        self,
        transport: Transport,
        engine: Engine,
        threads: ThreadLimits,
        options: Options = _DEFAULTS,
    ) -> None:
        self.registry = Registry()
        self.closed = self.in_program = False
        self.options = options
        self.remarks: list[Callable[[], None]] = []
        self.step_hooks: Any = None
        self.defer_interrupt = DeferredSignal(signal.SIGINT)
        self._threads = threads
        self.call_lock = CallLock(options.waits, self.check_usable)
        self._parts: dict[type, Any] = {}
        self.recorder: Any = None
        self._leave: Callable[[], None] | None = None  # ends the command in which the workers stay
        self._connect(transport, engine)

    def _connect(self, transport: Transport, engine: Engine) -> None:
        self.transport = transport
        self.size, self.master_rank = transport.size, transport.master_rank
        self.rank_state = self._make_rank_state(transport, engine)
        # Most engines have nothing to do in another thread.
        has_threads = type(engine).enter_thread is not Engine.enter_thread
        self._enter_thread = engine.enter_thread if has_threads else None
        self.registry.forget_workers()
        self.registry.attach(self.rank_state)
        for function in list(self.registry.functions.values()):
            self.show_name(function)
        self._threads.limit(transport.ranks_here)
        self.started = False
        self.broken: str | None = None

    def _make_rank_state(self, transport: Transport, engine: Engine) -> RankState:
        return RankState(transport, engine)

    def show_name(self, function: Any) -> None:
        """Write the name of a function where other processes can read it."""
        name = f"function {os.path.basename(function.name or '')}"
        self.rank_state.show_name(function.replica.number, name)

    @property
    def workers_inherit(self) -> bool:
        """Whether workers inherit the functions of the master; their start is then deferred."""
        return self.transport.inherits and self.rank_state.engine.survives_fork

    def part(self, kind: type[_Part]) -> _Part:
        """Return this world's only object of a class, which is created on first use.

        If the object has a method ``close``, it is called when the world is closed; if it has a method
        ``renew``, that is called when the workers have been replaced; a method ``forget`` is called with
        the numbers of functions and shared variables that were dropped.
        """
        part = self._parts.get(kind)
        # Another thread may create a part at the same time.
        return self._parts.setdefault(kind, kind()) if part is None else part

    def _tell_parts(self, event: str, *details: Any) -> None:
        for part in list(self._parts.values()):
            if hasattr(part, event):
                getattr(part, event)(*details)

    # Workers

    def start(self) -> None:
        """Start the workers, unless they have been started."""
        if self.started:
            return
        with DeferredSignals():
            if self.size > 1:
                self.rank_state.engine.before_fork(self.transport.forks_all)
                warn_of_threads()
                heap.trim()  # workers need not inherit freed memory
                try:
                    announce = self.defer_interrupt.announce
                    self.transport.start(self.work, announce, self.options.pass_fds)
                except WorldBrokenError as broken:
                    self.broken = str(broken)
                    raise
            self.started = True

    def work(self, transport: Transport) -> None:
        """Run as a worker, until the master ends the world."""
        forked = transport is self.transport  # a copy of the master's
        state = self.rank_state if forked else self._make_rank_state(transport, self.rank_state.engine)
        if forked:
            self.broken = "this process is a worker, and only the master may use the workers"
        state.keep_replicas()
        work(state, self._threads, self.options.profile_workers)

    def renew(self, size: int, master_rank: int) -> None:
        """End the workers and continue with new workers, which will inherit the state of the master."""
        with DeferredSignals(), self.call_lock:
            former, usable = self.rank_state, self.broken is None
            self.broken = f"a restart has begun, but has not ended; {REMEDY}"
            self._end_workers(usable)
            self.registry.collect()  # new workers need not inherit dropped objects
            self._tell_parts("forget", list(self.registry.dropped))
            self.rank_state.copy_out_of_store()
            former.keep_progress(is_over=True)
            self._connect(former.transport.successor(size, master_rank), former.engine)
            self.rank_state.store.trim_others()
            self._tell_parts("renew")

    def _end_workers(self, usable: bool) -> None:
        leave, self._leave = self._leave, None
        try:
            if leave is not None:
                leave()
            if self.started and self.size > 1 and usable:
                self.transport.post(b"")
        finally:
            self.transport.close(_CLOSING)

    # Commands

    def check_usable(self) -> None:
        """Raise if this world cannot run commands."""
        if self.in_program:
            raise SynkhronosError(IN_PROGRAM)
        if self.closed:
            raise ClosedError("these processes were closed; call synk.fork() to start new ones")
        if self.broken is not None:
            if self.transport.is_worker_process():  # in an operation of the command that is running
                raise SynkhronosError(BUSY)
            raise WorldBrokenError(self.broken)

    @property
    def is_recording(self) -> bool:
        """Whether commands are recorded, inside a `fuse` block, instead of run."""
        if self.recorder is not None and self.recorder.is_over():
            self.recorder.leave()
        return self.recorder is not None

    def submit(self, command: Command, finish: Finish, used: Any = None) -> Any:
        """Run a command and return ``finish(results by rank)``; inside ``fuse()``, record it.

        `used` holds the objects that have to exist until the command has run.
        """
        if not self.is_recording:
            return finish(self.run(command))
        return self.recorder.add(command, finish, used)

    def run(self, command: Command) -> list:
        """Run the command on every rank; return the list of the return values by rank.

        Ctrl-C is deferred until every rank has finished; a second Ctrl-C is not.

        Raises
        ------
        WorkerError
            If a worker raised an exception.
        WorldBrokenError
            If a worker died.
        Exception
            Any exception that the command raised in the master.
        """
        # The state has no local name: tracebacks would keep it, and its memory, after a restart.
        if self.broken is not None or self.in_program or self.closed:
            self.check_usable()
        if self._enter_thread is not None:
            self._enter_thread()
        if self.rank_state.size == 1:
            return self._drop_and_run(command, lambda command: [command.run(self.rank_state)])
        if self.before_command is not None:
            self.before_command()
        with self.defer_interrupt:
            if self.call_lock.thread != get_ident():
                with self.call_lock:
                    return self._drop_and_run(command, self._run)
            if self.registry.has_dropped:
                return self._drop_and_run(command, self._run)
            return self._run(command)

    def _drop_and_run(self, command: Command, run: Callable[[Command], list]) -> list:
        """Return ``run(command)``; before it, all ranks drop the objects that the script has dropped."""
        registry = self.registry
        if registry.dropped:
            registry.collect()  # which drops more
        numbers, schedules = list(registry.dropped), list(registry.dropped_schedules)
        if numbers:
            self._tell_parts("forget", numbers)
        known = [number for number in numbers if number < registry.replicated]
        if known or schedules:
            results = [own for _, own in run(FusedCommand([Ask(drop, known, schedules), command]))]
        else:
            results = run(command)
        del registry.dropped[: len(numbers)], registry.dropped_schedules[: len(schedules)]
        registry.has_dropped = False
        if registry.dropped:  # meanwhile
            registry.has_dropped = True
        return results

    def stay(self, command: Command, leave: Callable[[], None]) -> None:
        """Have the workers, but not the master, run a command that lasts until the next one.

        Parameters
        ----------
        command : Command
            Each worker replies to it when it has left it; its results are not used.
        leave : callable
            Has the workers leave it. It is called once, by the next command or by the end of the world.
        """
        self.check_usable()
        with self.defer_interrupt, self.call_lock:
            try:
                self._end_stay()
                self.transport.post(command.packed(), command.needs)
                self._leave = leave
            except BaseException as raised:
                self._break(raised)
                raise

    def _end_stay(self) -> None:
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()
            self.transport.collect()

    def check_waiting(self, waited: float) -> None:
        """Raise if it is useless to wait for workers that stay in a command, after these seconds."""
        self.check_usable()
        try:
            self.transport.check_waiting(waited)
        except WorldBrokenError as broken:
            self._break(broken)
            raise

    def _run(self, command: Command) -> list:
        payload = command.packed()
        transport, own, error = self.rank_state.transport, None, None
        try:
            if self._leave is not None:
                self._end_stay()
            transport.post(payload, command.needs)
            try:
                own = command.run(self.rank_state)
            except (WorldBrokenError, SystemExit, KeyboardInterrupt):
                raise
            except BaseException as raised:
                error = raised
                if not isinstance(raised, CollectiveAbortedError):
                    transport.abort()
            replies = transport.collect()
        except BaseException as raised:
            self._break(raised)
            raise
        results = results_of(replies, own, error)
        for schedule in command.schedules:
            schedule.is_sent = True
        if self.after_command is not None:
            self.after_command()
        return results

    def _break(self, error: BaseException) -> None:
        """End the workers after an exception between the barriers, unless no worker has noticed."""
        if isinstance(error, WorldBrokenError):
            self.broken = str(error)
            self.transport.kill()
        elif self.transport.posted or not isinstance(error, MemoryError):
            # The ranks may no longer be in step.
            self.broken = f"a command was interrupted; the workers were ended; {REMEDY}"
            self.transport.kill()

    # Closing

    def close(self) -> None:
        """End the workers and free all resources of this world."""
        if self.closed:
            return
        if self.transport.is_worker_process():
            raise SynkhronosError(
                f"close(): this process is rank {self.rank_state.rank}, a worker; only the master "
                f"can close"
            )
        with DeferredSignals():
            alone, usable = self.call_lock.take_within(0), self.broken is None
            self.broken = "close() has begun and not ended; if it was interrupted, call it again"
            try:
                if not alone:  # another thread is running a command, which must be ended
                    self.transport.kill()
                    alone, usable = self.call_lock.take_within(_CLOSING), False
                self._end_workers(usable)
            finally:
                try:
                    self.free()
                    if alone:  # otherwise a call that was interrupted may continue
                        self.transport.release()
                finally:
                    self.call_lock.give_back()
        self.defer_interrupt.remove()  # after the block, which has handlers of its own

    def free(self) -> None:
        """Free the resources of this process, when the workers have ended."""
        self._tell_parts("close")
        self.registry.outdate_schedules()
        self.rank_state.copy_out_of_store()
        self.rank_state.comm = None  # type: ignore[assignment]  # it keeps arrays alive
        self.rank_state.keep_progress(is_over=True)
        self.rank_state.store.trim()
        self.rank_state.store.trim_others()
        self.rank_state.store.close()
        self._threads.restore()
        self.closed = True


def current_world() -> World:
    """Return the current world, or raise if there is none or it is closed."""
    if _current is None:
        raise NotForkedError("no processes yet: call synk.fork() first")
    if _current.closed:
        raise ClosedError("the processes were closed: call synk.fork() again first")
    return _current


def world_exists() -> bool:
    """Whether there is an open world."""
    return _current is not None and not _current.closed


def enter_world(world: World) -> None:
    """Make this the current world."""
    global _current
    _current = world


def with_call_lock(function: _Callable) -> _Callable:
    """Decorate a public function: the call lock of the current world is held for the whole call."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        world = _current
        if world is None or world.closed:
            world = current_world()  # which says why there is none
        with world.call_lock:
            return function(*args, **kwargs)

    return call  # type: ignore[return-value]  # it has the function's signature


def _refuse_in_child() -> None:
    """In a process that the script forks: it has copies of the objects, but must not use the workers."""
    if _current is not None and not _current.closed:
        _current.transport.is_copy = True
        _current.broken = (
            "this process was forked from the master, and only the master may use the workers; the "
            "world is not broken: compute in the master, or call close() and then fork() for workers "
            "of this process"
        )


os.register_at_fork(after_in_child=_refuse_in_child)


# The loop of a worker


def work(state: RankState, threads: ThreadLimits, profile: bool = False) -> None:
    """Run the master's commands until it sends an empty command.

    Parameters
    ----------
    state : RankState
        This worker's state.
    threads : ThreadLimits
        The thread limits of this process.
    profile : bool
        Whether to write a cProfile file at the end.
    """
    if not profile:
        return _run_commands(state, threads)
    import cProfile

    profiler = cProfile.Profile()
    try:
        profiler.runcall(_run_commands, state, threads)
    finally:
        _write_profile(profiler, f"synk_worker_{state.rank}.prof")


def _run_commands(state: RankState, threads: ThreadLimits) -> None:
    threads.limit(state.transport.ranks_here)
    if threading.current_thread() is threading.main_thread():  # this process is the rank's own
        gc.freeze()  # garbage collection then neither scans nor copies the master's objects
    while True:
        payload = state.transport.receive(state.warm_caches)
        if payload == b"":
            return
        reply = state.execute(payload)
        try:
            state.transport.reply(reply)
        except MemoryError as error:  # no room for the reply
            if state.transport.posted:
                raise
            state.transport.reply(state.failure(error))
        state.store.collect()  # a rank that does not allocate would never do it otherwise


def _write_profile(profiler: Any, name: str) -> None:
    """Replace a file of this name; never write through it if it is a link or a pipe."""
    try:
        with tempfile.TemporaryDirectory(prefix=f"{name}.", dir=os.curdir) as folder:
            unfinished = os.path.join(folder, name)
            profiler.dump_stats(unfinished)
            os.chmod(unfinished, 0o600)
            os.replace(unfinished, name)
    except OSError as error:
        warnings.warn(f"profile_workers: {name} was not written: {error}", RuntimeWarning, stacklevel=2)
