"""Rules for the parameters of a worker and the central parameters that all workers share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Sequence

import numpy as np

Arrays = Sequence[np.ndarray]


def elastic_change(alpha: float, local: np.ndarray, central: np.ndarray) -> np.ndarray:
    """Return by how much elastic averaging moves parameters and central ones towards each other."""
    return np.asarray(alpha * (local - central), local.dtype)


class ParamSyncRule(ABC):
    """What a worker does with its own and the central parameters; rules override `update_params`."""

    def begin(self, local_params: Arrays) -> None:  # noqa: B027
        """Take note of the parameters from which a worker goes on, at the start and after a copy."""

    @abstractmethod
    def update_params(self, local_params: Arrays, master_params: Arrays) -> None:
        """Change arrays in place. No other worker interrupts it.

        Parameters
        ----------
        local_params : list of numpy.ndarray
            The parameters of this worker.
        master_params : list of numpy.ndarray
            The central parameters.
        """


class EASGD(ParamSyncRule):
    r"""Elastic averaging: the parameters of a worker and the central ones approach each other.

    With :math:`d = \alpha (x - \tilde{x})`, :math:`x \leftarrow x - d` and
    :math:`\tilde{x} \leftarrow \tilde{x} + d` [1]_.

    Parameters
    ----------
    alpha : float
        The part of the difference by which both move, in (0, 1].

    References
    ----------
    .. [1] Zhang, Choromanska, LeCun: Deep learning with elastic averaging SGD, 2015, algorithm 1.
    """

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha

    def get_alpha(self) -> float:
        """Return `alpha`."""
        return self.alpha

    def set_alpha(self, alpha: float) -> None:
        """Set `alpha`."""
        self.alpha = alpha

    def update_params(self, local_params: Arrays, master_params: Arrays) -> None:
        for local, master in zip(local_params, master_params):
            change = elastic_change(self.alpha, local, master)
            local -= change
            master += change


class ASGD(ParamSyncRule):
    """Asynchronous SGD: the central parameters change by what a worker has changed since the last time.

    Then the worker goes on from the central parameters.
    """

    def __init__(self) -> None:
        self._former: list[np.ndarray] = []

    def begin(self, local_params: Arrays) -> None:
        self._former = [np.array(local) for local in local_params]

    def update_params(self, local_params: Arrays, master_params: Arrays) -> None:
        for local, master, former in zip(local_params, master_params, self._former):
            master += local - former
            local[...] = master
            former[...] = master
