"""Programs that every rank runs at its own pace.

``spmd`` runs a program as one long command, which it sends to the workers. ``rank`` has the methods that
a program can use, and ``collectives`` the methods in which ranks meet, all of them, a part of them, or
processes that were not forked, which ``attached`` lets attach to a listener. ``stopping`` says when a
rank has to end. ``own_call`` calls a rank's own replica. ``center`` is one copy of parameters that
belongs to no rank, and a lock between the ranks. ``saving`` writes files with values of all ranks.
"""
