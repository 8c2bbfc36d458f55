"""The world: the ranks of one ``fork()``, the commands that they run, and failures.

``rank_state`` defines commands and the state of a rank. ``world`` runs commands between a start and a
finish barrier, and gets their results from ``replies``. ``schedule`` has what is compiled once and
repeated by number. ``registry`` numbers functions, shared variables and schedules.
``launch`` starts and closes a world, and ``options`` has its options; ``worker`` is the loop of a
worker, and ``logged`` a world that logs its commands. ``devices`` and ``threads`` assign devices and
BLAS threads to the ranks. ``job`` finds the machines of an MPI job and leads the ranks of a machine;
``placement`` says where the ranks are. ``restart`` replaces the workers, and ``replacement`` replaces
workers that die in a program. ``call_lock`` says whose call it is. ``generators`` seeds the
generators of Python and NumPy on the workers. ``fuse`` combines several calls into one command.
"""
