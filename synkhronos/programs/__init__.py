"""Programs that every rank runs at its own pace.

``spmd`` runs a program as one long command. ``rank`` has the methods that a program can use, and
``collectives`` the methods in which ranks meet; ``stopping`` says when a rank has to end. ``own_call``
calls a rank's own replica, and ``sending`` sends a program to the workers. ``center`` is one copy of
parameters that belongs to no rank, and ``layout`` says where each of them is in its memory. ``lock`` is
a lock between the ranks, and ``saving`` writes files with values of all ranks. ``rank_group`` is a part
of the ranks. ``attached`` has processes that were not forked, and attach to a listener.
``group_collectives`` are the collectives of both, and reductions of arrays that are no variables.
"""
