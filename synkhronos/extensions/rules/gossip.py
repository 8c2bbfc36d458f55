"""`GoSGD`: ranks send their parameters to each other at random, without a center."""

from __future__ import annotations

import time
from typing import Any

import numpy

import synkhronos as synk
from synkhronos.extensions.rules.rule import END, Params, Rule, assign, check_number, meet, values_of

_TAG = 7305  # the tag of this rule's messages
_NAP = 2e-4  # seconds


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
        self.probability = check_number("GoSGD: probability", probability, 0, 1)
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
            for one, other in zip(own, others):
                one *= self._weight / total
                one += (float(weight) / total) * other
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
