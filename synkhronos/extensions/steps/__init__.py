"""Training steps on all ranks: the updates of a function, with gradients that are all-reduced.

``definition`` makes the `Definition` of a step of the arguments that a script gives: ``parsing`` checks
each of them, ``update_rules`` converts update rules from any source to one form, and ``step_inputs``
matches the data of a call. ``reduced_expressions`` finds the expressions that are reduced over the
ranks: gradients, losses, and ``marked_expressions``. ``plan`` divides a step into the part that each
rank computes on its rows and the part after the all-reduce, ``step`` carries it out on all ranks, and
``serial_step`` in one process.

``plan`` has the values to be reduced in ``reduced_vectors``. ``all_rows`` has sums and means over all
rows by which losses divide; ``clipped_gradients`` gives operations that change gradients the gradients
of the serial loss; ``losses`` warns about losses whose gradients are combined by the wrong operation;
and ``errors`` has the errors for steps that cannot be divided. ``linear`` has the terms of expressions.

``fixed_draws`` defines a step whose random numbers do not depend on the ranks, and
``copied_arguments`` a step with other shared variables.
"""
