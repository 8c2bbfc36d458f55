"""Training steps on all ranks: the updates of a function, with gradients that are all-reduced.

``definition`` makes the `Definition` of a step of the ``arguments`` that a script gives, which are
checked there. ``reduced_expressions`` finds the expressions that are reduced over the ranks, and has the
vectors that hold their values. ``plan`` divides a step into the part that each rank computes on its rows
and the part after the all-reduce, and ``step`` carries it out, on all ranks or in one process.

``losses`` has the terms of losses, and sums and means over all rows by which they divide;
``clipped_gradients`` gives operations that change gradients the gradients of the serial loss; and
``errors`` has the errors for steps that cannot be divided.
"""
