"""Ranks on several machines: each machine has a transport of its own, and one rank of it is its leader.

``links`` is the interface of messages between leaders; ``naive``, in one process, is its specification,
and ``mpi`` the one in use. ``leaders`` meet, abort and wait by means of messages. ``transport`` joins
the machines' transports to one, ``meetings`` are those of all ranks. ``orders`` are commands on their
way to all ranks. ``lasting`` has the arrays that a machine keeps, ``flag`` is a request to stop, and
``watch`` what a leader looks at while it waits. ``clocks`` compares the clocks of the machines.
``in_program`` is the part of the transport for programs. The ``courier`` of a machine is a process that
communicates while its ranks compute; ``ahead`` lets it reduce what they compute, and ``kept`` has what
it keeps for that from one step to the next.

May import: what ``transports`` may.
"""
