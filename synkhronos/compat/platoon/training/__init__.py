"""Rules of training: ``global_dynamics`` has those in which all workers meet."""
