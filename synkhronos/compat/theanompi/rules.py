"""`BSP`, `EASGD` and `GOSGD`: Theano-MPI's rules, which train a model in a session."""

from __future__ import annotations

import inspect
import sys
from typing import Any, Sequence

from synkhronos.extensions.session import Recorder, Session
from synkhronos.extensions.session import model as models
from synkhronos.extensions.session.session import checked_devices

#: How Theano-MPI can transfer arrays. Here all of them are the same.
EXCHANGE_STRATEGIES = (
    "ar", "asa16", "asa32", "copper", "copper16", "cudaaware", "nccl16", "nccl32",
)  # fmt: skip
#: The exit status after Ctrl-C
INTERRUPTED = 3


class _TrainingRule:
    """A rule with the methods `init` and `wait`.

    Attributes
    ----------
    rulename : str
        The name of the rule.
    recorder : Recorder or None
        After `wait`, what was recorded.
    model : object or None
        After `wait`, the model of the first rank, with the final parameters.
    """

    rulename: str
    _rule: str  # of a session

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.model: Any = None
        self._given: tuple[list[str] | None, str, str] | None = None

    def init(self, devices: Sequence[str] | None, modelfile: str, modelclass: str) -> None:
        """Choose what is trained, and where. The training begins in `wait`.

        Parameters
        ----------
        devices : list of str
            Theano's names of the devices, one for each rank, such as ``["cuda0", "cuda1"]`` or
            ``["cpu", "cpu"]``. None if ``launch`` has set them.
        modelfile : str
            The module of the model, as in an import: ``"models.modelfile"``.
        modelclass : str
            The name of the model's class in it.

        Raises
        ------
        TypeError, ValueError
            If an argument is wrong, or a device is on another machine.
        """
        where = type(self).__name__
        for name, value in (("modelfile", modelfile), ("modelclass", modelclass)):
            if not isinstance(value, str) or not value:
                raise TypeError(f"{where}.init: {name}: expected a name, got {value!r}")
        if devices is not None:
            devices = checked_devices(devices, f"{where}.init")
        for device in devices or ():
            if ":" in device and not device.startswith(("opencl", "jax:")):
                raise ValueError(
                    f"{where}.init: devices: expected devices of this machine, got {device!r}; "
                    f"tmlauncher starts sessions on several machines"
                )
        self._given = (devices, modelfile, modelclass)

    def wait(self) -> None:
        """Train the model on all devices, and return when it is trained.

        An error in a rank is raised. After Ctrl-C this process exits with the status 3, as with
        Theano-MPI.

        Raises
        ------
        RuntimeError
            If `init` was not called.
        """
        if self._given is None:
            name = type(self).__name__
            raise RuntimeError(f"{name}.wait: expected a call of init(...) before, got none")
        devices, modelfile, modelclass = self._given
        model = f"{modelfile}:{modelclass}"
        options = {"config": {"mname": modelclass}, **self._options(models.find_class(model))}
        session = Session(model, self._rule, devices, progress=False, **options)
        self.recorder = session.run()
        self.model = session.model
        if self.recorder.interrupted:
            sys.exit(INTERRUPTED)

    def _options(self, model: Any) -> dict[str, Any]:
        """Return further options of the session for a class of models."""
        return {}


class BSP(_TrainingRule):
    """Bulk synchronous parallel: the ranks exchange after every batch.

    Attributes
    ----------
    sync_type : {"avg", "cdd"} or None
        What they exchange. With ``"avg"`` the parameters are averaged, and ``model.scale_lr(size)`` is
        called if the model has it. With ``"cdd"`` the velocities are added up. With None it is what the
        model compiles: ``"cdd"`` if its ``compile_iter_fns`` takes `sync_type`, and else ``"avg"``.
    exch_strategy : str
        How arrays are transferred, such as ``"nccl32"``. All of Theano-MPI's names are accepted; the
        arrays are transferred in their own dtype, by the fastest way between the devices.
    """

    sync_type: str | None = "avg"
    exch_strategy = "nccl32"
    _rule = "BSP"

    @property
    def rulename(self) -> str:  # type: ignore[override]  # depends on `sync_type`
        """The name of the rule, with what is exchanged."""
        return f"BSP({self.sync_type})"

    def _options(self, model: Any) -> dict[str, Any]:
        if self.exch_strategy not in EXCHANGE_STRATEGIES:
            raise ValueError(
                f"BSP.exch_strategy: expected one of {', '.join(EXCHANGE_STRATEGIES)}, got "
                f"{self.exch_strategy!r}"
            )
        sync_type = self.sync_type
        if sync_type is None:
            compiles = getattr(model, "compile_iter_fns", None)
            # Theano-MPI's README has (*args, **kwargs), which says nothing about velocities.
            named = callable(compiles) and "sync_type" in inspect.signature(compiles).parameters
            sync_type = "cdd" if named else "avg"
        scales = sync_type == "avg" and hasattr(model, "scale_lr")
        return {"sync_type": sync_type, "scale_lr": scales}


class EASGD(_TrainingRule):
    """Elastic averaging: each rank exchanges with a center after every tenth batch, with alpha 0.5.

    Theano-MPI uses the first device for the center. Here the center is in shared memory, so all devices
    train.
    """

    rulename = _rule = "EASGD"


class GOSGD(_TrainingRule):
    """Gossip: after a batch, a rank sends its parameters to another one with a given probability."""

    rulename = _rule = "GOSGD"
