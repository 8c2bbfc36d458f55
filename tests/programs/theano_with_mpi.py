"""Imports Theano, which imports mpi4py, and forks a child that ends like a script."""

import os
import sys

import synkhronos  # noqa: F401
import theano  # noqa: F401

assert "mpi4py.MPI" in sys.modules
from mpi4py import MPI

child = os.fork()
if not child:
    sys.exit(3)
print(MPI.Is_initialized(), os.WEXITSTATUS(os.waitpid(child, 0)[1]))
