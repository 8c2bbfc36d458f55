"""Products of a sparse matrix of data, with equal numbers of entries in all rows.

Ranks can share rows of dense arrays only. So each row of the matrix is stored as values and their
columns, with zeros up to the number of entries of the longest row, and the product is a sum over them.
"""

from __future__ import annotations

import numpy as np
import pytensor.sparse.math as sparse_math
import pytensor.tensor as pt

from synkhronos.engines.names import Variable, ancestors
from synkhronos.extensions.pymc.leaves import array_of, is_leaf, is_sparse
from synkhronos.extensions.pymc.potential import substitute

_MOST = 4  # stored entries per entry of the matrix

_PRODUCTS = (sparse_math.StructuredDot, sparse_math.Dot)


def padded(title: str, graph: Variable, n_rows: int) -> Variable:
    """Return a graph with dense arrays for the sparse matrices that have this number of rows.

    Raises
    ------
    ValueError
        If such a matrix is not the left factor of a product with a dense matrix or vector, or if its
        longest row has so many entries that the arrays would be too large.
    """
    products = {}
    for variable in ancestors([graph]):
        if variable.owner and isinstance(variable.owner.op, _PRODUCTS) and not is_sparse(variable):
            left, right = variable.owner.inputs
            if _has_rows(left, n_rows) and not is_sparse(right):
                products[variable] = _product(title, left, right, variable.type.dtype)
    for product in products:  # a factor may contain another product
        graph = substitute([graph], {product: products[product]})[0]
    left_over = [variable for variable in ancestors([graph]) if _has_rows(variable, n_rows)]
    if left_over:
        raise ValueError(
            f"{title}: expected that a sparse matrix of data is the left factor of pytensor.sparse.dot "
            f"or structured_dot, with a dense one, got another use of the matrix of shape "
            f"{array_of(left_over[0]).shape}; use a dense array, as by its toarray()"
        )
    return graph


def _has_rows(variable: Variable, n_rows: int) -> bool:
    return is_sparse(variable) and is_leaf(variable) and array_of(variable).shape[0] == n_rows


def _product(title: str, left: Variable, right: Variable, dtype: str) -> Variable:
    matrix = array_of(left).tocsr()
    counts = np.diff(matrix.indptr)
    longest = max(1, int(counts.max()))
    if matrix.shape[0] * longest > _MOST * max(matrix.nnz, matrix.shape[0]):
        raise ValueError(
            f"{title}: the rows of the sparse matrix of shape {matrix.shape} have {counts.mean():.3g} "
            f"entries on average, and up to {longest}. Ranks can divide it if no row has more than "
            f"{_MOST} times the average; split it into two matrices by columns, one of them dense"
        )
    is_entry = np.arange(longest) < counts[:, None]
    values = np.zeros(is_entry.shape, matrix.dtype)
    columns = np.zeros(is_entry.shape, "int64")
    values[is_entry], columns[is_entry] = matrix.data, matrix.indices
    chosen = right[pt.constant(columns)]
    weights = pt.constant(values)
    product = (weights if right.type.ndim == 1 else weights[:, :, None]) * chosen
    return pt.cast(product.sum(axis=1), dtype)
