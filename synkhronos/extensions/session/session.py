"""`Session`: trains a model of Theano-MPI's kind on all ranks, with any rule.

Every rank runs the program of a session: its model, batches, exchanges and validations.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Sequence

import numpy

import synkhronos as synk
from synkhronos._checks import check_choice, check_flag, check_in_range, check_int
from synkhronos._html import Facts, Shown
from synkhronos._typing import AnyArray, PathLike
from synkhronos.extensions import rules
from synkhronos.extensions.rules.record import POSITION, Progress, check_path, check_settings, numbers_of
from synkhronos.extensions.rules.rule import END, Rule, values_of, with_values
from synkhronos.extensions.rules.training import Loop, check_on_death, check_rule, combined
from synkhronos.extensions.session import model as models
from synkhronos.extensions.session.model import LearningRate, ModelState, SummedVelocities
from synkhronos.extensions.session.recorder import RankRecorder, Recorder

FORMAT = ["synkhronos session", 1]
_PATIENCE = 3  # batches after which the parameters must have changed
_BATCHES = "batches"  # that a rank has validated
_EPOCH, _STEPS, _BEGAN = range(3)  # what a rank that replaces a dead one must know


class Plan(NamedTuple):
    """The arguments of `Session`, checked."""

    model: Callable[..., Any] | str
    config: Mapping[str, Any]
    rule: Rule
    sync_type: str
    recorder: Recorder
    checkpoint: PathLike | None
    checkpoint_every: int
    resumes: bool
    scale_lr: bool
    warmup: float
    seed: int
    progress: bool

    def settings(self, size: int, model: Any) -> dict[str, Any]:
        """Return the settings that must be the same to continue from a checkpoint."""
        own = {name: getattr(self, name) for name in ("sync_type", "scale_lr", "warmup")}
        return {"model": type(model).__name__, "rule": type(self.rule).__name__, "ranks": size, **own}


class Outcome(NamedTuple):
    """The return value of the program on a rank; the model in the master only.

    The validations are of all ranks, or, if the ranks do not meet, of this one.
    """

    rows: dict[str, list[float]]
    validations: list[dict[str, Any]]
    has_stopped: bool
    model: Any


def session_program(rank: synk.Rank, plan: Plan) -> Outcome:
    """Build the model, train it, and give the parameters their final values.

    Parameters
    ----------
    rank : Rank
        The rank that runs the program.
    plan : Plan
        The arguments of the session.
    """
    model = None
    try:
        with rank.compiling() if rank.may_meet else contextlib.nullcontext():
            model = _build(rank, plan)
        models.check(model, is_compiled=True)
        if not isinstance(plan.rule, SummedVelocities):
            _check_updates_itself(model, plan)
        return _ModelLoop(rank, plan, model).run()
    finally:
        if model is not None:
            model.cleanup()


def _build(rank: synk.Rank, plan: Plan) -> Any:
    """Return the model of this rank, with its functions compiled."""
    made = models.find_class(plan.model)
    config = {
        **plan.config, "rank": rank.rank, "size": rank.size, "verbose": rank.is_master,
        "device": rank.device, "sync_type": plan.sync_type,
    }  # fmt: skip
    model = made(config)
    models.check(model, is_compiled=False)
    if models.accepts(model.compile_iter_fns, sync_type=plan.sync_type):
        model.compile_iter_fns(sync_type=plan.sync_type)
    else:
        model.compile_iter_fns()
    return model


def _check_updates_itself(model: Any, plan: Plan) -> None:
    """Raise if the model has compiled functions that compute velocities, which nobody would exchange."""
    if callable(getattr(model, "descent_vel", None)):
        raise ValueError(
            f"Session: sync_type='avg': expected a model whose train_iter() updates the parameters, but "
            f"{type(model).__name__}.compile_iter_fns() has made descent_vel(), so it computes "
            f"velocities only, which {plan.rule!r} does not exchange: nothing would be trained; let it "
            f"compile for sync_type='avg', or use rule='BSP' with sync_type='cdd'"
        )


class _ModelLoop(Loop):
    """The loop of a session, with the model of a rank, which has its own data."""

    def __init__(self, rank: synk.Rank, plan: Plan, model: Any) -> None:
        super().__init__(rank, plan.rule, list(model.params), model, plan.seed)
        self._plan, self._model = plan, model
        self._by_sub_batch = isinstance(self._rule, SummedVelocities)
        rank.adopt([*self._params, *model.vels2] if self._by_sub_batch else self._params)
        self._model_state = ModelState(model)
        self._epoch, self._place, self._has_stopped = 0, numpy.zeros(3), False
        self._validations: list[dict[str, Any]] = []
        scale = rank.size if plan.scale_lr else 1
        if plan.scale_lr and callable(getattr(model, "scale_lr", None)):
            model.scale_lr(rank.size)
            scale = 1
        self._rate = LearningRate(model.shared_lr, scale, rank.size)
        rows, state, elapsed = self._begin()
        per_batch = getattr(model, "batch_size", 1)
        self._samples = int(per_batch) if isinstance(per_batch, (int, numpy.integer)) else 1
        self._samples *= int(model.n_subb)
        total = int(model.n_epochs) * int(model.data.n_batch_train) * self._samples * rank.size
        self._progress = Progress(rank, plan.progress, total, int(model.n_epochs))
        self._sinks = plan.recorder.open_sinks(self._progress.write) if rank.is_master else []
        self._recorder = RankRecorder(self._sinks, plan.recorder.print_every, rows, elapsed)
        self._start(state)
        self._before: list[AnyArray] | None = values_of(self._params)  # until a parameter changes
        self._n_unchanged = 0  # batches

    # Beginning, and checkpoints

    def _begin(self) -> tuple[dict[str, list[float]], dict[str, Any] | None, float]:
        """Return the rows of the record, the rule's state and the seconds of earlier programs."""
        path = self._plan.checkpoint
        if not self._rank.may_meet:
            return {}, None, self._take_place()
        if path is None or not self._plan.resumes:
            self._rank.broadcast(self._params)
            return {}, None, 0.0
        values = self._rank.load(path)
        header = self._checked_header(path, values)
        self._model_state.set(_part(values, "model"))
        self._rate.restore(values["rate"])
        self._steps, self._epoch = header["steps"], header["epoch"]
        self._rule.seed = header["seed"]
        self._validations = header["validations"]
        rows = {name: column.tolist() for name, column in _part(values, "record").items()}
        return rows, _part(values, "rule"), header["seconds"]

    def _take_place(self) -> float:
        """Begin, or go on in the epoch in which a dead rank was; return the seconds since the beginning.

        All ranks begin with the parameters of the first one.
        """
        self._rank.center(self._params, "begin")
        self._place = self._rank.memory("session", 3)
        self._place[_BEGAN] = self._place[_BEGAN] or time.perf_counter()
        self._epoch, self._steps = int(self._place[_EPOCH]), int(self._place[_STEPS])
        for epoch in range(self._epoch):
            self._rate.adjust(self._model.adjust_hyperp, epoch)
        return time.perf_counter() - float(self._place[_BEGAN])

    def _checked_header(self, path: PathLike, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the header of a checkpoint; raise if it is not of this session."""
        header: dict[str, Any] = json.loads(values.get("session", "{}"))
        if header.get("format") != FORMAT:
            raise ValueError(
                f"Session: checkpoint: expected a file of a session, got {path!r}; give another path, "
                f"or remove it to begin anew"
            )
        settings = self._plan.settings(self._rank.size, self._model)
        check_settings("Session", path, header["settings"], settings)
        complaint = self._model_state.check(_part(values, "model"))
        if complaint is not None:
            raise ValueError(
                f"Session: checkpoint: expected the variables of this model in {path!r}, but "
                f"{complaint}; use the same model, or remove the file to begin anew"
            )
        return header

    def _save(self, path: PathLike) -> None:
        rank, rule = self._rank, self._rule
        state = self._state()
        if not rule.is_synchronous:  # then the rule has set the clocks beyond all steps
            rank.barrier()
            rank.clock = self._steps
            rank.barrier()
        header = {
            "format": FORMAT, "settings": self._plan.settings(rank.size, self._model),
            "steps": self._steps, "epoch": self._epoch, "seed": rule.seed,
            "seconds": self._recorder.seconds, "validations": self._validations,
        }  # fmt: skip
        rows = {name: numpy.array(column) for name, column in self._recorder.rows.items()}
        parts = {"model": self._model_state.get(), "rule": state, "record": rows}
        named = {
            f"{part} {name}": item for part, values in parts.items() for name, item in values.items()
        }
        rank.save(path, {"session": json.dumps(header), "rate": self._rate.own, **named})

    # The loop

    def run(self) -> Outcome:
        """Train up to the model's last epoch; end early if the ranks are asked to stop."""
        try:
            has_stopped = self._run(self._epochs())
            self._rule.finish(self._rank, self._params)
        finally:
            for sink in self._sinks:
                sink.close()
        kept = self._model if self._rank.is_master else None
        return Outcome(self._recorder.rows, self._validations, has_stopped, kept)

    def _epochs(self) -> Iterator[int]:
        while self._epoch < self._model.n_epochs:
            yield self._epoch

    def _batches(self, epoch: int) -> Iterator[int]:
        rank, model = self._rank, self._model
        model.epoch = epoch
        n_batches = int(model.data.n_batch_train)
        if self._rule.is_synchronous:
            self._check_equal(n_batches)
        self._warmup = round(self._plan.warmup * n_batches)
        rank.in_step = self._rule.is_synchronous  # the others stop where they are
        for batch in range(n_batches):
            self._has_stopped = rank.should_stop
            if self._has_stopped:
                break
            yield batch

    def _is_stopped(self, epoch: int) -> bool:
        if self._rank.may_meet:
            self._rank.clock = END  # no rank waits for this one, or sends to it
            self._has_stopped = any(self._rank.exchange(self._has_stopped))
            self._rank.clock = self._steps
        self._model.reset_iter("train")
        return self._has_stopped

    def _check_equal(self, n_batches: int) -> None:
        by_rank = self._rank.exchange(n_batches)
        if any(item != n_batches for item in by_rank):
            raise ValueError(
                f"Session: data.n_batch_train: expected the same number on every rank, as all of them "
                f"meet after each batch with {self._rule!r}, got {by_rank}; repeat or leave out batches "
                f"in shard_data(), or use a rule without collectives, such as EASGD"
            )

    def _compute(self, batch: int) -> tuple[float, int]:
        model, recorder = self._model, self._recorder
        self._rate_of_step = self._rate.before_step(self._steps - 1, self._warmup)
        self._computed = 0.0
        for number in range(1, int(model.n_subb) + 1):
            known, began = recorder.measured, time.perf_counter()
            model.train_iter(self._steps, recorder)
            self._computed += time.perf_counter() - began - (recorder.measured - known)
            if len(recorder.outputs_of_batch) < number:
                raise RuntimeError(
                    f"Session: expected that {type(model).__name__}.train_iter() calls "
                    f"recorder.train_error(count, cost, error), got no call in batch {self._steps}"
                )
            loss = recorder.outputs_of_batch[-1]["loss"]
            self._check_finite("Session", loss)
            if self._by_sub_batch:
                self._meet()
        self._check_changed()
        return loss, self._samples

    def _check_changed(self) -> None:
        """Raise after some batches in which no parameter has changed."""
        if self._before is None:
            return
        self._n_unchanged += 1
        if not all(map(numpy.array_equal, values_of(self._params), self._before)):
            self._before = None
        elif self._n_unchanged == _PATIENCE:
            raise RuntimeError(
                f"Session: expected that training changes the parameters, but after {_PATIENCE} batches "
                f"all of model.params are as before on rank {self._rank.rank}, with "
                f"sync_type={self._plan.sync_type!r}: let the functions that train_iter() calls update "
                f"them, or, for 'cdd', compute model.vels; and look at the learning rate"
            )

    def _exchange(self) -> None:
        if not self._by_sub_batch:
            self._meet()

    def _meet(self) -> None:
        """Let the rule exchange; the wait for slower ranks is measured if they meet."""
        if self._rule.is_synchronous and self._rank.size > 1:
            began = time.perf_counter()
            self._rank.barrier()
            self._recorder.add_time("wait", time.perf_counter() - began)
        began = time.perf_counter()
        super()._exchange()
        self._recorder.add_time("exchange", time.perf_counter() - began)

    def _finish_step(self, loss: float) -> int:
        self._place[_STEPS] = self._steps
        self._recorder.finish_batch(self._rate_of_step, self._computed, self._samples)
        self._recorder.print_train_info(self._steps)
        return self._recorder.n_samples

    def _validate(self, epoch: int) -> None:
        """Validate with the rule's value, each rank on its own batches; record the averages."""
        rank, model, recorder = self._rank, self._model, self._recorder
        with with_values(self._params, self._rule.value(rank, self._params)):
            for _ in range(int(model.data.n_batch_val) * int(model.n_subb)):
                model.val_iter(self._steps, recorder)
            model.reset_iter("val")
        position = dict(zip(POSITION, (epoch, None, self._steps, recorder.seconds, recorder.n_samples)))
        own_part = recorder.take_validation(), position
        every = rank.exchange(own_part) if rank.may_meet else [own_part]
        point = _point(every, every[rank.master_rank if rank.may_meet else 0][1])
        if point is not None:
            self._validations.append(point if rank.may_meet else {**point, _BATCHES: own_part[0][0]})
            recorder.print_val_info(self._steps, point)
            model.current_info = recorder.get_latest_val_info()

    def _finish_epoch(self, epoch: int) -> None:
        plan, model = self._plan, self._model
        if self._rank.is_master and callable(getattr(model, "print_info", None)):
            model.print_info(self._recorder)
        self._rate.adjust(model.adjust_hyperp, self._epoch)
        self._epoch = epoch
        self._place[_EPOCH] = epoch
        if plan.checkpoint is not None and (
            epoch == model.n_epochs or not epoch % plan.checkpoint_every
        ):
            self._save(plan.checkpoint)


def _point(
    every: Sequence[tuple[tuple[float, dict[str, float]], Any]], position: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return a validation: averages of what the ranks have measured; None if there is nothing."""
    numbers = combined([each for each, _ in every])
    return {**position, **numbers} if numbers else None


def combined_by_epoch(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return a validation for each epoch, from those of ranks that did not meet."""
    by_epoch: dict[int, list[Any]] = {}
    for outcome in outcomes:
        for item in outcome.validations:
            position = {name: item[name] for name in POSITION}
            numbers = numbers_of(item)
            by_epoch.setdefault(item["epoch"], []).append(((numbers.pop(_BATCHES), numbers), position))
    points = [_point(every, every[0][1]) for _, every in sorted(by_epoch.items())]
    return [point for point in points if point is not None]


def _part(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the values of a part of a checkpoint, by their names there."""
    start = f"{name} "
    return {key[len(start) :]: value for key, value in values.items() if key.startswith(start)}


_RULES: dict[str, Callable[[], Rule]] = {
    "ASGD": rules.ASGD, "BSP": functools.partial(rules.BSP, average="params"), "DiLoCo": rules.DiLoCo,
    "Downpour": rules.Downpour, "EASGD": rules.EASGD, "GoSGD": rules.GoSGD,
    "LocalSGD": rules.LocalSGD, "SSP": rules.SSP,
}  # fmt: skip


class Session(Shown):
    """Trains a model on all ranks. The model has the attributes and methods of Theano-MPI's models.

    Every rank builds a model of its own and trains it on its own batches; the rule says what the ranks
    exchange. The guide lists what a model must have.

    Parameters
    ----------
    model : class, or str
        ``model(config)`` builds the model of a rank. A string is ``"package.module:ClassName"``.
    rule : Rule or str, default: "BSP"
        A rule of `synkhronos.extensions.rules`, or its name in any case, for its default
        hyper-parameters: ``"BSP"``, ``"EASGD"``, ``"GOSGD"``, ``"LocalSGD"``, ``"DiLoCo"``, ``"ASGD"``,
        ``"Downpour"`` or ``"SSP"``. BSP averages parameters, or sums velocities; see `sync_type`.
    devices : int, or list of str, optional
        The ranks to fork: a number, or Theano's devices, such as ``["cuda0", "cuda1"]`` or
        ``["cpu", "cpu"]``. By default as `synkhronos.fork` chooses. The processes are closed at the end.
        If they are forked already, they are used, and stay.
    recorder : Recorder, optional
        Where everything is recorded. By default a new one, which prints a line every 40 batches.
    checkpoint : path, optional
        A file that is written after every `checkpoint_every` epochs. If it exists, training continues
        from it. With rules whose order of exchanges is fixed (BSP, LocalSGD, DiLoCo), the result equals
        that of a run without a stop bit for bit.
    sync_type : {"avg", "cdd"}, default: "avg"
        For BSP: whether the parameters are averaged after each batch, or the velocities are added up,
        which `compile_iter_fns` must then make. For all other rules ``"avg"``.
    config : dict, optional
        Further items of the model's `config`, which also has ``"rank"``, ``"size"``, ``"verbose"``,
        ``"device"`` and ``"sync_type"``.
    scale_lr : bool, default: False
        Whether to multiply the learning rate by the number of ranks: by ``model.scale_lr(size)`` if the
        model has it. With ``"cdd"`` the sum does that already.
    warmup : float, default: 0
        The number of epochs in which the learning rate grows from its value divided by the number of
        ranks to its value, by the same amount before each batch.
    checkpoint_every : int, default: 1
        The number of epochs between two checkpoints.
    seed : int, optional
        For rules that draw random numbers. By default it is drawn from ``numpy.random``.
    progress : bool, default: True
        Whether to show the progress on stderr, as `rules.train` does.
    on_death : {"raise", "continue"}
        What happens if a rank dies. With ``"continue"`` the others go on, and on the CPU a new rank
        takes its place: it builds its model again and repeats the epoch, and its record begins anew. The
        ranks then meet nowhere, so this needs a rule without collectives, and no `checkpoint`; the
        validations are combined at the end.

    Attributes
    ----------
    recorder : Recorder
        The record.
    model : object or None
        After `run`, the master's model, with the final parameters.

    Raises
    ------
    TypeError, ValueError, OSError
        If an argument is wrong, or the combination of the rule and `sync_type` would train nothing.

    Examples
    --------
    >>> import numpy as np
    >>> import theano
    >>> import theano.tensor as T
    >>> from synkhronos.extensions.session import Recorder, Session
    >>> class Rows:
    ...     n_batch_train, n_batch_val = 20, 1
    >>> class Mean:  # of rows around 3
    ...     epoch, n_epochs, n_subb, data = 0, 3, 1, Rows()
    ...     def __init__(self, config):
    ...         self.rows = np.random.RandomState(config["rank"]).normal(3, 0.1, (20, 8))
    ...         self.w, self.shared_lr = theano.shared(0.0, "w"), theano.shared(0.2, "rate")
    ...         self.params, self.batch = [self.w], 0
    ...     def compile_iter_fns(self):
    ...         x = T.dvector("x")
    ...         cost = T.sqr(x - self.w).mean()
    ...         new = self.w - self.shared_lr * T.grad(cost, self.w)
    ...         self.train = theano.function([x], cost, updates=[(self.w, new)])
    ...         self.validate = theano.function([x], cost)
    ...     def train_iter(self, count, recorder):
    ...         recorder.train_error(count, self.train(self.rows[self.batch]))
    ...         self.batch += 1
    ...     def val_iter(self, count, recorder):
    ...         recorder.val_error(count, self.validate(self.rows[0]))
    ...     def reset_iter(self, mode):
    ...         self.batch = 0
    ...     def adjust_hyperp(self, epoch):
    ...         self.shared_lr.set_value(0.2 / (epoch + 2))
    ...     def cleanup(self):
    ...         pass
    >>> session = Session(Mean, "EASGD", devices=2, recorder=Recorder(print_every=0))
    >>> record = session.run()
    >>> round(float(session.model.w.get_value()))
    3
    >>> len(record.losses[1]), record.validations[-1]["loss"] < 0.1
    (60, True)
    """

    def __init__(
        self,
        model: Any,
        rule: Rule | str = "BSP",
        devices: int | Sequence[str] | None = None,
        recorder: Recorder | None = None,
        checkpoint: PathLike | None = None,
        *,
        sync_type: str = "avg",
        config: Mapping[str, Any] | None = None,
        scale_lr: bool = False,
        warmup: float = 0,
        checkpoint_every: int = 1,
        seed: int | None = None,
        progress: bool = True,
        on_death: str = "raise",
    ) -> None:
        models.find_class(model)
        self.recorder = Recorder() if recorder is None else recorder
        if not isinstance(self.recorder, Recorder):
            raise TypeError(f"Session: recorder: expected a Recorder, got {recorder!r}")
        self.model: Any = None
        self._devices: int | list[str] | None = None
        if isinstance(devices, (list, tuple)):
            self._devices = checked_devices(devices)
        elif devices is not None:
            self._devices = check_int(devices, "Session: devices", 1)
        if checkpoint is not None:
            check_path(checkpoint, "Session")
        if config is not None and not isinstance(config, Mapping):
            raise TypeError(f"Session: config: expected a dict, got {config!r}")
        check_choice(sync_type, "Session: sync_type", ("avg", "cdd"))
        self._plan = Plan(
            model, dict(config or {}), _checked_rule(rule, sync_type), sync_type, self.recorder,
            checkpoint, check_int(checkpoint_every, "Session: checkpoint_every", 1), False,
            _checked_scale(scale_lr, sync_type), check_in_range(warmup, "Session: warmup", 0),
            -1 if seed is None else check_int(seed, "Session: seed", 0), bool(progress),
        )  # fmt: skip
        other = None if checkpoint is None else f"{checkpoint=}"
        self._on_death = check_on_death(on_death, "Session", self._plan.rule, other)

    def _shown(self) -> Facts:
        plan, devices = self._plan, self._devices
        rows: list[tuple[object, ...]] = [
            ("model", plan.model),
            ("rule", plan.rule),
            ("devices", "those of fork()" if devices is None else devices),
            ("options", ", ".join(f"{name}={value!r}" for name, value in plan.config.items()) or "none"),
            ("checkpoint", plan.checkpoint or "none"),
            ("recorder", self.recorder),
        ]
        return f"Session of {plan.model} with {plan.rule!r}", rows

    def run(self) -> Recorder:
        """Train up to the model's last epoch, and return the recorder.

        The first Ctrl-C ends the training after the current batch; the checkpoint is then that of the
        last epoch. After a run the parameters of all ranks have their final values, and the model's
        ``cleanup`` was called.

        Returns
        -------
        Recorder
            The record. Its `stopped` and `interrupted` tell whether the training was stopped.

        Raises
        ------
        TypeError
            If the model does not have what it must have; the message lists all of it.
        FloatingPointError or WorkerError
            If a cost is not finite. Any other exception in a worker also raises a `WorkerError`.
        WorldBrokenError
            If a rank has died. Run a new session with the same checkpoint to continue.
        """
        has_forked = self._fork()
        try:
            return self._run()
        finally:
            if has_forked and synk.is_forked():
                synk.close()

    def _fork(self) -> bool:
        """Fork unless that was done; return whether it was necessary."""
        if synk.is_forked():
            n_ranks = self._devices if isinstance(self._devices, int) else len(self._devices or ())
            if n_ranks not in (0, synk.size()):
                raise ValueError(
                    f"Session: devices: expected as many as there are processes, {synk.size()}, got "
                    f"{self._devices!r}; leave it out, or call synk.close() before"
                )
            return False
        if self._devices is None or isinstance(self._devices, int):
            synk.fork(self._devices)
        elif set(self._devices) == {"cpu"}:
            synk.fork(len(self._devices), use_gpu=False)
        else:
            synk.fork(devices=list(self._devices))
        return True

    def _run(self) -> Recorder:
        plan, recorder = self._plan, self.recorder
        seed = plan.seed if plan.seed >= 0 else int(numpy.random.randint(1 << 31))
        resumes = plan.checkpoint is not None and os.path.exists(plan.checkpoint)
        recorder.clear(synk.size())
        program_plan = plan._replace(seed=seed, resumes=resumes)
        results = synk.spmd(session_program, program_plan, on_death=self._on_death)
        outcomes: list[Outcome | None] = list(results)
        for rank, outcome in enumerate(outcomes):
            if outcome is None:  # it was ended before its model was built
                recorder.stopped = True
                continue
            recorder.extend(rank, outcome.rows)
            recorder.validations = outcome.validations
            recorder.stopped = recorder.stopped or outcome.has_stopped
            self.model = outcome.model if outcome.model is not None else self.model
        if self._on_death == "continue":
            recorder.validations = combined_by_epoch([item for item in outcomes if item is not None])
        recorder.interrupted = recorder.stopped and results.interrupted
        return recorder


# Arguments


def checked_devices(devices: Any, what: str = "Session") -> list[str]:
    """Return names of devices as a list; `what` begins the message if they are something else."""
    is_list = isinstance(devices, (list, tuple)) and devices
    if not is_list or not all(isinstance(device, str) for device in devices):
        raise TypeError(f"{what}: devices: expected names such as ['cuda0', 'cuda1'], got {devices!r}")
    return list(devices)


def _checked_scale(scale_lr: Any, sync_type: str) -> bool:
    scales = check_flag(scale_lr, "Session: scale_lr")
    if scales and sync_type == "cdd":
        raise ValueError(
            "Session: scale_lr: expected False with sync_type='cdd', got True: velocities are added up, "
            "which scales the step by the number of ranks already"
        )
    return scales


def _checked_rule(rule: Any, sync_type: str) -> Rule:
    """Return the rule that is run; raise if it would train nothing with this kind of exchange."""
    if sync_type == "cdd":
        return _velocities(rule)
    if isinstance(rule, str):
        by_name = {name.lower(): make for name, make in _RULES.items()}
        if rule.lower() not in by_name:
            raise ValueError(f"Session: rule: expected one of {', '.join(_RULES)}, got {rule!r}")
        return by_name[rule.lower()]()
    checked = check_rule(rule, "Session", ", or its name")
    if isinstance(checked, rules.BSP) and checked.average == "gradients":
        raise ValueError(
            f"Session: rule: expected BSP(average='params'), got {rule!r}: the model computes its "
            f"gradients and takes its steps inside train_iter(), so the rule cannot average the "
            f"gradients; use BSP(average='params'), or sync_type='cdd' for the velocities"
        )
    return checked


def _velocities(rule: Any) -> Rule:
    """Return the rule for ``sync_type="cdd"``; raise if another one was given, which trains nothing."""
    is_named = isinstance(rule, str) and rule.lower() == "bsp"
    is_plain = isinstance(rule, rules.BSP) and rule.average == "gradients"
    if not (is_named or is_plain):
        raise ValueError(
            f"Session: sync_type='cdd': expected rule='BSP', got {rule!r}: a model that is compiled for "
            f"'cdd' only computes velocities, which no other rule exchanges and adds to the parameters, "
            f"so nothing would be trained; use sync_type='avg'"
        )
    if is_plain and (rule.period != 1 or rule.wire is not None):
        raise ValueError(
            f"Session: sync_type='cdd': expected BSP(period=1) without a wire format, got {rule!r}: the "
            f"velocities of batches without an exchange would be lost"
        )
    return SummedVelocities()
