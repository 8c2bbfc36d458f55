"""Ranks on several machines: each machine has a transport of its own, and one rank of it is its leader.

A world of one machine imports nothing of this folder. ``transport``, ``store`` and ``communicator`` have
the same interfaces as those of one machine, which they join.

``links`` is the interface for messages between leaders. ``naive`` implements it in one process as the
specification; ``mpi`` is used in practice. ``leaders`` meet, abort and wait by means of messages;
``missing`` has those that do not come to a meeting. ``delivery`` is how a command gets to all ranks,
``meetings`` are the meetings of all ranks, ``waiting`` is what a leader checks while it waits,
``stop_request`` passes on a request to stop, and ``clocks`` compares the clocks of the machines.
``cached_arrays`` are the arrays that a machine keeps between commands.

The ``courier`` of a machine is a process that communicates while its ranks compute; its commons are
``joined_commons``. ``overlap`` lets it reduce in ``buckets`` what the ranks compute, and ``wire_state``
has what it keeps for that from one step to the next. ``neighbours`` are the machines that a courier
watches, and reports when they are lost, by their ``connections``.

The folder ``relay`` is the work of the couriers in programs, and ``job`` starts and ends an MPI job.

May import: ``arithmetic``, ``host``, ``stores``, ``comms``, ``transports``, ``services``.
"""
