"""A convolutional network of Lasagne, with dropout."""

if __name__ == "__main__":
    raise SystemExit(f"{__doc__}\nScripts use this file; run train.py.")

from digits import DigitsModel
from graphs import compile_functions  # imports synkhronos, without which Lasagne cannot be imported

import lasagne
import numpy as np
import theano
import theano.tensor as T


class LasagneModel(DigitsModel):
    name = "Lasagne"

    def __init__(self, config):
        super().__init__(config)
        lasagne.random.set_rng(np.random.RandomState(self.seed + self.rank))  # dropout of its own
        layers = lasagne.layers
        layer = layers.InputLayer((None, 64))
        layer = layers.ReshapeLayer(layer, ([0], 1, 8, 8))
        layer = layers.Conv2DLayer(layer, 16, 3)
        layer = layers.MaxPool2DLayer(layer, 2)
        layer = layers.DenseLayer(layers.dropout(layer, 0.2), 64)
        self.output = layers.DenseLayer(layer, 10, nonlinearity=lasagne.nonlinearities.softmax)
        self.params = layers.get_all_params(self.output, trainable=True)
        self.shared_lr = theano.shared(np.float32(config.get("learning_rate", 0.02)), "rate")

    def compile_iter_fns(self, sync_type):
        x, y = T.fmatrix("x"), T.ivector("y")
        get_output = lasagne.layers.get_output
        training, validation = get_output(self.output, x), get_output(self.output, x, deterministic=True)
        compile_functions(self, x, y, training, validation, sync_type)
