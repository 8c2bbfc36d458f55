"""Tools for training, built only on the public names of Synkhronos.

``updates``
    Update rules that keep the gradient of all parameters in one flat vector.
``train``
    A training step, built from a loss, its parameters and an update rule.

Import the module that you need; nothing is imported here.
"""
