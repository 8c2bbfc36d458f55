"""The loop that every rank runs: steps, exchanges and validations."""

from __future__ import annotations

import copy
import itertools
import math
import time
from typing import Any, Callable, Mapping, NamedTuple, Sequence

import numpy

import synkhronos as synk
from synkhronos._typing import AnyArray
from synkhronos.engines.names import SharedVariable
from synkhronos.extensions.rules.record import History, Saved
from synkhronos.extensions.rules.rule import Params, Rule, assign, values_of
from synkhronos.extensions.rules.writers import Progress
from synkhronos.functions.steps import report_step, verify_step

_ROWS = 1000  # computed at a time
#: How numbers of the ranks are combined by operations of outputs; by the others, they are averaged.
_COMBINED: dict[str | None, Callable[..., float]] = {"sum": sum, "max": max, "min": min}


class Validation(NamedTuple):
    """The function or callable that validates, and the ranks that take part.

    Attributes
    ----------
    function : Function or callable
        Computes the numbers.
    data : list of Data, or None for a callable
        The arguments of the function.
    by_all : bool
        Whether all ranks validate together, each on its share of the rows.
    operations : dict
        The operations of the function's outputs, by name.
    """

    function: Any
    data: list[Any] | None
    by_all: bool
    operations: Mapping[str, Any] = {}

    def verify(self) -> None:
        """Verify the combination of the ranks' numbers, and of slices, as in a first call."""
        data = self.data
        if data is None:
            return
        num_slices = _num_slices(len(data[0]) // (synk.size() if self.by_all else 1))
        if self.by_all or num_slices > 1:
            verify_step(lambda: self.function(*data, num_slices=num_slices))

    def run(self, rank: synk.Rank, params: Params, rule: Rule, epoch: int) -> dict[str, Any] | None:
        """Validate after an epoch; return the numbers on one rank, None on the others.

        The ranks take turns. The parameters are restored afterwards.
        """
        is_mine = rank.rank == epoch % rank.size
        if not (self.by_all or is_mine or rule.is_synchronous):
            return None
        if self.by_all and not rule.is_synchronous:
            rank.barrier()  # so that all take the same value
        value = rule.value(rank, params)
        if self.by_all and not rule.is_synchronous:
            rank.barrier()
        if not (self.by_all or is_mine):
            return None
        own = None
        if value is not None:
            own = values_of(params)
            assign(params, value)
        numbers, rows = self._compute(rank)
        if own is not None:
            assign(params, own)
        if not self.by_all:
            return {"rank": rank.rank, **numbers}
        every = rank.exchange((rows, numbers))
        return {"rank": None, **combined(every, self.operations)} if rank.rank == 0 else None

    def _compute(self, rank: synk.Rank) -> tuple[dict[str, float], float]:
        """Return the numbers of this rank, and their weight."""
        if self.data is None:
            numbers = dict(self.function(rank))
            rows = numbers.pop("rows", 1)
        else:
            length = len(self.data[0])
            share = rank.rows(length) if self.by_all else range(length)
            rows = len(share)
            if not rows:
                return {}, 0
            outputs = rank.call(
                self.function,
                *self.data,
                batch=slice(share.start, share.stop),
                num_slices=_num_slices(rows),
            )
            numbers = named(outputs)
        return {name: float(number) for name, number in numbers.items()}, float(rows)


def named(outputs: Any) -> dict[str, Any]:
    """Return the outputs of a function by name."""
    if isinstance(outputs, dict):
        return outputs
    if not isinstance(outputs, list):
        return {"loss": outputs}
    return {f"output {position}" if position else "loss": one for position, one in enumerate(outputs)}


def _num_slices(rows: int) -> int:
    return max(1, -(-rows // _ROWS))


def combined(
    every: Sequence[tuple[float, dict[str, float]]], operations: Mapping[str, Any] = {}
) -> dict[str, float]:
    """Return all ranks' numbers, combined by their operations; by default averages, weighted by rows."""
    every = [(rows, numbers) for rows, numbers in every if rows]
    weights = [rows for rows, _ in every]
    found = {}
    for name in every[0][1]:
        values, combine = [numbers[name] for _, numbers in every], _COMBINED.get(operations.get(name))
        found[name] = float(combine(values) if combine else numpy.average(values, weights=weights))
    return found


class Plan(NamedTuple):
    """The arguments of `train`, checked."""

    step: Any
    params: Sequence[SharedVariable]
    data: list[synk.Data]
    rule: Rule
    validation: Validation | None
    batch_size: int
    epochs: int
    progress: bool
    report: Callable[..., Any] | None


class Outcome(NamedTuple):
    """The return value of a program on a rank: its additions to the record, and its position."""

    losses: list[float]
    seconds: list[float]
    samples: list[int]
    validations: list[dict[str, Any]]
    steps: int
    state: dict[str, Any]


def train_program(rank: synk.Rank, plan: Plan, begin: Saved, until: int, saves: bool) -> Outcome:
    """Take the steps up to the end of an epoch.

    Parameters
    ----------
    rank : Rank
        The rank that runs the program.
    plan : Plan
        The arguments of `train`.
    begin : Saved
        The state in which the training begins.
    until : int
        How many epochs are done at the end, including earlier epochs.
    saves : bool
        Whether to return the rule's state instead of calling its `finish`.
    """
    rule = _begin(rank, plan, begin)
    loop = _Loop(rank, plan, rule, begin, until)
    progress = Progress(rank, plan.progress, plan.epochs * len(plan.data[0]), plan.epochs)
    try:
        loop.run(progress)
    finally:
        progress.close()
    state = {}
    if saves:
        state = {**rule.hyper_parameters, **rule.state(rank, plan.params)}
    else:
        rule.finish(rank, plan.params)
    return loop.outcome(state)


def finish_program(rank: synk.Rank, plan: Plan, begin: Saved) -> None:
    """Give the parameters their final values."""
    _begin(rank, plan, begin).finish(rank, plan.params)


def _begin(rank: synk.Rank, plan: Plan, begin: Saved) -> Rule:
    """Return the rule of this rank, started."""
    rule = copy.copy(plan.rule)
    rule.prepare(plan.step)
    if rule.seed is None:
        rule.seed = begin.seed
    by_all = plan.validation is not None and plan.validation.by_all
    rank.in_step = rule.is_synchronous or by_all
    state = None if begin.states is None else begin.states[rank.rank]
    start_rule(rank, rule, plan.params, begin.steps[rank.rank], state)
    return rule


def start_rule(
    rank: synk.Rank, rule: Rule, params: Params, n_steps: int, state: Mapping[str, Any] | None
) -> None:
    """Start a rank's copy of a rule, or let it continue from its state and hyper-parameters.

    Parameters
    ----------
    rank : Rank
        The rank that starts it.
    rule : Rule
        The rank's own copy.
    params : list of shared variables
        The parameters that are trained.
    n_steps : int
        How many steps the rank has taken.
    state : dict or None
        The rule's state after these steps, with its hyper-parameters; None at the beginning.
    """
    _ = rank.should_stop  # once asked, methods of the rank do not end the program
    # A new rank finds the clock of the dead one, unless that rank died before it began.
    rank.clock = max(rank.clock, n_steps)
    if state is not None:
        for name in rule.hyper_parameters.keys() & state.keys():
            setattr(rule, name, state[name])
        if not rank.restarts:
            rule.restore(state)
    rule.start(rank, params)


def check_finite(what: str, loss: float, step: int, rank: int) -> None:
    """Raise ``FloatingPointError`` unless a loss is a number."""
    if not math.isfinite(loss):
        raise FloatingPointError(
            f"{what}: the loss is {loss} at step {step} of rank {rank}; lower the learning rate, or "
            f"look for such values in the data"
        )


class _Loop:
    """The loop of one rank."""

    def __init__(self, rank: synk.Rank, plan: Plan, rule: Rule, begin: Saved, until: int) -> None:
        self._rank, self._plan, self._rule, self._seed = rank, plan, rule, begin.seed
        self._until, self._first = until, begin.steps[rank.rank]
        self._length = len(plan.data[0])
        self._per_epoch = rank.n_minibatches(self._length, rank.size, plan.batch_size)
        # A new rank continues where the dead one was; at the end, the clock was set beyond that.
        self._steps = min(rank.clock, plan.epochs * self._per_epoch)
        samples = begin.record.samples[rank.rank]
        most = until * self._per_epoch - self._first
        self._history = History(rank, begin.record.elapsed, samples[-1] if samples else 0, most)
        # It may have died after it had set the clock beyond all steps, or before it had set the clock.
        self._steps = min(self._steps, self._first + self._history.n_steps)
        self._history.cut(self._steps - self._first)

    def run(self, progress: Progress) -> None:
        """Take the steps of the epochs; end early if the ranks are asked to stop."""
        epoch, done = divmod(self._steps, self._per_epoch)
        if self._steps > self._first and not done:  # a rank may have died when it validated
            self._validate(epoch)
        for epoch in range(self._steps // self._per_epoch, self._until):
            done = self._steps - epoch * self._per_epoch
            seed = int(numpy.random.SeedSequence([self._seed, epoch]).generate_state(1)[0])
            batches = self._rank.minibatches(self._length, self._plan.batch_size, seed=seed)
            for rows in itertools.islice(batches, done, None):
                self._take(rows, epoch + 1, progress)
            if self._steps < (epoch + 1) * self._per_epoch:
                return
            self._validate(epoch + 1)

    def _take(self, rows: AnyArray, epoch: int, progress: Progress) -> None:
        rank, plan, rule, history = self._rank, self._plan, self._rule, self._history
        began = time.perf_counter()
        loss = _loss_of(rule.take_step(rank, plan.step, plan.data, rows))
        self._steps += 1
        check_finite("rules.train", loss, self._steps, rank.rank)
        history.add(loss, len(rows))  # before the clock, from which a new rank would go on
        rule.after_step(rank, plan.params, self._steps)
        rank.clock = self._steps
        history.finish_step()
        progress.step(epoch, loss, history.n_samples)
        if plan.report is not None:
            plan.report(rank, rule, self._steps, loss)
        report_step("step", time.perf_counter() - began, len(rows), loss)

    def _validate(self, epoch: int) -> None:
        validation = self._plan.validation
        if validation is None or self._history.validation(epoch) is not None:
            return
        numbers = validation.run(self._rank, self._plan.params, self._rule, epoch)
        if numbers is not None:
            point = {
                "epoch": epoch,
                "step": self._steps,
                "seconds": self._history.seconds,
                "samples": self._history.n_samples,
            }
            self._history.add_validation(epoch, {**point, **numbers})

    def outcome(self, state: dict[str, Any]) -> Outcome:
        """Return the additions to the record, with the state of the rule."""
        epochs = range(self._first // self._per_epoch + 1, self._steps // self._per_epoch + 1)
        validations = self._history.validations(epochs)
        return Outcome(*self._history.steps(), validations, self._steps, state)


def _loss_of(outputs: Any) -> float:
    """Return the loss: the first output."""
    if isinstance(outputs, dict):
        outputs = list(outputs.values())
    first = outputs[0] if isinstance(outputs, list) else outputs
    first = numpy.asarray(first)
    if first.size != 1:
        raise ValueError(
            f"rules.train: step: expected the loss, one number, as the first output, got an array of "
            f"the shape {first.shape}"
        )
    return float(first.reshape(()))
