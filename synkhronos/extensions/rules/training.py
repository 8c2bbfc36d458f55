"""`train`: the loop for all rules; and its state in a checkpoint."""

from __future__ import annotations

import copy
import os
from typing import Any, Callable, Sequence

import numpy

import synkhronos as synk
from synkhronos._checks import check_int
from synkhronos._text import listed
from synkhronos._typing import PathLike
from synkhronos.engines.names import SharedVariable
from synkhronos.extensions._parameters import checked_parameters
from synkhronos.extensions.rules.loop import Outcome, Plan, Validation, named, train_program
from synkhronos.extensions.rules.record import Record, Saved, check_path, load_state, save_state
from synkhronos.extensions.rules.rule import Rule, TrainingStep, updated_by
from synkhronos.functions.steps import operations_of


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
    if not isinstance(rule, Rule):
        raise TypeError(
            f"rules.train: rule: expected a Rule, such as rules.EASGD(), got {rule!r}; a rule of your "
            f"own is derived from rules.Rule"
        )
    params = _checked_params(step, params)
    rule = copy.copy(rule)
    rule.prepare(step)
    by_all = _checked_by_all(validate_by, rule, on_death)
    plan = Plan(
        step, params, _as_data(step, data), rule,
        _checked_validation(validate, by_all),
        check_int(batch_size, "rules.train: batch_size", 1),
        check_int(epochs, "rules.train: epochs", 0),
        bool(progress), report,
    )  # fmt: skip
    _check_lengths(plan)
    _check_program(report, controller, on_death)
    every = check_int(checkpoint_every, "rules.train: checkpoint_every", 1)
    if seed is not None:
        seed = check_int(seed, "rules.train: seed", 0)
    if checkpoint is not None:
        check_path(checkpoint)

    def run(program: Callable[..., Any], *args: Any) -> synk.Results:
        return synk.spmd(program, plan, *args, controller=controller, on_death=on_death)

    return _train(plan, run, seed, checkpoint, every)


def _train(
    plan: Plan, run: Callable[..., synk.Results], seed: int | None, path: PathLike | None, every: int
) -> Record:
    """Run a program for all epochs, or, with a checkpoint, for the epochs up to each of them."""
    settings, results = _settings(plan), None
    if path is not None and os.path.exists(path):
        saved = load_state(path, settings, seed)
    else:
        _start_alike(plan)
        seed = int(numpy.random.randint(1 << 31)) if seed is None else seed
        saved = Saved(None, Record(synk.size()), seed)
        if path is not None:
            save_state(path, saved, settings)  # for a death before the first epochs are saved
    per_epoch = synk.Rank.n_minibatches(len(plan.data[0]), synk.size(), plan.batch_size)
    if path is None:
        results = run(train_program, saved, plan.epochs, False)
        saved = _after(saved, results)
    while path is not None and min(saved.steps) < plan.epochs * per_epoch:
        until = min(plan.epochs, (min(saved.steps) // per_epoch // every + 1) * every)
        results = run(train_program, saved, until, True)
        saved = _after(saved, results)
        save_state(path, saved, settings)
        if results.stopped:
            break
    if path is not None and saved.states is not None:
        run(train_program, saved, 0, False)  # which gives the parameters their final values
    record = saved.record
    record.stopped = min(saved.steps) < plan.epochs * per_epoch
    record.interrupted = record.stopped and results is not None and results.interrupted
    return record


def _start_alike(plan: Plan) -> None:
    """Give every rank the master's parameters; verify the first step of all ranks and the validation."""
    synk.broadcast(plan.params)
    n_rows = min(plan.batch_size * synk.size(), len(plan.data[0]))
    plan.rule.verify(plan.data, n_rows)
    if plan.validation is not None:
        plan.validation.verify()


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


def _settings(plan: Plan) -> dict[str, Any]:
    """Return the settings that must be the same to continue from a checkpoint."""
    return {
        "rule": type(plan.rule).__name__,
        "ranks": synk.size(),
        "batch_size": plan.batch_size,
        "rows": len(plan.data[0]),
    }


# Arguments


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


def _checked_by_all(validate_by: str | None, rule: Rule, on_death: str) -> bool:
    if validate_by not in (None, "one", "all"):
        raise ValueError(f"rules.train: validate_by: expected 'one', 'all' or None, got {validate_by!r}")
    by_all = rule.is_synchronous if validate_by is None else validate_by == "all"
    if on_death == "continue" and (rule.is_synchronous or by_all):
        what = f"{rule!r}" if rule.is_synchronous else "validate_by='all'"
        raise ValueError(
            f"rules.train: on_death='continue': the ranks that are left cannot meet a dead one in "
            f"collectives, which {what} uses; use a rule without, such as EASGD, or on_death='raise'"
        )
    return by_all


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


def _check_program(report: Any, controller: Any, on_death: str) -> None:
    for name, given in (("report", report), ("controller", controller)):
        if given is not None and not callable(given):
            raise TypeError(f"rules.train: {name}: expected a function or None, got {given!r}")
    if on_death not in ("raise", "continue"):
        raise ValueError(f"rules.train: on_death: expected 'raise' or 'continue', got {on_death!r}")


def _check_lengths(plan: Plan) -> None:
    rows, size = len(plan.data[0]), synk.size()
    if rows < size:
        raise ValueError(
            f"rules.train: data: expected at least a row for each of the {size} ranks, got {rows} row(s)"
        )
    if plan.validation is not None and plan.validation.data is not None:
        if not len(plan.validation.data[0]):
            raise ValueError("rules.train: validate: expected at least one row, got none")
