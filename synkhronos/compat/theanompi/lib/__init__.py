"""What models and scripts of Theano-MPI use: ``recorder``, ``opt`` for updates, ``helper_funcs``."""
