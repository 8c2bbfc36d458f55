"""Ranks on several machines: each machine has a transport of its own, and one rank of it is its leader.

A world of one machine imports nothing of this folder. ``transport``, ``store`` and ``communicator`` have
the same interfaces as the objects of one machine, which they join.

``leaders`` meet, abort and wait by means of messages, which ``mpi`` implements. ``commands`` is how a
command and its arrays get to the ranks of other machines, and how the replies get back. ``communicator``
has the meetings and collectives of all ranks.

The ``progress_process`` of a machine is a process that communicates while its ranks compute. ``overlap``
lets it reduce in buckets what the ranks compute, and ``relay`` is its work in programs. ``neighbours``
are the machines that a progress process watches, and reports when they are lost.

The folder ``job`` starts and ends an MPI job.
"""
