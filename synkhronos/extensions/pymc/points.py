"""Points at which the log-probability of a model may be finite."""

from __future__ import annotations

import itertools
from typing import Any, Iterator, Sequence

import numpy as np
import pymc as pm
from pytensor.graph.basic import Variable

from synkhronos._typing import AnyArray

#: By how much values differ from the initial point, before and after points of the prior are tried.
_NEAR, _FAR = (0.5, 0.5, 0.5, 0.1, 0.0, 1.0, 1.0, 1.0), (2.0, 0.2, 1.0, 4.0)
_DRAWS, _ROUNDS = 64, 8


def points_of(model: pm.Model, inputs: Sequence[Variable]) -> Iterator[list[AnyArray]]:
    """Yield values of variables of a model: near the initial point, of the prior, and further away.

    Parameters
    ----------
    model : pymc.Model
        The model.
    inputs : list of variables
        Variables of the model.
    """
    compute = model.compile_fn(
        model.replace_rvs_by_values(inputs),
        inputs=model.value_vars,
        mode="FAST_COMPILE",
        on_unused_input="ignore",
    )
    random, initial = np.random.default_rng(0), model.initial_point(random_seed=0)

    def near(width: float) -> list[AnyArray]:
        point = {
            name: value + random.uniform(-width, width, value.shape).astype(value.dtype)
            if value.dtype.kind == "f"
            else value
            for name, value in initial.items()
        }
        return _typed(compute(point), inputs)

    yield from map(near, _NEAR)
    yield from _draws(inputs)
    yield from map(near, itertools.chain(*[_FAR] * _ROUNDS))


def _draws(inputs: Sequence[Variable]) -> Iterator[list[AnyArray]]:
    """Yield values drawn from the prior, if it can be drawn from."""
    try:
        drawn = pm.draw(list(inputs), draws=_DRAWS, random_seed=0, mode="FAST_COMPILE")
    except Exception:  # as pm.Flat raises; the draws only help to find a point
        return
    for each in zip(*drawn):
        yield _typed(each, inputs)


def _typed(values: Sequence[Any], inputs: Sequence[Any]) -> list[AnyArray]:
    return [np.asarray(value, kind.type.dtype) for value, kind in zip(values, inputs)]
