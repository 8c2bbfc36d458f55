"""`function`: as ``theano.function``, for all ranks."""

from __future__ import annotations

import sys
from typing import Any, Iterable, Mapping, Sequence, Tuple, Union

import numpy as np

from synkhronos import _arguments, _outputs, _world
from synkhronos._binding import bind, find_bound
from synkhronos._data import Data
from synkhronos._errors import ClosedError
from synkhronos._operations import OPERATIONS, parse_output_mode
from synkhronos._replicate import check_sent, replicate
from synkhronos._signature import (
    Input,
    parse_givens,
    parse_inputs,
    parse_outputs,
    parse_sliceable,
    parse_updates,
)
from synkhronos._typing import ArrayLike, Batch, Compiled, Result, SharedVariable, Variable
from synkhronos._world import World

Output = Union[Variable, Tuple[Variable, Union[str, None]]]
Update = Union[Tuple[SharedVariable, Any], Tuple[SharedVariable, Any, Union[str, None]]]


class Function:
    """A function that every rank has a replica of. Made by `function`.

    Attributes
    ----------
    name : str
    output_modes : list of str or None
        How each output is reduced.
    update_modes : list of str or None
        How each explicit update accumulates over slices.
    """

    # As in a worker, which has just what is pickled.
    _world: World | None = None
    _last_plain: Any = None  # the command of the last call, if that had inputs only

    def __init__(
        self,
        world: World,
        number: int,
        compiled: Compiled,
        inputs: list[Input],
        outputs: tuple[list[Variable], list[str | None], bool],
        updates: list[tuple[SharedVariable, str | None]],
        sliceable: list[SharedVariable],
        downcast: bool,
    ) -> None:
        variables, modes, single = outputs
        engine = world.here.engine
        self._world = world
        self.inputs = inputs
        self._single = single
        self.downcast = downcast
        self.update_modes = [op for _, op in updates]
        # What every rank needs:
        self.number = number
        self.compiled = compiled
        self.output_modes = [parse_output_mode(mode)[0] for mode in modes]
        self.output_dtypes = [engine.type_of(variable).dtype for variable in variables]
        self.sliceable = [world.shared_numbers[shared] for shared in sliceable]
        self.updates, self.not_accumulated = _accumulated(world, compiled, dict(updates))

    def __getstate__(self) -> dict[str, Any]:
        kept = ("number", "compiled", "output_modes", "output_dtypes", "sliceable", "updates")
        return {name: getattr(self, name) for name in kept}

    @property
    def name(self) -> str | None:
        """The name given to `function`, or None."""
        return self.compiled.name

    def __repr__(self) -> str:
        return f"<synkhronos.Function {self.name or self.number}>"

    def get_shared(self) -> list[SharedVariable]:
        """Return the shared variables that the function reads or updates."""
        here = (self._world or self._usable_world()).here
        return [*here.engine.shareds(self.compiled), *(here.shareds[k] for k in self.sliceable)]

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
            The inputs, the scattered ones first. With none given, the data bound to them.
        output_subset : list of int, optional
            The outputs to compute and return.
        batch : int, slice, 1-d array-like of int or bool, optional
            Rows of the inputs to use.
        batch_s : slice, 1-d array-like of int or bool, or a list of one of these a rank, optional
            Rows of each rank's sliceable shared variables to use.
        num_slices : int
            In how many slices each rank computes over its rows.

        Returns
        -------
        numpy.ndarray or list of numpy.ndarray
            As the Theano function would.
        """
        world = self._world
        plain = batch is None and batch_s is None and output_subset is None and num_slices == 1
        command = None
        if plain and not inputs_by_name:
            command = self._command_of_last_call(args)
        memory = None
        if command is None:
            self._usable_world()
            values = _arguments.match(world, self, args, inputs_by_name)
            datas = [_arguments.in_shared_memory(world, value) for value in values]
            command = _arguments.plan(
                world, self, datas, output_subset, batch, batch_s, num_slices
            )
            self._last_plain = command if plain else None
            # For as long as the command runs: they may be of this call only, or be freed in fuse().
            memory = [data.data for data in datas]
        if self.number >= world.replicated_functions:
            replicate(world)
        if world.unsent:
            check_sent(world, self)

        def finish(results, in_use_until_here=memory):
            outputs = _outputs.collect(world, self, results, command.subset)
            return outputs[0] if self._single and output_subset is None else outputs

        return world.submit(command, finish)

    def _command_of_last_call(self, args):
        """Return the last call's command if these are the same `Data`, where they were; else None."""
        command, world = self._last_plain, self._world
        if command is None or len(args) != len(command.references):
            return None
        if world.fused is not None or world.closed:
            return None
        for arg, reference in zip(args, command.references):
            if type(arg) is not Data or arg.last_reference is not reference:
                return None
        return command

    def forget_last_call(self) -> None:
        """Make the next call's command anew: it holds this rank's rows as the ranks were."""
        self._last_plain = None

    def _usable_world(self):
        world = self._world
        if world is None:
            raise TypeError(
                f"{self!r}: this is a copy, by copy or pickle, which belongs to no processes; use the "
                f"function itself, or make it anew with synk.function()"
            )
        if world.closed:
            raise ClosedError(
                f"{self!r}: the processes that it was made for were closed; make it anew with "
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
        """Call the Theano function in the master alone, with whole inputs, and return its outputs.

        Sliceable shared variables are used whole. Updates change the master's replicas only.

        Parameters
        ----------
        *args, **inputs_by_name : Data or array-like
            The inputs, as in a call.
        output_subset : list of int, optional
            The outputs to compute and return.

        Returns
        -------
        numpy.ndarray or list of numpy.ndarray
        """
        world = self._usable_world()
        if output_subset is not None:
            output_subset = _arguments.check_subset(self, output_subset)
        values = _arguments.match(world, self, args, inputs_by_name)
        engine = world.here.engine
        rows = [engine.storage(world.here.shareds[number]) for number in self.sliceable]
        arguments = [*(np.asarray(value) for value in values), *rows]
        outputs = engine.call(self.compiled, arguments, output_subset)
        outputs = [engine.to_host(value) for value in outputs]
        return outputs[0] if self._single and output_subset is None else outputs

    def build_inputs(
        self,
        *args: ArrayLike,
        force_cast: bool = False,
        oversize: float = 1.0,
        minibatch: bool = False,
    ) -> Result:
        """Make `Data` of the function's inputs.

        Parameters
        ----------
        *args : array-like
            One an input, in order; inputs at the end may be left out.
        force_cast, oversize, minibatch
            As in `data`.

        Returns
        -------
        Data or tuple of Data
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
        """Make, or refill, the `Data` bound to the inputs, as `set_shmems` does.

        Functions that share input variables share the data.

        Parameters
        ----------
        *values, **values_by_name : array-like or Data
            One an input, in order or by its name. Inputs left out keep the `Data` they have.

        Returns
        -------
        list of Data
            One a value that was given, in the order of the inputs.
        """
        world = self._usable_world()
        each = _arguments.in_order(self, values, values_by_name)
        given = [(one.variable, value) for one, value in zip(self.inputs, each) if value is not None]
        bind(world, given, None, "set_input_shmems")
        return [world.bound[variable] for variable, _ in given]

    def get_input_shmems(self) -> list[Data]:
        """Return the list of the `Data` bound to the inputs, in their order.

        Raises
        ------
        ValueError
            If an input has none.
        """
        world = self._usable_world()
        return find_bound(world, [one.variable for one in self.inputs], "get_input_shmems")


def _accumulated(world, compiled, ops):
    """Return ``(number, op)`` of each variable whose updates accumulate, and variables whose cannot.

    Over slices, that is. Updates by default count too. Random streams do not: they just run on.
    """
    engine = world.here.engine
    streams = engine.random_streams(compiled)
    accumulated, not_accumulated = [], []
    for shared in engine.updated(compiled):
        if shared in streams:
            continue
        if not engine.is_shared(shared):
            not_accumulated.append(shared)
        else:
            is_mean = OPERATIONS["avg"].is_defined_for(engine.type_of(shared).dtype)
            op = ops.get(shared, "avg" if is_mean else None)
            accumulated.append((world.shared_numbers[shared], op))
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
        Each is split along axis 0 over the ranks.
    outputs : variable, (variable, op), or list of these, optional
        `op`: ``"avg"`` (default), ``"sum"``, ``"prod"``, ``"min"``, ``"max"``, ``"gather"``, or None
        for the master's own value; with ``"c_"`` before it the reduction runs over the CPU.
    bcast_inputs : list of variables, optional
        Given whole to every rank; after `inputs` in the order of the call.
    updates : list of (shared, new) or (shared, new, op), or an ordered dict, optional
        `op` says how slices accumulate. Updates stay local to each rank.
    givens : as in Theano, optional
    sliceable_shareds : list of shared variables, optional
        Hold data rows, subject to `batch_s` and `num_slices`.
    **kwargs
        For ``theano.function``.

    Returns
    -------
    Function

    Raises
    ------
    TypeError, ValueError
        For what cannot be compiled, split or reduced so.
    """
    world = _world.current()
    world.check_usable()
    engine = world.here.engine
    parsed = parse_inputs(engine, inputs, bcast_inputs)
    variables, modes, single = parse_outputs(engine, outputs)
    pairs, ops = parse_updates(engine, updates)
    givens = parse_givens(givens)
    sliceable = parse_sliceable(engine, sliceable_shareds, pairs)
    if kwargs.get("name") is None:
        caller = sys._getframe(1)  # as Theano names functions
        kwargs["name"] = f"{caller.f_code.co_filename}:{caller.f_lineno}"
    on_host = [parse_output_mode(mode)[1] for mode in modes]
    compiled = engine.build(
        [one.variable for one in parsed], variables, pairs, givens, sliceable, on_host, **kwargs
    )
    for shared in [*engine.shareds(compiled), *sliceable, *(shared for shared, _ in pairs)]:
        world.number_shared(shared)
    made = Function(
        world,
        len(world.here.functions),
        compiled,
        parsed,
        (variables, modes, single),
        [(shared, op) for (shared, _), op in zip(pairs, ops)],
        sliceable,
        bool(kwargs.get("allow_input_downcast")),
    )
    world.here.functions.append(made)
    return made
