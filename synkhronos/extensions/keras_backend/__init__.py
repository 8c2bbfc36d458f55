"""The parts of `keras`: how models of Keras 2.3.1 compute on all ranks.

``imports`` imports Keras with current versions of Python and h5py. ``functions`` has the functions
of a model, and finds which of its losses and metrics are means or sums over rows.
"""
