"""Programs that every rank runs at its own pace.

``spmd`` runs a program as one long command. ``rank`` has the methods that a program can use, and
``collectives`` the methods in which ranks meet; ``meeting`` lets ranks come to collectives by
themselves, and ``stopping`` asks them to stop. ``own_call`` calls a rank's own replica, ``sending``
sends a program to the workers, and ``reports`` are numbers for the master.

``center`` is one copy of parameters that belongs to no rank; ``stripes`` is its memory, which changes
piece by piece, and ``layout`` says what is in each piece. ``messages`` go from one rank to another
through the ``mailbox`` of the receiver, and a ``controller`` answers questions, which are in a
``register``. ``bells`` wake processes that wait for these, and ``numbers`` are numbers that each rank
shows to all.

All this is in the memory of one machine. On several machines, the folder ``relay`` passes it on, and
``remote_stripes`` give access to a center on another machine.

May import: ``arithmetic``, ``host``, ``stores``, ``comms``, ``transports``, ``engines``, ``world``,
``arrays``, ``functions``, ``variables``.
"""
