"""Memory and processes for ranks at their own pace, without commands and barriers, on one machine.

``stripes`` are memory that changes piece by piece, and ``messages`` go from one rank to another through
the ``mailbox`` of the receiver. A ``controller`` is a process that answers the questions in a
``channel``. ``register_group`` lets processes exchange bytes. ``reports`` has the numbers that each rank
shows to all, and ``wakeups`` wake processes that wait for any of these. ``background_processes`` are
processes of the script that belong to no world, and the memory that they share with the ranks.
"""
