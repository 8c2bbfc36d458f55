"""Functions of a model from its graph: steps with momentum, for both kinds of exchange."""

if __name__ == "__main__":
    raise SystemExit(f"{__doc__}\nScripts use this file; run train.py.")

import synkhronos  # noqa: F401  (before Theano)
import numpy as np
import theano
import theano.tensor as T

theano.config.floatX = "float32"
MOMENTUM = 0.9


def measures(probabilities, y):
    """Return the cost, the error, and how often the digit is not among the best five."""
    cost = T.nnet.categorical_crossentropy(probabilities, y).mean()
    error = T.neq(probabilities.argmax(axis=1), y).mean(dtype="float32")
    of_label = probabilities[T.arange(y.shape[0]), y].dimshuffle(0, "x")
    better = T.gt(probabilities, of_label).sum(axis=1)
    return cost, error, T.ge(better, 5).mean(dtype="float32")


def compile_functions(model, x, y, training, validation, sync_type):
    """Give a model ``train_fn`` and ``val_fn``.

    With ``"avg"`` a step updates the parameters. With ``"cdd"`` it computes velocities, ``model.vels``;
    the session adds up those of all ranks in ``model.vels2``, and calls ``model.descent_vel()``.
    """
    cost, error, _ = measures(training, y)
    model.vels = [theano.shared(0 * one.get_value()) for one in model.params]
    new = [
        np.float32(MOMENTUM) * v - model.shared_lr * gradient
        for v, gradient in zip(model.vels, T.grad(cost, model.params))
    ]
    updates = list(zip(model.vels, new))
    if sync_type == "cdd":
        model.vels2 = [theano.shared(0 * one.get_value()) for one in model.params]
        steps = [(one, one + v) for one, v in zip(model.params, model.vels2)]
        model.descent_vel = theano.function([], [], updates=steps)
    else:
        updates += [(one, one + v) for one, v in zip(model.params, new)]
    model.train_fn = theano.function([x, y], [cost, error], updates=updates)
    model.val_fn = theano.function([x, y], measures(validation, y))
