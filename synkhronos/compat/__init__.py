"""The names of older libraries, for scripts written for them, on the public names of this package.

The scripts are started by ``python -m synkhronos run``, or by the commands of those libraries. Each
module was written from the documented interface of its library; nothing is copied. Nothing here has a
mechanism of its own.

The folder ``platoon`` stands for Platoon, and ``theanompi`` for Theano-MPI.
"""
