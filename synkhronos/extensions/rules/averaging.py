"""`BSP`, `LocalSGD` and `DiLoCo`: the ranks average gradients or parameters, all at the same step."""

from __future__ import annotations

from typing import Any, Sequence

import numpy

import synkhronos as synk
from synkhronos._checks import check_choice, check_in_range, check_int
from synkhronos._typing import AnyArray
from synkhronos.extensions.rules.rule import Params, Rule, TrainingStep, assign, pack, unpack, values_of


class LocalSGD(Rule):
    r"""Local SGD [1]_: each rank takes `period` steps by itself, then all average their parameters.

    With :math:`x_i` the parameters of rank :math:`i` after its own step :math:`t`, and :math:`H` the
    period:

    .. math:: x_i \leftarrow \sum_j \frac{n_j}{n} x_j \qquad \text{if } H \text{ divides } t

    where :math:`n_j` is the number of rows that rank :math:`j` has used since the last average, and
    :math:`n` their sum. The paper has equal numbers of rows. Other variables, such as velocities, stay
    local.

    Parameters
    ----------
    period : int, default: 10
        :math:`H`.

    References
    ----------
    .. [1] Stich, S. U. (2018): Local SGD converges fast and communicates little. arXiv:1805.09767.
    """

    is_synchronous = True

    def __init__(self, period: int = 10) -> None:
        self.period = check_int(period, "LocalSGD: period", 1)

    def start(self, rank: synk.Rank, params: Params) -> None:
        self._rows, self._pending = 0, False
        if self.restored:
            self._rows, self._pending = int(self.restored["rows"]), bool(self.restored["pending"])

    def after_step(self, rank: synk.Rank, params: Params, step: int) -> None:
        self._pending = True
        if step % self.period == 0:
            self._meet(rank, params)

    def finish(self, rank: synk.Rank, params: Params) -> None:
        if self._pending:
            self._meet(rank, params)

    def _meet(self, rank: synk.Rank, params: Params) -> None:
        self._average(rank, params)
        self._pending = False

    def value(self, rank: synk.Rank, params: Params) -> list[AnyArray] | None:
        """Return the average of the parameters of all ranks."""
        if not self._pending:
            return None
        own, rows = values_of(params), self._rows
        self._average(rank, params)
        average = values_of(params)
        assign(params, own)
        self._rows = rows
        return average

    def state(self, rank: synk.Rank, params: Params) -> dict[str, Any]:
        return {"rows": self._rows, "pending": self._pending}


class BSP(LocalSGD):
    r"""Bulk synchronous parallel: the serial step on the rows of all ranks together.

    With ``average="gradients"``, :math:`g_j` the gradient of rank :math:`j` on its :math:`n_j` rows, and
    :math:`n` the sum of these numbers, over all ranks and the last `period` steps:

    .. math:: x \leftarrow \operatorname{update}\Bigl(x, \sum_j \frac{n_j}{n} g_j\Bigr)

    on every rank, every `period` steps. This equals the step on all these rows in one process. Any
    update can be used, such as Adam. Gradients of several steps are added up in NumPy arrays.

    With ``average="params"``, each rank takes its own steps, and the parameters are averaged as in
    `LocalSGD`. Other variables stay local. For plain gradient descent and ``period=1`` both are the
    same.

    It is named after Valiant's model of computation [1]_.

    Parameters
    ----------
    period : int, default: 1
        The number of steps between two averages.
    average : {"gradients", "params"}
        ``"gradients"`` needs a step in two parts, from `make_step`.
    wire : {"float16", "bfloat16", "int8"}, PowerSGD or TopK, optional
        The format in which gradients are sent between machines, as in :func:`synkhronos.all_reduce`.

    References
    ----------
    .. [1] Valiant, L. G. (1990): A bridging model for parallel computation. Communications of the ACM
           33 (8), 103-111.
    """

    def __init__(self, period: int = 1, average: str = "gradients", wire: Any = None) -> None:
        self.period = check_int(period, "BSP: period", 1)
        check_choice(average, "BSP: average", ("gradients", "params"))
        if wire is not None and average != "gradients":
            raise ValueError(
                f"BSP: wire: expected None with average='params', got {wire!r}: parameters must be "
                f"averaged exactly; use average='gradients'"
            )
        self.average, self.wire = average, wire

    _step: TrainingStep | None = None

    def prepare(self, step: Any) -> None:
        """Raise if gradients are to be averaged and the step has no part that computes them.

        Parameters
        ----------
        step : Function or TrainingStep
            The step with which the ranks train.
        """
        if self.average == "gradients" and not isinstance(step, TrainingStep):
            raise TypeError(
                f"BSP(average='gradients'): expected a step in two parts, so that the gradients can be "
                f"averaged before the update; build it with rules.make_step(), or use "
                f"BSP(average='params'); got {step!r}"
            )
        self._step = step

    def verify(self, data: Sequence[Any], n_rows: int) -> None:
        """Compare the average of the gradients with the gradient of one rank, if they are averaged."""
        if self.average == "gradients" and self._step is not None:
            self._step.verify(data, n_rows)

    def start(self, rank: synk.Rank, params: Params) -> None:
        super().start(rank, params)
        self._sums = None  # of gradients times rows, if they accumulate
        if self.restored and "sum 0" in self.restored:
            count = sum(name.startswith("sum ") for name in self.restored)
            self._sums = unpack("sum", range(count), self.restored)

    def take_step(self, rank: synk.Rank, step: Any, data: Sequence[Any], rows: AnyArray) -> Any:
        """Compute the gradients only, or take the step, and return its outputs.

        Parameters
        ----------
        rank : Rank
            The rank on which the method is called.
        step : Function or TrainingStep
            The step with which the ranks train.
        data : list of Data or arrays
            The inputs.
        rows : numpy.ndarray of int
            The minibatch.
        """
        if self.average == "params":
            return super().take_step(rank, step, data, rows)
        self._step = step
        outputs = rank.call(step.compute, *data, batch=rows)
        if self.period > 1 or self._sums is not None:
            own = [len(rows) * item.get_value(borrow=True) for item in step.gradient]
            self._sums = own if self._sums is None else [a + b for a, b in zip(self._sums, own)]
        self._rows += len(rows)
        return outputs

    def _meet(self, rank: synk.Rank, params: Params) -> None:
        if self.average == "params":
            super()._meet(rank, params)
            return
        if self._step is None:
            raise TypeError(
                "BSP(average='gradients'): no step was taken by rule.take_step(rank, step, data, rows), "
                "which computes the gradients; call it in place of rank.call(step, ...)"
            )
        gradient = self._step.gradient
        if self._sums is not None:
            assign(gradient, [array / array.dtype.type(self._rows) for array in self._sums])
        self._average(rank, gradient, self.wire)
        rank.call(self._step.update)
        self._sums, self._pending = None, False

    def value(self, rank: synk.Rank, params: Params) -> list[AnyArray] | None:
        """Return the average of the parameters of all ranks, or None if they are equal on all ranks."""
        return super().value(rank, params) if self.average == "params" else None

    def state(self, rank: synk.Rank, params: Params) -> dict[str, Any]:
        return {**super().state(rank, params), **pack("sum", self._sums)}


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
        self._momentum = momentum or [numpy.zeros_like(array) for array in self._outer]

    def _meet(self, rank: synk.Rank, params: Params) -> None:
        self._average(rank, params)
        for outer, momentum, average in zip(self._outer, self._momentum, values_of(params)):
            difference = outer - average
            momentum *= self.outer_momentum
            momentum += difference
            outer -= self.outer_learning_rate * (difference + self.outer_momentum * momentum)
        assign(params, self._outer)
        self._pending = False

    def value(self, rank: synk.Rank, params: Params) -> list[AnyArray] | None:
        """Return the outer parameters."""
        return self._outer

    def state(self, rank: synk.Rank, params: Params) -> dict[str, Any]:
        return {
            **super().state(rank, params),
            **pack("outer", self._outer),
            **pack("momentum", self._momentum),
        }
