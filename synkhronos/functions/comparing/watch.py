"""Comparisons in the first calls of a function: of the results, and of the replicas that they use.

`Verification` compares calls with the same calls on one rank, in one piece. Calls after the first are
compared if the graph has a reason for which other rows may differ. Only a few rows are used, which one
rank computes alone, and then all ranks together. If the results agree, those that the graph shows to
differ on other rows are reported nevertheless. Outputs whose operation the script has stated are not
compared, and neither are variables that each rank updates from its own rows: they may be combined later.
Results that depend on random numbers cannot be compared, as each rank draws its own.

`DivergenceWarner` warns if replicas differ, and `DivergenceCheck` raises an error in every call. For the
former, a few of the first calls, and the calls after a value was set on the master, return samples of
the replicas with their results, and the master compares the samples. Other calls cost nothing: the
attribute ``watch`` of a function, which every call checks, is None.

Replicas may differ on purpose, as between the collectives of local SGD. So an update is not reported
until a function that makes it has been called `PATIENCE` times or the world is closed. It is not
reported at all once a collective has been used on the variable. Variables that only accumulate, such as
a count of rows, may differ, since no result depends on them.
"""

from __future__ import annotations

import collections
import functools
import weakref
from typing import Any, Callable, Hashable, Iterable, Mapping, Sequence

import numpy as np

from synkhronos._errors import MismatchError, WorldBrokenError, prepare_warning, warn
from synkhronos._text import listed
from synkhronos._typing import Finish
from synkhronos.engines.analysis.difference_causes import SPACED
from synkhronos.engines.base import Analysis, Causes
from synkhronos.functions.analysis import analysis_of, causes_of, sources, uses
from synkhronos.functions.call import CallFunction
from synkhronos.functions.comparing.serial_comparison import (
    SerialComparison,
    ToCompare,
    causes_in_words,
    how_called,
)
from synkhronos.functions.comparing.trial_runs import Called, Calls, calls_until
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
from synkhronos.host.handler_errors import reraise_if_handlers
from synkhronos.host.log import logger
from synkhronos.world.rank_state import Ask, Command
from synkhronos.world.world import ALWAYS, OFF, RAISE, World

#: Rows of each rank that are used at most, and at least if the call has them and takes a short time
_MOST, _LEAST = 32, 4
_SMALL = 4 << 20  # bytes of shared variables with which it does
#: Calls that are compared, those after the first if the graph may make other rows differ
COMPARED = (1, 2, 4, 8)
_LINEAR = ("avg", "sum")  # the operations for what is linear in means or sums over the rows
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
    engine, numbers = world.rank_state.engine, world.registry.numbers
    agreement = replica_tracker_of(world)
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


class Verification:
    """The comparison in the first call of a function, or of the functions of a step.

    Parameters
    ----------
    compared : ToCompare
        The outputs and variables that are compared.
    """

    def __init__(self, world: World, compared: ToCompare) -> None:
        self._world, self._compared = world, compared
        self._calls: collections.Counter[Hashable] = collections.Counter()
        self._reduced: dict[int, str] = {}
        self._is_reported = False
        self._reported: set[str] = set()
        self._causes: tuple[list[Causes], dict[int, Causes]] | None = None

    def before(self, function: Any, command: CallFunction) -> None:
        """Verify a call that is about to be made; inside `fuse`, when the block ends."""
        world = self._world
        if world.size == 1 and command.num_slices == 1:
            return
        if world.rank_state.log is not None:  # `profile` measures only the calls themselves
            return
        if self._is_reported and world.options.verify != RAISE:
            return
        results = [*self._compared.outputs, *self._compared.variables.values(), *self._reduced.values()]
        if self._reported.issuperset(results):  # nothing could be said any more
            return
        if world.options.verify != ALWAYS and not self._is_due(function, command):
            return
        if world.is_recording:
            world.recorder.observers.append(
                lambda commands: self._verify(
                    *calls_until(world, commands, command, bool(self._reduced))
                )
            )
        else:
            self._verify([Called(function, command)], 0)

    def _is_due(self, function: Any, command: CallFunction) -> bool:
        """Whether a call is the first of its kind, or an early one with its number of rows."""
        kind = self._world.size, command.options
        with_rows = *kind, None if command.rows is None else len(command.rows)
        self._calls.update([kind, with_rows])
        if self._calls[kind] == 1 or not self._possible(function):
            return self._calls[kind] == 1
        return self._calls[with_rows] in COMPARED

    def _causes_of(self, function: Any) -> tuple[list[Causes], dict[int, Causes]]:
        if self._causes is None:
            self._causes = causes_of(self._world, function)
        return self._causes

    def _possible(self, function: Any) -> frozenset[str]:
        """Return the causes in the graph for which results may differ."""
        outputs, updates = self._causes_of(function)
        return frozenset().union(*[causes.possible for causes in [*outputs, *updates.values()]])

    def add(self, variables: Mapping[int, str], is_doubtful: bool) -> None:
        """Compare these variables, too, where they are reduced. They are names for messages, by number.

        If a warning has already said that the step differs (`is_doubtful`), it is not repeated.
        """
        self._reduced, self._is_reported = dict(variables), is_doubtful

    def _verify(self, called: Sequence[Called], place: int) -> None:
        """Compare calls that are about to be made, and warn if they differ, or raise an error."""
        function = called[place].function
        is_like_serial = all([item.command.is_like_serial for item in called])
        found = self._found(called, place) if is_like_serial else None
        names = [] if found is None else [complaint.what for complaint in found.complaints]
        text = found.text(function, "one process") if found is not None and names else ""
        if not names:
            names, causes = self._doubtful(called[place])
            text = (
                f"{function!r}: {how_called(self._world, called)} the call may equal one process on "
                f"these rows, but differs on others, in {listed(names)}. {causes_in_words(causes)}"
            )
        if set(names) <= self._reported:
            return
        self._reported.update(names)
        if self._world.options.verify == RAISE:
            raise MismatchError(text, names)
        warn(text)

    def _doubtful(self, called: Called) -> tuple[list[str], set[str]]:
        """Return the results that certainly differ on some rows, and the causes in the graph."""
        function, subset = called.function, called.command.subset
        outputs, updates = self._causes_of(function)
        of_outputs = {
            what: outputs[index].certain
            for what, (_, index) in self._compared.outputs.items()
            if outputs and (subset is None or index in subset)
            if function.output_modes[index] in _LINEAR
        }
        of_updates: dict[str, frozenset[str]] = {}
        for number, what in self._reduced.items():
            if number in updates and function.reduced[number] in _LINEAR:
                of_updates[what] = of_updates.get(what, frozenset()) | updates[number].certain
        # Gradients have the causes of their losses, and further ones.
        causes = set().union(*of_outputs.values()) or set().union(*of_updates.values())
        return [what for what, found in [*of_outputs.items(), *of_updates.items()] if found], causes

    def _found(self, called: Sequence[Called], place: int) -> SerialComparison | None:
        """Return the comparison; None if nothing can be compared, or nothing differs beyond rounding."""
        # The shares of a few rows have other lengths.
        is_spaced = SPACED in self._possible(called[place].function)
        few = called if is_spaced else _on_few_rows(self._world, called)
        try:
            try:
                return self._compared_on(few, place)
            except (WorldBrokenError, MemoryError):
                raise
            except Exception as error:  # the graph may need as many rows as the script gives
                reraise_if_handlers(error)
                return self._compared_on(called, place)
        except WorldBrokenError:
            raise
        except Exception as error:  # the call itself reports what is wrong
            reraise_if_handlers(error)
            logger.info("not verified: %s: %s", type(error).__name__, error)
            return None

    def _compared_on(self, called: Sequence[Called], place: int) -> SerialComparison | None:
        calls = Calls(self._world, called)
        compared = self._comparable(calls, place)
        if not compared.outputs and not compared.variables:
            return None
        found = SerialComparison(self._world, calls, compared)
        found.run(everywhere=False)
        found.forgive_rounding()
        return None if found.is_stale else found

    def _comparable(self, calls: Calls, place: int) -> ToCompare:
        """Leave out results that depend on random numbers or on variables that differ on purpose."""
        different = replica_tracker_of(self._world).different

        def is_same(sources: set[int]) -> bool:
            return not sources & different

        commands = [item.command for item in calls.called if item.function is None]
        reduced = {number for command in commands for number in command.numbers}
        variables = {item: what for item, what in self._reduced.items() if item in reduced}
        variables.update(self._compared.variables)
        subset = calls.called[place].command.subset
        return ToCompare(
            {
                what: (place, index)
                for what, (_, index) in self._compared.outputs.items()
                if is_same(calls.sources[place][index]) and (subset is None or index in subset)
            },
            {item: what for item, what in variables.items() if is_same(calls.update_sources[item])},
        )


def _on_few_rows(world: World, called: Sequence[Called]) -> list[Called]:
    """Return the calls on rows that take less time than the calls themselves."""
    engine, size = world.rank_state.engine, world.size
    rows = [getattr(item.command, "rows", None) for item in called if item.function is not None]
    lengths = [len(each) for each in rows if each is not None]
    own = -(-max(lengths) // size) if lengths else _MOST
    shareds = {shared for item in called if item.function for shared in item.function.get_shared()}
    tensors = [engine.storage(shared) for shared in shareds if engine.is_tensor(shared)]
    is_short = sum(tensor.size * tensor.dtype.itemsize for tensor in tensors) <= _SMALL
    # One rank computes `size` times as many rows, and then all compute these: half of a call or less.
    by_rank = max(1, min(own, _LEAST) if is_short else 1, min(_MOST, own // (2 * (size + 1))))
    by_rank = max(by_rank, *[getattr(item.command, "num_slices", 1) for item in called])
    return [
        item._replace(command=item.command.on_few(by_rank, size)) if item.function else item
        for item in called
    ]


class _Watch:
    """What the replicas of one function are used for.

    Parameters
    ----------
    function : Function
        The function.
    analysis : Analysis
        What its graph says.
    """

    def __init__(self, world: World, function: Any, analysis: Analysis) -> None:
        self._world = world
        self.updated = sources(world, function, analysis)
        self.used, self.read = uses(world, function, analysis)


class DivergenceWarner(_Watch):
    """The observation of the calls of one function."""

    def __init__(self, world: World, function: Any, analysis: Analysis) -> None:
        super().__init__(world, function, analysis)
        self.calls, self._reference = 0, weakref.ref(function)
        agreement = replica_tracker_of(world)
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


class DivergenceCheck(_Watch):
    """The check in every call of one function, with ``fork(check=True)``.

    Before the call, the variables on whose values its results depend must be equal on all ranks. After
    the call, all variables must be equal except variables that were last updated from values that differ
    by rank: a rank's own rows, random numbers, or other such variables. These must be equal again before
    their values are used.
    """

    def __init__(self, world: World, function: Any, analysis: Analysis) -> None:
        super().__init__(world, function, analysis)
        self._name = repr(function)

    def observe(self, call: Command, finish: Finish) -> tuple[Command, Finish]:
        """Return a command to submit in place of a call, which also returns digests, and how it ends."""
        world, agreement = self._world, replica_tracker_of(self._world)
        before = sorted(self.used - agreement.different)
        for number, (from_rows, shareds) in self.updated.items():
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
