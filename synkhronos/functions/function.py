"""`Function`: a function with a replica on every rank, and its calls."""

from __future__ import annotations

import functools
from typing import Any, Mapping, Sequence, TypeVar, overload

from synkhronos import _html
from synkhronos._errors import BUSY, ClosedError, SynkhronosError
from synkhronos._typing import ArrayLike, Batch, Finish, Result, SharedVariable
from synkhronos.arrays.binding import bind, find_bound, rebind
from synkhronos.arrays.data import Data
from synkhronos.engines.base import Analysis
from synkhronos.functions import arguments, copies
from synkhronos.functions.call import collect, in_form
from synkhronos.functions.comparing.serial_comparison import Comparison, check_call
from synkhronos.functions.comparing.watch import DivergenceCheck, DivergenceWarner, Verification, watch
from synkhronos.functions.replica import serial_arguments
from synkhronos.functions.replica_tracker import replica_tracker_of
from synkhronos.functions.replicate import check_sent, replicate
from synkhronos.functions.signature import Output, describe
from synkhronos.world.call_lock import CallLock, takes_call_lock
from synkhronos.world.rank_state import Command
from synkhronos.world.schedule import Schedule, ScheduledRun
from synkhronos.world.world import World, current_world, world_exists

#: An output of a copy: the script is not warned about it again
_STATED = Output(None, None, None, False, 0, True)  # type: ignore[arg-type]  # without a variable

_F = TypeVar("_F", bound="Function")


class Function:
    """A function with a replica on every rank. Create it with `function`.

    Attributes
    ----------
    name : str
        The name given to `function`; by default the file and line of its call.
    output_modes : list of str or None
        The operation that reduces each output.
    update_modes : list of str or None
        The operation that accumulates each update over slices.
    """

    _world: World | None = None  # in a copy for programs
    _specification: copies.Parts | None = None
    schedule: Schedule | None = None  # of the last call, if it had no options but a batch
    watch: DivergenceWarner | DivergenceCheck | None = None  # `watcher`, if it observes the next call
    watcher: DivergenceWarner | DivergenceCheck | None = None
    verification: Verification | None = None  # of the first calls
    analysis: Analysis | None = None  # of the graph, when it is first needed
    reduced: dict[int, str] = {}  # the operations by which a step reduces variables after a call

    def __init__(
        self, world: World, parts: copies.Parts, outputs: Sequence[Output] | None = None
    ) -> None:
        """Register the function. Without `outputs`, the script is not warned about their operations."""
        self._world, self.parts = world, parts
        self.name, made, self.inputs, self.update_modes, self.not_accumulated, self.form = parts
        self.sliceable: list[SharedVariable] = made.sliceable
        self.replica = copies.replica_of(world, parts)
        world.registry.add_function(self)
        world.show_name(self)
        watch(world, self, [_STATED] * len(made.output_modes) if outputs is None else outputs)

    @property  # type: ignore[misc]  # the class of objects can be set
    def __class__(self) -> type:
        # So that the compiler's tools, such as theano.printing.debugprint, accept this function.
        return Function if self._world is None else type(self.replica.compiled)

    @property
    def maker(self) -> Any:
        """The ``maker`` of the master's compiled function; ``maker.fgraph`` is the optimized graph."""
        return self.replica.compiled.maker

    @property
    def fn(self) -> Any:
        """The part of the master's compiled function that runs it, as in Theano."""
        if self._world is not None and not self._world.closed:
            self._changed_on_master(self._world)  # the script may call it
        return self.replica.compiled.fn

    def _changed_on_master(self, world: World) -> None:
        """Record that variables may be updated on the master only."""
        replicated = world.registry.replicated
        changed = [number for number, _ in self.replica.updates if number < replicated]
        if changed and world.size > 1:
            replica_tracker_of(world).note_changed(changed)

    @property
    def profile(self) -> Any:
        """Theano's profile of the master's compiled function, or None."""
        return self.replica.compiled.profile

    @property
    def output_modes(self) -> list[str | None]:
        return self.replica.output_modes

    def __repr__(self) -> str:
        return f"<synkhronos.Function {self.name}>"

    def _repr_html_(self) -> str:
        return _html.table(f"Function {self.name}", describe(self), ("", "name", "type", "ranks"))

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        # IPython would choose the text by the class in `__class__`.
        return {"text/plain": repr(self)}

    def __dir__(self) -> list[str]:
        # object.__dir__ would list the attributes of `__class__`, a class of the compiler.
        return sorted({"name", "update_modes", *vars(Function)} - _INTERNAL)

    def get_shared(self) -> list[SharedVariable]:
        """Return a list of the shared variables that the function reads or updates."""
        engine = (self._world or self._usable_world()).rank_state.engine
        return [*engine.shareds(self.replica.compiled), *self.sliceable]

    # Calling

    def __call__(
        self,
        /,
        *args: ArrayLike,
        output_subset: Sequence[int] | None = None,
        batch: Batch | None = None,
        batch_s: Batch | Sequence[Batch | None] | None = None,
        num_slices: int = 1,
        **inputs_by_name: ArrayLike,
    ) -> Result:
        """Scatter the inputs, compute on every rank, reduce the outputs.

        Parameters
        ----------
        *args, **inputs_by_name : Data or array-like
            The inputs, scattered inputs first, by position or by the name of the variable. For omitted
            inputs, the `Data` bound to them is used. Arrays are converted to the dtype of
            the input if they can be cast safely; a `Data` must have this dtype.
        output_subset : list of int, optional
            The outputs to compute and return.
        batch : int, slice, 1-d array-like of int or bool, optional
            Rows of the scattered inputs to use, as in NumPy's indexing; an int `k` means the first `k`.
            All rows by default.
        batch_s : slice, 1-d array-like of int or bool, or a list of these by rank, optional
            Rows of each rank's sliceable shared variables to use. All rows by default.
        num_slices : int, default: 1
            The number of slices in which each rank computes on its rows, to use less memory.

        Returns
        -------
        numpy.ndarray or list of numpy.ndarray
            The outputs, as the Theano function would return them: a list if `outputs` was a list. They
            have the dtypes of the output variables. A reduced output has the same shape as on each rank.
            An output with ``"gather"`` has the rows of all ranks in its order, with the shape
            ``(sum of rows, ...)``, or ``(n,)`` for a scalar on each of `n` ranks. Inside a ``fuse()``
            block, an object whose ``result()`` returns this after the block.

        Raises
        ------
        TypeError
            If an input is missing, unknown or given twice, or has the wrong dtype or ndim.
        ValueError
            If the inputs differ in their numbers of rows, there are no rows to compute on, or the
            shapes of an output on different ranks cannot be combined.
        IndexError
            If `batch` or `batch_s` contains a row, or `output_subset` an index, that does not exist.
        MemoryError
            If there is too little shared memory for an input.

        Examples
        --------
        >>> import numpy as np
        >>> import synkhronos as synk
        >>> import theano.tensor as T
        >>> synk.fork(2, use_gpu=False)
        2
        >>> x, scale = T.dmatrix("x"), T.dscalar("scale")
        >>> f = synk.function([x], [x.mean(), (x * scale, "gather")], bcast_inputs=[scale])
        >>> rows = synk.data(np.arange(6.0).reshape(3, 2))
        >>> mean, scaled = f(rows, 10, batch=[2, 0])  # one row for each rank
        >>> mean, scaled.shape
        (array(2.5), (2, 2))
        >>> f(rows, scale=10, output_subset=[0])
        [array(2.5)]
        >>> synk.close()
        """
        world = self._world or self._usable_world()
        if (hooks := world.step_hooks) is not None and hooks.are_due(world):
            call = functools.partial(
                self, *args, output_subset=output_subset, batch=batch, batch_s=batch_s,
                num_slices=num_slices, **inputs_by_name,
            )  # fmt: skip
            return hooks.run(world, self.name or "", self.replica.number, call)
        with world.call_lock:
            if world.before_command is not None:
                world.before_command()
            plain = batch_s is None and output_subset is None and num_slices == 1
            datas: Sequence[Any] = args
            command: Command | None = None
            if plain and self.schedule is not None and not inputs_by_name:
                command = self.schedule.again(args, batch)
            if command is None:
                self._usable_world()
                self.schedule = None
                command, datas, are_given = arguments.compile_call(
                    world, self, args, inputs_by_name, output_subset, batch, batch_s, num_slices
                )
                replicate(world)
                check_sent(world, self)
                if plain and are_given:
                    self.schedule = Schedule(world, command, datas, batch is None)
                    command = ScheduledRun(self.schedule)
            if world.recorder is not None and world.is_recording:
                # The script may free arrays before the command runs.
                return self._submit(command, [getattr(data, "stored", data) for data in datas])
            if plain and self.watch is None:
                return collect(world, self, None, world.run(command))
            return self._submit(command)

    def _submit(self, command: Command, kept: Sequence[Any] | None = None) -> Result:
        """Run or record a command, or an observed form of it; `kept` lives until it has run."""
        world: Any = self._world  # it is usable
        subset = getattr(command, "subset", None)
        finish: Finish = functools.partial(collect, world, self, subset)
        if self.verification is not None:
            self.verification.before(self, command.plain)  # type: ignore[arg-type]  # it is a call
        if self.watch is not None:
            observed, finish = self.watch.observe(command.plain, finish)
            if observed is not command.plain:
                command = observed
        return world.submit(command, finish, kept)

    @property
    def call_lock(self) -> CallLock:
        """The turn that calls of this function take."""
        return self._usable_world().call_lock

    def _usable_world(self) -> World:
        world = self._world
        if world is None:
            if world_exists() and current_world().transport.is_worker_process():
                raise SynkhronosError(BUSY)  # it came with an operation
            raise TypeError(
                f"{self!r}: this is a copy that was made for a program of spmd(), and cannot be called; "
                f"use rank.call() there, and the original function elsewhere"
            )
        if world.closed:
            raise ClosedError(
                f"{self!r}: the processes of this function were closed; build it again with "
                f"synk.function() after synk.fork()"
            )
        world.check_usable()
        return world

    @takes_call_lock
    def check(
        self,
        /,
        *args: ArrayLike,
        rtol: float | None = None,
        atol: float | None = None,
        output_subset: Sequence[int] | None = None,
        batch: Batch | None = None,
        batch_s: Batch | Sequence[Batch | None] | None = None,
        num_slices: int = 1,
        **inputs_by_name: ArrayLike,
    ) -> Comparison:
        """Compare a call with the serial function on the same rows and the same state.

        The master computes the Theano function on all rows, including the rows of all ranks of sliceable
        shared variables, in the order of the ranks. All ranks compute the call. Outputs, and the new
        values of updated shared variables on each rank, are compared. Then every rank has its former
        shared variables and random streams again, also after an error.

        Results that depend on random numbers cannot be compared with more than one rank, since the
        ranks draw different numbers. Neither can the master's own value (op None), a number per rank (op
        ``"gather"``), or results of variables that differ by rank because they were scattered.

        Parameters
        ----------
        *args, **inputs_by_name : Data or array-like
            The inputs, as in a call.
        rtol, atol : float, optional
            No element may differ by more than `atol`, plus `rtol` times the largest absolute value of
            the serial result. By default `atol` is 0, and `rtol` is 1e-7 in double precision, 1e-4 if an
            input, a shared variable or the result is in single precision, 0.01 in half precision, and 0
            for integers.
        output_subset, batch, batch_s, num_slices
            As in a call. The serial function does not compute in slices.

        Returns
        -------
        Comparison
            The differences, all within the tolerances, and the results that could not be compared.

        Raises
        ------
        MismatchError
            If an output or a new value differs by more. The error names each of them, the difference
            and the usual reason.
        TypeError, ValueError, IndexError
            For wrong arguments, as in a call, or tolerances that are not numbers of at least 0.
        RuntimeError
            Inside a ``fuse()`` block.
        MemoryError
            If there is too little memory for copies of the inputs and of the updated variables.

        Examples
        --------
        >>> import numpy as np
        >>> import synkhronos as synk
        >>> import theano.tensor as T
        >>> synk.fork(2, use_gpu=False)
        2
        >>> x = T.dmatrix("x")
        >>> f = synk.function([x], [x.mean(), (x.sum(), "avg")], name="f")
        >>> f.check(np.ones((10, 3)), output_subset=[0])
        Comparison(differences={'output 0': 0.0}, not_compared={})
        >>> try:
        ...     f.check(np.ones((10, 3)))
        ... except synk.MismatchError as error:
        ...     print(error.names)
        ['output 1']
        >>> synk.close()
        """
        world = self._usable_world()
        if world.is_recording:
            raise RuntimeError("check(): not inside a fuse() block; call it before or after")
        command, *_ = arguments.compile_call(
            world, self, args, inputs_by_name, output_subset, batch, batch_s, num_slices
        )
        check_sent(world, self)
        indices = command.chosen(range(len(self.output_modes)))
        outputs = {f"output {index}": (0, index) for index in indices}
        return check_call(world, self, [command], outputs, None, rtol, atol)

    # The master alone

    @takes_call_lock
    def as_theano(
        self,
        /,
        *args: ArrayLike,
        output_subset: Sequence[int] | None = None,
        **inputs_by_name: ArrayLike,
    ) -> Result:
        """Call the Theano function in the master only, with all rows, and return its outputs.

        All rows of sliceable shared variables are used. Updates change the master's replicas only.

        Parameters
        ----------
        *args, **inputs_by_name : Data or array-like
            The inputs, as in a call.
        output_subset : list of int, optional
            The outputs to compute and return.

        Returns
        -------
        numpy.ndarray or list of numpy.ndarray
            The outputs of the Theano function.

        Raises
        ------
        TypeError, IndexError
            For wrong arguments, as in a call.
        """
        world = self._usable_world()
        if output_subset is not None:
            output_subset = arguments.check_indices(output_subset, len(self.output_modes), self.form)
        values = arguments.match(world, self, args, inputs_by_name)
        engine, replica = world.rank_state.engine, self.replica
        rows = [engine.storage(shared) for shared in self.sliceable]
        whole = [value.data if type(value) is Data else value for value in values]
        given = serial_arguments(engine, replica, whole, rows)
        computed = engine.call(replica.compiled, given, output_subset)
        self._changed_on_master(world)
        computed = [engine.to_host(value) for value in computed]
        return in_form(self, computed, output_subset)

    # The data of the inputs, before calls

    @overload
    def build_inputs(
        self,
        value: ArrayLike,
        /,
        *,
        force_cast: bool = ...,
        oversize: float = ...,
        minibatch: bool = ...,
    ) -> Data: ...

    @overload
    def build_inputs(
        self,
        first: ArrayLike,
        second: ArrayLike,
        /,
        *others: ArrayLike,
        force_cast: bool = ...,
        oversize: float = ...,
        minibatch: bool = ...,
    ) -> tuple[Data, ...]: ...

    def build_inputs(
        self, *args: ArrayLike, force_cast: bool = False, oversize: float = 1.0, minibatch: bool = False
    ) -> Any:
        """Create a `Data` for each of the function's inputs, with its dtype and ndim.

        Parameters
        ----------
        *args : array-like
            One value per input, in order; inputs at the end may be omitted.
        force_cast, oversize, minibatch
            As in `data`.

        Returns
        -------
        Data or tuple of Data
            A single `Data` if one value is given.

        Raises
        ------
        TypeError
            If there are more values than inputs, or a value has the wrong ndim or cannot be cast safely.
        MemoryError
            If there is too little shared memory.
        ClosedError, WorldBrokenError
            If there are no processes that can be used.
        """
        world = self._usable_world()
        if not self.inputs:
            raise TypeError(f"{self!r}: build_inputs: the function has no inputs")
        if not args or len(args) > len(self.inputs):
            raise TypeError(
                f"{self!r}: build_inputs expected 1 to {len(self.inputs)} arrays, got {len(args)}"
            )
        built = []
        for item, value in zip(self.inputs, args):
            if item.type.format != "dense":
                raise TypeError(f"{self!r}: build_inputs: {item.label} is a {item.type.format} input")
            made = Data(world, item.type.dtype, item.type.ndim, minibatch, item.name)
            made.set_value(value, force_cast, oversize)
            built.append(made)
        return built[0] if len(built) == 1 else tuple(built)

    def set_input_shmems(self, /, *values: ArrayLike, **values_by_name: ArrayLike) -> list[Data]:
        """Bind data to the inputs, as `set_shmems` does.

        Functions that share input variables share the data.

        Parameters
        ----------
        *values, **values_by_name : array-like or Data
            One value per input, in order or by name. Inputs that are omitted keep their `Data`.

        Returns
        -------
        list of Data
            One for each value that was given, in the order of the inputs.

        Raises
        ------
        TypeError
            If an input is unknown or given twice, or a value has the wrong dtype or ndim.
        MemoryError
            If there is too little shared memory.
        ClosedError, WorldBrokenError
            If there are no processes that can be used.
        """
        world = self._usable_world()
        each = arguments.in_order(self, values, values_by_name)
        pairs = [(spec.variable, value) for spec, value in zip(self.inputs, each)]
        given = [pair for pair in pairs if pair[1] is not arguments.MISSING]
        bound = bind(world, given, None, "set_input_shmems")
        return [bound[variable] for variable, _ in given]

    def get_input_shmems(self) -> list[Data]:
        """Return the `Data` bound to the inputs, in the order of the inputs.

        Returns
        -------
        list of Data

        Raises
        ------
        TypeError
            If the function has no inputs.
        ValueError
            If no data is bound to an input.
        """
        world = self._usable_world()
        return find_bound(world, [spec.variable for spec in self.inputs], "get_input_shmems")

    # Copies: by the method `copy`, by the module of this name, and by `pickle`

    @property
    def specification(self) -> copies.Parts:
        """The parts by which any rank calls its replica, for pickles. Copies have them, too.

        In place of the replica, they have the token of the world, and the number of the function.
        """
        if self._specification is None:
            world: Any = self._world
            identity = world.registry.token, self.replica.number
            names: Any = [str(spec.variable) for spec in self.inputs]
            inputs = [spec._replace(variable=name) for spec, name in zip(self.inputs, names)]
            self._specification = self.parts._replace(name=self.name, replica=identity, inputs=inputs)
        return self._specification

    @classmethod
    def copy_of(cls: type[_F], specification: copies.Parts) -> _F:
        """Return a copy of a function. Calling it raises a TypeError; programs can use it."""
        made = cls.__new__(cls)
        made.name, made._specification = specification.name, specification
        return made

    @classmethod
    def from_parts(cls: type[_F], parts: copies.Parts) -> _F:
        """Return a new function of the current world."""
        world = current_world()
        world.check_usable()
        return cls(world, parts.converted(world.rank_state.engine.from_parts))

    def _to_parts(self, world: World) -> copies.Parts:
        """Return the parts in a form that can be copied and pickled."""
        return self.parts._replace(name=self.name).converted(world.rank_state.engine.to_parts)

    def _is_for_ranks(self) -> bool:
        """Whether a copy is for programs."""
        world = self._world
        return world is None or world.in_program or world.registry.is_sending

    def __reduce__(self) -> tuple[Any, ...]:
        if self._is_for_ranks():
            return self.copy_of, (self.specification,)
        world = self._usable_world()
        copies.check_one_value(world, self)
        return self.from_parts, (self._to_parts(world),)

    def __deepcopy__(self: _F, memo: dict[int, Any]) -> _F:
        if self._is_for_ranks():
            return self.copy_of(self.specification)
        world = self._usable_world()
        if world.is_recording:
            raise RuntimeError("copy.deepcopy(): not inside a fuse() block; call it before or after")
        shareds = self.get_shared()
        parts = world.rank_state.engine.deepcopy(self._to_parts(world), memo)
        copied = world.rank_state.engine.deepcopy(shareds, memo)
        copies.duplicate_replicas(world, zip(shareds, copied))
        made = self.from_parts(parts)
        rebind(world, [(old.variable, new.variable) for old, new in zip(self.inputs, made.inputs)])
        return made

    def __copy__(self: _F) -> _F:
        return self.copy()

    def copy(
        self: _F,
        share_memory: bool = False,
        swap: Mapping[SharedVariable, SharedVariable] | None = None,
        delete_updates: bool = False,
        name: str | None = None,
        profile: Any = None,
    ) -> _F:
        """Return a copy of this function, as the method of the same name of a ``theano.Function`` does.

        The copy uses the same shared variables, except the variables that are swapped. It is compiled
        again.

        Parameters
        ----------
        share_memory : bool, default: False
            Accepted for compatibility; the copy always has its own intermediate arrays.
        swap : dict, optional
            From shared variables of this function to variables of the same types, which the copy uses
            and updates in their place. They may be sliceable.
        delete_updates : bool, default: False
            Whether the copy makes no updates. Random streams are not advanced then, either.
        name : str, optional
            By default the name of this function, followed by "copy".
        profile : bool, str or object, optional
            As of ``theano.function``.

        Returns
        -------
        Function

        Raises
        ------
        TypeError, ValueError
            If `swap` is not a dict of shared variables of equal types, this function does not use one of
            them, or two of them would become one.
        ClosedError, WorldBrokenError
            If there are no processes that can be used.

        Notes
        -----
        ``copy.copy(f)`` is the same without arguments. ``copy.deepcopy`` of a function, or of an object
        that has functions, copies the shared variables as well, as with Theano: each rank copies its own
        replica. A pickle has the values of the master, and becomes a function of the ranks that
        exist when it is loaded; a function of which each rank has its own rows cannot be pickled.

        Examples
        --------
        >>> import numpy as np
        >>> import synkhronos as synk
        >>> import theano
        >>> import theano.tensor as T
        >>> synk.fork(2, use_gpu=False)
        2
        >>> x, w, other = T.dvector("x"), theano.shared(0.0, "w"), theano.shared(10.0, "other")
        >>> f = synk.function([x], (x + w, "gather"), updates=[(w, w + 1)])
        >>> g = f.copy(swap={w: other})
        >>> f([1.0, 2.0]), g([1.0, 2.0]), g([1.0, 2.0])
        (array([1., 2.]), array([11., 12.]), array([12., 13.]))
        >>> f.copy(delete_updates=True)([1.0, 2.0])
        array([2., 3.])
        >>> synk.close()
        """
        world = self._usable_world()
        swap = copies.checked_swap(world, self, swap)
        name = name or f"{self.name} copy"
        parts = copies.swapped(world, self.parts, swap, bool(delete_updates), name, profile)
        return type(self)(world, parts)


#: Used by the package itself; not shown by completion.
_INTERNAL = set(
    "analysis call_lock copy_of from_parts reduced schedule specification verification watch "
    "watcher".split()
)
