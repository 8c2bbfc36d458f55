"""Tools for training, built only on the public names of Synkhronos.

``updates``
    Update rules that keep the gradient of all parameters in one flat vector.
``train``
    Training steps, built from a loss, its parameters and any update rule, or from the arguments of a
    script's own ``theano.function``.
``keras``
    Models of Keras 2.3.1 on all ranks.

Import the module that you need; nothing is imported here. ``train`` stands on the folder ``steps``, and
``keras`` on ``keras_backend``.
"""
