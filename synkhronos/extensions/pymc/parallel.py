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
    ``pm.sample(model=..., cores=1)``, ``pm.fit`` or ``pm.find_MAP``. For the same seed the draws equal
    the draws of `model`, up to rounding.

    Parameters
    ----------
    model : pymc.Model
        It is not changed. Use it for predictions:
        ``pm.sample_posterior_predictive(idata, model=model)``.
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
        The mode of PyTensor in which the ranks compile, such as ``"NUMBA"``; by default the mode of
        PyTensor's settings.

    Returns
    -------
    pymc.Model
        It keeps the rows with which it was created. Data without rows can be changed with
        ``pm.set_data``. It has no ``pm.Deterministic`` that depends on the rows; compute these from the
        draws, with `compute_deterministics`.

    Raises
    ------
    NotForkedError, ClosedError, WorldBrokenError
        If there are no processes that can be used.
    TypeError
        If `model` is not a PyMC model, or an array has the wrong dtype.
    ValueError
        If a name is unknown, the numbers of rows differ, or the log-probability of an observed variable
        is not a sum over its rows.
    ImportError
        If PyMC is not installed.

    Notes
    -----
    Chains must be sampled one after another, with ``cores=1``: with more, PyMC starts a process for each
    chain, and these raise an error, since only this process may use the ranks. All ranks work on one
    chain instead.

    Whether the log-probability is a sum over the rows is tested on at most 1000 rows, at a point near
    the initial point: the values of its two halves must add up to the value of the whole.

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
        if error.name != "pymc":
            raise
        raise ImportError(
            'parallelize: PyMC is not installed: python -m pip install "pymc>=5.28.5,<6"'
        ) from error

    return divide(model, data, observed, mode)
