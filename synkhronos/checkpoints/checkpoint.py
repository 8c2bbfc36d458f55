"""`save` and `load`: the shared variables and random streams of all ranks, in a file."""

from __future__ import annotations

from typing import Any, Callable, Iterator, Mapping, Sequence

import numpy as np

from synkhronos._checks import check_flag
from synkhronos._typing import AnyArray, PathLike, SharedVariables
from synkhronos.arithmetic.comparison import digest
from synkhronos.checkpoints import archive, feedback, manifest
from synkhronos.checkpoints.manifest import Entry, Key, Manifest, Side, Use
from synkhronos.functions.replica_tracker import replica_tracker_of
from synkhronos.functions.replicate import replicate
from synkhronos.stores.handle import Handle, RequiredRows
from synkhronos.world.rank_state import Ask, Command, RankState
from synkhronos.world.world import World, current_world, with_call_lock


def _inspect(
    state: RankState, numbers: Sequence[int], with_digests: bool
) -> list[tuple[str, tuple[int, ...], bytes | None]]:
    """Return dtype, shape and, on request, a digest of the bytes of each replica."""
    arrays = [state.engine.export(state.shareds[number]) for number in numbers]
    return [(array.dtype.name, array.shape, digest(array) if with_digests else None) for array in arrays]


def _send(state: RankState, number: int) -> AnyArray | Handle:
    """Send a rank's replica to the master, where it can be read until the next command."""
    array = np.asarray(state.engine.export(state.shareds[number]), order="C")
    return array if state.is_master else state.send(array)


class _Restore(Command):
    """Set replicas to stored values.

    Parameters
    ----------
    numbers : list of int
        The numbers of the variables.
    handles : list of list
        For each variable, one handle for all ranks, or one handle per rank.
    streams : list of int
        The random streams for which one rank's state was stored; each rank derives its own from it.
    """

    def __init__(
        self, numbers: Sequence[int], handles: Sequence[Sequence[Handle]], streams: Sequence[int]
    ) -> None:
        self.numbers, self.handles, self.streams = numbers, handles, streams

    def needs(self, ranks: range, size: int) -> list[RequiredRows]:
        return [
            RequiredRows(handle)
            for handles in self.handles
            for handle in (handles[ranks.start : ranks.stop] if len(handles) > 1 else handles)
        ]

    def run(self, state: RankState) -> None:
        for key in [key for key in state.wires if key[0] in self.numbers]:
            del state.wires[key]
        for number, handles in zip(self.numbers, self.handles):
            handle = handles[state.rank if len(handles) > 1 else 0]
            state.engine.restore(state.shareds[number], state.store.get(handle))
        if state.stream_index:
            for number in self.streams:
                state.engine.jump(state.shareds[number], state.stream_index)


@with_call_lock
def save(
    path: PathLike,
    extra: Mapping[str, Any] | None = None,
    *,
    without: SharedVariables = (),
) -> None:
    """Write all shared variables and random streams of all ranks to a file.

    On several machines, the file also contains the state that each machine keeps for wire formats (error
    feedback).

    The new file replaces an existing file only when it is complete: if the process is killed before
    that, the old file still exists. It is an ``.npz`` file without pickles. It keeps the mode of the
    file that it replaces.

    Parameters
    ----------
    path : str or path-like
        The file to write.
    extra : dict, optional
        Further values, which `load` returns, such as the position in the data. The keys are strings;
        the values are numbers, strings, None, arrays of numbers or ``numpy.random.RandomState``.
    without : shared variable, or list of these, optional
        Variables that are not saved and that `load` does not change, such as data that will be
        scattered again.

    Raises
    ------
    TypeError
        If a variable is neither a tensor nor a random stream, or if `extra` is not a dict or contains
        a value that cannot be saved.
    ValueError
        If no function uses a variable in `without`.
    RuntimeError
        Inside a ``fuse()`` block.
    OSError
        If the file cannot be written, also because another user has created it, or a link to it, in a
        folder for everybody, such as ``/tmp``. An existing file is then unchanged.

    Examples
    --------
    >>> import os, tempfile
    >>> import numpy as np
    >>> import synkhronos as synk
    >>> import theano
    >>> synk.fork(2, use_gpu=False)
    2
    >>> w = theano.shared(np.zeros(2), name="w")
    >>> update = synk.function([], updates=[(w, w + 1)])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "checkpoint.npz")
    ...     synk.save(path, {"step": 10})
    ...     _ = update()
    ...     position = synk.load(path)
    >>> position["step"], w.get_value()
    (10, array([0., 0.]))
    >>> synk.close()
    """
    world = _usable_world("save")
    left_out = _numbers_of(world, without)
    described, extra_arrays = manifest.pack(extra)
    numbers = [number for number in list(world.rank_state.shareds) if number not in left_out]
    _check_can_be_saved(world, numbers)
    replicate(world)
    keys = _keys(world)
    entries = _entries(world, numbers, keys)
    kept = feedback.find(world, numbers, keys)
    saved = Manifest(
        world.size, world.master_rank, entries, [keys[item] for item in left_out],
        [described for _, described in kept], _uses(world, keys, any(nth for _, nth in keys.values())),
    )  # fmt: skip

    def arrays() -> Iterator[tuple[str, AnyArray]]:
        for number, entry in zip(numbers, entries):
            yield from zip(entry.members, _values(world, number, entry))
        for item in kept:
            yield from feedback.arrays(world, *item)
        yield from extra_arrays.items()

    archive.write(path, manifest.describe(saved, described), arrays())


def _usable_world(what: str) -> World:
    world = current_world()
    world.check_usable()
    if world.is_recording:
        raise RuntimeError(f"{what}(): not inside a fuse() block; call it after the block")
    world.registry.collect()  # dropped objects are not part of a checkpoint
    return world


def _numbers_of(world: World, without: SharedVariables) -> list[int]:
    numbers = []
    for item in without if isinstance(without, (list, tuple)) else [without]:
        found = [number for number, shared in world.rank_state.shareds.items() if shared is item]
        if not found:
            raise ValueError(
                f"save: without: expected shared variables of functions made with synk.function(), "
                f"got {item!r}"
            )
        numbers += found
    return sorted(set(numbers))


def _keys(world: World) -> dict[int, Key]:
    """Return the key of each shared variable, by number."""
    shareds = dict(world.rank_state.shareds)
    return dict(zip(shareds, manifest.keys(shared.name for shared in shareds.values())))


def _uses(world: World, keys: Mapping[int, Key], with_digests: bool) -> list[Use]:
    """Return how each function uses variables."""
    registry, engine = world.registry, world.rank_state.engine
    uses = []
    for _, function in sorted(registry.functions.items()):
        compiled = function.replica.compiled
        found = engine.fingerprints(compiled) if with_digests else []
        expressions = [
            (digest, [keys[registry.numbers[shared]] for shared in shareds])
            for digest, shareds in found or [("", engine.shareds(compiled))]
        ]
        uses.append((manifest.label_of(function.name), expressions))
    return uses


def _match(world: World, saved: Manifest, keys: Mapping[int, Key], strict: bool) -> dict[int, Key]:
    """Return the key in the file of each shared variable that the file has, by number."""
    streams, engine, shareds = _streams(world), world.rank_state.engine, world.rank_state.shareds
    arrays = [item for item in keys if item in streams or engine.is_tensor(shareds[item])]
    state: dict[Key, Any] = dict.fromkeys(keys.values())
    for number, (dtype, shape, _) in zip(arrays, _inspect(world.rank_state, arrays, False)):
        state[keys[number]] = dtype, shape
    there: dict[Key, Any] = {}
    for entry in saved.entries:
        there[entry.key] = entry.dtype, entry.of_rank(saved.master_rank).shapes[0]
    there.update(dict.fromkeys(saved.left_out))
    digests = [digest for _, expressions in saved.functions or () for digest, _ in expressions]
    uses = _uses(world, keys, with_digests=any(digests))
    found = manifest.match(Side(there, saved.functions), Side(state, uses), strict)
    return {number: found[key] for number, key in keys.items() if key in found}


def _streams(world: World) -> set[int]:
    """Return the numbers of the shared variables that are states of random streams."""
    engine = world.rank_state.engine
    return {
        world.registry.numbers[shared]
        for function in world.registry.functions.values()
        for shared in engine.random_streams(function.replica.compiled)
    }


def _check_can_be_saved(world: World, numbers: Sequence[int]) -> None:
    streams = _streams(world)
    for number in numbers:
        shared = world.rank_state.shareds[number]
        if number not in streams and not world.rank_state.engine.is_tensor(shared):
            raise TypeError(
                f"save: {shared}: expected a tensor or a random stream, got {shared.type}; leave it "
                f"out with without=, and put its value into extra="
            )


def _entries(world: World, numbers: Sequence[int], keys: Mapping[int, Key]) -> list[Entry]:
    by_rank = world.run(Ask(_inspect, numbers, world.size > 1))
    entries = []
    for number, found in zip(numbers, zip(*by_rank)):
        dtype, shapes = found[0][0], [shape for _, shape, _ in found]
        members = [f"shared_{number}_rank_{rank}" for rank in range(world.size)]
        if all(item == found[0] for item in found):
            shapes, members = shapes[:1], [f"shared_{number}"]
        entries.append(Entry(*keys[number], dtype, shapes, members))
    return entries


def _values(world: World, number: int, entry: Entry) -> list[AnyArray]:
    state = world.rank_state
    if len(entry.members) == 1:
        return [state.engine.export(state.shareds[number])]
    sent = world.run(Ask(_send, number))
    return [item if rank == state.rank else state.store.get(item) for rank, item in enumerate(sent)]


@with_call_lock
def load(
    path: PathLike, check: Callable[[dict[str, Any]], Any] | None = None, *, strict: bool = True
) -> dict[str, Any]:
    """Restore the shared variables and random streams of every rank from a file written by `save`.

    The same functions must have been built as for `save`, in any order. Variables whose names are
    missing or not unique are found by the functions that use them: by the names of these, by their
    places in the graphs, and by dtypes and shapes. If that leaves a doubt, an error is raised.

    If the number of ranks is different, the variables must have had the same values on all ranks;
    independent random streams are then derived again from the master's streams. Shapes must match the
    file. Only if the ranks had different values, such as scattered rows, may the number of rows differ.
    If the file does not match, nothing is changed.

    The state that the machines kept for wire formats is restored as well. On a different number of
    machines, the first machine gets the sum of the parts that had not been sent. On one machine the
    state is ignored.

    Parameters
    ----------
    path : str or path-like
        The file to read.
    check : callable, optional
        ``check(extra)`` is called before anything is changed. It raises an exception if the checkpoint
        should not be loaded, for example because `extra` says that it belongs to another model.
    strict : bool, default: True
        Whether the file and the functions here must have the same variables. If False, those that only
        one of them has are left as they are.

    Returns
    -------
    dict
        The argument `extra` of `save`.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If the file is damaged, or does not match the variables, their shapes and dtypes, or the number
        of ranks.
    RuntimeError
        Inside a ``fuse()`` block.
    MemoryError
        If there is too little memory for the values.

    Examples
    --------
    See `save`.
    """
    world = _usable_world("load")
    strict = check_flag(strict, "load: strict")
    with archive.Reader(path) as reader:
        with reader.interpreting():
            saved = manifest.interpret(reader.description)
        keys = _match(world, saved, _keys(world), strict)
        by_key = {key: number for number, key in keys.items()}
        saved = saved.of(by_key)
        entries, streams = saved.entries, []
        if saved.ranks != world.size:
            streams = sorted(_streams(world) & keys.keys())
            entries = manifest.for_other_ranks(saved, world.size, [keys[stream] for stream in streams])
        numbers = [by_key[entry.key] for entry in entries]
        replicate(world)
        _check_fit(world, numbers, entries)
        values = [_read(world, reader, *item) for item in zip(numbers, entries)]
        kept = feedback.read(world, reader, saved.kept, by_key)
        with reader.interpreting():
            extra = manifest.unpack(reader.description, reader.read)
        if check is not None:
            check(extra)
    handles = [[world.rank_state.store.put(array) for array in arrays] for arrays in values]
    world.run(_Restore(numbers, handles, [stream for stream in streams if stream in numbers]))
    agreement = replica_tracker_of(world)
    agreement.restored([item for item, each in zip(numbers, handles) if len(each) == 1])
    for changed in (agreement.changed, agreement.set_on_master):
        changed.difference_update(numbers)
    feedback.restore_all(world, kept, numbers)
    values.clear()
    kept.clear()
    world.rank_state.store.trim()
    return extra


def _check_fit(world: World, numbers: Sequence[int], entries: Sequence[Entry]) -> None:
    """Raise ``ValueError`` unless replicas have the shapes in the file; numbers of rows may differ."""
    complaints, has_other_dtypes = [], False
    state, streams = world.rank_state, _streams(world)
    by_rank = world.run(Ask(_inspect, numbers, False))
    for number, entry, found in zip(numbers, entries, zip(*by_rank)):
        kind = None if number in streams else state.engine.type_of(state.shareds[number])
        has_rows = kind is not None and kind.ndim > 0 and kind.extents[0] is None
        fixed = slice(1 if has_rows and len(entry.shapes) > 1 else 0, None)
        for rank, (dtype, shape, _) in enumerate(found):
            saved = entry.shapes[rank if len(entry.shapes) > 1 else 0]
            same = shape[fixed] == saved[fixed] and len(shape) == len(saved)
            has_other_dtypes = has_other_dtypes or dtype != entry.dtype
            if dtype != entry.dtype or not same:
                complaints.append(
                    f"{manifest.label(entry.key)} on rank {rank} is {dtype} {shape}, in the file "
                    f"{entry.dtype} {saved}"
                )
    remedy = "set the variables to such shapes first, by set_value or scatter"
    if has_other_dtypes:
        remedy = "build the functions with variables of the same dtypes as in the script that saved it"
    manifest.complain(complaints, remedy)


def _read(world: World, reader: archive.Reader, number: int, entry: Entry) -> list[AnyArray]:
    """Return the arrays of a variable, read into the store and checked."""
    arrays = []
    for member, shape in zip(entry.members, entry.shapes):
        array = reader.read(member, world.rank_state.store.empty)
        with reader.interpreting():
            if (array.shape, array.dtype.name) != (shape, entry.dtype):
                raise ValueError(f"array {member} is {array.dtype} {array.shape}")
            if not world.rank_state.engine.is_tensor(world.rank_state.shareds[number]):
                world.rank_state.engine.check_state(array)
        arrays.append(array)
    return arrays
