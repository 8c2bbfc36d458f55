"""The public functions for models of PyMC, which import PyMC when they are called."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Mapping, Sequence

if TYPE_CHECKING:
    import xarray


def parallelize(
    model: Any,
    data: Mapping[Any, Any] | None = None,
    *,
    observed: Sequence[str] | None = None,
    mode: Any = None,
) -> Any:
    """Return a model with the same posterior, whose rows of data are divided over all ranks.

    It has the same free variables as `model`. In place of the observed variables it has a
    ``pm.Potential``, to which every rank contributes its rows, with the gradient. Sample with it by
    ``pm.sample(model=..., nuts_sampler="nutpie")``, ``pm.sample(model=..., cores=1)``, ``pm.fit`` or
    ``pm.find_MAP``. For the same seed the draws equal the draws of `model`, up to rounding.

    Parameters
    ----------
    model : pymc.Model
        It is not changed. Use it for predictions:
        ``pm.sample_posterior_predictive(idata, model=model)``, and for the log-likelihood of each row.
    data : dict, optional
        The arrays that have a row for each observation: by the name of a ``pm.Data``, or of an observed
        variable for its observed values; None stands for the values in the model. Arrays, `Data` or
        ``numpy.memmap`` may have different rows from the model, and more of them. By default, all
        constants and ``pm.Data`` that the observed variables depend on and that are as long as their
        values.
    observed : list of str, optional
        The observed variables and potentials to divide. The others remain as they are. By default, all
        observed variables that have rows, or, in a model without observed variables, all potentials.
    mode : str or Mode, optional
        The mode of PyTensor in which the ranks compile; by default ``"NUMBA"``, with which evaluations
        need no Python, or the mode of PyTensor's settings if they name one.

    Returns
    -------
    pymc.Model
        It shares its ``pm.Data`` with `model`, so ``pm.set_data`` on either changes both, also the rows,
        unless `data` gave them. It has no ``pm.Deterministic`` that depends on the rows; compute these
        from the draws, with `compute_deterministics`.

    Raises
    ------
    NotForkedError, ClosedError, WorldBrokenError
        If there are no processes that can be used.
    TypeError
        If `model` is not a PyMC model, or an array has the wrong dtype.
    ValueError
        If a name is unknown, the numbers of rows differ, the log-probability of an observed variable is
        not a sum over its rows, or no point was found at which it is finite.
    MismatchError
        In one of the first evaluations, if the sum over all rows differs from that of `model`.
    ImportError
        If PyMC is not installed.

    Notes
    -----
    PyMC's own samplers must sample the chains one after another, with ``cores=1``: with more, PyMC
    starts a process for each chain, and only this process may use the ranks. The chains of nutpie are
    threads, which take turns. In either case all ranks work on one evaluation.

    Whether the log-probability is a sum over the rows is tested on at most 1000 rows, at three points
    near the initial point or drawn from the prior: the values and gradients of two parts of the rows
    must add up to those of the whole. The first three evaluations are compared with `model`, which this
    process compiles and computes for that.

    Examples
    --------
    >>> import numpy as np
    >>> import pymc as pm
    >>> import synkhronos as synk
    >>> from synkhronos.extensions.pymc import parallelize
    >>> synk.fork(2)
    2
    >>> with pm.Model() as model:
    ...     mean = pm.Normal("mean")
    ...     _ = pm.Normal("y", mean, 1, observed=np.arange(4.0))
    >>> point = {"mean": np.array(1.0)}
    >>> parallel = parallelize(model)
    >>> for one in (model, parallel):
    ...     print(one.compile_logp()(point).round(6), one.compile_dlogp()(point).round(6))
    -8.094693 [1.]
    -8.094693 [1.]
    >>> synk.close()
    """
    return _imported("parallelize", "models", "divide")(model, data, observed, mode)


def sample(
    model: Any,
    draws: int = 1000,
    tune: int = 1000,
    *,
    chains: int = 4,
    ranks_per_chain: int | None = None,
    random_seed: Any = None,
    deterministics: bool | Sequence[str] = False,
    **options: Any,
) -> Any:
    """Sample several chains at once, each by ranks of its own, over one copy of the rows.

    Parameters
    ----------
    model : pymc.Model
        A model of `parallelize`, or with a potential of `rows_potential`.
    draws, tune : int, default: 1000
        The number of draws of each chain, and of steps before them in which the sampler adapts.
    chains : int, default: 4
        The number of chains. If there are more than groups of ranks, a group samples one after another.
    ranks_per_chain : int, optional
        The number of ranks that evaluate a chain; by default all ranks are divided among the chains.
    random_seed : int or list of int, optional
        Seeds, or a number from which the seeds of all chains are drawn.
    deterministics : bool or list of str, default: False
        Whether to add the deterministic variables that `parallelize` leaves out, or which of them. They
        are computed after sampling, by `compute_deterministics`.
    **options
        Others of ``pm.sample``, such as ``nuts_sampler`` and ``target_accept``; but neither ``cores``
        nor ``mp_ctx``.

    Returns
    -------
    arviz.InferenceData or xarray.DataTree
        What ``pm.sample`` returns. A chain has the draws of ``pm.sample(chains=1, random_seed=[seed])``
        for its seed, up to rounding.

    Raises
    ------
    NotForkedError, ClosedError, WorldBrokenError
        If there are no processes that can be used, or one has died.
    TypeError, ValueError
        If an argument is wrong, or no sum over rows is in the model.
    KeyboardInterrupt
        After Ctrl-C, if no chain has a draw. Otherwise the draws until then are returned, equally many
        of each chain that has any.
    """
    sample_chains = _imported("sample", "chains", "sample_chains")
    return sample_chains(
        model, draws, tune, chains, ranks_per_chain, random_seed, deterministics, options
    )


def compute_deterministics(
    draws: Any,
    model: Any,
    *,
    var_names: Sequence[str] | None = None,
    rows: slice | None = None,
    mode: Any = None,
    sample_dims: Sequence[str] = ("chain", "draw"),
) -> xarray.Dataset:
    """Return the deterministic variables of a model for draws of its parameters.

    The result is the same as by ``pm.compute_deterministics``. All ranks compute their part of the rows
    of variables that have an item for each row.

    Parameters
    ----------
    draws : xarray.Dataset or InferenceData
        The draws of the free variables, or an object that has them as ``posterior``.
    model : pymc.Model
        The model itself, not the one that `parallelize` returns.
    var_names : list of str, optional
        The names of the deterministic variables; by default, all.
    rows : slice, optional
        Which rows to return of variables that have an item for each row. The result has an item for each
        draw and row, which can be more than fits into memory. By default, all rows.
    mode : str or Mode, optional
        The mode of PyTensor in which the ranks compile, as in `parallelize`.
    sample_dims : list of str, optional
        The dimensions of the draws.

    Returns
    -------
    xarray.Dataset
        It has the dimensions and coordinates of the model.

    Raises
    ------
    NotForkedError, ClosedError, WorldBrokenError
        If there are no processes that can be used.
    ValueError
        If a deterministic variable is not in the model, or a free variable is not in the draws.
    ImportError
        If PyMC is not installed.

    Notes
    -----
    Observed variables have their observed values.

    Examples
    --------
    >>> import numpy as np
    >>> import pymc as pm
    >>> import synkhronos as synk
    >>> import xarray
    >>> from synkhronos.extensions.pymc import compute_deterministics
    >>> synk.fork(2)
    2
    >>> with pm.Model(coords={"row": [10, 20, 30]}) as model:
    ...     slope = pm.Normal("slope")
    ...     _ = pm.Deterministic("mean", slope * np.array([1.0, 2.0, 3.0]), dims="row")
    >>> draws = xarray.Dataset({"slope": (("chain", "draw"), [[1.0, 2.0]])})
    >>> computed = compute_deterministics(draws, model)
    >>> print(computed["mean"].sel(row=20).values)
    [[2. 4.]]
    >>> synk.close()
    """
    computed = _imported("compute_deterministics", "deterministics", "computed")
    return computed(draws, model, var_names, rows, mode, sample_dims)


def _imported(name: str, module: str, function: str) -> Any:
    """Return a function of a module that imports PyMC, for a public function with a name."""
    try:
        return getattr(importlib.import_module(f"synkhronos.extensions.pymc.{module}"), function)
    except ModuleNotFoundError as error:
        if error.name != "pymc":
            raise
        raise ImportError(
            f'{name}: PyMC is not installed: python -m pip install "pymc>=5.28.5,<7"'
        ) from error
