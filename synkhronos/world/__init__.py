"""The world: the ranks of one ``fork()``, the commands that they run, and failures.

``rank_state`` defines commands, the state of a rank and its replies. ``world`` runs commands between a
start and a finish barrier, and has the loop of a worker. ``schedule`` has what is compiled once and
repeated by number, and `fuse`, which combines several calls into one command. ``registry`` numbers
functions, shared variables and schedules. ``launch`` starts and closes a world, and ``logged`` is a
world that logs its commands. ``devices`` and ``threads`` assign machines, devices and BLAS threads to
the ranks. ``job`` finds the machines of an MPI job and leads the ranks of a machine. ``restart``
replaces the workers, also those that die in a program. ``call_lock`` says whose call it is.
``generators`` seeds the generators of Python and NumPy on the workers.
"""
