"""`compute_deterministics`: what a model computes for each row, for draws of its parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Sequence

if TYPE_CHECKING:
    import xarray


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
    from synkhronos.extensions.pymc.row_values import computed  # imports PyMC

    return computed(draws, model, var_names, rows, mode, sample_dims)
