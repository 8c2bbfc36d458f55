"""An MPI job: its start by ``python -m synkhronos launch``, and its end.

``config`` has the options and the config file, and ``launcher`` runs mpirun. ``networks`` are those that
the machines share. ``signals_of_user`` passes signals on to it, and ``loss_messages`` tells from its
output whether a machine or a task was lost. Then ``restarts`` runs it again, after ``end_processes`` on
each machine. In the tasks, ``output_prefix`` puts the name of its machine before the output of a rank,
``script_process`` passes signals on to the script and reports its exit code, ``start_guard`` ends a job
in which a task dies before MPI can notice it, and ``leftovers`` removes the files of killed jobs.
``source_digest`` tells whether machines have the same code, and ``termination`` ends a job where a
machine does not answer. ``doctor`` reports what is missing for a job.
"""
