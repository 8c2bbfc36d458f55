"""Keras: a network for handwritten digits that trains on all processes.

    python keras_digits.py --processes 2

The digits are the 1797 small pictures of scikit-learn.
"""

import time

import script

script.need("keras", "sklearn", extra="keras,demos")
from synkhronos.extensions.keras import parallelize  # before Keras

import keras
import numpy as np
from sklearn.datasets import load_digits

TEST = 360  # pictures


def build(units):
    """Return a network of two layers."""
    model = keras.models.Sequential([
        keras.layers.Dense(units, activation="relu", input_shape=(64,)),
        keras.layers.Dense(10, activation="softmax"),
    ])  # fmt: skip
    optimizer = keras.optimizers.SGD(momentum=0.9, nesterov=True)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def train(model, options):
    """Train with a falling learning rate; return the history, and the seconds after the first epoch."""
    pictures = load_digits()
    x, y = pictures.data / 16, pictures.target
    np.random.seed(options.seed)  # Keras shuffles with it
    starts = []

    def check(batch, logs):
        script.check_loss(logs["loss"], f"in batch {batch + 1} of epoch {len(starts) + 1}")

    def note(epoch, logs):
        starts.append(time.time())

    callbacks = [
        keras.callbacks.LearningRateScheduler(lambda epoch: options.learning_rate * 0.9**epoch),
        keras.callbacks.LambdaCallback(on_batch_end=check, on_epoch_end=note),
    ]
    history = model.fit(
        x[TEST:],
        y[TEST:],
        batch_size=options.batch,
        epochs=options.epochs,
        validation_data=(x[:TEST], y[:TEST]),
        callbacks=callbacks,
        verbose=0,
    )
    return history.history, starts[-1] - starts[0]


def main():
    whole = script.whole
    parser = script.parser(__doc__)
    script.add_processes(parser, devices=False)
    parser.add_argument("--epochs", type=whole(2, 10_000), default=10, help="default: 10")
    parser.add_argument(
        "--batch", type=whole(1, 10_000), default=200, help="rows in a batch (default: 200)"
    )
    parser.add_argument(
        "--units", type=whole(1, 100_000), default=500, help="hidden units (default: 500)"
    )
    parser.add_argument("--learning-rate", type=script.positive(), default=0.2, help="default: 0.2")
    parser.add_argument("--seed", type=whole(0, 2**32 - 1), default=0)
    options = parser.parse_args()
    n = script.fork(options.processes, use_gpu=False)
    script.say_too_small()

    np.random.seed(options.seed)
    serial, parallel = build(options.units), build(options.units)
    parallel.set_weights(serial.get_weights())
    parallelize(parallel)  # this is all that changes

    with script.showing("compiling and training with Keras on one process"):
        expected, serial_time = train(serial, options)
    history, parallel_time = train(parallel, options)
    columns = [history[name] for name in ("loss", "val_loss", "val_accuracy")]
    for epoch, (loss, test_loss, accuracy) in enumerate(zip(*columns), 1):
        print(f"epoch {epoch}: loss {loss:.4f}; test: {test_loss:.4f}, accuracy {accuracy:.3f}")
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-2, atol=1e-2)
    print(
        f"The history matches Keras on one process. Epochs after the first: {serial_time:.2f} s "
        f"on one process, {parallel_time:.2f} s on {n}"
    )


if __name__ == "__main__":
    script.run(main)
