"""What the couriers of several machines exchange while a program runs.

``relay`` is the work of a courier, which runs the parts. With ``post`` the parts send to each other.
``mirrors`` copy numbers and reports of each machine's ranks to all machines. ``boxes`` pass on messages,
``questions`` pass on questions to the controller and its answers, and ``visitors`` visit the stripes of
a center for the ``remote_stripes`` of ranks of other machines.

May import: what ``machines`` may.
"""
