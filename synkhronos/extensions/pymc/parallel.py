"""`parallelize`: a model whose observed variables are computed by all ranks."""

from __future__ import annotations

from typing import Any, Mapping, Sequence


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
    try:
        from synkhronos.extensions.pymc.models import divide  # imports PyMC
    except ModuleNotFoundError as error:
        raise _without_pymc("parallelize", error) from error

    return divide(model, data, observed, mode)


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
    try:
        from synkhronos.extensions.pymc.chains import sample_chains  # imports PyMC
    except ModuleNotFoundError as error:
        raise _without_pymc("sample", error) from error

    return sample_chains(
        model, draws, tune, chains, ranks_per_chain, random_seed, deterministics, options
    )


def _without_pymc(name: str, error: ModuleNotFoundError) -> ImportError:
    """Return the error to raise if PyMC cannot be imported."""
    if error.name != "pymc":
        return error
    return ImportError(f'{name}: PyMC is not installed: python -m pip install "pymc>=5.28.5,<7"')
