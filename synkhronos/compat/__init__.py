"""The names of other libraries, so that scripts for them run unchanged.

``aliases`` lets Python find the folders here by the names of the libraries, where these are not
installed. The folder ``theanompi`` has the names of Theano-MPI.

The names were written from the documented interfaces of the libraries, and what they do is done by the
public names and the extensions of this package.

May import: ``extensions``, ``engines``.
"""
