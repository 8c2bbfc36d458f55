"""The repairs of Theano, Lasagne and Keras: ``table.txt``, and modules loaded under their names.

``scan_perform_ext`` is the loop of ``scan`` in C, ``inc_code`` the C code of increments at indices,
``numpy_1_24`` has the functions that repaired lines of Theano call, and ``downsample`` a module of older
versions.
"""
