"""Rules in which all workers meet. Each is made for variables once, and called after each step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Sequence, Union

import numpy as np

from synkhronos._typing import SharedVariable
from synkhronos.compat.platoon.channel.worker import Worker, find_worker
from synkhronos.compat.platoon.param_sync import elastic_change

_Variables = Union[SharedVariable, Sequence[SharedVariable]]


class GlobalDynamics(ABC):
    """A rule: ``make_rule(...)`` gives it its variables, and a call applies it.

    Parameters
    ----------
    worker : Worker, optional
        By default the worker that this process has made.
    """

    def __init__(self, worker: Worker | None = None) -> None:
        self._worker = worker
        self._groups: list[list[SharedVariable]] | None = None

    @property
    def worker(self) -> Worker:
        """The worker of the rule."""
        return find_worker(self._worker)

    @abstractmethod
    def make_rule(self, *args: Any) -> None:
        """Give the rule its variables."""

    def __call__(self) -> None:
        """Apply the rule; all workers do so at the same point."""
        if self._groups is None:
            raise RuntimeError(f"{type(self).__name__}: expected make_rule() before the call")
        self._apply(*self._groups)

    @abstractmethod
    def _apply(self, *groups: list[SharedVariable]) -> None:
        """Apply the rule to its variables."""

    def _keep(self, *groups: _Variables) -> None:
        lists: list[list[SharedVariable]] = [
            [group] if hasattr(group, "get_value") else list(group)  # type: ignore[list-item]  # by kind
            for group in groups
        ]
        lengths = [len(each) for each in lists]
        if len(set(lengths)) > 1:
            raise ValueError(f"make_rule: expected as many variables in each list, got {lengths}")
        self._groups = lists


class _SGD(GlobalDynamics):
    """A rule that replaces variables by their reduction."""

    _op: str

    def make_rule(self, local_updates: _Variables) -> None:
        """Give the rule the variables that it reduces, such as parameters or their updates."""
        self._keep(local_updates)

    def _apply(self, *groups: list[SharedVariable]) -> None:
        _set(groups[0], self.worker.all_reduce_arrays(_values(groups[0]), self._op))


class SumSGD(_SGD):
    """Variables become the sum of those of all workers."""

    _op = "sum"


class AverageSGD(_SGD):
    """Variables become the average of those of all workers."""

    _op = "avg"


class EASGD(GlobalDynamics):
    r"""Elastic averaging, synchronous.

    :math:`\tilde{x} \leftarrow \tilde{x} + \alpha \sum_i (x_i - \tilde{x})` and
    :math:`x_i \leftarrow x_i - \alpha (x_i - \tilde{x})`, with the former :math:`\tilde{x}` in
    both [1]_.

    References
    ----------
    .. [1] Zhang, Choromanska, LeCun: Deep learning with elastic averaging SGD, 2015, equations 2 and 3.
    """

    def make_rule(self, local_particle: _Variables, central_particle: _Variables, alpha: float) -> None:
        """Give the rule its variables.

        Parameters
        ----------
        local_particle, central_particle : shared variable, or list of these
            The parameters of the worker, and the central ones, which are equal on all workers.
        alpha : float
            The part of the difference.
        """
        self._keep(local_particle, central_particle)
        self._alpha = alpha

    def _apply(self, *groups: list[SharedVariable]) -> None:
        locals_, centrals = map(_values, groups)
        changes = [elastic_change(self._alpha, *pair) for pair in zip(locals_, centrals)]
        sums = self.worker.all_reduce_arrays(changes, "sum")
        _set(groups[0], [local - change for local, change in zip(locals_, changes)])
        _set(groups[1], [central + total for central, total in zip(centrals, sums)])


class Downpour(GlobalDynamics):
    """Downpour SGD, synchronous: the accumulated updates of all workers go to the global parameters.

    The workers go on from the global parameters, and accumulate from zero.
    """

    def make_rule(
        self, local_particle: _Variables, local_acc_updates: _Variables, global_particle: _Variables
    ) -> None:
        """Give the rule its variables.

        Parameters
        ----------
        local_particle, local_acc_updates, global_particle : shared variable, or list of these
            The parameters of the worker, the updates that it has accumulated, and the global parameters,
            which are equal on all workers.
        """
        self._keep(local_particle, local_acc_updates, global_particle)

    def _apply(self, *groups: list[SharedVariable]) -> None:
        own, updates, global_ = groups
        sums = self.worker.all_reduce_arrays(_values(updates), "sum")
        new = [value + total for value, total in zip(_values(global_), sums)]
        _set(updates, [np.zeros_like(total) for total in sums])
        _set(global_, new)
        _set(own, new)


def _values(variables: Sequence[SharedVariable]) -> list[np.ndarray]:
    return [np.asarray(variable.get_value(borrow=True)) for variable in variables]


def _set(variables: Sequence[SharedVariable], values: Sequence[np.ndarray]) -> None:
    for variable, value in zip(variables, values):
        variable.set_value(value)
