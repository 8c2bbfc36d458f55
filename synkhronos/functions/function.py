"""`function`: the equivalent of ``theano.function`` for all ranks."""

from __future__ import annotations

import sys
from typing import Any, Iterable, Mapping, Sequence, Tuple, Union

import numpy as np

from synkhronos._errors import ClosedError
from synkhronos._typing import ArrayLike, Batch, Compiled, Result, SharedVariable, Variable
from synkhronos.arithmetic.operations import OPERATIONS, parse_output_mode
from synkhronos.arrays.binding import bind, find_bound
from synkhronos.arrays.data import Data, as_data
from synkhronos.functions import arguments, outputs
from synkhronos.functions.call import Replica
from synkhronos.functions.replicate import check_sent, replicate
from synkhronos.functions.signature import (
    Input,
    parse_givens,
    parse_inputs,
    parse_outputs,
    parse_sliceable,
    parse_updates,
)
from synkhronos.world.world import World, current_world

Output = Union[Variable, Tuple[Variable, Union[str, None]]]
Update = Union[Tuple[SharedVariable, Any], Tuple[SharedVariable, Any, Union[str, None]]]


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

    _world: World | None = None  # in a copy
    _last: Any = None  # the command of the last call, if it had inputs only, all of them `Data`

    def __init__(
        self,
        world: World,
        name: str | None,
        replica: Replica,
        inputs: list[Input],
        update_modes: list[str | None],
        not_accumulated: list[SharedVariable],
        single: bool,
        downcast: bool,
    ) -> None:
        self._world = world
        self.name = name
        self.replica = replica
        self.inputs = inputs
        self.update_modes = update_modes
        self.not_accumulated = not_accumulated
        self.downcast = downcast
        self._single = single

    def __getstate__(self) -> dict[str, Any]:
        # A copy cannot be called: it raises a TypeError that says so.
        return {"name": self.name}

    @property
    def output_modes(self) -> list[str | None]:
        return self.replica.output_modes

    def __repr__(self) -> str:
        return f"<synkhronos.Function {self.name}>"

    def get_shared(self) -> list[SharedVariable]:
        """Return the shared variables that the function reads or updates.

        Returns
        -------
        list of shared variables
        """
        here = (self._world or self._usable_world()).here
        sliceable = [here.shareds[number] for number in self.replica.sliceable]
        return [*here.engine.shareds(self.replica.compiled), *sliceable]

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
            The inputs, the scattered ones first, by position or by the name of the variable. For inputs
            that are omitted, the `Data` bound to them is used. Arrays are converted to the dtype of
            the input if they can be cast safely; a `Data` must have this dtype.
        output_subset : list of int, optional
            The outputs to compute and return.
        batch : int, slice, 1-d array-like of int or bool, optional
            Rows of the scattered inputs to use, as in NumPy's indexing; an int `k` means the first `k`.
            All rows by default.
        batch_s : slice, 1-d array-like of int or bool, or a list of one of these per rank, optional
            Rows of each rank's sliceable shared variables to use. All rows by default.
        num_slices : int, default: 1
            The number of slices in which each rank computes on its rows, to use less memory.

        Returns
        -------
        numpy.ndarray or list of numpy.ndarray
            The outputs, as the Theano function would return them: a list if `outputs` was a list. They
            have the dtypes of the output variables. A reduced output has the shape that it has on each
            rank; an output with ``"gather"`` has the rows of all ranks. Inside a ``fuse()`` block, an
            object whose ``result()`` returns this after the block.

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
        ClosedError
            If the processes of the function were closed.
        WorkerError
            If a worker raised an exception. An exception in the master is raised as it is.
        WorldBrokenError
            If a worker died or a barrier timed out, in this call or before.

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
        world = self._world
        plain = batch is None and batch_s is None and output_subset is None and num_slices == 1
        command = None
        if plain and not inputs_by_name:
            command = self._command_of_last_call(args)
        kept = None
        if command is None:
            self._usable_world()
            values = arguments.match(world, self, args, inputs_by_name)
            datas = [as_data(world, value) for value in values]
            command = arguments.plan(world, self, datas, output_subset, batch, batch_s, num_slices)
            self._last = command if plain else None
            # The arrays must live until the command has run: they may belong to this call only, or be
            # freed inside fuse().
            kept = [data.data for data in datas]
        if self.replica.number >= world.registry.replicated_functions:
            replicate(world)
        if world.registry.unsent:
            check_sent(world, self)

        def finish(results, kept=kept):
            values = outputs.collect(world, self, results, command.subset)
            return values[0] if self._single and output_subset is None else values

        return world.submit(command, finish)

    def _command_of_last_call(self, args):
        """Return the last call's command if the arguments are the same unmoved `Data`; else None."""
        command, world = self._last, self._world
        if command is None or len(args) != len(command.handles):
            return None
        if world.is_recording or world.closed:
            return None
        for arg, handle in zip(args, command.handles):
            if type(arg) is not Data or arg.last_handle is not handle:
                return None
        return command

    def forget_last_call(self) -> None:
        """Discard the last command, whose rows are those for the former number of ranks."""
        self._last = None

    def _usable_world(self):
        world = self._world
        if world is None:
            raise TypeError(
                f"{self!r}: this is a copy, made by copy or pickle, and cannot be called; use the "
                f"original function, or build it again with synk.function()"
            )
        if world.closed:
            raise ClosedError(
                f"{self!r}: the processes of this function were closed; build it again with "
                f"synk.function() after synk.fork()"
            )
        world.check_usable()
        return world

    # The master alone

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
        ClosedError, WorldBrokenError
            If there are no processes that can be used.
        """
        world = self._usable_world()
        if output_subset is not None:
            output_subset = arguments.check_subset(self, output_subset)
        values = arguments.match(world, self, args, inputs_by_name)
        engine, replica = world.here.engine, self.replica
        rows = [engine.storage(world.here.shareds[number]) for number in replica.sliceable]
        inputs = [np.asarray(value) for value in values]
        computed = engine.call(replica.compiled, [*inputs, *rows], output_subset)
        computed = [engine.to_host(value) for value in computed]
        return computed[0] if self._single and output_subset is None else computed

    def build_inputs(
        self,
        *args: ArrayLike,
        force_cast: bool = False,
        oversize: float = 1.0,
        minibatch: bool = False,
    ) -> Result:
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
        for one, value in zip(self.inputs, args):
            made = Data(world, one.type.dtype, one.type.ndim, minibatch, one.name)
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
        given = [(one.variable, value) for one, value in zip(self.inputs, each) if value is not None]
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
        return find_bound(world, [one.variable for one in self.inputs], "get_input_shmems")


def _accumulated(
    world: World, compiled: Compiled, ops: Mapping[SharedVariable, str | None]
) -> tuple[list[tuple[int, str | None]], list[SharedVariable]]:
    """Return how updates accumulate over slices, and the variables whose updates cannot accumulate.

    The first is a list of ``(number, op)``, which includes default updates. Random streams are not
    included: they continue from slice to slice.
    """
    engine = world.here.engine
    streams = engine.random_streams(compiled)
    accumulated, not_accumulated = [], []
    for shared in engine.updated(compiled):
        if shared in streams:
            continue
        if not engine.is_tensor(shared):
            not_accumulated.append(shared)
        else:
            is_mean = OPERATIONS["avg"].is_defined_for(engine.type_of(shared).dtype)
            op = ops.get(shared, "avg" if is_mean else None)
            accumulated.append((world.registry.numbers[shared], op))
    return accumulated, not_accumulated


def function(
    inputs: Sequence[Variable],
    outputs: Output | list[Output] | None = None,
    bcast_inputs: Sequence[Variable] | None = None,
    updates: Mapping[SharedVariable, Any] | Sequence[Update] | None = None,
    givens: Mapping[Variable, Any] | Iterable[tuple[Variable, Any]] | None = None,
    sliceable_shareds: Sequence[SharedVariable] | None = None,
    **kwargs: Any,
) -> Function:
    """Compile a function that computes on all ranks.

    Parameters
    ----------
    inputs : list of variables
        Tensors of at least one dimension. Each is split along axis 0 over the ranks.
    outputs : variable, (variable, op), or list of these, optional
        `op` says how the values of the ranks are combined: ``"avg"`` (default; weighted by the number
        of rows), ``"sum"``, ``"prod"``, ``"min"``, ``"max"``, ``"gather"`` (concatenated along axis 0),
        or None for the master's own value. With the prefix ``"c_"`` the reduction uses the CPU.
    bcast_inputs : list of variables, optional
        Every rank gets the whole value. In a call they follow `inputs`.
    updates : list of (shared, new) or (shared, new, op), or an ordered dict, optional
        Each rank updates its own replica only. `op`, by default ``"avg"``, combines the new values of
        several slices (``num_slices``).
    givens : as in Theano, optional
        Substitutions in the graph.
    sliceable_shareds : list of shared variables, optional
        Variables that hold rows of data, from which `batch_s` and `num_slices` select.
    **kwargs
        Passed to ``theano.function``.

    Returns
    -------
    Function

    Raises
    ------
    NotForkedError, ClosedError, WorldBrokenError
        If there are no processes that can be used.
    TypeError
        If an argument is not a variable of the right kind, or an operation is not defined for the dtype
        of an output.
    ValueError
        If an input cannot be split along axis 0, an operation does not exist, a variable is given
        twice, or a sliceable shared variable is unused, updated by the function or replaced by `givens`.
    SynkhronosError
        If there is no room on disk for Theano's compiled code.

    Examples
    --------
    >>> import numpy as np
    >>> import synkhronos as synk
    >>> import theano.tensor as T
    >>> synk.fork(2, use_gpu=False)
    2
    >>> x = T.dmatrix("x")
    >>> f = synk.function([x], [x.mean(), (x.max(axis=0), "max")])
    >>> f(np.arange(6.0).reshape(3, 2))  # two rows on this process, one on the worker
    [array(2.5), array([4., 5.])]
    >>> synk.close()
    """
    world = current_world()
    world.check_usable()
    engine, registry = world.here.engine, world.registry
    parsed = parse_inputs(engine, inputs, bcast_inputs)
    variables, modes, single = parse_outputs(engine, outputs)
    pairs, ops = parse_updates(engine, updates)
    givens = parse_givens(givens)
    sliceable = parse_sliceable(engine, sliceable_shareds, pairs)
    if kwargs.get("name") is None:
        caller = sys._getframe(1)  # as Theano names functions
        kwargs["name"] = f"{caller.f_code.co_filename}:{caller.f_lineno}"
    parsed_modes = [parse_output_mode(mode) for mode in modes]
    on_host = [over_cpu for _, over_cpu in parsed_modes]
    compiled = engine.build(
        [one.variable for one in parsed], variables, pairs, givens, sliceable, on_host, **kwargs
    )
    for shared in [*engine.shareds(compiled), *sliceable, *(shared for shared, _ in pairs)]:
        registry.add_shared(shared)
    updated = [shared for shared, _ in pairs]
    accumulated, not_accumulated = _accumulated(world, compiled, dict(zip(updated, ops)))
    replica = Replica(
        number=len(registry.functions),
        compiled=compiled,
        output_modes=[name for name, _ in parsed_modes],
        output_dtypes=[engine.type_of(variable).dtype for variable in variables],
        sliceable=[registry.numbers[shared] for shared in sliceable],
        updates=accumulated,
    )
    downcast = bool(kwargs.get("allow_input_downcast"))
    made = Function(
        world, kwargs["name"], replica, parsed, ops, not_accumulated, single, downcast
    )
    registry.add_function(made)
    return made
