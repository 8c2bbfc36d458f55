"""Programs that every rank runs at its own pace.

``spmd`` runs a program as one long command. ``rank`` is what a program can do, ``collectives``
its part in which ranks meet; ``meeting`` lets them come to collectives by themselves, and ``stopping``
asks them to stop. ``own_call`` calls a rank's own replica, ``sending`` sends a program to the workers,
and ``reports`` are numbers for the master.

``center`` is one copy of parameters that belongs to no rank; ``stripes`` is its memory, which changes
piece by piece, and ``layout`` says what is in each piece. ``messages`` go from one rank to another,
by way of the ``mailbox`` of the receiver, and a ``controller`` answers questions, which are in a
``register``. ``bells`` wake who waits for these, and ``numbers`` are those that each rank shows to all.

All this is in the memory of one machine. On several, the folder ``relay`` passes it on, and a center on
another machine has ``remote_stripes``.

May import: ``arithmetic``, ``stores``, ``comms``, ``transports``, ``engines``, ``world``, ``arrays``,
``functions``, ``variables``.
"""
