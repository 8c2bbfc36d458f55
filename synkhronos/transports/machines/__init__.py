"""Ranks on several machines: each machine has a transport of its own, and one rank of it is its leader.

``links`` is the interface for messages between leaders. ``naive`` implements it in one process as the
specification; ``mpi`` is used in practice. ``leaders`` meet, abort and wait by means of messages;
``absent`` has those that do not come to a meeting.
``transport`` joins the transports of the machines to one, and ``meetings`` implements the meetings of
all ranks. ``orders`` are commands being sent to all ranks. ``lasting`` has the arrays that a machine
keeps, ``flag`` is a request to stop, and ``watch`` is what a leader checks while it waits. ``clocks``
compares the clocks of the machines. ``in_program`` is the part of the transport for programs. The
``courier`` of a machine is a process that communicates while its ranks compute; ``ahead`` lets it reduce
what they compute, and ``kept`` has what it keeps for that from one step to the next. ``neighbours`` are
the machines that a courier watches, and reports when they are lost.

May import: what ``transports`` may.
"""
