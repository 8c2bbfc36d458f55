"""`Function`: a function with a replica on every rank, and its calls."""

from __future__ import annotations

import functools
from typing import Any, Iterable, Mapping, Sequence

from synkhronos import _html
from synkhronos._errors import BUSY, ClosedError, SynkhronosError
from synkhronos._typing import ArrayLike, Batch, Result, SharedVariable
from synkhronos.functions import arguments, outputs
from synkhronos.functions.agreement import agreement_of
from synkhronos.functions.check import Comparison, check_call, check_commands
from synkhronos.functions.copyable import Copyable
from synkhronos.functions.description import describe
from synkhronos.functions.inputs import Inputs
from synkhronos.functions.last_call import LastCall
from synkhronos.functions.replica import Replica, serial_arguments
from synkhronos.functions.replicate import check_sent, replicate
from synkhronos.functions.signature import Input
from synkhronos.world.here import Command
from synkhronos.world.turn import Turn, takes_turn
from synkhronos.world.world import World, current_world, world_exists


class Function(Inputs, Copyable):
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
    last_call: LastCall | None = None  # if it had no options but a batch
    watch: Any = None  # what observes the next call; `watcher`, while there is something to observe
    watcher: Any = None
    verification: Any = None  # of the first calls
    analysis: Any = None  # of the graph, once it has been asked for
    reduced: dict[int, str] = {}  # what a step reduces after a call, and how

    def __init__(
        self,
        world: World,
        name: str | None,
        replica: Replica,
        inputs: list[Input],
        sliceable: list[SharedVariable],
        update_modes: list[str | None],
        not_accumulated: list[str],
        form: list[str] | bool,
    ) -> None:
        self._world = world
        self.name = name
        self.replica = replica
        self.inputs = inputs
        self.sliceable = sliceable
        self.update_modes = update_modes
        self.not_accumulated = not_accumulated
        self.form = form

    @property
    def __class__(self) -> type:  # type: ignore[override]
        # So that the compiler's tools, such as theano.printing.debugprint, accept this function.
        return Function if self._world is None else type(self.replica.compiled)

    @property
    def maker(self) -> Any:
        """The ``maker`` of the master's compiled function; ``maker.fgraph`` is the optimized graph."""
        return self.replica.compiled.maker

    @property
    def fn(self) -> Any:
        """The part of the master's compiled function that runs it, as in Theano."""
        return self.replica.compiled.fn

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
        parts = {**vars(Inputs), **vars(Copyable), **vars(Function)}
        return sorted({"name", "update_modes", *parts} - _INTERNAL)

    def get_shared(self) -> list[SharedVariable]:
        """Return a list of the shared variables that the function reads or updates."""
        engine = (self._world or self._usable_world()).here.engine
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
        >>> mean, scaled = f(rows, 10, batch=[2, 0])  # one row for each process
        >>> mean, scaled.shape
        (array(2.5), (2, 2))
        >>> f(rows, scale=10, output_subset=[0])
        [array(2.5)]
        >>> synk.close()
        """
        world = self._world or self._usable_world()
        with world.turn:
            last = self.last_call
            plain = batch_s is None and output_subset is None and num_slices == 1
            command, datas = None, args
            if plain and last is not None and not inputs_by_name and not world.closed:
                command = last.repeated(args, batch)
            if command is None:
                self._usable_world()
                values = arguments.match(world, self, args, inputs_by_name)
                datas = [arguments.in_store(world, *pair) for pair in zip(self.inputs, values)]
                command = arguments.plan(world, self, datas, output_subset, batch, batch_s, num_slices)
                self.last_call = None
                if plain:
                    self.last_call = LastCall(self, datas, command, batch, world.size)
            registry = world.registry
            if self.replica.number >= registry.replicated:
                replicate(world)
            if registry.unsent:
                check_sent(world, self)

            if world.is_recording:  # the script may free arrays before the command runs
                return self._submit(command, [data.data for data in datas])
            if plain and self.watch is None:
                values = outputs.collect(world, self, world.run(command), None)
                return outputs.in_form(self, values, None)
            return self._submit(command)

    def reduced_by_step(
        self, reduced: Mapping[SharedVariable, tuple[str, str]], is_doubtful: bool
    ) -> None:
        """Record the variables that a step reduces after each call.

        Parameters
        ----------
        reduced : dict
            For each variable, its name in messages and the operation.
        is_doubtful : bool
            Whether a warning has already said that the step differs from the serial step.
        """
        if self._world is None:  # a copy that programs use
            return
        numbers = self._world.registry.numbers
        self.reduced = {numbers[shared]: op for shared, (_, op) in reduced.items()}
        if self.verification is not None:
            named = {numbers[shared]: what for shared, (what, _) in reduced.items()}
            self.verification.add(named, is_doubtful)

    def check_step(
        self,
        commands: list[Command],
        outputs: Mapping[str, tuple[int, int]],
        variables: Iterable[SharedVariable],
        rtol: float | None,
        atol: float | None,
    ) -> Comparison:
        """Compare a step, to which calls of this function belong, with the same step on one rank.

        Parameters
        ----------
        commands : list of Command
            The recorded commands of the step.
        outputs : dict
            For each output of the step by name, the number of the command, and its number there.
        variables : iterable of shared variables
            The variables that the step updates.
        rtol, atol : float, optional
            The tolerances, as for `check`.
        """
        return check_commands(self._usable_world(), self, commands, outputs, variables, rtol, atol)

    def _submit(self, command, kept=None):
        """Run or record a command, perhaps another one that is observed; `kept` lives until then."""
        if self.verification is not None:
            self.verification.before(self, command)
        finish = functools.partial(self._finish, command)
        if self.watch is not None:
            command, finish = self.watch.observe(command, finish)
        return self._world.submit(command, finish, kept)

    def _finish(self, command, results):
        values = outputs.collect(self._world, self, results, command.subset)
        return outputs.in_form(self, values, command.subset)

    @property
    def turn(self) -> Turn:
        """The turn that calls of this function take."""
        return self._usable_world().turn

    def forget_last_call(self) -> None:
        """Discard the last command, whose rows were divided for the former number of ranks."""
        self.last_call = None
        self.watch = self.watcher

    def _usable_world(self):
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

    @takes_turn
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
        values = arguments.match(world, self, args, inputs_by_name)
        datas = [arguments.in_store(world, *pair) for pair in zip(self.inputs, values)]
        command = arguments.plan(world, self, datas, output_subset, batch, batch_s, num_slices)
        check_sent(world, self)
        return check_call(world, self, command, rtol, atol)

    # The master alone

    @takes_turn
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
            output_subset = arguments.check_subset(self, output_subset)
        values = arguments.match(world, self, args, inputs_by_name)
        engine, replica = world.here.engine, self.replica
        rows = [engine.storage(shared) for shared in self.sliceable]
        given = serial_arguments(engine, replica, arguments.whole(values), rows)
        computed = engine.call(replica.compiled, given, output_subset)
        replicated = world.registry.replicated
        changed = [number for number, _ in replica.updates if number < replicated]
        agreement_of(world).changed_on_master(changed)
        computed = [engine.to_host(value) for value in computed]
        return outputs.in_form(self, computed, output_subset)


#: Used by the package itself; not shown by completion.
_INTERNAL = set(
    "analysis check_step copy_of forget_last_call from_parts last_call reduced reduced_by_step "
    "specification turn verification watch watcher".split()
)
