"""`train`, the loop for all rules; and the loop that every rank runs, also in sessions."""

from __future__ import annotations

import copy
import itertools
import math
import os
import time
from abc import ABC, abstractmethod
from typing import Any, Callable, Iterable, Mapping, NamedTuple, Sequence

import numpy

import synkhronos as synk
from synkhronos._checks import check_choice, check_int
from synkhronos._text import listed
from synkhronos._typing import AnyArray, PathLike
from synkhronos.engines.names import SharedVariable
from synkhronos.extensions._parameters import checked_parameters
from synkhronos.extensions.rules import record as records
from synkhronos.extensions.rules.record import History, Progress, Record, Saved
from synkhronos.extensions.rules.rule import Params, Rule, TrainingStep, updated_by, with_values
from synkhronos.functions.steps import operations_of, report_step, verify_step

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
            batch, num_slices = slice(share.start, share.stop), _num_slices(rows)
            numbers = named(rank.call(self.function, *self.data, batch=batch, num_slices=num_slices))
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
    found = {}
    for name in dict.fromkeys(name for _, numbers in every for name in numbers):
        values, weights = zip(*((numbers[name], rows) for rows, numbers in every if name in numbers))
        combine = _COMBINED.get(operations.get(name))
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

    def _run(self, epochs: Iterable[int]) -> bool:
        """Take the steps of epochs; return whether the ranks were asked to stop before the end."""
        try:
            for epoch in epochs:
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
        self._progress.step(epoch + 1, loss, self._finish_step(loss))
        report_step("step", time.perf_counter() - began, n_rows, loss)

    def _check_finite(self, what: str, loss: float) -> None:
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"{what}: the loss is {loss} at step {self._steps} of rank {self._rank.rank}; lower the "
                f"learning rate, or look for such values in the data"
            )

    @abstractmethod
    def _batches(self, epoch: int) -> Iterable[Any]:
        """Return the minibatches of an epoch that are left; fewer if the ranks are asked to stop."""

    @abstractmethod
    def _compute(self, batch: Any) -> tuple[float, int]:
        """Compute a step, and return its loss and its number of rows."""

    def _exchange(self) -> None:
        self._rule.after_step(self._rank, self._params, self._steps)

    @abstractmethod
    def _finish_step(self, loss: float) -> int:
        """Record a step after its exchange, tell the user, and return how many rows this rank used."""

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
        self._run(range(epoch, self._until))
        state = self._state() if saves else {}
        if not saves:
            self._rule.finish(self._rank, self._params)
        epochs = range(self._first // self._per_epoch + 1, self._steps // self._per_epoch + 1)
        validations = self._history.validations(epochs)
        return Outcome(self._history.rows(), validations, state)

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

    def _finish_step(self, loss: float) -> int:
        self._history.finish_step()
        if self._plan.report is not None:
            self._plan.report(self._rank, self._rule, self._steps, loss)
        return self._history.n_samples

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


def train(
    step: synk.Function | TrainingStep,
    params: Sequence[SharedVariable],
    data: Sequence[Any],
    rule: Rule,
    batch_size: int,
    epochs: int = 1,
    validate: Any = None,
    validate_by: str | None = None,
    seed: int | None = None,
    checkpoint: PathLike | None = None,
    checkpoint_every: int = 1,
    progress: bool = True,
    report: Callable[..., Any] | None = None,
    controller: Any = None,
    on_death: str = "raise",
) -> Record:
    """Train on all ranks, each at its own pace, with a rule that determines what they exchange.

    First every rank gets the master's parameters. Then each rank takes its steps, on minibatches of its
    own share of the rows, in a new order in each epoch; all ranks have the same number of steps. At the
    end `rule.finish` gives every rank the final parameters.

    The steps may use any update, such as Adam. Its state stays local to each rank. With
    ``BSP(average="gradients")``, however, all ranks make the same updates.

    Parameters
    ----------
    step : Function or TrainingStep
        It updates the parameters of its rank, and its first output is the loss, the mean over the rows.
        Build it with `synkhronos.function`, or in two parts with `make_step`.
    params : list of shared variables
        The parameters, all of one dtype: float16, float32 or float64.
    data : list of Data or arrays
        The inputs of the step, with equal numbers of rows.
    rule : Rule
        Each rank has a copy of it; the object itself is not changed.
    batch_size : int
        The largest number of rows of a rank in a step.
    epochs : int, default: 1
        If training continues from a checkpoint, earlier epochs count as well.
    validate : (Function, list of Data or arrays) or callable, optional
        What is computed after each epoch with `rule.value`: the center, or the average of the ranks. A
        function's outputs are numbers that are means over the rows, or have another operation. The first
        output is recorded as ``"loss"``, unless the function returns a dict. A callable
        ``validate(rank)`` returns numbers by name. The parameters are restored afterwards.
    validate_by : {"one", "all"}, optional
        Whether one rank validates while the others continue, each in its turn, which is the default for
        rules without collectives; or all ranks validate together, each on its share of the rows. Their
        numbers are combined by the operations of the outputs, by default averaged, weighted by rows; a
        callable may return ``"rows"`` as the weight.
    seed : int, optional
        Determines the order of the rows, and the rule's random draws. By default it is drawn from
        ``numpy.random``.
    checkpoint : path, optional
        A file that is written by `synkhronos.save` at the start, every `checkpoint_every` epochs, and
        when training is stopped. If it exists, training continues from it, with the rule's
        hyper-parameters at that time. The result is bit-identical to an uninterrupted run for rules in
        which the order of the exchanges is fixed: `BSP`, `LocalSGD`, `DiLoCo`, and any rule on one rank.
        The variables that functions use must be the same as when it was written.
    checkpoint_every : int, default: 1
        The number of epochs between two checkpoints.
    progress : bool, default: True
        Whether to show the loss and the rate of each rank on stderr: a bar of tqdm on a terminal, else a
        line once a minute. The environment variable ``SYNKHRONOS_PROGRESS=0`` turns it off.
    report : callable, optional
        ``report(rank, rule, step, loss)`` is called on every rank after each step and exchange, with the
        rank's own copy of the rule. It may change the rule's hyper-parameters, or shared variables such
        as a learning rate; ask the controller with ``rank.ask``; or stop all ranks with ``rank.stop()``.
    controller : callable, optional
        As in `synkhronos.spmd`. With `checkpoint`, it is started again after each checkpoint.
    on_death : {"raise", "continue"}
        As in `synkhronos.spmd`. With ``"continue"``, a new rank continues with the step at which the
        dead one was. It is for rules without collectives.

    Returns
    -------
    Record
        The losses and times of all steps, by rank, and the validations.

    Raises
    ------
    NotForkedError, ClosedError, WorldBrokenError
        If there are no processes that can be used.
    TypeError, ValueError, OSError
        If an argument is wrong, before anything starts, or the checkpoint is from a different training
        run.
    FloatingPointError or WorkerError
        If a loss is not finite; the message names the rank and the step. Any other exception in a worker
        also raises a `WorkerError`.

    Examples
    --------
    >>> import numpy as np
    >>> import synkhronos as synk
    >>> import theano
    >>> import theano.tensor as T
    >>> from synkhronos.extensions import rules
    >>> synk.fork(2, use_gpu=False)
    2
    >>> x, w = T.dmatrix("x"), theano.shared(np.zeros(2), name="w")
    >>> loss = T.sqr(x - w).sum(axis=1).mean()
    >>> step = synk.function([x], loss, updates=[(w, w - 0.1 * T.grad(loss, w))])
    >>> data = np.random.RandomState(0).normal([1, 2], 0.1, (1000, 2))
    >>> rule = rules.EASGD(alpha=0.4, period=2)
    >>> record = rules.train(step, [w], [data], rule, batch_size=20, epochs=4)
    >>> w.get_value().round(1)
    array([1., 2.])
    >>> len(record.losses[0]), len(record.losses[1])
    (100, 100)
    >>> synk.close()
    """
    rule, params = check_rule(rule, "rules.train"), _checked_params(step, params)
    rule.prepare(step)
    by_all = rule.is_synchronous
    if validate_by is not None:
        by_all = check_choice(validate_by, "rules.train: validate_by", ("one", "all")) == "all"
    check_on_death(on_death, "rules.train", rule, "validate_by='all'" if by_all else None)
    plan = Plan(
        step, params, _as_data(step, data), rule,
        _checked_validation(validate, by_all),
        check_int(batch_size, "rules.train: batch_size", 1),
        check_int(epochs, "rules.train: epochs", 0),
        bool(progress), report,
    )  # fmt: skip
    _check_lengths(plan)
    for name, given in (("report", report), ("controller", controller)):
        if given is not None and not callable(given):
            raise TypeError(f"rules.train: {name}: expected a function or None, got {given!r}")
    every = check_int(checkpoint_every, "rules.train: checkpoint_every", 1)
    if seed is not None:
        seed = check_int(seed, "rules.train: seed", 0)
    if checkpoint is not None:
        records.check_path(checkpoint)

    def run(program: Callable[..., Any], *args: Any) -> synk.Results:
        return synk.spmd(program, plan, *args, controller=controller, on_death=on_death)

    return _train(plan, run, seed, checkpoint, every)


def _train(
    plan: Plan, run: Callable[..., synk.Results], seed: int | None, path: PathLike | None, every: int
) -> Record:
    """Run a program for all epochs, or, with a checkpoint, for the epochs up to each of them."""
    results, rows, size = None, len(plan.data[0]), synk.size()
    # They must be the same to continue from a checkpoint.
    settings = {"rule": type(plan.rule).__name__, "ranks": size}
    settings.update(batch_size=plan.batch_size, rows=rows)
    if path is not None and os.path.exists(path):
        saved = records.load_state(path, settings, seed)
    else:
        synk.broadcast(plan.params)
        plan.rule.verify(plan.data, min(plan.batch_size * size, rows))
        if plan.validation is not None:
            plan.validation.verify()
        seed = int(numpy.random.randint(1 << 31)) if seed is None else seed
        saved = Saved(None, Record(size), seed)
        if path is not None:
            records.save_state(path, saved, settings)  # for a death before the first epochs are saved
    per_epoch = synk.Rank.n_minibatches(rows, size, plan.batch_size)
    if path is None:
        results = run(train_program, saved, plan.epochs, False)
        saved = _after(saved, results)
    while path is not None and min(saved.steps) < plan.epochs * per_epoch:
        until = min(plan.epochs, (min(saved.steps) // per_epoch // every + 1) * every)
        results = run(train_program, saved, until, True)
        saved = _after(saved, results)
        records.save_state(path, saved, settings)
        if results.stopped:
            break
    if path is not None and saved.states is not None:
        run(train_program, saved, 0, False)  # which gives the parameters their final values
    record = saved.record
    record.stopped = min(saved.steps) < plan.epochs * per_epoch
    record.interrupted = record.stopped and results is not None and results.interrupted
    return record


def _after(before: Saved, results: synk.Results) -> Saved:
    """Return the state after a program, with its outcomes added to the record."""
    record, states = before.record, list(before.states or [{}] * synk.size())
    outcomes: list[Outcome | None] = list(results)
    for rank, outcome in enumerate(outcomes):
        if outcome is not None:  # None for a rank that was ended
            record.extend(rank, outcome.rows)
            record.validations += outcome.validations
            states[rank] = outcome.state
    record.validations.sort(key=lambda point: point["seconds"])
    return before._replace(states=states)


# Arguments


def check_rule(given: Any, what: str, also: str = "") -> Rule:
    """Return a copy of a rule; raise if it is something else.

    The message begins with `what`, and says after a rule what is expected `also`.
    """
    if not isinstance(given, Rule):
        raise TypeError(
            f"{what}: rule: expected a Rule, such as rules.EASGD(){also}, got {given!r}; a rule of "
            f"your own is derived from rules.Rule"
        )
    return copy.copy(given)


def check_on_death(on_death: str, what: str, rule: Rule, other: str | None) -> str:
    """Return `on_death`; raise if the ranks that are left would meet a dead one.

    They do so by a synchronous rule, and by an `other` argument, which the message names.
    """
    check_choice(on_death, f"{what}: on_death", ("raise", "continue"))
    meeting = repr(rule) if rule.is_synchronous else other
    if on_death == "continue" and meeting:
        advice = f"leave out {other}"
        if rule.is_synchronous:
            advice = "use a rule without them, such as rules.EASGD()"
        raise ValueError(
            f"{what}: on_death='continue': the ranks that are left cannot meet a dead one in "
            f"collectives, which {meeting} uses; {advice}, or use on_death='raise' and a checkpoint"
        )
    return on_death


def _checked_params(step: Any, params: Sequence[SharedVariable]) -> list[SharedVariable]:
    if not isinstance(step, (synk.Function, TrainingStep)):
        raise TypeError(
            f"rules.train: step: expected a function built with synk.function(), or a step of "
            f"rules.make_step(), got {step!r}"
        )
    params = checked_parameters(params)
    updated = updated_by(step)
    missing = [str(param) for param in params if param not in updated]
    if missing:
        raise ValueError(
            f"rules.train: params: expected variables that the step updates, got some that it does not: "
            f"{listed(missing)}; give the step updates for them, or leave them out"
        )
    return params


def _checked_validation(validate: Any, by_all: bool) -> Validation | None:
    if validate is None:
        return None
    if isinstance(validate, (tuple, list)) and len(validate) == 2:
        function, data = validate
        if isinstance(function, synk.Function):
            arrays = _as_data(function, data, "validate")
            return Validation(function, arrays, by_all, named(operations_of(function)))
    elif callable(validate) and not isinstance(validate, synk.Function):
        return Validation(validate, None, by_all)
    raise TypeError(
        f"rules.train: validate: expected (function, [data, ...]) with a function built by "
        f"synk.function(), or a callable that takes the rank, got {validate!r}"
    )


def _as_data(step: synk.Function | TrainingStep, data: Any, name: str = "data") -> list[synk.Data]:
    """Return a `Data` for each input, converted once; raise unless their numbers of rows are equal."""
    function = step.compute if isinstance(step, TrainingStep) else step
    if isinstance(data, (synk.Data, numpy.ndarray)) or not isinstance(data, (list, tuple)):
        raise TypeError(
            f"rules.train: {name}: expected a list with an array or Data for each input, got "
            f"{type(data).__name__}; put a single one in a list"
        )
    if not data:
        raise ValueError(f"rules.train: {name}: expected at least one array, got an empty list")
    # If it is already Data, only an empty part is converted.
    arrays = [array.data[:0] if isinstance(array, synk.Data) else array for array in data]
    built = function.build_inputs(*arrays)
    built = built if isinstance(built, tuple) else (built,)
    made = [array if isinstance(array, synk.Data) else new for array, new in zip(data, built)]
    lengths = [len(item) for item in made]
    if len(set(lengths)) > 1:
        raise ValueError(f"rules.train: {name}: expected equal numbers of rows, got {lengths}")
    return made


def _check_lengths(plan: Plan) -> None:
    rows, size = len(plan.data[0]), synk.size()
    if rows < size:
        raise ValueError(
            f"rules.train: data: expected at least a row for each of the {size} ranks, got {rows} row(s)"
        )
    if plan.validation is not None and plan.validation.data is not None:
        if not len(plan.validation.data[0]):
            raise ValueError("rules.train: validate: expected at least one row, got none")
