"""The learning rate of a model: scaled by the number of ranks, with a gradual warm-up."""

from __future__ import annotations

from typing import Any, Callable

import numpy

from synkhronos._typing import AnyArray
from synkhronos.engines.names import SharedVariable


class LearningRate:
    r"""Sets a model's ``shared_lr`` before each step.

    With linear scaling the rate is the model's own rate times the number of ranks :math:`k`. A warm-up
    begins with the target divided by :math:`k`, and adds a constant amount before each step, so that the
    target is reached after some epochs (Goyal et al. [1]_, section 2.2):

    .. math:: \eta_t = \eta \left(\frac{1}{k} + \Bigl(1 - \frac{1}{k}\Bigr) \frac{t}{T}\right),
              \qquad t < T

    with :math:`t` the number of steps before, and :math:`T` the steps of the warm-up. The model sees its
    own rate in ``adjust_hyperp``, neither scaled nor warmed up, so schedules that multiply the current
    rate and schedules that set a rate both work.

    Parameters
    ----------
    shared : shared variable
        The model's ``shared_lr``.
    scale : float
        The factor of linear scaling; 1 if the model has scaled its rate by itself.
    size : int
        The number of ranks.

    References
    ----------
    .. [1] Goyal, P., Dollár, P., Girshick, R., et al. (2017): Accurate, large minibatch SGD: training
           ImageNet in 1 hour. arXiv:1706.02677.
    """

    def __init__(self, shared: SharedVariable, scale: float, size: int) -> None:
        self._shared, self._scale, self._size = shared, scale, size
        self._own = numpy.array(shared.get_value())
        self._is_changed = False  # whether the shared variable has another value than `own`

    def before_step(self, done: int, warmup: int) -> float:
        """Set the rate for the next step, and return it.

        Parameters
        ----------
        done : int
            The number of steps before it.
        warmup : int
            The number of steps of the warm-up.
        """
        factor = self._scale
        if done < warmup:
            factor *= (1 + (self._size - 1) * done / warmup) / self._size
        if factor != 1:
            self._shared.set_value((self._own * factor).astype(self._own.dtype))
            self._is_changed = True
        elif self._is_changed:
            self._restore()
        return float(numpy.mean(self._shared.get_value(borrow=True)))

    def adjust(self, adjust_hyperp: Callable[[int], Any], epoch: int) -> None:
        """Let the model adjust its own rate after an epoch."""
        if self._is_changed:
            self._restore()
        adjust_hyperp(epoch)
        self._own = numpy.array(self._shared.get_value())

    def _restore(self) -> None:
        self._shared.set_value(self._own)
        self._is_changed = False

    @property
    def own(self) -> AnyArray:
        """The model's own rate."""
        return self._own

    @own.setter
    def own(self, value: AnyArray) -> None:
        self._own = numpy.array(value)
        self._restore()
