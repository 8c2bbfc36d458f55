"""What models of Theano-MPI are made of: the layers in ``layers2``, and the folder ``data``."""
