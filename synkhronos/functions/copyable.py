"""Copies of functions: by ``copy()``, by the module `copy`, and by `pickle`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Mapping, TypeVar

from synkhronos._typing import SharedVariable
from synkhronos.arrays.binding import rebind
from synkhronos.functions.comparing.watch import watch
from synkhronos.functions.parts import (
    Parts,
    check_one_value,
    checked_swap,
    duplicate_replicas,
    parts_of,
    replica_of,
    swapped,
)
from synkhronos.functions.signature import Output
from synkhronos.functions.specification import Sending, Specification, specify
from synkhronos.world.world import current_world

#: An output of a copy: the script is not warned about it again
_STATED = Output(None, None, None, False, 0, True)

_Function = TypeVar("_Function", bound="Copyable")


class Copyable:
    """A function of this package, as far as copies and pickles of it are concerned.

    Programs of `spmd` need no functions, only what says which replica a rank has to call. So functions
    that are sent to ranks become copies with a `Specification` alone.
    """

    _specification: Specification | None = None

    if TYPE_CHECKING:
        _world: Any
        name: Any
        inputs: Any

        def __init__(self, *args: Any) -> None: ...
        def _usable_world(self) -> Any: ...
        def get_shared(self) -> list[SharedVariable]: ...

    @property
    def specification(self) -> Specification:
        """What is needed to call the replica of a rank. Copies have it, too."""
        if self._specification is None:
            self._specification = specify(self)
        return self._specification

    @classmethod
    def copy_of(cls: type[_Function], name: str | None, specification: Specification) -> _Function:
        """Return a copy of a function. Calling it raises a TypeError; programs can use it."""
        made = cls.__new__(cls)
        made.name, made._specification = name, specification
        return made

    @classmethod
    def from_parts(cls: type[_Function], parts: Parts) -> _Function:
        """Return a new function of the current world."""
        world = current_world()
        world.check_usable()
        made = cls(
            world,
            parts.name,
            replica_of(world, parts),
            parts.inputs,
            parts.replica.sliceable,
            parts.update_modes,
            parts.not_accumulated,
            parts.form,
        )
        world.registry.add_function(made)
        watch(world, made, [_STATED] * len(parts.replica.output_modes))
        return made

    def _is_for_ranks(self):
        """Whether a copy is for programs."""
        world = self._world
        return world is None or world.in_program or world.part(Sending).is_active

    def __reduce__(self) -> tuple:
        if self._is_for_ranks():
            return self.copy_of, (self.name, self.specification)
        world = self._usable_world()
        check_one_value(world, self)
        return self.from_parts, (parts_of(world, self),)

    def __deepcopy__(self: _Function, memo: dict[int, Any]) -> _Function:
        if self._is_for_ranks():
            return self.copy_of(self.name, self.specification)
        world = self._usable_world()
        if world.is_recording:
            raise RuntimeError("copy.deepcopy(): not inside a fuse() block; call it before or after")
        shareds = self.get_shared()
        parts = world.here.engine.deepcopy(parts_of(world, self), memo)
        copies = world.here.engine.deepcopy(shareds, memo)
        duplicate_replicas(world, zip(shareds, copies))
        made = self.from_parts(parts)
        rebind(world, [(old.variable, new.variable) for old, new in zip(self.inputs, made.inputs)])
        return made

    def __copy__(self: _Function) -> _Function:
        return self.copy()

    def copy(
        self: _Function,
        share_memory: bool = False,
        swap: Mapping[SharedVariable, SharedVariable] | None = None,
        delete_updates: bool = False,
        name: str | None = None,
        profile: Any = None,
    ) -> _Function:
        """Return a copy of this function, as the method of the same name of a ``theano.Function`` does.

        The copy uses the same shared variables, with the exception of those that are swapped. It is
        compiled again.

        Parameters
        ----------
        share_memory : bool, default: False
            Accepted for compatibility; the copy has intermediate arrays of its own.
        swap : dict, optional
            From shared variables of this function to those, of the same types, that the copy uses and
            updates in their place. They may be sliceable.
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
        replica. A pickle has the values of the master, and becomes a function of the processes that
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
        swap = checked_swap(world, self, swap)
        return self.from_parts(swapped(world, self, swap, bool(delete_updates), name, profile))
