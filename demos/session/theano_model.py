"""A network of two layers in plain Theano."""

if __name__ == "__main__":
    raise SystemExit(f"{__doc__}\nScripts use this file; run train.py.")

import numpy as np
import theano
import theano.tensor as T
from digits import DigitsModel
from graphs import compile_functions

HIDDEN = 100  # units


class TheanoModel(DigitsModel):
    name = "plain Theano"

    def __init__(self, config):
        super().__init__(config)
        random = np.random.RandomState(self.seed)
        shapes = {"W1": (64, HIDDEN), "b1": (HIDDEN,), "W2": (HIDDEN, 10), "b2": (10,)}
        self.params = [
            theano.shared(random.normal(0, 0.1, shape).astype("float32") * (len(shape) > 1), name)
            for name, shape in shapes.items()
        ]
        self.shared_lr = theano.shared(np.float32(config.get("learning_rate", 0.05)), "rate")

    def compile_iter_fns(self, sync_type):
        x, y = T.fmatrix("x"), T.ivector("y")
        w1, b1, w2, b2 = self.params
        probabilities = T.nnet.softmax(T.dot(T.nnet.relu(T.dot(x, w1) + b1), w2) + b2)
        compile_functions(self, x, y, probabilities, probabilities, sync_type)
