"""Sending a program to the workers, with the objects to which it refers.

The program is pickled by value, with the current values of its global variables, unless it belongs to an
imported module that the workers also have, because they were forked from the master or because it is a
module of this package. Some objects in it are replaced: shared variables and functions by the ranks' own
replicas, and `Data` and large arrays by handles, so that all ranks use the same memory.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
from collections import ChainMap
from typing import Any, Iterator

import cloudpickle
import numpy as np

from synkhronos.arrays.data import Data, as_data
from synkhronos.functions.function import Function
from synkhronos.host.handler_errors import reraise_if_handlers
from synkhronos.stores.handle import Handle
from synkhronos.world.rank_state import RankState
from synkhronos.world.world import World

_LARGE = 1 << 16  # bytes; larger arrays are shared
_PACKAGE = __name__.partition(".")[0]


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO, world: World) -> None:
        # Set before the call, which reads it; a later change has no effect.
        self.dispatch_table = ChainMap(
            world.rank_state.engine.reducers, cloudpickle.Pickler.dispatch_table
        )
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._world = world
        self.kept: list[Data] = []  # the handles refer to these

    def persistent_id(self, item: Any) -> tuple[Any, ...] | None:
        kind = type(item)
        if kind is Data:
            self.kept.append(item)
            return "data", item.handle(), item.minibatch, item.name
        if isinstance(item, np.ndarray) and item.nbytes >= _LARGE and not item.dtype.hasobject:
            data = as_data(self._world, item)
            self.kept.append(data)
            return "array", data.handle()
        if kind is Function:
            return "function", item.name, item.specification
        if kind in _PLAIN:
            return None
        found = self._world.rank_state.engine.refer(item, self._world.registry.numbers)
        return found and ("variable", found)

    def reducer_override(self, item: Any) -> Any:
        engine = self._world.rank_state.engine
        return engine.reduce(item) if engine.is_function(item) else super().reducer_override(item)


_PLAIN = frozenset({str, bytes, int, float, bool, tuple, list, dict, type(None)})


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, state: RankState, world: World) -> None:
        super().__init__(file)
        self._rank_state, self._world = state, world

    def persistent_load(self, reference: tuple[Any, ...]) -> Any:
        kind, *what = reference
        if kind == "variable":
            return self._rank_state.engine.resolve(what[0], self._rank_state.shareds)
        if kind == "function":
            return Function.copy_of(*what)
        array = self._rank_state.store.get(what[0])
        if kind == "data":
            return Data.of_array(self._world, array, *what[1:])
        array.flags.writeable = False
        return array


def pack(world: World, program: Any) -> tuple[Handle, list[Handle], list[Any]]:
    """Return a handle to a pickle of the program in the store, the handles in it, and their objects.

    Raises
    ------
    TypeError
        If it cannot be pickled.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, world)
    try:
        with contextlib.nullcontext() if world.transport.forks_all else _by_value(program[0]):
            pickler.dump(program)
    except MemoryError:
        raise
    except Exception as error:  # any exception that a class of the script raises
        reraise_if_handlers(error)
        raise TypeError(
            f"spmd: the program, its arguments, or a global variable that it uses cannot be sent to the "
            f"workers: {error}; make such objects inside the program"
        ) from error
    handle = world.rank_state.store.put(np.frombuffer(file.getbuffer(), np.uint8))
    return handle, [data.handle() for data in pickler.kept], pickler.kept


@contextlib.contextmanager
def _by_value(program: Any) -> Iterator[None]:
    """Inside the block, pickle the definitions of a program's module by value."""
    module = sys.modules.get(getattr(program, "__module__", None) or "")
    name = getattr(module, "__name__", "__main__")
    known = {"__main__", *cloudpickle.list_registry_pickle_by_value()}
    if name in known or name.partition(".")[0] == _PACKAGE:
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def unpack(state: RankState, world: World, handle: Handle) -> Any:
    """Return the program, in a worker."""
    return _Unpickler(io.BytesIO(state.store.get(handle).tobytes()), state, world).load()
