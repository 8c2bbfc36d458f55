"""`function`: as ``theano.function``, for all ranks."""

import logging

import numpy as np

from synkhronos import _world
from synkhronos._call import CallFunction, unpack
from synkhronos._data import Data, bind, condition, find_bound
from synkhronos._errors import ClosedError
from synkhronos._operations import GATHER, OPERATIONS, concatenate, parse_output_mode
from synkhronos._partition import select
from synkhronos._replicate import replicate
from synkhronos._signature import parse_inputs, parse_outputs, parse_sliceable, parse_updates

logger = logging.getLogger("synkhronos")


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

    def __init__(self, world, number, compiled, inputs, outputs, updates, sliceable, downcast):
        variables, modes, single = outputs
        engine = world.here.engine
        self._world = world
        self._inputs = inputs
        self._modes = list(modes)
        self._single = single
        self._downcast = downcast
        self._last_plain = None  # the command of the last call, if that had inputs only
        self._n_scattered = sum(one.scattered for one in inputs)
        self._update_ops = [op for _, op in updates]
        # What every rank needs:
        self.number = number
        self.compiled = compiled
        self.output_modes = [parse_output_mode(mode)[0] for mode in modes]
        self.output_dtypes = [engine.type_of(variable).dtype for variable in variables]
        self.sliceable = [world.shared_numbers[shared] for shared in sliceable]
        streams = engine.random_streams(compiled)
        self.updates = [
            (world.shared_numbers[shared], op)
            for shared, op in updates
            if engine.is_shared(shared) and shared not in streams  # a stream just runs on
        ]

    def __getstate__(self):
        kept = ("number", "compiled", "output_modes", "output_dtypes", "sliceable", "updates")
        return {name: getattr(self, name) for name in kept}

    @property
    def name(self):
        return self.compiled.name

    @property
    def update_modes(self):
        return list(self._update_ops)

    def __repr__(self):
        return f"<synkhronos.Function {self.name or self.number}>"

    def get_shared(self):
        """Return the shared variables that the function reads or updates."""
        return list(self._world.here.engine.shareds(self.compiled))

    # Calling

    def __call__(
        self, *args, output_subset=None, batch=None, batch_s=None, num_slices=1, **inputs_by_name
    ):
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
        world = self._usable_world()
        datas = self._match(args, inputs_by_name)
        references = tuple([data.reference() for data in datas])
        command = self._last_plain
        if (
            command is None
            or command.references != references
            or batch is not None
            or batch_s is not None
            or output_subset is not None
            or num_slices != 1
        ):
            command = self._plan(datas, references, output_subset, batch, batch_s, num_slices)
        if self.number >= world.replicated_functions:
            replicate(world)
        return world.submit(command, lambda results: self._collect(results, output_subset, datas))

    def _usable_world(self):
        world = self._world
        if world.closed:
            raise ClosedError(
                f"{self!r}: the processes that it was made for were closed; make it anew with "
                f"synk.function() after synk.fork()"
            )
        world.check_usable()
        return world

    def _plan(self, datas, references, output_subset, batch, batch_s, num_slices):
        num_slices = _check_num_slices(num_slices)
        rows, minibatch = self._select_rows(datas, batch)
        if num_slices > 1:
            self._check_slicing()
        if output_subset is not None:
            output_subset = self._check_subset(output_subset)
        if rows is not None:
            self._check_master_takes_part(len(rows), output_subset)
        if batch_s is not None:
            batch_s = self._check_batch_s(batch_s)
        command = CallFunction(
            self.number, references, rows, minibatch, batch_s, num_slices, output_subset
        )
        plain = batch is None and batch_s is None and output_subset is None and num_slices == 1
        self._last_plain = command if plain else None
        return command

    def _match(self, args, named):
        """Return the `Data` of each input, in order."""
        values = self._in_order(args, named)
        if named or len(args) < len(self._inputs):
            values = self._fill_with_bound(values)
        return [
            value if type(value) is Data and self._fits(value, one) else self._wrap(value, one)
            for value, one in zip(values, self._inputs)
        ]

    def _in_order(self, args, named):
        """Return the value given for each input, by position or by name; None where none is."""
        if len(args) > len(self._inputs):
            raise TypeError(
                f"{self!r}: expected at most {len(self._inputs)} inputs, got {len(args)}"
            )
        values = [*args, *[None] * (len(self._inputs) - len(args))]
        for name, value in named.items():
            positions = [i for i, one in enumerate(self._inputs) if one.name == name]
            if not positions:
                names = [one.name for one in self._inputs]
                raise TypeError(f"{self!r}: no input is named {name!r}; inputs: {names}")
            if values[positions[0]] is not None:
                raise TypeError(f"{self!r}: input {name!r} is given twice")
            values[positions[0]] = value
        return values

    def _fill_with_bound(self, values):
        values = [
            self._world.bound.get(one.variable) if value is None else value
            for one, value in zip(self._inputs, values)
        ]
        missing = [one.label for one, value in zip(self._inputs, values) if value is None]
        if missing:
            raise TypeError(
                f"{self!r}: no value for {', '.join(missing)}; give one, or bind data with "
                f"set_shmems()"
            )
        return values

    def _fits(self, value, one):
        if value._world is not self._world:
            raise ClosedError(f"{one.label}: the Data belongs to processes that were closed")
        kind = one.type
        if value._dtype != kind.dtype or value._ndim != kind.ndim:
            raise TypeError(
                f"{one.label}: expected {kind.dtype} with {kind.ndim} dimensions, got Data of "
                f"{value.dtype} with {value.ndim}"
            )
        self._check_broadcastable(value.shape, one)
        return True

    def _wrap(self, value, one):
        """Return a `Data`, for this call, of an array that is not one."""
        kind = one.type
        array = condition(value, np.dtype(kind.dtype), kind.ndim, self._downcast, one.label)
        self._check_broadcastable(array.shape, one)
        wrapped = Data(self._world, kind.dtype, kind.ndim, name=one.name)
        wrapped.set_value(array)
        return wrapped

    @staticmethod
    def _check_broadcastable(shape, one):
        for axis, (extent, is_one) in enumerate(zip(shape, one.type.broadcastable)):
            if is_one and extent != 1:
                raise TypeError(f"{one.label}: expected extent 1 on axis {axis}, got shape {shape}")

    def _select_rows(self, datas, batch):
        """Return the rows to share out, and which inputs hold just them."""
        scattered = datas[: self._n_scattered]
        if not scattered:
            if batch is not None:
                raise ValueError(f"{self!r}: batch was given, but no input is scattered")
            return None, ()
        minibatch = tuple([data.minibatch for data in scattered])
        whole = [data for data in scattered if not data.minibatch] or scattered[:1]
        lengths = {len(data) for data in whole}
        if len(lengths) > 1:
            listed = ", ".join(
                f"{one.label}: {len(data)}" for one, data in zip(self._inputs, scattered)
            )
            raise ValueError(f"{self!r}: expected inputs of the same number of rows, got {listed}")
        rows = select(batch, lengths.pop())
        if not len(rows):
            raise ValueError(f"{self!r}: no rows to compute on (batch={batch!r})")
        for one, data in zip(self._inputs, scattered):
            if data.minibatch and len(data) < len(rows):
                raise ValueError(
                    f"{one.label}: expected minibatch data of {len(rows)} rows, the length of the "
                    f"batch, got {len(data)}"
                )
        return rows, minibatch

    def _check_slicing(self):
        if not self._n_scattered and not self.sliceable:
            raise ValueError(f"{self!r}: num_slices was given, but no input can be sliced")
        for number, op in self.updates:
            shared = self._world.here.shareds[number]
            if op in OPERATIONS:
                dtype = self._world.here.engine.type_of(shared).dtype
                OPERATIONS[op].check_dtype(dtype, f"the update of {shared} over slices")

    def _check_subset(self, subset):
        if isinstance(subset, (str, bytes)) or not hasattr(subset, "__iter__"):
            raise TypeError(f"output_subset: expected a list of ints, got {subset!r}")
        for index in subset:
            if isinstance(index, bool) or not isinstance(index, (int, np.integer)):
                raise TypeError(f"output_subset: expected a list of ints, got {subset!r}")
            if not 0 <= index < len(self._modes):
                raise IndexError(
                    f"output_subset: expected indices below {len(self._modes)}, got {index}"
                )
        return [int(index) for index in subset]

    def _check_master_takes_part(self, n_rows, subset):
        if n_rows > self._world.master_rank or None not in self.output_modes:
            return
        for index in range(len(self._modes)) if subset is None else subset:
            if self.output_modes[index] is None:
                raise ValueError(
                    f"{self!r}: output {index} is the master's own value (op None), but of "
                    f"{n_rows} rows rank {self._world.master_rank}, the master, gets none"
                )

    def _check_batch_s(self, batch_s):
        """Return a list with the rows of each rank, checked where they can be checked."""
        size = self._world.size
        if not self.sliceable:
            raise ValueError(f"{self!r}: batch_s was given, but there are no sliceable_shareds")
        each = isinstance(batch_s, (list, tuple)) and any(
            one is None or isinstance(one, (slice, list, tuple, np.ndarray)) for one in batch_s
        )
        if each and len(batch_s) != size:
            raise ValueError(f"batch_s: expected one batch a rank, {size}, got {len(batch_s)}")
        batches = list(batch_s) if each else [batch_s] * size
        if not all(one is None or isinstance(one, slice) for one in batches):
            self._check_rows_exist(batches)
        for one in batches:
            if isinstance(one, slice):
                select(one, 0, "batch_s")
        return batches

    def _check_rows_exist(self, batches):
        """Row numbers, unlike slices, must exist on the rank; only the ranks know their lengths."""
        replicate(self._world)
        lengths = self._world.run(_SliceableLengths(self.sliceable))
        for rank, (batch, own) in enumerate(zip(batches, lengths)):
            for length in own:
                select(batch, length, f"batch_s for rank {rank}")

    # Results

    def _collect(self, results, subset, datas):
        """Reduce the ranks' outputs. `datas` live until here: they may be of this call only."""
        world = self._world
        indices = range(len(self._modes)) if subset is None else subset
        active = [rank for rank, (n_rows, _) in enumerate(results) if n_rows]
        if not active:
            raise ValueError(f"{self!r}: no rank had any rows to compute on (batch_s)")
        weights = [results[rank][0] for rank in active]
        outputs = []
        for position, index in enumerate(indices):
            values = [
                results[rank][1][position]
                if rank == world.master_rank
                else unpack(world.here, results[rank][1][position], self.output_dtypes[index])
                for rank in active
            ]
            outputs.append(self._reduce(index, values, weights, active))
        if self._single and subset is None:
            return outputs[0]
        return outputs

    def _reduce(self, index, values, weights, active):
        mode = self.output_modes[index]
        if mode is None:
            return values[active.index(self._world.master_rank)]
        if mode == GATHER:
            return concatenate(values)
        shapes = {np.shape(value) for value in values}
        if len(shapes) > 1:
            listed = ", ".join(f"rank {r}: {np.shape(v)}" for r, v in zip(active, values))
            raise ValueError(
                f"{self!r}: output {index} cannot be reduced by {mode!r}, its shapes differ: "
                f"{listed}; use 'gather'"
            )
        if len(values) == 1:
            return np.array(values[0])
        return OPERATIONS[mode].reduce(values, weights)

    # The master alone

    def as_theano(self, *args, **kwargs):
        """Call the Theano function in the master alone, with whole inputs, and return its outputs.

        Sliceable shared variables are used whole. Updates change the master's replicas only.
        """
        world = self._usable_world()
        subset = kwargs.pop("output_subset", None)
        if subset is not None:
            subset = self._check_subset(subset)
        datas = self._match(args, kwargs)
        engine = world.here.engine
        rows = [engine.storage(world.here.shareds[number]) for number in self.sliceable]
        outputs = engine.call(self.compiled, [*(data.data for data in datas), *rows], subset)
        return outputs[0] if self._single and subset is None else list(outputs)

    def build_inputs(self, *args, force_cast=False, oversize=1.0, minibatch=False):
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
        if not args or len(args) > len(self._inputs):
            raise TypeError(
                f"{self!r}: build_inputs expected 1 to {len(self._inputs)} arrays, got {len(args)}"
            )
        built = []
        for one, value in zip(self._inputs, args):
            made = Data(world, one.type.dtype, one.type.ndim, minibatch, one.name)
            made.set_value(value, force_cast, oversize)
            built.append(made)
        return built[0] if len(built) == 1 else tuple(built)

    def set_input_shmems(self, *values, **values_by_name):
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
        values = self._in_order(values, values_by_name)
        given = [
            (one.variable, value) for one, value in zip(self._inputs, values) if value is not None
        ]
        bind(world, given, None, "set_input_shmems")
        return [world.bound[variable] for variable, _ in given]

    def get_input_shmems(self):
        """Return the list of the `Data` bound to the inputs, in their order.

        Raises
        ------
        ValueError
            If an input has none.
        """
        variables = [one.variable for one in self._inputs]
        return find_bound(self._usable_world(), variables, "get_input_shmems")


class _SliceableLengths(_world.Command):
    """How many rows this rank has of some shared variables."""

    def __init__(self, numbers):
        self.numbers = numbers

    def run(self, here):
        return [len(here.engine.storage(here.shareds[number])) for number in self.numbers]


def function(
    inputs,
    outputs=None,
    bcast_inputs=None,
    updates=None,
    givens=None,
    sliceable_shareds=None,
    **kwargs,
):
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
    sliceable = parse_sliceable(engine, sliceable_shareds, pairs)
    compiled = engine.build(
        [one.variable for one in parsed], variables, pairs, givens, sliceable, **kwargs
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


def _check_num_slices(num_slices):
    if isinstance(num_slices, bool) or not isinstance(num_slices, (int, np.integer)):
        raise TypeError(f"num_slices: expected an int, got {num_slices!r}")
    if num_slices < 1:
        raise ValueError(f"num_slices: expected 1 or more, got {num_slices}")
    return int(num_slices)
