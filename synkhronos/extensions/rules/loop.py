"""The loop that every rank runs: steps, exchanges and validations."""

from __future__ import annotations

import copy
import itertools
import math
import time
from abc import ABC, abstractmethod
from typing import Any, Callable, Iterable, Mapping, NamedTuple, Sequence

import numpy

import synkhronos as synk
from synkhronos._typing import AnyArray
from synkhronos.engines.names import SharedVariable
from synkhronos.extensions.rules.record import History, Saved
from synkhronos.extensions.rules.rule import Params, Rule, with_values
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
        with with_values(params, value):
            numbers, rows = self._compute(rank)
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
    return {f"output {position}" if position else "loss": item for position, item in enumerate(outputs)}


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
    """The return value of a program on a rank: additions to the record, and the state of the rule."""

    rows: dict[str, list[float]]
    validations: list[dict[str, Any]]
    state: dict[str, Any]


class Loop(ABC):
    """The loop of one rank: steps, exchanges by a rule, validations and checkpoints after epochs.

    A subclass says what a step computes, what is recorded, and when training ends.

    Parameters
    ----------
    rank : Rank
        The rank that runs the loop.
    rule : Rule
        The rule, of which this rank gets its own copy.
    params : list of shared variables
        The parameters that are trained.
    step : object
        What the rule prepares for: the step or the model.
    seed : int
        The seed for a rule that has none.
    """

    _progress: Progress

    def __init__(self, rank: synk.Rank, rule: Rule, params: Params, step: Any, seed: int) -> None:
        self._rank, self._params, self._rule = rank, params, copy.copy(rule)
        self._rule.prepare(step)
        if self._rule.seed is None:
            self._rule.seed = seed
        self._steps = 0

    def _start(self, state: Mapping[str, Any] | None) -> None:
        """Start the rule, or let it continue from its state after `_steps` steps."""
        rank, rule = self._rank, self._rule
        _ = rank.should_stop  # once asked, methods of the rank do not end the program
        # A new rank finds the clock of the dead one, unless that rank died before it began.
        rank.clock = max(rank.clock, self._steps)
        if state is not None:
            for name in rule.hyper_parameters.keys() & state.keys():
                setattr(rule, name, state[name])
            if not rank.restarts:
                rule.restore(state)
        rule.start(rank, self._params)

    def _state(self) -> dict[str, Any]:
        """Return the state of the rule with which this rank continues."""
        return {**self._rule.hyper_parameters, **self._rule.state(self._rank, self._params)}

    def _run(self) -> bool:
        """Take the steps of all epochs; return whether the ranks were asked to stop before the end."""
        try:
            for epoch in self._epochs():
                for batch in self._batches(epoch):
                    self._take(epoch, batch)
                if self._is_stopped(epoch):
                    return True
                self._validate(epoch + 1)
                self._finish_epoch(epoch + 1)
        finally:
            self._progress.close()
        return False

    def _take(self, epoch: int, batch: Any) -> None:
        began = time.perf_counter()
        self._steps += 1
        loss, n_rows = self._compute(batch)
        self._exchange()
        self._rank.clock = self._steps
        self._progress.step(epoch + 1, loss, self._finish_step())
        self._report(loss)
        report_step("step", time.perf_counter() - began, n_rows, loss)

    def _check_finite(self, what: str, loss: float) -> None:
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"{what}: the loss is {loss} at step {self._steps} of rank {self._rank.rank}; lower the "
                f"learning rate, or look for such values in the data"
            )

    @abstractmethod
    def _epochs(self) -> Iterable[int]:
        """Return the epochs that are left, from 0."""

    @abstractmethod
    def _batches(self, epoch: int) -> Iterable[Any]:
        """Return the minibatches of an epoch that are left; fewer if the ranks are asked to stop."""

    @abstractmethod
    def _compute(self, batch: Any) -> tuple[float, int]:
        """Compute a step, and return its loss and its number of rows."""

    def _exchange(self) -> None:
        self._rule.after_step(self._rank, self._params, self._steps)

    @abstractmethod
    def _finish_step(self) -> int:
        """Record a step after its exchange, and return how many rows this rank has used."""

    @abstractmethod
    def _report(self, loss: float) -> None:
        """Tell the user of a step."""

    @abstractmethod
    def _is_stopped(self, epoch: int) -> bool:
        """Whether the ranks were asked to stop in an epoch."""

    @abstractmethod
    def _validate(self, epoch: int) -> None:
        """Validate when a number of epochs is done."""

    def _finish_epoch(self, epoch: int) -> None:  # noqa: B027
        """Do what is left when a number of epochs is done."""


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
    return _StepLoop(rank, plan, begin, until).run(saves)


class _StepLoop(Loop):
    """The loop of `train`, with a step and data of the script."""

    def __init__(self, rank: synk.Rank, plan: Plan, begin: Saved, until: int) -> None:
        super().__init__(rank, plan.rule, plan.params, plan.step, begin.seed)
        by_all = plan.validation is not None and plan.validation.by_all
        rank.in_step = self._rule.is_synchronous or by_all
        self._plan, self._seed, self._until = plan, begin.seed, until
        self._steps = self._first = begin.steps[rank.rank]
        self._start(None if begin.states is None else begin.states[rank.rank])
        self._length = len(plan.data[0])
        self._per_epoch = rank.n_minibatches(self._length, rank.size, plan.batch_size)
        samples = begin.record.samples[rank.rank]
        most = until * self._per_epoch - self._first
        self._history = History(rank, begin.record.elapsed, samples[-1] if samples else 0, most)
        # A new rank continues where the dead one was, which may have died after it had set the clock
        # beyond all steps, or before it had set the clock.
        last = min(plan.epochs * self._per_epoch, self._first + self._history.n_steps)
        self._steps = min(rank.clock, last)
        self._history.cut(self._steps - self._first)
        self._progress = Progress(rank, plan.progress, plan.epochs * self._length, plan.epochs)

    def run(self, saves: bool) -> Outcome:
        """Take the steps; return the additions to the record, and the rule's state if it is saved."""
        epoch, done = divmod(self._steps, self._per_epoch)
        if self._steps > self._first and not done:  # a rank may have died when it validated
            self._validate(epoch)
        self._run()
        state = self._state() if saves else {}
        if not saves:
            self._rule.finish(self._rank, self._params)
        epochs = range(self._first // self._per_epoch + 1, self._steps // self._per_epoch + 1)
        validations = self._history.validations(epochs)
        return Outcome(self._history.rows(), validations, state)

    def _epochs(self) -> Iterable[int]:
        return range(self._steps // self._per_epoch, self._until)

    def _batches(self, epoch: int) -> Iterable[AnyArray]:
        seed = int(numpy.random.SeedSequence([self._seed, epoch]).generate_state(1)[0])
        batches = self._rank.minibatches(self._length, self._plan.batch_size, seed=seed)
        return itertools.islice(batches, self._steps - epoch * self._per_epoch, None)

    def _compute(self, batch: AnyArray) -> tuple[float, int]:
        plan = self._plan
        loss = _loss_of(self._rule.take_step(self._rank, plan.step, plan.data, batch))
        self._check_finite("rules.train", loss)
        self._history.add(loss, len(batch))  # before the clock, from which a new rank would go on
        return loss, len(batch)

    def _finish_step(self) -> int:
        self._history.finish_step()
        return self._history.n_samples

    def _report(self, loss: float) -> None:
        if self._plan.report is not None:
            self._plan.report(self._rank, self._rule, self._steps, loss)

    def _is_stopped(self, epoch: int) -> bool:
        return self._steps < (epoch + 1) * self._per_epoch

    def _validate(self, epoch: int) -> None:
        validation, history = self._plan.validation, self._history
        if validation is None or history.validation(epoch) is not None:
            return
        numbers = validation.run(self._rank, self._params, self._rule, epoch)
        if numbers is not None:
            position = {"step": self._steps, "seconds": history.seconds, "samples": history.n_samples}
            history.add_validation(epoch, {"epoch": epoch, **position, **numbers})


def _loss_of(outputs: Any) -> float:
    """Return the loss: the first output."""
    first = numpy.asarray(list(named(outputs).values())[0])
    if first.size != 1:
        raise ValueError(
            f"rules.train: step: expected the loss, one number, as the first output, got an array of "
            f"the shape {first.shape}"
        )
    return float(first.reshape(()))
