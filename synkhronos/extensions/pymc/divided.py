"""`DividedModel`: a model without the rows, which says where PyMC would need them.

PyMC computes predictions and the log-likelihood of each row from the observed variables of a model, and
nothing at all if there are none. It also starts chains in other processes, or asks JAX, without a
question to the model, and fails there with long tracebacks. But it reads the observed variables first.
So the model looks at who reads them. Models that PyMC makes of its graph, as ``pm.do`` and copies, do so
too.
"""

from __future__ import annotations

import multiprocessing
import sys
import warnings
from types import FrameType
from typing import Any, Sequence

import pymc as pm
from pymc.model import fgraph
from pytensor.graph.traversal import ancestors

from synkhronos.extensions.pymc.operation import RowsSum

_NEEDS_JAX = ("blackjax", "numpyro")
_PACKAGES = ("pymc", "pymc_extras")


class DividedModel(pm.Model):
    """A model whose observed variables, or some of them, are divided over the ranks."""

    @property
    def observed_RVs(self) -> Any:  # noqa: N802 - PyMC's name
        """The observed variables that are not divided."""
        _check_readers(sys._getframe(1))
        return self.__dict__["observed_RVs"]

    @observed_RVs.setter
    def observed_RVs(self, variables: Any) -> None:  # noqa: N802
        self.__dict__["observed_RVs"] = variables

    def sums_over_rows(self) -> list[Any]:
        """Return the sums over rows in the model."""
        nodes = [variable.owner for variable in ancestors(self.potentials) if variable.owner]
        return list(dict.fromkeys(node.op.rows for node in nodes if isinstance(node.op, RowsSum)))

    def left_out(self) -> list[str]:
        """Return the names of the deterministic variables that depend on rows."""
        models = [rows.model for rows in self.sums_over_rows() if getattr(rows, "model", None)]
        names = [variable.name for model in models for variable in model.deterministics]
        return [item for item in dict.fromkeys(names) if item not in self.named_vars]

    def __getitem__(self, key: str) -> Any:
        try:
            return super().__getitem__(key)
        except KeyError:
            if key in self.left_out():
                raise KeyError(_left_out([key])) from None
            raise

    def set_data(self, name: str, values: Any, coords: Any = None) -> None:
        """Change data of the model, whose rows may be divided; see ``pymc.Model.set_data``."""
        for rows in () if name in self.named_vars else self.sums_over_rows():
            data = rows.model and rows.model.named_vars.get(name)
            if data is not None and rows.depends_on(data):
                rows.model.set_data(name, values, coords=coords)
                return
            if data is not None and data in rows.model.data_vars:
                raise ValueError(
                    f"set_data: the rows of {name!r} were given to parallelize() by data={{...}}; call "
                    f"it again with others"
                )
        super().set_data(name, values, coords=coords)


def _left_out(names: Sequence[str]) -> str:
    return (
        f"{', '.join(map(repr, names))}: deterministic variables that depend on the rows are not "
        f"computed while sampling; compute them with compute_deterministics(drawn, model), or sample "
        f"with synkhronos.extensions.pymc.sample(parallel, deterministics=True)"
    )


def _model_of_graph(**options: Any) -> pm.Model:
    """Return the model into which PyMC puts the variables of a graph."""
    made, graph = pm.Model(**options), sys._getframe(1).f_locals["fgraph"]
    if any(isinstance(node.op, RowsSum) for node in graph.apply_nodes):
        made.__class__ = DividedModel
    return made


fgraph.Model = _model_of_graph


def _check_readers(frame: FrameType | None) -> None:
    """Raise if a function of PyMC among the callers cannot do its work with such a model."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] in _PACKAGES:
            check = _CHECKS.get(frame.f_code.co_name)
            if check is not None:
                check(frame, frame.f_locals)
                return
        frame = frame.f_back


def _check_density(frame: FrameType, given: dict[str, Any]) -> None:
    if given.get("kind") != "likelihood" or given.get("var_names") is not None:
        return
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "sample" and frame.f_globals.get("__name__") == pm.sample.__module__:
            warnings.warn(
                "the log-likelihood has no rows that are divided over the ranks; compute it from the "
                "draws, by pm.compute_log_likelihood(idata, model=model) with the model that was given "
                "to parallelize()",
                stacklevel=2,
            )
            return
    raise ValueError(
        "compute_log_likelihood: this model, from parallelize(), has no rows. Give the model that was "
        "given to parallelize(), as in pm.compute_log_likelihood(idata, model=model)"
    )


def _check_predictive(frame: FrameType, given: dict[str, Any]) -> None:
    if given.get("var_names") is None:
        raise ValueError(
            "sample_posterior_predictive: this model, from parallelize(), has no rows. Give the model "
            "that was given to parallelize(), as in pm.sample_posterior_predictive(idata, model=model)"
        )


def _check_sample(frame: FrameType, given: dict[str, Any]) -> None:
    sampler = given.get("nuts_sampler")  # in PyMC 6, None until it has chosen one
    if sampler in _NEEDS_JAX:
        _refuse_jax(frame, given)
    names, model = given.get("var_names"), given.get("model")
    if names and isinstance(model, DividedModel) and {*names} & {*model.left_out()}:
        raise ValueError(f"var_names: {_left_out(sorted({*names} & {*model.left_out()}))}")
    cores, chains, context = given.get("cores"), given.get("chains"), given.get("mp_ctx")
    if sampler != "pymc" or not cores or not chains or min(cores, chains) < 2:
        return
    if isinstance(context, str) or context is None:
        context = multiprocessing.get_context(context)
    if context.get_start_method() == "fork":
        raise ValueError(
            f"pm.sample: {cores} chains would be sampled in processes that are forked from this one and "
            f"cannot use the ranks; sample them one after another, with pm.sample(cores=1)"
        )


def _check_smc(frame: FrameType, given: dict[str, Any]) -> None:
    if min(given["cores"], given["chains"]) > 1:
        raise ValueError(
            f"pm.sample_smc: {given['chains']} chains would be sampled in processes of their own, which "
            f"cannot use the ranks; sample them one after another, with pm.sample_smc(cores=1)"
        )


def _check_pathfinder(frame: FrameType, given: dict[str, Any]) -> None:
    option = "parallel=False" if "parallel" in given else 'concurrent="thread"'  # as it was once
    if given.get("parallel") or given.get("concurrent") == "process":
        raise ValueError(
            f"fit_pathfinder: the paths would be computed in processes of their own, which cannot use "
            f"the ranks; give it {option}"
        )


def _refuse_jax(frame: FrameType, given: dict[str, Any]) -> None:
    raise ValueError(
        'JAX cannot use the ranks; with the model of parallelize(), use nuts_sampler="nutpie" or "pymc" '
        "of pm.sample, or fit_pathfinder(parallel=False) of pymc_extras"
    )


#: What to do if a function of PyMC reads the observed variables.
_CHECKS = {
    "compute_log_density": _check_density,
    "fit_blackjax_pathfinder": _refuse_jax,
    "fit_pathfinder": _check_pathfinder,
    "sample": _check_sample,
    "sample_jax_nuts": _refuse_jax,
    "sample_posterior_predictive": _check_predictive,
    "sample_smc": _check_smc,
}
