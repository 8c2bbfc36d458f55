"""Training steps on all ranks: the updates of a function, cut at the gradients, which are all-reduced.

``requests`` and ``script`` check what a script asks for, ``rules`` converts update rules from any
source to a common form, and ``refusals`` has the errors that say what cannot be done. ``plan``
divides a step into what each rank computes on its rows and what follows the all-reduce; it uses
``cuts``, ``marks``, ``seeds``, ``linear``, ``dependence``, ``equality`` and ``graphs``, which read
and rewrite graphs, and ``slots`` and ``layout``, which place the values to be reduced in one vector.
``shares`` gives operations that change gradients, which ``changes`` finds by ``homogeneity`` and
``loops``, the gradients of the serial loss. ``losses`` warns about losses that are combined in a way
that is not theirs. ``step`` carries out a plan on all ranks, with ``overlap`` while gradients are
reduced, and ``serial`` in one process; ``fixed_draws`` makes one whose random numbers do not depend
on the ranks. ``arguments`` matches the data of a call, and ``repetition`` takes a step again that
differs only in its rows. ``copies`` builds a step again with other variables.
"""
