"""An MPI job: its start by ``python -m synkhronos launch``, and its end.

``config`` has the options and the config file. ``launcher`` finds mpirun and has its command line, and
``running`` runs it, passes signals on, and runs it again after a loss. The processes of the job tell
``launch`` by ``reports`` what has happened. ``tasks`` are the processes of a task: that of the script,
its parent, and that which puts the name of the machine before the output. ``ending`` ends a job where a
machine does not answer or a task dies too early, and removes what killed jobs have left. ``doctor``
reports what is missing for a job.
"""
