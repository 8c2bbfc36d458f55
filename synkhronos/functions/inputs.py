"""The data of a function's inputs, before its calls: made in the right types, or bound."""

from __future__ import annotations

from typing import Any, overload

from synkhronos._typing import ArrayLike
from synkhronos.arrays.binding import bind, find_bound
from synkhronos.arrays.data import Data
from synkhronos.functions import arguments
from synkhronos.functions.signature import Input
from synkhronos.world.world import World


class Inputs:
    """The part of a `Function` that concerns the data of its inputs."""

    inputs: list[Input]

    def _usable_world(self) -> World:
        raise NotImplementedError

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
        self,
        *args: ArrayLike,
        force_cast: bool = False,
        oversize: float = 1.0,
        minibatch: bool = False,
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
        for one, value in zip(self.inputs, args):
            if one.type.format != "dense":
                raise TypeError(f"{self!r}: build_inputs: {one.label} is a {one.type.format} input")
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
        pairs = [(one.variable, value) for one, value in zip(self.inputs, each)]
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
        return find_bound(world, [one.variable for one in self.inputs], "get_input_shmems")
