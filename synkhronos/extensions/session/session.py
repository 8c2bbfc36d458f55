"""`Session`: trains a model of Theano-MPI's kind on all ranks, with any rule."""

from __future__ import annotations

import copy
import functools
import os
from typing import Any, Callable, Mapping, Sequence

import numpy

import synkhronos as synk
from synkhronos._checks import check_flag, check_in_range, check_int
from synkhronos._html import Facts, Shown
from synkhronos._typing import PathLike
from synkhronos.extensions import rules
from synkhronos.extensions.rules.record import check_path
from synkhronos.extensions.rules.rule import Rule
from synkhronos.extensions.session import model as models
from synkhronos.extensions.session.loop import Outcome, Plan, combined_by_epoch, session_program
from synkhronos.extensions.session.model import SummedVelocities
from synkhronos.extensions.session.recorder import Recorder

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
        self._devices = _checked_devices(devices)
        if checkpoint is not None:
            check_path(checkpoint, "Session")
        if config is not None and not isinstance(config, Mapping):
            raise TypeError(f"Session: config: expected a dict, got {config!r}")
        if sync_type not in ("avg", "cdd"):
            raise ValueError(f"Session: sync_type: expected 'avg' or 'cdd', got {sync_type!r}")
        self._plan = Plan(
            model, dict(config or {}), _checked_rule(rule, sync_type), sync_type, self.recorder,
            checkpoint, check_int(checkpoint_every, "Session: checkpoint_every", 1), False,
            _checked_scale(scale_lr, sync_type), check_in_range(warmup, "Session: warmup", 0),
            -1 if seed is None else check_int(seed, "Session: seed", 0), bool(progress),
        )  # fmt: skip
        self._on_death = _checked_on_death(on_death, self._plan)

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


def _checked_devices(devices: Any) -> int | list[str] | None:
    if devices is None:
        return None
    if isinstance(devices, (list, tuple)):
        if not devices or not all(isinstance(device, str) for device in devices):
            raise TypeError(
                f"Session: devices: expected names such as ['cuda0', 'cuda1'], got {devices!r}"
            )
        return list(devices)
    return check_int(devices, "Session: devices", 1)


def _checked_scale(scale_lr: Any, sync_type: str) -> bool:
    scales = check_flag(scale_lr, "Session: scale_lr")
    if scales and sync_type == "cdd":
        raise ValueError(
            "Session: scale_lr: expected False with sync_type='cdd', got True: velocities are added up, "
            "which scales the step by the number of ranks already"
        )
    return scales


def _checked_on_death(on_death: str, plan: Plan) -> str:
    if on_death not in ("raise", "continue"):
        raise ValueError(f"Session: on_death: expected 'raise' or 'continue', got {on_death!r}")
    if on_death == "continue" and (plan.rule.is_synchronous or plan.checkpoint is not None):
        what = "a checkpoint" if plan.checkpoint is not None else repr(plan.rule)
        raise ValueError(
            f"Session: on_death='continue': expected a rule without collectives, such as EASGD, and no "
            f"checkpoint, got {what}: the ranks that are left cannot meet a dead one; run the session "
            f"again from its checkpoint after a death instead"
        )
    return on_death


def _checked_rule(rule: Any, sync_type: str) -> Rule:
    """Return the rule that is run; raise if it would train nothing with this kind of exchange."""
    if sync_type == "cdd":
        return _velocities(rule)
    if isinstance(rule, str):
        by_name = {name.lower(): make for name, make in _RULES.items()}
        if rule.lower() not in by_name:
            raise ValueError(f"Session: rule: expected one of {', '.join(_RULES)}, got {rule!r}")
        return by_name[rule.lower()]()
    if not isinstance(rule, Rule):
        raise TypeError(
            f"Session: rule: expected a Rule, such as rules.EASGD(), or its name, got {rule!r}; a rule "
            f"of your own is derived from rules.Rule"
        )
    if isinstance(rule, rules.BSP) and rule.average == "gradients":
        raise ValueError(
            f"Session: rule: expected BSP(average='params'), got {rule!r}: the model computes its "
            f"gradients and takes its steps inside train_iter(), so the rule cannot average the "
            f"gradients; use BSP(average='params'), or sync_type='cdd' for the velocities"
        )
    return copy.copy(rule)


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
