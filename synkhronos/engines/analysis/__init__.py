"""What graphs tell about rows, before they are optimized; of Theano and of PyTensor alike.

``result_dependence`` reads on which inputs results depend, and ``rows`` how results depend on the number
of rows; ``shapes`` reads shapes and indices. ``gradient_seeds`` are where gradients begin.
``difference_causes`` finds operations that may make results differ from the results of one process.
``row_axes`` follows the axis of the rows further than ``rows``, for ``windows``, which divides the rows
that an index selects, and ``recurrence``, which finds loops along them. ``equal_axes`` finds which axes
have equal extents, for ``fixed_rows``, which replaces numbers of rows that a script gives as constants.
"""
