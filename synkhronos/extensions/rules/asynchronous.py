"""Rules without collectives: each rank exchanges with a center, or with another rank, by itself."""

from __future__ import annotations

import time
from typing import Any

import numpy

import synkhronos as synk
from synkhronos._checks import check_in_range, check_int
from synkhronos._typing import AnyArray
from synkhronos.extensions.rules.rule import END, Params, Rule, assign, meet, pack, unpack, values_of

_TAG = 7305  # the tag of this rule's messages
_NAP = 2e-4  # seconds


class _Centered(Rule):
    """A rule with a center, which is also its final value."""

    _center: synk.Center
    _pushes = True  # whether the center gets the changes of a rank's last steps

    def start(self, rank: synk.Rank, params: Params) -> None:
        # The first rank gives the center its values, so all ranks begin with the same values.
        center = unpack("center", params, self.restored)
        if center is not None:
            assign(params, center)
        self._center = rank.center(params)

    def value(self, rank: synk.Rank, params: Params) -> list[AnyArray] | None:
        """Return the center."""
        values: list[AnyArray] = self._center.value()
        return values

    def finish(self, rank: synk.Rank, params: Params) -> None:
        self._settle(rank)
        self._center.pull()

    def state(self, rank: synk.Rank, params: Params) -> dict[str, Any]:
        self._settle(rank)
        return pack("center", self._center.value())

    def _settle(self, rank: synk.Rank) -> None:
        """Give the center the changes that it does not have yet, and wait for the other ranks."""
        if self._pushes:
            self._center.push()
        meet(rank)


class EASGD(_Centered):
    r"""Elastic averaging SGD [1]_, asynchronous, and with `momentum` EAMSGD.

    Each rank exchanges with the center :math:`\tilde x` every `period` of its own steps:

    .. math:: d = \alpha (x_i - \tilde x), \qquad
              x_i \leftarrow x_i - d, \qquad
              \tilde x \leftarrow \tilde x + d

    as one operation that no other rank interrupts for the same elements (algorithm 1 of the paper). The
    exchange is between two steps, so the next gradient is taken at the new :math:`x_i`; algorithm 1
    takes the gradient of that step before the exchange. Any step can be used. At the end all ranks get
    the center.

    With a momentum :math:`\delta` it is the paper's algorithm 2, with Nesterov's momentum on the local
    parameters:

    .. math:: v_i \leftarrow \delta v_i - \eta g(x_i + \delta v_i), \qquad
              x_i \leftarrow x_i + v_i

    The step is the script's own and takes :math:`y` to :math:`y - \eta g(y)`, so between two steps the
    parameters are kept at the point ahead, :math:`y = x_i + \delta v_i`. After the step they are
    :math:`x_i + \delta v_i - \eta g(y)`, which is the new :math:`x_i` itself, and the new velocity is
    its difference from the former :math:`x_i`. Then :math:`x_i` exchanges with the center, and the
    parameters are set to the next point ahead. So the step should be plain gradient descent; any other
    step gets Nesterov's momentum in addition.

    Parameters
    ----------
    alpha : float, default: 0.5
        :math:`\alpha`, above 0 and at most 1. The paper uses, among others, :math:`0.9 / p` for `p`
        ranks.
    period : int, default: 10
        :math:`\tau` in the paper.
    momentum : float, default: 0
        :math:`\delta`, below 1.

    References
    ----------
    .. [1] Zhang, S., Choromanska, A., & LeCun, Y. (2015): Deep learning with elastic averaging SGD.
           Advances in Neural Information Processing Systems 28. arXiv:1412.6651.
    """

    _pushes = False

    def __init__(self, alpha: float = 0.5, period: int = 10, momentum: float = 0) -> None:
        self.alpha = check_in_range(alpha, "EASGD: alpha", 0, 1)
        if not self.alpha:
            raise ValueError("EASGD: alpha: expected a number above 0, got 0")
        self.period = check_int(period, "EASGD: period", 1)
        self.momentum = check_in_range(momentum, "EASGD: momentum", 0, 1)
        if self.momentum == 1:
            raise ValueError("EASGD: momentum: expected a number below 1, got 1")

    def start(self, rank: synk.Rank, params: Params) -> None:
        own = values_of(params)
        super().start(rank, params)
        if self.restored:
            assign(params, own)
        # Where the parameters were before they were moved ahead.
        self._behind = unpack("behind", params, self.restored)
        if self._behind is None and self.momentum:
            self._behind = values_of(params)

    def after_step(self, rank: synk.Rank, params: Params, step: int) -> None:
        velocity = None
        if self._behind is not None and self.momentum:
            velocity = [new - old for new, old in zip(values_of(params), self._behind)]
        if step % self.period == 0:
            self._center.elastic(self.alpha)
        self._behind = values_of(params) if self.momentum else None
        if velocity is not None and self._behind is not None:
            ahead = zip(self._behind, velocity)
            assign(params, [array + array.dtype.type(self.momentum) * v for array, v in ahead])

    def state(self, rank: synk.Rank, params: Params) -> dict[str, Any]:
        return {**super().state(rank, params), **pack("behind", self._behind)}


class Downpour(_Centered):
    r"""Downpour SGD [1]_: ranks add the changes of their steps to the center, and fetch its values.

    With :math:`\Delta_i` the sum of the changes by the steps of rank :math:`i` since its last push:

    .. math:: \tilde x &\leftarrow \tilde x + \Delta_i, \quad \Delta_i \leftarrow 0
              && \quad \text{every } n_{push} \text{ steps, then} \\
              x_i &\leftarrow \tilde x && \quad \text{every } n_{fetch} \text{ steps}

    In the paper the center adds accumulated gradients by its own update, such as Adagrad; here the
    rank's step updates the parameters, and the center adds up the changes. For gradient descent with one
    learning rate both are the same. A pull does not lose changes that have not been pushed; they are
    pushed later. At the end, and before a checkpoint, each rank pushes its remaining changes; then all
    ranks get the center.

    Parameters
    ----------
    push_period, pull_period : int, default: 1
        :math:`n_{push}` and :math:`n_{fetch}` in the paper.

    References
    ----------
    .. [1] Dean, J., Corrado, G. S., Monga, R., et al. (2012): Large scale distributed deep networks.
           Advances in Neural Information Processing Systems 25.
    """

    def __init__(self, push_period: int = 1, pull_period: int = 1) -> None:
        name = type(self).__name__
        self.push_period = check_int(push_period, f"{name}: push_period", 1)
        self.pull_period = check_int(pull_period, f"{name}: pull_period", 1)

    def after_step(self, rank: synk.Rank, params: Params, step: int) -> None:
        if step % self.push_period == 0:
            self._center.push()
        if step % self.pull_period == 0:
            self._center.pull(keep_changes=True)


class ASGD(Downpour):
    """Asynchronous SGD: `Downpour` with both periods 1. Each rank pushes and pulls after every step."""

    def __init__(self) -> None:
        super().__init__(1, 1)


class SSP(_Centered):
    r"""Stale synchronous parallel [1]_: like `ASGD`, but no rank gets far ahead of the slowest.

    The clock :math:`c_i` of a rank is the number of steps that it has taken. After each step it pushes
    the change, advances its clock, and waits until

    .. math:: c_i - \min_j c_j \le s

    before it pulls the center and takes the next step. So the parameters of a step contain at least all
    changes up to :math:`s` steps before it. With :math:`s = 0` all ranks take each step together. Ranks
    whose programs have ended are ignored.

    Parameters
    ----------
    staleness : int, default: 3
        :math:`s`.

    References
    ----------
    .. [1] Ho, Q., Cipar, J., Cui, H., et al. (2013): More effective distributed ML via a stale
           synchronous parallel parameter server. Advances in Neural Information Processing Systems 26.
    """

    def __init__(self, staleness: int = 3) -> None:
        self.staleness = check_int(staleness, "SSP: staleness", 0)

    def after_step(self, rank: synk.Rank, params: Params, step: int) -> None:
        self._center.push()
        rank.clock = step
        rank.wait_for_clocks(step - self.staleness)
        self._center.pull()


class GoSGD(Rule):
    r"""Gossip SGD [1]_: after a step, a rank may send its parameters to another rank.

    Each rank has a weight :math:`\alpha_i`, initially one over the number of ranks. After each step it
    draws, with the given probability, another rank :math:`j`, and sends:

    .. math:: \alpha_i \leftarrow \alpha_i / 2, \qquad \text{message to } j: (x_i, \alpha_i)

    Before its next step a rank adds the messages that have arrived, in the order of arrival:

    .. math:: x_j \leftarrow \frac{\alpha_j x_j + \alpha_i x_i}{\alpha_j + \alpha_i}, \qquad
              \alpha_j \leftarrow \alpha_j + \alpha_i

    The sum of all weights, including the weights of messages in transit, is always 1. If the receiver's
    box is full, or it has taken its last step, nothing is sent and the weight is kept. At the end, when
    all ranks have taken their last steps, they add the messages still in transit, and get the average of
    all parameters with these weights. In a program without collectives, that is, with
    ``on_death="continue"``, each rank keeps its own parameters instead. A rank that replaces a dead one
    begins with the weight 0, and so with the first parameters that it receives.

    Parameters
    ----------
    probability : float, default: 0.01
        The probability with which a rank sends its parameters after a step.
    seed : int, optional
        Determines, with the rank and the step, the random draws. `train` sets it if it is None.

    References
    ----------
    .. [1] Blot, M., Picard, D., Cord, M., & Thome, N. (2016): Gossip training for deep learning.
           arXiv:1611.09726.
    """

    def __init__(self, probability: float = 0.01, seed: int | None = None) -> None:
        self.probability = check_in_range(probability, "GoSGD: probability", 0, 1)
        self.seed = seed

    def start(self, rank: synk.Rank, params: Params) -> None:
        self._n_sent, self._n_received = [0] * rank.size, 0
        self._weight = 0.0 if rank.restarts else 1 / rank.size
        if self.restored:
            self._weight = float(self.restored["weight"])
        if self.seed is None:
            self.seed = int(rank.random.integers(1 << 62))

    @property
    def weight(self) -> float:
        r"""The weight :math:`\alpha_i` of this rank."""
        return self._weight

    def after_step(self, rank: synk.Rank, params: Params, step: int) -> None:
        entropy: list[Any] = [self.seed, rank.rank, step]
        draw = numpy.random.default_rng(entropy)
        if draw.random() < self.probability and rank.size > 1 and self._weight:
            other = int(draw.integers(rank.size - 1))
            other += other >= rank.rank
            # Parameters that arrive after the last step are added as they are, although they are older.
            if rank.clocks[other] != END:
                self._send(rank, params, other)
        self._receive(rank, params)

    def _send(self, rank: synk.Rank, params: Params, other: int) -> None:
        weight = self._weight / 2
        if rank.send(other, [numpy.float64(weight), *values_of(params)], _TAG):
            self._weight = weight
            self._n_sent[other] += 1

    def _receive(self, rank: synk.Rank, params: Params, at_least: int = 0) -> None:
        """Add all messages that have arrived, and wait until there were `at_least` this many."""
        own = None
        while True:
            message = rank.receive(_TAG)
            if message is None:
                if self._n_received >= at_least:
                    break
                time.sleep(_NAP)
                continue
            self._n_received += 1
            own = values_of(params) if own is None else own
            weight, *others = message[1]
            total = self._weight + float(weight)
            for item, other in zip(own, others):
                item *= self._weight / total
                item += (float(weight) / total) * other
            self._weight = total
        if own is not None:
            assign(params, own)

    def finish(self, rank: synk.Rank, params: Params) -> None:
        self._settle(rank, params)
        if rank.may_meet:
            rank.all_reduce(params, "avg", weight=self._weight)

    def state(self, rank: synk.Rank, params: Params) -> dict[str, Any]:
        self._settle(rank, params)
        return {"weight": self._weight}

    def _settle(self, rank: synk.Rank, params: Params) -> None:
        meet(rank)  # nothing more is sent
        at_least = 0
        if rank.may_meet:  # otherwise a rank may have died
            at_least = sum(sent[rank.rank] for sent in rank.exchange(self._n_sent))
        self._receive(rank, params, at_least)
