"""Tests of Keras models on all ranks, against the same models of Keras on one process."""

import importlib.util
import json
import os
import warnings

import numpy as np
import pytest
from processes import MODULES, Programs, own_process

if importlib.util.find_spec("keras") is None:
    pytest.skip("Keras is not installed: python -m synkhronos install keras", allow_module_level=True)

import synkhronos as synk

SETTINGS = {
    "floatx": "float64",
    "epsilon": 1e-07,
    "backend": "tensorflow",
    "image_data_format": "channels_last",
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """`Programs` that have imported Keras, which sets ``floatX``, and build functions without C code."""
    home = tmp_path_factory.mktemp("keras")
    (home / "keras.json").write_text(json.dumps(SETTINGS))
    flags = ",".join(filter(None, [os.environ.get("THEANO_FLAGS"), "mode=FAST_COMPILE"]))
    made = Programs(
        [*MODULES, "synkhronos.extensions.keras"], {"KERAS_HOME": str(home), "THEANO_FLAGS": flags}
    )
    yield made
    made.close()


def lengths(*counts, **options):
    """Yield calls of ``train_on_batch`` with as many rows."""
    from keras_models import digits

    for number, count in enumerate(counts):
        x, y = digits(number, count)
        weights = np.random.RandomState(number).rand(count)
        yield (x, y), {"sample_weight": weights, **options}


@own_process
@pytest.mark.parametrize("rule", [pytest.param("sgd", marks=pytest.mark.slow), "adam"])
def test_fit_evaluate_and_predict_equal_the_serial_ones(rule):
    from keras_models import assert_equal_histories, assert_same_weights, compiled, digits, fitted, keras

    def optimizer():
        if rule == "adam":
            return keras.optimizers.Adam(0.05, amsgrad=True, decay=0.01)
        return keras.optimizers.SGD(0.3, momentum=0.5, nesterov=True, decay=0.1, clipnorm=0.5)

    def network():
        regularizer = keras.regularizers.l2(0.01)
        return keras.models.Sequential([
            keras.layers.Dense(4, activation="tanh", input_shape=(5,), kernel_regularizer=regularizer),
            keras.layers.Dense(3, activation="softmax", kernel_constraint=keras.constraints.max_norm(1)),
        ])  # fmt: skip

    synk.fork(2, use_gpu=False)
    models = compiled(network, optimizer, metrics=["accuracy", "mae"])
    x, y = digits()
    serial, parallel = (
        fitted(model, x, y, epochs=2, batch_size=6, validation_data=digits(4, 9)) for model in models
    )
    assert_equal_histories(parallel, serial)
    assert serial.history["loss"][1] < serial.history["loss"][0]
    assert_same_weights(*models)
    x, y = digits(5, 13)
    expected, got = (model.evaluate(x, y, batch_size=4, verbose=0) for model in models)
    np.testing.assert_allclose(got, expected)
    expected, got = (model.predict(x, batch_size=4) for model in models)
    assert got.shape == (13, 3)
    np.testing.assert_allclose(got, expected)


@own_process
def test_several_inputs_and_outputs():
    from keras_models import assert_equal_histories, assert_same_weights, compiled, fitted, keras

    def network():
        first, second = keras.layers.Input((4,), name="first"), keras.layers.Input((2,), name="second")
        hidden = keras.layers.Dense(3, activation="tanh")(keras.layers.concatenate([first, second]))
        label = keras.layers.Dense(1, activation="sigmoid", name="label")(hidden)
        value = keras.layers.Dense(2, name="value")(hidden)
        return keras.models.Model([first, second], [label, value])

    synk.fork(2, use_gpu=False)
    models = compiled(
        network,
        loss={"label": "binary_crossentropy", "value": "mse"},
        loss_weights={"label": 1.0, "value": 0.2},
        metrics={"label": "accuracy"},
    )
    rng = np.random.RandomState(0)
    x = {"first": rng.rand(11, 4), "second": rng.rand(11, 2)}
    y = {"label": rng.randint(0, 2, 11), "value": rng.rand(11, 2)}
    weights = {"value": rng.rand(11)}
    serial, parallel = (
        fitted(model, x, y, epochs=2, batch_size=4, sample_weight=weights) for model in models
    )
    assert "value_loss" in serial.history
    assert_equal_histories(parallel, serial)
    assert_same_weights(*models)
    expected, got = (model.predict(x, batch_size=4) for model in models)
    for one, other in zip(got, expected):
        np.testing.assert_allclose(one, other)


@pytest.mark.slow
@own_process
def test_sequences_with_masks_and_weights_by_time():
    from keras_models import assert_equal_steps, compiled, keras

    def network():
        return keras.models.Sequential([
            keras.layers.Masking(input_shape=(3, 2)),
            keras.layers.SimpleRNN(2, return_sequences=True, unroll=True),
            keras.layers.TimeDistributed(keras.layers.Dense(1)),
        ])  # fmt: skip

    synk.fork(2, use_gpu=False)
    models = compiled(network, loss="mse", sample_weight_mode="temporal", weighted_metrics=["mae"])
    rng = np.random.RandomState(0)
    calls = []
    for rows in (5, 4):
        x = rng.rand(rows, 3, 2)
        x[::2, 2:] = 0
        calls.append(((x, rng.rand(rows, 3, 1)), {"sample_weight": rng.rand(rows, 3)}))
    assert_equal_steps(models, calls)


@own_process
def test_generators_and_models_that_are_compiled_again():
    from keras_models import assert_equal_histories, assert_same_weights, compiled, digits

    def batches():
        while True:
            yield from (digits(0, 5), digits(1, 4))

    synk.fork(2, use_gpu=False)
    models = compiled()
    for model in models:
        model.train_on_batch(*digits())
        model.compile("adam", "mse")
    serial, parallel = (
        model.fit_generator(batches(), steps_per_epoch=2, epochs=2, verbose=0) for model in models
    )
    assert_equal_histories(parallel, serial)
    assert_same_weights(*models)
    assert type(models[1].train_function).__module__.startswith("synkhronos")


@own_process
def test_losses_that_are_sums_over_the_rows():
    from keras_models import assert_equal_steps, compiled, keras, network

    synk.fork(2, use_gpu=False)
    models = compiled(
        lambda: network(activity_regularizer=keras.regularizers.l1_l2(0.02, 0.01)), metrics=["mse"]
    )
    assert_equal_steps(models, lengths(7, 1, 4))
    models = compiled(loss=keras.losses.CategoricalCrossentropy(reduction="sum"))
    assert_equal_steps(models, lengths(7, 1, 4))


@own_process
def test_losses_and_metrics_of_the_users():
    from keras import backend as K
    from keras_models import assert_equal_steps, compiled

    def by_row(y_true, y_pred):
        return K.max(K.abs(y_true - y_pred), axis=-1)

    def whole(y_true, y_pred):
        return K.mean(K.square(y_true - y_pred))

    def total(y_true, y_pred):
        return K.sum(y_pred * y_true)

    synk.fork(2, use_gpu=False)
    models = compiled(loss=by_row, metrics=[whole, total, by_row])
    assert_equal_steps(models, lengths(7, 4, 1))
    models = compiled(loss=whole)
    assert_equal_steps(models, lengths(7, 4, sample_weight=None))
    with pytest.raises(ValueError, match="loss of the output 'dense_.*' returns one number"):
        assert_equal_steps(models, lengths(5))


@own_process
def test_what_cannot_be_divided_is_refused():
    from keras import backend as K
    from keras_models import compiled, digits

    warnings.simplefilter("ignore", synk.SynkhronosWarning)  # of the sums, before they are refused

    def overlap(y_true, y_pred):
        return K.sum(y_true * y_pred) / K.sum(y_pred * y_pred)

    def total(y_true, y_pred):
        return K.sum(y_true * y_pred)

    def contrast(y_true, y_pred):
        return K.sum(K.square(y_pred - K.mean(y_pred, axis=0)), axis=-1)

    def masked(y_true, y_pred):  # no row of the batch is masked
        mask = K.cast(K.greater(K.sum(y_true, axis=-1), 0), "float32")
        return K.sum(K.sum(K.square(y_true - y_pred), axis=-1) * mask) / K.sum(mask)

    synk.fork(2, use_gpu=False)
    wrong = [{"loss": one} for one in (overlap, contrast, total, masked)]
    for options in [*wrong, {"metrics": [overlap]}, {"metrics": [masked]}]:
        _, parallel = compiled(**options)
        before = parallel.get_weights()
        with pytest.raises(ValueError, match="^(loss|metric .*total): it is no mean of"):
            parallel.train_on_batch(*digits())
        for one, other in zip(parallel.get_weights(), before):
            np.testing.assert_array_equal(one, other)


@own_process
def test_none_is_not_taken_for_a_number():
    from keras_models import compiled, digits

    synk.fork(2, use_gpu=False)
    x, y = digits()
    _, model = compiled()
    model.train_on_batch(x, y)
    for inputs in ([x, y, None], [x, None, np.ones(len(y))]):
        with pytest.raises(TypeError, match="expected an array or a number, got None"):
            model.train_function(inputs)


@own_process
def test_a_metric_that_does_not_add_is_refused():
    from keras import backend as K
    from keras_models import compiled, digits, keras

    class Largest(keras.metrics.Metric):
        def __init__(self, name="largest"):
            super().__init__(name=name)
            self.value = self.add_weight("value", initializer="zeros")

        def update_state(self, y_true, y_pred, sample_weight=None):
            return [K.update(self.value, K.maximum(self.value, K.max(y_pred)))]

        def result(self):
            return self.value

    synk.fork(2, use_gpu=False)
    _, parallel = compiled(metrics=[Largest()])
    with pytest.raises(ValueError, match="metric .*value: its update does not add"):
        parallel.train_on_batch(*digits())


@own_process
def test_an_added_loss_of_random_numbers_is_accepted():
    from keras import backend as K
    from keras_models import digits, keras, parallelize

    synk.fork(2, use_gpu=False)
    model = keras.models.Sequential([keras.layers.Dense(3, input_shape=(5,))])
    noise = K.random_normal(K.shape(model.output), seed=1)
    model.add_loss(K.mean(K.square(model.output + 0.1 * noise)))
    model.compile(keras.optimizers.SGD(0.5))
    parallelize(model)
    losses = [model.train_on_batch(digits()[0], None) for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0]
    for weights in model.weights:
        assert np.ptp(synk.gather(weights), axis=0).max() == 0


@own_process
def test_ranks_drop_different_units_and_keep_the_same_weights():
    from keras_models import compiled, keras

    def network():
        return keras.models.Sequential([
            keras.layers.Dropout(0.5, input_shape=(40,), seed=1),
            keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros"),
        ])  # fmt: skip

    synk.fork(2, use_gpu=False)
    serial, parallel = compiled(network, loss="mse")
    x, y = np.ones((2, 40)), np.array([[1.0], [-1.0]])
    parallel.train_on_batch(x, y)
    kernel = parallel.weights[0]
    assert np.ptp(synk.gather(kernel), axis=0).max() == 0
    # With equal masks, the gradients of the two rows would cancel.
    assert np.abs(parallel.get_weights()[0]).max() > 0
    serial.set_weights(parallel.get_weights())
    np.testing.assert_allclose(parallel.predict(x), serial.predict(x))
    np.testing.assert_allclose(parallel.evaluate(x, y, verbose=0), serial.evaluate(x, y, verbose=0))


@own_process
def test_batch_normalization_uses_the_rows_of_each_rank_and_a_warning_says_so():
    from keras_models import compiled, keras

    def network():
        return keras.models.Sequential([
            keras.layers.BatchNormalization(momentum=0.75, input_shape=(1,)), keras.layers.Dense(1)
        ])  # fmt: skip

    synk.fork(2, use_gpu=False)
    serial, parallel = compiled(network, loss="mse")
    x = np.array([[1.0], [2.0], [6.0], [5.0], [3.0]])  # three rows on this process, two on the worker
    before = serial.get_weights()
    with pytest.warns(synk.SynkhronosWarning, match="statistics over the batch"):
        parallel.train_on_batch(x, x)
    layer = parallel.layers[0]
    for mean in synk.gather(layer.moving_mean):
        np.testing.assert_allclose(mean, [0.25 * x.mean()])
    for variance in synk.gather(layer.moving_variance):
        unbiased = (3 * x[:3].var(ddof=1) + 2 * x[3:].var(ddof=1)) / 5
        np.testing.assert_allclose(variance, [0.75 + 0.25 * unbiased], rtol=0.01)

    # The gradient is Keras's gradient on the rows of each rank.
    gradients = []
    for rows in (x[:3], x[3:]):
        serial.set_weights(before)
        serial.train_on_batch(rows, rows)
        gradients.append([old - new for old, new in zip(before, serial.get_weights())])
    for number, weights in enumerate(parallel.weights):
        if weights in parallel.trainable_weights:
            step = (3 * gradients[0][number] + 2 * gradients[1][number]) / 5
            np.testing.assert_allclose(parallel.get_weights()[number], before[number] - step)
    serial.set_weights(parallel.get_weights())
    np.testing.assert_allclose(parallel.predict(x), serial.predict(x))


@own_process
def test_callbacks_reach_every_rank(tmp_path):
    from keras_models import assert_equal_histories, assert_same_weights, compiled, digits, fitted, keras

    def callbacks(name):
        return [
            keras.callbacks.LearningRateScheduler(lambda epoch: 0.5 ** epoch),
            keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=10, factor=0.5),
            keras.callbacks.EarlyStopping("loss", patience=2, min_delta=10, restore_best_weights=True),
            keras.callbacks.ModelCheckpoint(str(tmp_path / name), save_weights_only=name == "weights"),
        ]  # fmt: skip

    synk.fork(2, use_gpu=False)
    models = compiled(optimizer="adam")
    for name in ("weights", "model"):
        x, y = digits()
        serial, parallel = (
            fitted(model, x, y, epochs=5, batch_size=6, callbacks=callbacks(name)) for model in models
        )
        assert len(serial.history["lr"]) == 3
        assert_equal_histories(parallel, serial)
        models[1].predict(x)
        models[0].train_on_batch(x, y), models[1].train_on_batch(x, y)
        assert_same_weights(*models)
        for replica in synk.gather(models[1].optimizer.lr):
            assert replica == models[0].optimizer.lr.get_value()
        weights = models[1].get_weights()
        models[1].load_weights(str(tmp_path / name))
        assert any((one != other).any() for one, other in zip(models[1].get_weights(), weights))
        models[0].load_weights(str(tmp_path / name))
        models[0].train_on_batch(x, y), models[1].train_on_batch(x, y)
        assert_same_weights(*models)
    loaded = keras.models.load_model(str(tmp_path / "model"))
    assert len(loaded.optimizer.get_weights()) == len(models[1].optimizer.get_weights())


@own_process
def test_weights_that_are_set_reach_every_rank():
    from keras import backend as K
    from keras_models import assert_same_weights, compiled, digits

    synk.fork(2, use_gpu=False)
    models = compiled(optimizer="adam")
    x, y = digits()
    for model in models:
        model.train_on_batch(x, y)
        model.set_weights([0.5 * one for one in model.get_weights()])
    np.testing.assert_allclose(models[1].predict(x), models[0].predict(x))
    for model in models:
        model.train_on_batch(x, y)
        K.set_value(model.optimizer.iterations, 50)
        model.optimizer.set_weights([2 * one for one in model.optimizer.get_weights()])
        model.train_on_batch(x, y)
    assert_same_weights(*models)


@own_process
def test_a_model_outlives_its_processes():
    from keras_models import assert_same_weights, compiled, digits, parallelize

    models = compiled(optimizer="adam", metrics=["accuracy"])
    for n in (2, 3):
        synk.fork(n, use_gpu=False)
        parallelize(models[1])
        for model in models:
            model.fit(*digits(), epochs=1, batch_size=6, verbose=0, shuffle=False)
        assert_same_weights(*models)
        synk.close()
    with pytest.raises(synk.ClosedError):
        models[1].predict(digits()[0])


@own_process
def test_without_processes_and_with_wrong_models():
    from keras_models import compiled, digits, keras, network, parallelize

    _, parallel = compiled()
    with pytest.raises(synk.NotForkedError):
        parallel.train_on_batch(*digits())
    with pytest.raises(TypeError, match="expected a Keras model, got Dense"):
        parallelize(network().layers[0])
    layer = keras.layers.LSTM(2, stateful=True, batch_input_shape=(4, 3, 2), name="memory")
    with pytest.raises(ValueError, match="layers memory keep states"):
        parallelize(keras.models.Sequential([layer]))


@own_process
def test_a_model_that_predicts_only_needs_no_compilation():
    from keras_models import digits, network, pair

    synk.fork(2, use_gpu=False)
    serial, parallel = pair(network)
    np.testing.assert_allclose(parallel.predict(digits()[0]), serial.predict(digits()[0]))


@own_process
def test_importing_refuses_another_back_end_and_another_keras():
    from unittest import mock

    import keras

    from synkhronos.extensions.keras_backend import import_keras

    assert import_keras() is keras and keras.backend.backend() == "theano"
    with mock.patch.dict(os.environ, KERAS_BACKEND="cntk"):
        with pytest.raises(ImportError, match="KERAS_BACKEND: expected 'theano', got 'cntk'"):
            import_keras()
    with mock.patch.object(keras.backend, "backend", lambda: "cntk"):
        with pytest.raises(ImportError, match="imported with the back end 'cntk'"):
            import_keras()
    with mock.patch.object(keras, "__version__", "2.2.4"):
        with pytest.raises(ImportError, match="expected version 2.3.1, got 2.2.4"):
            import_keras()
    with mock.patch.dict("sys.modules", keras=None):
        with pytest.raises(ImportError, match="python -m synkhronos install keras"):
            import_keras()


@own_process
def test_the_example_of_parallelize_prints_what_it_shows():
    from compilers import run_examples
    from keras_models import parallelize

    assert run_examples(parallelize.__doc__, "parallelize") > 9
