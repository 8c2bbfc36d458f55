"""An MPI job: its start by ``python -m synkhronos launch``, and its end.

``config`` has the options and the config file, ``launcher`` runs mpirun, and ``prefixes`` puts the name
of its machine before the output of a rank. ``sources`` tells whether machines have the same code.
``ending`` ends a job where a machine does not answer, and ``leftovers`` removes the files of killed
jobs. ``doctor`` reports what is missing for a job.

May import: what ``machines`` may.
"""
