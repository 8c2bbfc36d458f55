"""Modules that Python loads under names of Theano modules; ``host/repairs`` says which, and why.

``scan_perform_ext`` is the loop of ``scan`` in C, ``inc_code`` the C code of increments at indices,
``numpy_1_24`` has the functions that repaired lines of Theano call, and ``downsample`` a module of older
versions.
"""
