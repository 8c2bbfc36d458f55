"""`Rank`: the methods that a program can use."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Iterator, Mapping, Sequence

import numpy as np

from synkhronos._checks import check_int, check_string
from synkhronos._errors import SynkhronosError
from synkhronos._typing import AnyArray, ArrayLike, Batch, DTypeLike, PathLike, Result, SharedVariables
from synkhronos.arithmetic.minibatches import make_minibatches, n_batches
from synkhronos.arithmetic.partition import share
from synkhronos.functions.function import Function
from synkhronos.host.progress import REMARK, Progress
from synkhronos.programs import own_call, saving
from synkhronos.programs.center import Center, ProgramLock
from synkhronos.programs.collectives import Collectives, RankGroup
from synkhronos.programs.stopping import ASKED, Run
from synkhronos.services.controller import ControllerChannel
from synkhronos.services.messages import Messages
from synkhronos.services.registers import CLOCKS, ENDED, RESTARTS, Reports
from synkhronos.services.stripes import RemoteStripes, StripeChannel, Stripes
from synkhronos.stores.named_memory import NamedMemory
from synkhronos.world.call_lock import takes_call_lock
from synkhronos.world.rank_state import RankState

_AWAKE = 0.1  # seconds between two checks of a rank that waits for a message

#: Why a program on several machines cannot use the named memory
NO_NAMED_MEMORY = (
    "ranks on several machines need a second task on each machine, which passes things on while they "
    "compute; start the script by 'synkhronos launch', or let mpirun or srun start two tasks or more on "
    "each machine"
)


class Rank(Collectives):
    """A rank inside a program of `spmd`. It is the program's first argument.

    Every method raises an error that ends the program if another rank has failed. After its program has
    ended, its methods raise ``RuntimeError``.

    Attributes
    ----------
    rank, size : int
        The number of this rank, from 0 to ``size - 1``, and the number of ranks.
    is_master : bool
        Whether this rank is the process of the script.
    master_rank : int
        The rank of the process of the script.
    device : str
        The name of the rank's device, such as ``"cpu"`` or ``"cuda0"``.
    may_meet : bool
        Whether the program may use collectives; False with ``on_death="continue"``.
    random : numpy.random.Generator
        Independent of the generators of the other ranks. It depends on the state of ``numpy.random`` in
        the script, so ``numpy.random.seed`` makes it reproducible.
    restarts : int
        How often this rank has died and was replaced in this program.
    """

    def __init__(
        self,
        state: RankState,
        run: Run,
        token: bytes,
        entropy: Sequence[int],
        has_controller: bool,
        may_meet: bool,
        waits: bool,
    ) -> None:
        super().__init__(state, run, may_meet, waits)
        named_memory = state.store.named_memory
        self._clocks, restarts, self._ended = (
            named_memory.array(name, (state.size,), "int64") for name in (CLOCKS, RESTARTS, ENDED)
        )
        restarts[state.rank] = self.restarts = state.restarts
        self._token = token
        self._reports = Reports(named_memory, state.rank, state.size)
        self._has_controller = has_controller
        self._centers: dict[str, Center] = {}
        self._locks: dict[str, ProgramLock] = {}
        self._splits = 0
        self.random = np.random.default_rng([*entropy, state.rank, state.restarts])

    def __repr__(self) -> str:
        return f"<synkhronos.Rank {self.rank} of {self.size}>"

    # Computing

    @takes_call_lock
    def call(
        self,
        f: Function | Callable[..., Any],
        /,
        *inputs: ArrayLike,
        batch: Batch | None = None,
        batch_s: Batch | None = None,
        num_slices: int = 1,
        output_subset: Sequence[int] | None = None,
        **inputs_by_name: ArrayLike,
    ) -> Result:
        """Call this rank's replica of a function; nothing is split or reduced.

        If there are collectives in its graph, from `synkhronos.ops`, this call is a collective as well:
        all ranks have to call the function at the same point.

        Parameters
        ----------
        f : Function
            A function that was built with `function` before the program. Or a function of the compiler,
            such as ``theano.function``: it is called with the inputs as they are, and nothing is checked
            about rows. If the script has built it, every rank calls a copy that uses and updates its own
            replicas.
        *inputs, **inputs_by_name : Data or array-like
            The inputs, as in a call outside a program.
        batch : int, slice, 1-d array-like of int or bool, optional
            The rows of the scattered inputs to use, all of them on this rank.
        batch_s : slice, 1-d array-like of int or bool, optional
            The rows of this rank's sliceable shared variables to use.
        num_slices, output_subset
            As in a call outside a program.

        Returns
        -------
        numpy.ndarray, or list or dict of numpy.ndarray
            This rank's outputs, as the Theano function would return them.

        Raises
        ------
        TypeError, ValueError, IndexError
            For wrong arguments, as in a call outside a program, or a function that is not replicated.
        SynkhronosError
            For a function with collectives, if the ranks are at different points.
        RuntimeError
            For a function with collectives, in a program with ``on_death="continue"``.
        """
        self._enter()
        options = batch, batch_s, num_slices, output_subset
        if not isinstance(f, Function) and self._rank_state.engine.is_function(f):
            own_call.check_no_options(f, *options)
            with self._timed("compute", getattr(f, "name", None) or "function"):
                return f(*inputs, **inputs_by_name)
        command, form = own_call.prepare(
            self._rank_state, self._token, f, inputs, inputs_by_name, *options
        )
        if not self._rank_state.functions[command.number].has_collectives:
            return form(command.run(self._rank_state))
        self._enter_meeting()
        self._meet("call", getattr(f, "name", None), command.number, command.num_slices, command.subset)
        with self._stopped_by_others():
            outputs = command.run(self._rank_state)
        return form(outputs)

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Compile functions once, in a ``with`` block in which every rank builds the same graphs.

        One rank of each machine runs the block first. Then the other ranks run theirs, and find the
        compiled code in the compiler's cache. It is a collective.

        Examples
        --------
        >>> import synkhronos as synk
        >>> import theano
        >>> import theano.tensor as T
        >>> synk.fork(2, use_gpu=False)
        2
        >>> def program(rank):
        ...     x = T.dvector("x")
        ...     with rank.compiling():
        ...         f = theano.function([x], T.sqr(x).sum())
        ...     return float(f([1, 2]))
        >>> synk.spmd(program)
        [5.0, 5.0]
        >>> synk.close()
        """
        self._enter_meeting()
        engine, first = self._rank_state.engine, self._rank_state.transport.near[0]
        code = None
        if self.rank == first:
            working = Progress().show("compiling the functions of the program", REMARK)
            with working if self.is_master else contextlib.nullcontext():
                yield
            code = bytes(engine.dumps(None, {}))
        by_rank = self._meet("compiling", own=code)
        if self.rank == first:
            engine.after_replication()
        else:
            engine.loads(by_rank[first], {})
            yield

    def rows(self, length: int) -> range:
        """Return this rank's share of the rows; the lower ranks have the longer shares.

        Parameters
        ----------
        length : int
            The number of rows of all ranks.
        """
        return range(*share(check_int(length, "rank.rows: length", 0), self.size, self.rank))

    def minibatches(
        self,
        length: int,
        batch_size: int,
        epochs: int = 1,
        seed: int | None = None,
        shuffle: bool = True,
    ) -> Iterator[AnyArray]:
        """Yield the row numbers of this rank's share, one minibatch after another.

        It ends early when the ranks are asked to stop. All ranks have the same number of minibatches.
        With ``batch_size=1``, ranks with a longer share omit one row in each epoch.

        Parameters
        ----------
        length : int
            The number of rows of all ranks, at least one for each rank.
        batch_size : int
            The largest number of rows of this rank in a minibatch.
        epochs : int, default: 1
            The number of passes over the share.
        seed : int, optional
            Determines the order. By default it is drawn from `random`.
        shuffle : bool, default: True
            Whether each epoch has a new random order.

        Yields
        ------
        numpy.ndarray of int64
            The row numbers of a minibatch.
        """
        length = check_int(length, "rank.minibatches: length", self.size)
        batch_size = check_int(batch_size, "rank.minibatches: batch_size", 1)
        epochs = check_int(epochs, "rank.minibatches: epochs", 0)
        if seed is not None:
            seed = check_int(seed, "rank.minibatches: seed", 0)
        elif shuffle:
            seed = int(self.random.integers(1 << 62))
        if not shuffle:
            seed = None
        return self._yield_minibatches(length, batch_size, epochs, seed)

    def _yield_minibatches(
        self, length: int, batch_size: int, epochs: int, seed: int | None
    ) -> Iterator[AnyArray]:
        for epoch in range(epochs):
            own = make_minibatches(length, self.size, self.rank, batch_size, epoch, seed)
            for rows in own:
                if self.should_stop:
                    return
                yield rows

    @staticmethod
    def n_minibatches(length: int, size: int, batch_size: int) -> int:
        """Return the number of minibatches of an epoch of `minibatches`, for `size` ranks."""
        return n_batches(length, size, batch_size)

    # Stopping and reporting

    @property
    def should_stop(self) -> bool:
        """Whether this rank should end its program, because of `stop` or of Ctrl-C in the script.

        Ranks that meet in collectives get the same answer at the same point of the program.
        """
        self._program.check()
        return self._stop.watch()

    @property
    def in_step(self) -> bool:
        """Whether the ranks meet in collectives inside their loops, so that they must stop together.

        It is found by the first collective after the program has asked whether to stop. Set it before
        the loop if the ranks could be asked to stop before that.
        """
        return self._stop.in_step

    @in_step.setter
    def in_step(self, value: bool) -> None:
        self._program.check_running()
        self._stop.in_step = bool(value)

    def stop(self) -> None:
        """Ask all ranks to stop: at their next minibatch, or at their next call of a method."""
        self._program.check_running()
        self._stop.ask(ASKED)

    @takes_call_lock
    def report(self, **numbers: float) -> None:
        """Report numbers, such as ``report(loss=0.3, step=100)``.

        They are in ``reports`` of the result of `spmd`, with the time in seconds. All ranks can read the
        latest report of each rank in `latest`.

        Parameters
        ----------
        **numbers : float
            The numbers by name.
        """
        self._enter()
        self._reports.add(numbers)

    @property
    def latest(self) -> list[dict[str, float] | None]:
        """The latest report of each rank, or None."""
        self._enter()
        return self._reports.latest()

    # Center, messages, controller

    @takes_call_lock
    def center(self, shared_vars: SharedVariables, name: str | None = None) -> Center:
        """Return the center of shared variables: a copy that belongs to no rank.

        The first rank that requests a center gives it its own values. The variables of every other rank,
        and of a rank that replaces a dead rank, are set to the center's values.

        Parameters
        ----------
        shared_vars : shared variable, or list of these
            The variables, the same on all ranks.
        name : str, optional
            Distinguishes several centers of the same variables.

        Returns
        -------
        Center
            The methods for exchanges with the center.
        """
        self._enter()
        numbers = self._numbers_of(shared_vars)
        if name is not None:
            check_string(name, "rank.center: name")
        key = f"of {numbers}" if name is None else f"named {name}"
        if key not in self._centers:
            state = self._rank_state
            variables = [state.shareds[number] for number in numbers]
            given = variables if isinstance(shared_vars, (list, tuple)) else variables[0]
            open_stripes = functools.partial(self._open_stripes, "center")
            pause = self._program.pause
            made = Center(open_stripes, state.engine, given, key, pause, self._enter, self.call_lock)
            for method in ("assign", "elastic", "pull", "push", "update", "value"):
                if state.log is not None:
                    state.log.replace(made, method, "reduce")
            self._centers[key] = made
        return self._centers[key]

    @takes_call_lock
    def lock(self, name: str = "lock") -> ProgramLock:
        """Return a lock that one rank can hold at a time, for use in a ``with`` statement.

        It is free again when its holder has died, or when the program has ended.

        Parameters
        ----------
        name : str, default: "lock"
            Each name denotes a separate lock.
        """
        check_string(name, "rank.lock: name")
        if name not in self._locks:
            opened = functools.partial(self._open_stripes, "lock")
            self._locks[name] = ProgramLock(
                opened, name, self._program.pause, self._enter, self.call_lock
            )
        return self._locks[name]

    def _open_stripes(self, method: str, *args: Any) -> Stripes | RemoteStripes:
        """Return the stripes for these arguments, on this machine or another one."""
        named_memory = self._named_memory(method)
        if self._rank_state.transport.is_home:
            return Stripes(named_memory, *args)
        return RemoteStripes(StripeChannel(named_memory, self.rank), self.restarts, *args)

    @takes_call_lock
    def split(self, color: int | None, key: int = 0) -> RankGroup | None:
        """Divide the ranks into groups, each with collectives of its own. It is a collective.

        A rank may be in several groups, of several splits.

        Parameters
        ----------
        color : int or None
            Ranks that give the same number are a group; all of them must be on one machine. None stands
            for no group.
        key : int, default: 0
            The order in the group; with equal keys, by the numbers of the ranks.

        Returns
        -------
        RankGroup or None
            The group of this rank.

        Raises
        ------
        ValueError
            If ranks of a group are on several machines.

        Examples
        --------
        >>> import synkhronos as synk
        >>> synk.fork(4, use_gpu=False)
        4
        >>> def program(rank):
        ...     group = rank.split(rank.rank % 2)
        ...     return float(group.all_reduce(rank.rank, "sum"))
        >>> synk.spmd(program)
        [2.0, 4.0, 2.0, 4.0]
        >>> synk.close()
        """
        self._enter_meeting()
        color = None if color is None else check_int(color, "rank.split: color")
        key = check_int(key, "rank.split: key")
        self._named_memory("split")
        given = self._meet("split", own=(color, key))
        number = self._splits = self._splits + 1
        if color is None:
            return None
        ranks = [rank for rank, (other, _) in enumerate(given) if other == color]
        ranks.sort(key=lambda rank: given[rank][1])
        far = sorted({*ranks} - {*self._rank_state.transport.near})
        if far:
            raise ValueError(
                f"rank.split: color {color}: expected ranks of one machine, got {sorted(ranks)}, of "
                f"which {far} are on other machines than rank {self.rank}; choose colors by machine"
            )
        name = f"group {color} of split {number}"
        return RankGroup(self._rank_state, self._program, self.call_lock, self._ended, name, ranks)

    @takes_call_lock
    def send(self, to: int, arrays: Any, tag: int = 0) -> bool:
        """Send arrays to another rank; it never waits.

        Parameters
        ----------
        to : int
            The rank of the receiver.
        arrays : array-like, or list of these
            The contents of the message.
        tag : int, default: 0
            The kind of the message; the receiver asks for messages with a tag.

        Returns
        -------
        bool
            False if the receiver's box is full; nothing was sent then.
        """
        self._enter()
        with self._timed("copy", "send"):
            return self._messages.send(to, arrays, tag)

    def receive(self, tag: int = 0, wait: bool = False) -> tuple[int, Any] | None:
        """Return the oldest message for this rank with a tag.

        Parameters
        ----------
        tag : int, default: 0
            The kind of the message.
        wait : bool, default: False
            Whether to wait for a message. The wait ends without a message when the ranks are asked to
            stop.

        Returns
        -------
        (int, numpy.ndarray or list of these) or None
            The sender and the arrays; None if there is no message.

        Raises
        ------
        SynkhronosError
            If `wait` is set, and all other ranks have ended.
        """
        with self.call_lock:
            self._enter()
            messages = self._messages
        with self._timed("wait" if wait else "copy", "receive"):
            while True:
                with self.call_lock:
                    alone = not self._others_running() and not messages.more_to_come()
                    message = messages.receive(tag)
                if message is not None or not wait or self._stop.is_asked:
                    return message
                if alone:
                    raise SynkhronosError(
                        "rank.receive: all other ranks have ended their programs, so no message will "
                        "come"
                    )
                messages.wait(_AWAKE)  # meanwhile another thread may send
                self._program.pause(0)

    @functools.cached_property
    def _messages(self) -> Messages:
        near = self._rank_state.transport.near
        return Messages(self._named_memory("send"), self.rank, self.size, near)

    def _before_meeting(self) -> None:
        if "_messages" in vars(self):  # what was sent before a meeting can be received after it
            self._messages.settle()

    @takes_call_lock
    def ask(self, request: Any, info: Any = None) -> Any:
        """Ask the controller, and return its answer.

        Parameters
        ----------
        request, info : object
            Arguments for the controller, in addition to the number of this rank. They are pickled.

        Raises
        ------
        RuntimeError
            If the program has no controller.
        SynkhronosError
            If the controller raised an exception, or has died.
        """
        self._enter()
        if not self._has_controller:
            raise RuntimeError("rank.ask: there is no controller; give one: spmd(..., controller=...)")
        with self._timed("wait", "ask"):
            return self._controller.ask(request, info)

    @functools.cached_property
    def _controller(self) -> ControllerChannel:
        return ControllerChannel(self._named_memory("ask"), self.rank, self.size, self._program.pause)

    # Clocks

    @property
    def clock(self) -> int:
        """A number that this rank sets and all ranks can read, such as its step count; initially 0.

        The number outlives the rank: a new rank that replaces a dead rank finds it there.
        """
        self._enter()
        return int(self._clocks[self.rank])

    @clock.setter
    def clock(self, number: int) -> None:
        self._enter()
        self._clocks[self.rank] = check_int(number, "rank.clock", 0)

    @property
    def clocks(self) -> list[int]:
        """The clocks of all ranks, by rank."""
        self._enter()
        return [int(number) for number in self._clocks]

    @takes_call_lock
    def memory(self, name: str, shape: int | Sequence[int], dtype: DTypeLike = "float64") -> AnyArray:
        """Return an array of this rank that outlives it; it is zero when it is first requested.

        A new rank that replaces a dead rank finds the same values there, such as the losses of its
        steps. The array can be used until the program ends.

        Parameters
        ----------
        name : str
            The name of the array; another name is another array.
        shape : int or tuple of int
            The shape of the array.
        dtype : dtype, default: "float64"
            The dtype of the array.

        Raises
        ------
        ValueError
            If the array exists with another shape or dtype.
        MemoryError
            If there is too little memory.
        """
        self._enter()
        return self._named_memory("memory").array(f"memory of {self.rank}: {name}", shape, dtype)

    # Files

    @takes_call_lock
    def save(self, path: PathLike, values: Mapping[str, Any]) -> None:
        """Write values of every rank to a file. It is a collective.

        The master writes the file, which replaces an existing file only when it is complete. It is an
        ``.npz`` file without pickles. An array that is equal on several ranks is written once.

        Parameters
        ----------
        path : str or path-like
            The file, on the machine of the master.
        values : dict
            The values of this rank by name: numbers, strings, None, arrays of numbers, or random
            generators of NumPy. The names may differ between ranks.

        Raises
        ------
        TypeError
            If `values` is not a dict or contains a value that cannot be saved.
        OSError
            If the file cannot be written. An existing file is then unchanged.

        Examples
        --------
        >>> import os, tempfile
        >>> import numpy as np
        >>> import synkhronos as synk
        >>> synk.fork(2, use_gpu=False)
        2
        >>> def program(rank, path):
        ...     rank.save(path, {"step": 10 + rank.rank, "w": np.zeros(2)})
        ...     return rank.load(path)["step"]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     synk.spmd(program, os.path.join(folder, "values.npz"))
        [10, 11]
        >>> synk.close()
        """
        self._enter_meeting()
        with self._stopped_by_others():
            saving.save(self._rank_state, self._meet, path, values)

    @takes_call_lock
    def load(self, path: PathLike) -> dict[str, Any]:
        """Return this rank's values from a file that `save` has written. It is a collective.

        Parameters
        ----------
        path : str or path-like
            The file, on the machine of the master.

        Raises
        ------
        FileNotFoundError
            If there is no such file.
        ValueError
            If the file is damaged, was not written by `save`, or by another number of ranks.
        """
        self._enter_meeting()
        with self._stopped_by_others():
            return saving.load(self._rank_state, self._meet, path)

    def wait_for_clocks(self, least: int) -> None:
        """Wait until no rank's clock is below a number. Ranks that have ended are ignored.

        Parameters
        ----------
        least : int
            The number, at most this rank's own clock.
        """
        self._enter()
        self._named_memory("wait_for_clocks")
        if least > self.clock:
            own = f"this rank's own clock, {self.clock}"
            raise ValueError(f"rank.wait_for_clocks: expected at most {own}, got {least}")
        if self._clocks.min() >= least:
            return
        with self._timed("wait", "clocks"):
            while any(self._clocks[rank] < least for rank in self._others_running()):
                self._program.pause()

    # Internal

    def _others_running(self) -> list[int]:
        """Return the other ranks that have not ended their programs."""
        return [rank for rank in range(self.size) if rank != self.rank and not self._ended[rank]]

    def _named_memory(self, method: str) -> NamedMemory:
        """Return the named memory, or raise if not all ranks share them."""
        if not self._rank_state.transport.has_named_memory:
            raise SynkhronosError(f"rank.{method}: {NO_NAMED_MEMORY}; or use collectives only")
        return self._rank_state.store.named_memory

    @contextlib.contextmanager
    def _timed(self, category: str, name: str) -> Iterator[None]:
        log = self._rank_state.log
        if log is None:
            yield
            return
        start = log.clock()
        try:
            yield
        finally:
            log.add(category, name, start)
