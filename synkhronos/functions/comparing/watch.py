"""Comparison of the replicas in calls that use their values.

`DivergenceWarner` warns, `DivergenceCheck` raises an error.

A few of the first calls, and the calls after a value was set on the master, return samples of the
replicas with their results, and the master compares the samples. Other calls cost nothing: the attribute
``watch`` of a function, which every call checks, is None.

Replicas may differ on purpose, as between the collectives of local SGD. So an update is not reported
until a function that makes it has been called `PATIENCE` times or the world is closed. It is not
reported at all once a collective has been used on the variable. Variables that only accumulate, such as
a count of rows, may differ, since no result depends on them.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Callable, Iterable, Mapping, Sequence

import numpy as np

from synkhronos._errors import MismatchError, prepare_warning, warn
from synkhronos._text import listed
from synkhronos._typing import Finish
from synkhronos.engines.base import Analysis
from synkhronos.functions.analysis import analysis_of, sources, uses
from synkhronos.functions.comparing.first_calls import COMPARED, Verification
from synkhronos.functions.comparing.serial_comparison import ToCompare
from synkhronos.functions.replica_tracker import (
    Observed,
    digests,
    expected_equal,
    label,
    labels,
    largest_difference,
    ranks_that_differ,
    replica_tracker_of,
    samples,
)
from synkhronos.functions.signature import Output
from synkhronos.host import compiler
from synkhronos.world.rank_state import Ask, Command
from synkhronos.world.world import OFF, World

#: Calls after which replicas that differ and were never combined are taken for a mistake.
PATIENCE = 64


def watch(world: World, function: Any, given: Sequence[Output]) -> None:
    """Have the first calls of a new function verified, and watch the variables that it uses.

    Parameters
    ----------
    function : Function
        The function.
    given : list of Output
        The outputs as the script gave them.
    """
    engine, agreement, numbers = (
        world.rank_state.engine,
        replica_tracker_of(world),
        world.registry.numbers,
    )
    streams = engine.random_streams(function.replica.compiled)
    agreement.streams.update(numbers[shared] for shared in streams)
    if world.options.verify != OFF and function.replica.has_rows:
        function.verification = Verification(world, _claimed(world, function, given))
    if world.size == 1:
        return
    agreement.sliceable.update(function.replica.sliceable)
    shareds = function.get_shared()
    agreement.objects.update(numbers[variable] for variable in shareds if not engine.is_tensor(variable))
    analysis = analysis_of(world, function)
    kind = DivergenceCheck if world.options.audits else DivergenceWarner
    function.watch = function.watcher = kind(world, function, analysis)


def _claimed(world: World, function: Any, given: Sequence[Output]) -> ToCompare:
    """Return the outputs and variables of a call that have to be as on one process."""
    modes = function.output_modes
    outputs = {
        f"output {index} ({spec.variable})": (0, index)
        for index, spec in enumerate(given)
        if not spec.stated and modes[index] is not None
    }
    joint = {item: f"shared variable {label(world, item)}" for item in sorted(function.replica.joint)}
    return ToCompare(outputs, joint)


class DivergenceWarner:
    """The observation of the calls of one function.

    Parameters
    ----------
    function : Function
        The function.
    analysis : Analysis
        What its graph says.
    """

    def __init__(self, world: World, function: Any, analysis: Analysis) -> None:
        self.calls = 0
        self._world, self._reference = world, weakref.ref(function)
        agreement = replica_tracker_of(world)
        self.updated = sources(world, function, analysis)
        self.used, self.read = uses(world, function, analysis)
        numbers = {world.registry.numbers[shared] for shared in function.get_shared()}
        self.incomparable = numbers & agreement.incomparable
        for number in self.read | self.incomparable:
            agreement.readers.setdefault(number, weakref.WeakSet()).add(self)
        for number in self.updated:
            agreement.updaters.setdefault(number, weakref.WeakSet()).add(self)

    @property
    def _function(self) -> Any:
        return self._reference()

    def wake(self) -> None:
        """Observe the next call."""
        if self._function is not None:
            self._function.watch = self._function.watcher
            self._world.registry.outdate_schedules()

    def observe(self, call: Command, finish: Finish) -> tuple[Command, Finish]:
        """Return the command to submit in place of a call, and how it ends; it may return samples."""
        self.calls += 1
        replica_tracker_of(self._world).updated_from(self.updated)
        self._judge_without_comparing()
        numbers = self._to_compare()
        if self.calls >= PATIENCE:
            self._function.watch = None  # until something wakes it
        if not numbers:
            return call, finish

        def finish_observed(results: Sequence[tuple[Any, Any]]) -> Any:
            before, results = zip(*results)
            finished = finish(results)
            self._judge(numbers, before)
            return finished

        return Observed([Ask(samples, numbers), call], place=1), finish_observed

    def _to_compare(self) -> list[int]:
        """Return the numbers of the variables whose replicas this call compares."""
        agreement = replica_tracker_of(self._world)
        numbers = agreement.set_on_master & self.read
        if self.calls in COMPARED:
            numbers |= self.used - agreement.combined - agreement.suspected.keys()
        if self.calls <= PATIENCE and not self.calls & (self.calls - 1):
            suspected = [number for number in self.used if number in agreement.suspected]
            numbers.update(number for number in suspected if self._is_settled(number))
        return sorted(numbers - agreement.different - agreement.reported)

    # Replicas

    def _judge(
        self, numbers: Sequence[int], samples: Sequence[Sequence[tuple[Any, np.ndarray]]]
    ) -> None:
        """Compare samples of replicas, and warn, or remember the warning for later."""
        world, agreement = self._world, replica_tracker_of(self._world)
        set_alone, updated = {}, {}
        for position, number in enumerate(numbers):
            by_rank = [each[position] for each in samples]
            amount = largest_difference(by_rank, world.master_rank)
            by_master = number in agreement.set_on_master
            agreement.set_on_master.discard(number)
            if amount is None:
                agreement.suspected.pop(number, None)
            elif by_master:
                set_alone[number] = amount
            elif number not in agreement.combined | agreement.stale:
                updated[number] = amount
        if set_alone:
            agreement.reported.update(set_alone)
            agreement.stale.update(set_alone)
            agreement.updated_from(self.updated)
            warn(_text(repr(self._function), labels(world, set_alone), set_alone) + _SET_ALONE)
        if updated:
            self._suspect(_Suspicion(world, self._function, updated), updated)

    def _judge_without_comparing(self) -> None:
        """Warn about values that were set on the master only, and cannot be compared."""
        world, agreement = self._world, replica_tracker_of(self._world)
        numbers = agreement.set_on_master & self.incomparable
        agreement.set_on_master -= numbers
        agreement.reported |= numbers
        if streams := numbers & agreement.streams:
            warn(
                f"{self._function!r} draws from {len(streams)} random stream(s) whose state was set on "
                f"the master only. {_NOT_RESEEDED}"
            )
        if objects := numbers - streams:
            names = labels(world, objects)
            warn(f"{self._function!r} uses {names}, set on the master only. {_OLD_OBJECT}")

    def _suspect(self, suspicion: _Suspicion, numbers: Iterable[int]) -> None:
        """Issue a warning about variables that differ, or defer it."""
        agreement = replica_tracker_of(self._world)
        agreement.suspected.update(dict.fromkeys(numbers, suspicion))
        if any(self._is_settled(number) for number in numbers):
            issue = suspicion.warning()
            for number in numbers:
                del agreement.suspected[number]
            agreement.reported.update(numbers)
            issue()

    def _is_settled(self, number: int) -> bool:
        """Whether this function, or a function that updates a variable, was called often enough."""
        updaters = replica_tracker_of(self._world).updaters.get(number, ())
        return any(watch.calls >= PATIENCE for watch in (self, *updaters))


class DivergenceCheck:
    """The check in every call of one function, with ``fork(check=True)``.

    Before the call, the variables on whose values its results depend must be equal on all ranks. After
    the call, all variables must be equal except variables that were last updated from values that differ
    by rank: a rank's own rows, random numbers, or other such variables. These must be equal again before
    their values are used.

    Parameters
    ----------
    world, function, analysis
        As of `DivergenceWarner`.
    """

    def __init__(self, world: World, function: Any, analysis: Analysis) -> None:
        self._world = world
        self._name = repr(function)
        self._used, _ = uses(world, function, analysis)
        self._updates = sources(world, function, analysis)

    def observe(self, call: Command, finish: Finish) -> tuple[Command, Finish]:
        """Return a command to submit in place of a call, which also returns digests, and how it ends."""
        world, agreement = self._world, replica_tracker_of(self._world)
        before = sorted(self._used - agreement.different)
        for number, (from_rows, shareds) in self._updates.items():
            own = from_rows or shareds & (agreement.different | agreement.local)
            (agreement.local.add if own else agreement.local.discard)(number)
        after = [
            item for item in expected_equal(world) if item not in agreement.local | agreement.assigned
        ]

        def finish_observed(results: Sequence[tuple[Any, Any, Any]]) -> Any:
            before_by_rank, results, after_by_rank = zip(*results)
            self._compare("before", before, before_by_rank)
            self._compare("after", after, after_by_rank)
            return finish(results)

        looked = [Ask(digests, before), call, Ask(digests, after)]
        return Observed(looked, place=1), finish_observed

    def _compare(self, when: str, numbers: Sequence[int], by_rank: Sequence[Sequence[bytes]]) -> None:
        found = ranks_that_differ(self._world, numbers, by_rank)
        if not found:
            return
        ranks = sorted({rank for each in found.values() for rank in each})
        remedy = (
            "call synk.broadcast() on what was set on one rank only; combine what is updated from a "
            "rank's own rows before it is used, with synk.all_reduce() or in "
            "synkhronos.extensions.train.make_train_function()"
        )
        raise MismatchError(
            f"{self._name}: {when} this call the replicas of {labels(self._world, found)} differ "
            f"from the master's on rank(s) {', '.join(map(str, ranks))}; {remedy}",
            [labels(self._world, [number]) for number in found],
        )


class _Suspicion:
    """The suspicion that replicas of variables differ, except variables that were combined since.

    Parameters
    ----------
    amounts : dict of float
        By how much each variable differs, by number.
    """

    def __init__(self, world: World, function: Any, amounts: Mapping[int, float]) -> None:
        self._tracker, self._world = replica_tracker_of(world), weakref.ref(world)
        self._name, self._amounts = repr(function), amounts
        self._names = {number: label(world, number) for number in amounts}
        self._issue = prepare_warning()

    def remark(self) -> None:
        """Have the warning issued when the world is closed."""
        world = self._world()
        if world is not None:
            world.remarks.append(self.warning())

    def warning(self) -> Callable[[], None]:
        """Return a function that issues the warning about the variables that are suspected now."""
        suspected = self._tracker.suspected
        left = {name: self._amounts[name] for name in self._names if suspected.get(name) is self}
        text = _text(self._name, listed(self._names[item] for item in left), left)
        return functools.partial(self._issue, text + _UPDATED)


def _text(function: str, names: str, amounts: Mapping[int, float]) -> str:
    return (
        f"{function} uses {names}, whose replicas differ between the ranks, by up to "
        f"{max(amounts.values()):.3g}: the result differs from one process. "
    )


_SET_ALONE = (
    f"{compiler.TITLE}'s set_value(), functions of {compiler.TITLE}, as_theano() and fn() change only "
    "the replica of the master; call synk.broadcast(variable), or set the value with "
    "synk.broadcast(variable, value), or rows of which each rank shall have its part with "
    "synk.scatter(variable, value)"
)
_NOT_RESEEDED = (
    "The other ranks continue with their own states, so a run does not repeat. Instead of the stream's "
    "seed() or set_value(), call synk.reseed(streams, seed), which seeds the streams of all ranks"
)
_OLD_OBJECT = (
    "The other ranks keep the former value, and collectives take arrays only. Set it before the workers "
    "are started, or call synk.restart() afterwards: new workers have the values of the master"
)
_UPDATED = (
    "Each rank updates its own replica, from its own rows, and no collective has combined them. To "
    "train on the whole minibatch, build the step from the same updates with "
    "synkhronos.extensions.train.parallel_function(), or from the loss with make_train_function(); or "
    "call synk.all_reduce(variable) after each call"
)
