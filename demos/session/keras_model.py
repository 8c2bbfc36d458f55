"""A network of Keras, whose functions take its optimizer's steps."""

if __name__ == "__main__":
    raise SystemExit(f"{__doc__}\nScripts use this file; run train.py.")

import synkhronos.extensions.keras  # noqa: F401  (before Keras)
import keras
import numpy as np
from digits import DigitsModel


class KerasModel(DigitsModel):
    name = "Keras"

    def __init__(self, config):
        super().__init__(config)
        np.random.seed(self.seed)  # Keras draws the weights with it
        self.model = keras.models.Sequential([
            keras.layers.Dense(100, activation="relu", input_shape=(64,)),
            keras.layers.Dense(10, activation="softmax"),
        ])  # fmt: skip
        self.model.compile(
            keras.optimizers.SGD(config.get("learning_rate", 0.05), momentum=0.9),
            "sparse_categorical_crossentropy",
            metrics=["accuracy", "sparse_top_k_categorical_accuracy"],
        )
        self.params = list(self.model.trainable_weights)
        self.shared_lr = self.model.optimizer.lr

    def compile_iter_fns(self, sync_type):
        if sync_type != "avg":
            raise ValueError(
                f"an optimizer of Keras updates the parameters, got sync_type={sync_type!r}"
            )
        self.model._make_train_function()
        self.model._make_test_function()

    def train_fn(self, x, y):
        cost, accuracy, _ = self.model.train_on_batch(x, y)
        return cost, 1 - accuracy

    def val_fn(self, x, y):
        cost, accuracy, top5 = self.model.test_on_batch(x, y)
        return cost, 1 - accuracy, 1 - top5
