"""The exchange of velocities, which Theano-MPI calls ``cdd``."""

from __future__ import annotations

from typing import Any

import numpy

import synkhronos as synk
from synkhronos.extensions.rules.rule import Params, Rule


class SummedVelocities(Rule):
    r"""The ranks add up their velocities, and every rank takes the step with the sum.

    With :math:`v_i` the velocity that rank :math:`i` has computed, which includes the learning rate:

    .. math:: x \leftarrow x + \sum_i v_i

    on every rank. The model's ``train_iter`` computes :math:`v_i` in ``model.vels``. The sum is in
    ``model.vels2`` when ``model.descent_vel()`` adds it to the parameters. Models of Theano-MPI call it
    themselves as well, at the beginning of the next ``train_iter``; so ``vels2`` is zero by then, and no
    step is taken twice, or lost at the end.

    This is BSP of Theano-MPI with ``sync_type="cdd"``.
    """

    is_synchronous = True

    def prepare(self, step: Any) -> None:
        """Take the velocities of a model.

        Parameters
        ----------
        step : object
            The model of this rank.

        Raises
        ------
        TypeError
            If the model has none.
        """
        self._model = step
        wrong = [name for name in ("vels", "vels2") if not _fit(getattr(step, name, None), step.params)]
        if not callable(getattr(step, "descent_vel", None)):
            wrong.append("descent_vel")
        if wrong:
            raise TypeError(
                f"Session: sync_type='cdd': expected that compile_iter_fns() makes vels and vels2, "
                f"lists with a shared variable for each parameter, and descent_vel(), which adds vels2 "
                f"to the parameters; missing or wrong in {type(step).__name__}: {', '.join(wrong)}; "
                f"without them nothing would be trained; use sync_type='avg'"
            )

    def after_step(self, rank: synk.Rank, params: Params, step: int) -> None:
        for own, total in zip(self._model.vels, self._model.vels2):
            total.set_value(own.get_value(borrow=True))
        rank.all_reduce(list(self._model.vels2), "sum")
        self._model.descent_vel()
        for total in self._model.vels2:
            total.set_value(numpy.zeros_like(total.get_value(borrow=True)))


def _fit(velocities: Any, params: Params) -> bool:
    """Whether there is a velocity for each parameter."""
    if not isinstance(velocities, (list, tuple)) or len(velocities) != len(params):
        return False
    return all(
        hasattr(one, "get_value")
        and one.get_value(borrow=True).shape == each.get_value(borrow=True).shape
        for one, each in zip(velocities, params)
    )
