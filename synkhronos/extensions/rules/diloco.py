"""`DiLoCo`: local steps, and an outer step with Nesterov momentum on the averaged difference."""

from __future__ import annotations

from typing import Any

import numpy

import synkhronos as synk
from synkhronos._checks import check_in_range, check_int
from synkhronos.extensions.rules.averaging import LocalSGD
from synkhronos.extensions.rules.parameters import Params, assign, pack, unpack, values_of


class DiLoCo(LocalSGD):
    r"""Distributed low-communication training [1]_: local steps, and an outer step for all ranks.

    Each rank takes `period` inner steps from the outer parameters :math:`\theta` with its own optimizer,
    whose state stays local. Then, with :math:`x_j` the parameters that rank :math:`j` has reached:

    .. math:: \Delta = \theta - \sum_j \frac{n_j}{n} x_j, \qquad
              b \leftarrow \mu b + \Delta, \qquad
              \theta \leftarrow \theta - \eta (\Delta + \mu b), \qquad
              x_i \leftarrow \theta

    This is gradient descent with Nesterov momentum on :math:`\theta`, in the form that deep-learning
    libraries use, with :math:`\Delta` as the gradient. :math:`n_j` is the number of rows that rank
    :math:`j` has used in these steps, and :math:`n` their sum; the paper has equal numbers. With
    ``outer_learning_rate=1, outer_momentum=0`` it is `LocalSGD`. Steps after the last full period also
    end with an outer step.

    Parameters
    ----------
    period : int, default: 50
        The number of inner steps, :math:`H` in the paper.
    outer_learning_rate : float, default: 0.7
        :math:`\eta`.
    outer_momentum : float, default: 0.9
        :math:`\mu`.

    References
    ----------
    .. [1] Douillard, A., Feng, Q., Rusu, A. A., Chhaparia, R., Donchev, Y., Kuncoro, A., Ranzato, M.,
           Szlam, A., & Shen, J. (2023): DiLoCo: Distributed low-communication training of language
           models. arXiv:2311.08105.
    """

    def __init__(
        self, period: int = 50, outer_learning_rate: float = 0.7, outer_momentum: float = 0.9
    ) -> None:
        self.period = check_int(period, "DiLoCo: period", 1)
        self.outer_learning_rate = check_in_range(outer_learning_rate, "DiLoCo: outer_learning_rate", 0)
        self.outer_momentum = check_in_range(outer_momentum, "DiLoCo: outer_momentum", 0)

    def start(self, rank: synk.Rank, params: Params) -> None:
        super().start(rank, params)
        outer = unpack("outer", params, self.restored)
        momentum = unpack("momentum", params, self.restored)
        self._outer = values_of(params) if outer is None else outer
        self._momentum = momentum or [numpy.zeros_like(one) for one in self._outer]

    def _meet(self, rank, params):
        self._average(rank, params)
        for outer, momentum, average in zip(self._outer, self._momentum, values_of(params)):
            difference = outer - average
            momentum *= self.outer_momentum
            momentum += difference
            outer -= self.outer_learning_rate * (difference + self.outer_momentum * momentum)
        assign(params, self._outer)
        self._pending = False

    def value(self, rank: synk.Rank, params: Params) -> list[numpy.ndarray] | None:
        """Return the outer parameters."""
        return self._outer

    def state(self, rank: synk.Rank, params: Params) -> dict[str, Any]:
        return {
            **super().state(rank, params),
            **pack("outer", self._outer),
            **pack("momentum", self._momentum),
        }
