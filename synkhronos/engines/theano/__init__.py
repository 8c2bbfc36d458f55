"""Theano 1.0.5: ``engine`` runs it on NumPy arrays, and ``gpu_engine`` on the arrays of a GPU.

``gpu_engine`` also works around defects in the GPU code of Theano and libgpuarray. ``module_cache``
shares what Theano has compiled among ranks, and halves the time of compiling. The folder ``kernels`` has
faster operations for the CPU. The folder ``repairs`` has the repairs of Theano, Lasagne and Keras for
newer versions of Python and NumPy, which ``host/imports`` applies.
"""
