"""Tests of Theano-MPI's names: the config file, and layers, updates and data against NumPy."""

import importlib
import pickle
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import theano
import theano.tensor as tt

from synkhronos.compat import theanompi as ours
from synkhronos.compat.theanompi import launcher
from synkhronos.compat.theanompi.launcher import ConfigurationError, read_arguments
from synkhronos.compat.theanompi.lib import helper_funcs, opt
from synkhronos.compat.theanompi.lib.recorder import Recorder
from synkhronos.compat.theanompi.models import layers2
from synkhronos.compat.theanompi.models.data import utils
from synkhronos.extensions.session import Recorder as SessionRecorder, model as models

SESSION = "RULE=BSP\nMODELFILE=models.modelfile\nMODELCLASS=ModelClass\n"


@pytest.fixture(autouse=True)
def random():
    return np.random.RandomState(0)


#: Theano's grouped convolutions have no code in Python.
WITH_C = theano.compile.Mode("cvm", "fast_compile")


def compute(output, values, mode="FAST_COMPILE"):
    """Return the value of an output for inputs and their values."""
    return theano.function(list(values), output, mode=mode)(*values.values())


@pytest.fixture
def configure(tmp_path):
    def read(text, *options):
        path = tmp_path / "session.cfg"
        path.write_text(text)
        return read_arguments([f"-cfg={path}", *options])

    return read


def test_layers_take_their_shapes_by_position():
    x = tt.matrix("x")
    dropped = layers2.Dropout(x, 6, 0.5, False, (4, 6))
    softmax = layers2.Softmax(x, 10, None, None, False, (4, 6))
    flat = layers2.Flatten(tt.tensor4("images"), 2, False, (4, 1, 8, 8), (4, 64))
    assert dropped.input_shape == (4, 6) and softmax.output_shape == (4, 10)
    assert flat.output_shape == (4, 64)


def test_the_readmes_config_file(configure):
    session = configure(f"# launch_session.cfg\n{SESSION}DEVICES=cuda0,cuda1\n")
    assert session[:3] == ("BSP", "models.modelfile", "ModelClass")
    assert session.devices == [("", ["cuda0", "cuda1"])]
    assert (session.sync_type, session.exch_strategy) == (None, None)


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("DEVICES=cpu", [("", ["cpu"])]),
        ("DEVICES='cuda0,cuda2' # two\nSIZE=2", [("", ["cuda0", "cuda2"])]),
        ("SIZE=3", [("", ["cuda0", "cuda1", "cuda2"])]),
        ("DEVICES=node0:cuda0,cuda1", [("node0", ["cuda0", "cuda1"])]),
        (
            'DEVICES=("node0:cuda0"\n\t\t "node1:cuda0,cuda1")\nBIND=True',
            [("node0", ["cuda0"]), ("node1", ["cuda0", "cuda1"])],
        ),
        ("DEVICES=opencl0:0", [("", ["opencl0:0"])]),
        ("NOTE='run (2)'\nDEVICES=cpu", [("", ["cpu"])]),
        ("DEVICES=('a:cpu' # a core\n'b:cpu')", [("a", ["cpu"]), ("b", ["cpu"])]),
    ],
)
def test_devices_of_a_config_file(configure, text, devices):
    assert configure(SESSION + text).devices == devices


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rm -rf folder", "line 4: expected KEY=VALUE"),
        ("DEVICES=$(touch run)", "line 4: expected a plain value"),
        ("DEVICES=`touch run`", "expected a plain value"),
        ("SIZE=2; touch run", "expected a plain value"),
        ('DEVICES="$HOME"', "expected a plain value"),
        ("DEVICES=cuda0 touch", "expected one value, in quotes"),
        ("DEVICES=(cpu", "expected a list"),
        ("DEVICES=(cpu # :)", "expected a list"),
        ("DEVICES=(\n" + "'cuda0' # a GPU of this machine\n" * 40, "expected a list"),
        ("DEVICES=cpu(0)", "expected a plain value"),
        ("DEVICES='cpu", "line 4: expected a closing quotation mark"),
        ("DEVICES=gpu0", "expected names such as cuda0 or cpu, got 'gpu0'"),
        ("DEVICES=cpu,cpu\nSIZE=3", "expected as many DEVICES as SIZE, 3, got 2"),
        ("DEVICES='a:cpu a:cpu'", "or one for each host"),
        ("SIZE=0", "SIZE: expected a number from 1 on"),
        ("", "expected DEVICES or SIZE"),
        ("SIZE=2\nRULE=ASGD", "RULE: expected BSP, EASGD, GOSGD, got 'ASGD'"),
        ("SIZE=2\nMODELFILE=models/modelfile.py", "MODELFILE: expected a module"),
        ("SIZE=2\nMODELCLASS=", "expected a value for MODELCLASS"),
        ("SIZE=2\nBSP_SYNC_TYPE=sum", "BSP_SYNC_TYPE: expected avg or cdd"),
    ],
)
def test_a_wrong_config_file_is_an_error_and_never_run(configure, text, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match="(?s).*") as caught:
        configure(SESSION + text)
    assert message in str(caught.value)
    assert [one.name for one in tmp_path.iterdir()] == ["session.cfg"]


def test_options_in_place_of_a_config_file_which_has_priority(configure):
    options = ["-r=EASGD", "--modelfile=m", "-class=C", "-d=cpu,cpu", "-bsp_sync_type=cdd", "-bind"]
    session = read_arguments(options)
    assert session == ("EASGD", "m", "C", [("", ["cpu", "cpu"])], "cdd", None)
    assert configure(f"{SESSION}SIZE=2", *options).rule == "BSP"


@pytest.mark.parametrize("options", [[], ["-x=1"], ["-r", "BSP"], ["-cfg=/nowhere"]])
def test_wrong_options_end_with_1_and_say_why(options, capsys):
    with pytest.raises(SystemExit) as caught:
        launcher.main(options)
    assert str(caught.value).startswith("tmlauncher: ") and caught.value.code not in (0, None)


def test_hosts_are_given_to_launch_by_a_file_in_memory():
    options = ["-r=BSP", "-file=m", "-class=C", "-d=node0:cuda0 node1:cuda0,cuda1", "-bsp_sync_type=avg"]
    line = launcher.command(read_arguments(options))
    assert line[7:] == ["-m", "synkhronos.compat.theanompi", *options]
    assert line[4:6] == ["launch", "--config"]
    expected = 'hosts = ["node0", "node1"]\n[devices]\n"node0" = ["cuda0"]\n'
    expected += '"node1" = ["cuda0", "cuda1"]\n'
    with open(line[6]) as file:
        assert file.read() == expected


@pytest.fixture
def found(monkeypatch):
    """Let Python find the names, and forget them after the test."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    ours.install()
    yield
    for name in list(sys.modules):
        if name.partition(".")[0] in ("theanompi", "models"):
            del sys.modules[name]


def test_a_module_is_the_same_under_both_names(found):
    import theanompi
    from theanompi import BSP, EASGD, GOSGD
    import theanompi.models.layers2
    import theanompi.models.data.utils
    import models.layers2

    assert theanompi.models.layers2 is layers2 is models.layers2
    assert theanompi.models.data.utils is utils
    assert [one.__module__ for one in (BSP, EASGD, GOSGD)] == ["synkhronos.compat.theanompi.rules"] * 3
    assert layers2.__spec__.name == "synkhronos.compat.theanompi.models.layers2"


MODELS = {
    "alex_net": ("AlexNet", "AlexNet"),
    "cifar10": ("Cifar10_model", "Cifar10CNN"),
    "googlenet": ("GoogLeNet", "GoogLeNet"),
    "keras_model_zoo.wresnet": ("Wide_ResNet", "WideResNet"),
    "lasagne_model_zoo.lsgan": ("LSGAN", "LSGAN"),
    "lasagne_model_zoo.resnet152": ("ResNet152", "ResNet152"),
    "lasagne_model_zoo.resnet50": ("ResNet50", "ResNet50"),
    "lasagne_model_zoo.vgg16": ("VGG16", "VGG16"),
    "lasagne_model_zoo.wgan": ("WGAN", "WGAN"),
}


@pytest.mark.parametrize("module", MODELS)
def test_the_models_are_those_of_the_zoo(found, module):
    pytest.importorskip("keras" if "keras" in module else "lasagne")
    from synkhronos.extensions import zoo

    there, state = MODELS[module]
    model = getattr(importlib.import_module(f"theanompi.models.{module}"), there)
    assert model is getattr(zoo, state)
    assert not models.accepts(model.compile_iter_fns, None, sync_type="cdd"), "BSP averages it"


def test_an_installed_library_and_a_scripts_modules_come_first(found, tmp_path, monkeypatch):
    for name in ("theanompi", "models"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    import models
    import theanompi

    assert {one.__path__[0] for one in (models, theanompi)} == {
        str(tmp_path / "models"), str(tmp_path / "theanompi"),
    }  # fmt: skip
    with pytest.raises(ModuleNotFoundError):
        import models.layers2  # noqa: F401


def images(random, *shape):
    return random.normal(size=shape)


def test_a_convolution_and_a_pooling_against_numpy(random):
    x, value = tt.dtensor4("x"), images(random, 2, 3, 7, 7)
    W, b = layers2.Normal((4, 3, 3, 3), std=0.5), layers2.Uniform((4,), -1, 1)
    conv = layers2.Conv(x, 2, 1, b, W, printinfo=False, input_shape=value.shape)
    pool = layers2.Pool(conv, 2, 2, 0, "max", printinfo=False)
    padded = np.pad(value, [(0, 0), (0, 0), (1, 1), (1, 1)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))[:, :, ::2, ::2]
    linear = np.einsum("bchwij,fcij->bfhw", windows, W.np_values[:, :, ::-1, ::-1])
    expected = np.maximum(linear + b.np_values[:, None, None], 0)
    assert np.allclose(compute(conv.output, {x: value}, WITH_C), expected)
    assert conv.output_shape == expected.shape == (2, 4, 4, 4)
    largest = expected.reshape(2, 4, 2, 2, 2, 2).max(axis=(3, 5))
    assert np.allclose(compute(pool.output, {x: value}, WITH_C), largest)
    assert pool.output_shape == largest.shape
    assert layers2.get_params(layers2.get_layers(pool)) == ([W.val, b.val], ["W", "b"])


def test_groups_see_their_own_channels_and_the_normalization_is_the_papers(random):
    x, value = tt.dtensor4("x"), images(random, 4, 5, 5, 2)
    layer = layers2.ConvPoolLRN(
        x, 1, 0, 1, 1, 2, 0.1, filter_shape=(4, 3, 3, 6), lrn=True, printinfo=False,
        input_shape=value.shape,
    )  # fmt: skip
    parts = []
    for half, weight in enumerate((layer.W0, layer.W1)):
        windows = np.lib.stride_tricks.sliding_window_view(value, (3, 3), axis=(1, 2))
        filters = weight.np_values[:, ::-1, ::-1]
        part = np.einsum("chwbij,cijf->fhwb", windows[2 * half : 2 * half + 2], filters)
        parts.append(np.maximum(part + 0.1, 0))
    y = np.concatenate(parts)
    scale = [sum(y[j] ** 2 for j in range(max(0, i - 2), min(6, i + 3))) for i in range(6)]
    expected = y / (2 + 1e-4 * np.stack(scale)) ** 0.75
    assert np.allclose(compute(layer.output, {x: value}, WITH_C), expected)
    assert layer.output_shape == expected.shape
    assert layer.weight_type == ["W", "b"] * 2
    with pytest.raises(AttributeError, match="group 1 or 2"):
        layers2.ConvPoolLRN(x, 1, 0, 1, 1, 3, 0, filter_shape=(4, 3, 3, 6), input_shape=value.shape)


@pytest.mark.parametrize("flag_batch", [True, False])
def test_crops_are_parts_of_the_images_or_the_middle(random, flag_batch):
    x, value = tt.dtensor4("x"), np.arange(2 * 6 * 6 * 3.0).reshape(2, 6, 6, 3)
    crop = layers2.Crop(x, (2, 4, 4, 3), value.shape, flag_batch, printinfo=False)
    f = theano.function([x], crop.output, mode="FAST_COMPILE")
    parts = {
        tuple(part.ravel()): (row, column, mirrored)
        for row in range(3)
        for column in range(3)
        for mirrored in (False, True)
        for image in range(3)
        for part in [value[:, row : row + 4, column : column + 4, image][:, :, :: 1 - 2 * mirrored]]
    }
    cuts = [f(value) for _ in range(30)]
    seen = [[parts[tuple(cut[..., image].ravel())] for image in range(3)] for cut in cuts]
    assert len({one for row in seen for one in row}) > 9  # of 18
    assert any(len(set(row)) > 1 for row in seen) != flag_batch
    layers2.Crop.SetRandCropOff()
    assert np.array_equal(f(value), value[:, 1:5, 1:5])
    layers2.Crop.SetRandCropOn()
    assert any(not np.array_equal(f(value), value[:, 1:5, 1:5]) for _ in range(20))


def test_dropout_and_a_network_of_fully_connected_layers(random):
    x, y, value = tt.dmatrix("x"), tt.lvector("y"), random.normal(size=(50, 8))
    dropped = layers2.Dropout(layers2.FC(x, 20, printinfo=False, input_shape=(50, 8)), 20, 0.25, False)
    softmax = layers2.Softmax(dropped, 6, printinfo=False)
    softmax.W.val.set_value(random.normal(size=(20, 6)))
    labels = random.randint(6, size=50)
    kept = compute([dropped.output, dropped.input], {x: value + 5})
    zeros = np.mean(kept[0][kept[1] > 0] == 0)
    assert 0.1 < zeros < 0.4
    layers2.Dropout.SetDropoutOff()
    W, b = (one.get_value() for one in softmax.input_layer.input_layer.params)
    hidden = 0.75 * np.maximum(value @ W + b, 0)
    logits = hidden @ softmax.W.val.get_value()
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    outputs = [softmax.negative_log_likelihood(y), softmax.errors(y), softmax.errors_top_x(y, 2)]
    cost, error, error_top_2 = compute(outputs, {x: value, y: labels})
    layers2.Dropout.SetDropoutOn()
    assert np.isclose(cost, -np.log(p[np.arange(50), labels]).mean())
    assert np.isclose(error, (p.argmax(axis=1) != labels).mean())
    best = p.argsort(axis=1)[:, -2:]
    assert np.isclose(error_top_2, 1 - (best == labels[:, None]).any(axis=1).mean())
    assert 0 < error_top_2 < error
    with pytest.raises(NotImplementedError, match="expected integers"):
        softmax.errors(tt.dvector())
    with pytest.raises(TypeError, match="expected a vector"):
        softmax.errors_top_x(tt.lmatrix())


def test_shapes_are_those_of_the_values_and_are_written(random, capsys):
    x, value = tt.dtensor4("x"), images(random, 3, 4, 5, 2)
    mean = value.mean(axis=3, keepdims=True)
    subtract = layers2.Subtract(x, mean, input_shape=value.shape)
    shuffled = layers2.Dimshuffle(layers2.LRN(subtract, printinfo=False), (3, 0, 1, 2), printinfo=False)
    flat = layers2.Flatten(shuffled, 2, printinfo=False)
    assert flat.output_shape == compute(flat.output, {x: value}).shape == (2, 60)
    assert np.allclose(compute(subtract.output, {x: value}), value - mean)
    assert "Layer Subtract\t in (3, 4, 5, 2) --> out (3, 4, 5, 2)\n" == capsys.readouterr().out
    assert layers2.count_params([layers2.Constant((3, 4)).val, layers2.Constant((5,)).val], True) == 17
    assert capsys.readouterr().out == "(3, 4)\n(5,)\nmodel size 0.000 M floats\n"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda x: layers2.LRN(x), "expected a layer, or a variable and its input_shape"),
        (lambda x: layers2.Conv(x, 1, 0, None, input_shape=(1, 1, 5, 5)), "expected W or filter_shape"),
        (
            lambda x: layers2.Conv(
                x, 1, 0, None, layers2.Constant((2, 1, 3, 3)), (2, 2, 3, 3), input_shape=(1, 1, 5, 5)
            ),
            "W: expected the shape",
        ),
        (lambda x: layers2.Subtract(x, np.zeros((3, 4, 4)), input_shape=(3, 4, 4, 1)), "subtract_arr"),
        (lambda x: layers2.Crop(x, (3, 5, 5, 1), (3, 4, 4, 1)), "output_shape: expected at most"),
        (lambda x: layers2.CrossChannelNormalization(n=4), "expected an odd number"),
        (lambda x: layers2.HeNormal((1, 2, 3)), "2 or 4 axes"),
    ],
)
def test_wrong_layers(wrong, message):
    with pytest.raises((AttributeError, ValueError, NotImplementedError), match=message):
        wrong(tt.dtensor4("x"))


def test_initial_weights_have_the_documented_spread_and_are_equal_on_all_ranks(monkeypatch):
    monkeypatch.setattr(layers2, "rng", np.random.RandomState(5))
    first = layers2.Normal((200, 300), mean=1, std=0.1).np_values
    assert abs(first.mean() - 1) < 0.01 and abs(first.std() - 0.1) < 0.01
    for kind, limit in ((layers2.GlorotUniform, (2 * 6 / 500) ** 0.5), (layers2.HeUniform, 0.02**0.5)):
        value = kind((200, 300)).np_values
        assert 0.99 * limit < abs(value).max() < limit
    assert abs(layers2.GlorotNormal((200, 300)).np_values.std() / (12 / 500) ** 0.5 - 1) < 0.01
    assert abs(layers2.HeNormal((20, 30, 3, 3)).np_values.std() / (6 / 270) ** 0.5 - 1) < 0.03
    monkeypatch.setattr(layers2, "rng", np.random.RandomState(5))
    assert np.array_equal(layers2.Normal((200, 300), mean=1, std=0.1).np_values, first)


def a_model(random, momentum=True, nesterov=False):
    """Return a model with a weight and a bias, whose cost is quadratic."""
    W, b = theano.shared(random.normal(size=(3, 2)), "W"), theano.shared(random.normal(size=2), "b")
    x, y, lr = tt.dmatrix("x"), tt.dmatrix("y"), tt.dscalar("lr")
    model = SimpleNamespace(
        params=[W, b], weight_types=["W", "b"], x=x, y=y, lr=lr, mu=0.9, eta=0.01,
        use_momentum=momentum, use_nesterov_momentum=nesterov, subb_ind=tt.iscalar("subb"),
        shared_x=theano.shared(random.normal(size=(4, 3))), shared_lr=theano.shared(np.float32(0.125)),
        shared_y=theano.shared(random.normal(size=(4, 2))), compiled_train_fn_list=[],
    )  # fmt: skip
    rows = slice(2 * model.subb_ind, 2 * model.subb_ind + 2)
    model.shared_x_slice, model.shared_y_slice = model.shared_x[rows], model.shared_y[rows]
    difference = x.dot(W) + b - y
    model.cost, model.error = tt.sqr(difference).sum(), abs(difference).max()
    model.grads = tt.grad(model.cost, model.params)

    def compile_train(*functions):
        for arguments in functions:
            compiled = theano.function(**arguments, mode="FAST_COMPILE")
            model.compiled_train_fn_list.append(compiled)

    def compile_val():
        model.val_fn = theano.function([model.x, model.y], model.cost, mode="FAST_COMPILE")

    model.compile_train, model.compile_val = compile_train, compile_val
    return model


def by_hand(model, momentum, nesterov, batches):
    """Return the values after steps, computed with NumPy."""
    W, b = (one.get_value() for one in model.params)
    x, y = model.shared_x.get_value(), model.shared_y.get_value()
    velocities = [np.zeros_like(W), np.zeros_like(b)]
    for number in batches:
        rows = slice(2 * number, 2 * number + 2)
        d = 2 * (x[rows] @ W + b - y[rows])
        gradients = [x[rows].T @ d + 0.01 * W, d.sum(axis=0)]
        for k, rate in enumerate((0.125, 0.25)):
            if not momentum:
                velocities[k] = -rate * gradients[k]
            elif nesterov:
                velocities[k] = 0.81 * velocities[k] - 1.9 * rate * gradients[k]
            else:
                velocities[k] = 0.9 * velocities[k] - rate * gradients[k]
        W, b = W + velocities[0], b + velocities[1]
    return [W, b], velocities


@pytest.mark.parametrize("rule", [(True, False), (True, True), (False, False)], ids=str)
@pytest.mark.parametrize("sync_type", ["avg", "cdd"])
def test_steps_are_those_by_hand(random, rule, sync_type):
    model = a_model(random, *rule)
    opt.pre_model_iter_fn(model, sync_type=sync_type)
    expected, velocities = by_hand(model, *rule, [0, 1])
    for number in (0, 1):
        cost, _ = model.train_iter_fn(number)
        if sync_type == "cdd":  # what the exchange of one rank does
            for own, total in zip(model.vels, model.vels2):
                total.set_value(own.get_value())
    if sync_type == "cdd":
        model.descent_vel()
        assert all(np.allclose(a.get_value(), b) for a, b in zip(model.vels, velocities))
    assert all(np.allclose(a.get_value(), b) for a, b in zip(model.params, expected))
    assert np.isfinite(cost) and model.val_iter_fn is model.val_fn


def test_clipping_and_wrong_models(random):
    model = a_model(random, False)
    model.vels, model.vels2 = opt._zeros(model.params), opt._zeros(model.params)
    model.grads = [100 * one for one in model.grads]
    (updates,) = opt.prepare_update_dict(model, "avg", clip=True)
    values = {model.x: np.ones((2, 3)), model.y: np.zeros((2, 2)), model.lr: 1.0}
    change = compute(updates[1][1], values) - model.params[1].get_value()
    assert np.allclose(abs(change), 20)
    with pytest.raises(ValueError, match="expected one of .'avg', 'cdd'"):
        opt.prepare_update_dict(model, "sum")
    model.weight_types = ["W", "c"]
    with pytest.raises(TypeError, match="expected 'W' or 'b'"):
        opt.prepare_update_dict(model, "avg")
    model.weight_types = ["W"]
    with pytest.raises(ValueError, match="a weight type for each of 2"):
        opt.prepare_update_dict(model, "avg")


def test_new_values_are_broadcast_as_the_variables():
    column = theano.shared(np.zeros((3, 1)), broadcastable=(False, True))
    fixed = opt.fix_update_bcasts({column: tt.dmatrix()})
    assert fixed[column].broadcastable == (False, True)


def record(recorder):
    for count in range(1, 5):
        recorder.start()
        recorder.end("calc")
        recorder.train_error(count, np.float32(count), 0.5)
        assert recorder.train_info["cost"][-1] == count and recorder.all_time["calc"][0] > 0
        recorder.print_train_info(count)
    recorder.val_error(4, 1.0, 0.25, 0.125)
    recorder.val_error(4, 3.0, 0.75, 0.375)


def test_the_recorder_writes_and_keeps_means(tmp_path, capsys):
    recorder = Recorder(None, 2, "model", True)
    assert recorder.get_latest_val_info() is None
    record(recorder)
    recorder.print_val_info(4, "after training")
    out = capsys.readouterr().out
    assert "\n2 1.500000 0.500000\ntime per 2 batches: 0.00" in out
    assert "after training\n" in out and "validation cost:2.0000\n" in out
    assert recorder.info_dict["train_info"] == [[2, 1.5, 0.5], [4, 3.5, 0.5]]
    assert recorder.get_latest_val_info() == [4, 2.0, 0.5, 0.25]
    recorder.start_epoch()
    recorder.end_epoch(4, 0)
    recorder.save(4, np.float32(0.5), f"{tmp_path}/made/")
    path = f"{tmp_path}/made/inforec.pkl"
    again = Recorder(None, 2, "model", False)
    again.load(path)
    assert again.info_dict == recorder.info_dict
    assert SessionRecorder.from_inforec(path).losses == [[1.5, 3.5]]
    again.cut(1)
    assert again.info_dict["train_info"] == [[2, 1.5, 0.5]]


def test_the_recorder_draws_what_it_has(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    recorder = Recorder(None, 2, "model", False)
    record(recorder)
    recorder.print_val_info(4)
    recorder.show(label=", a run", color_id=1, show=False)
    assert (tmp_path / "train.png").read_bytes()[:4] == b"\x89PNG"
    assert SessionRecorder.from_inforec(recorder.info_dict).validations[0]["error_top5"] == 0.25


def test_validations_of_all_processes_are_collected():
    recorder = Recorder(SimpleNamespace(allgather=lambda one: [one, one]), 2, "model", False)
    record(recorder)
    recorder.gather_val_info()
    assert recorder.val_info["error"] == [0.25, 0.75, 0.25, 0.75]
    recorder.comm = None
    with pytest.raises(RuntimeError, match="expected a communicator"):
        recorder.gather_val_info()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda one: one.end("calc"), "expected a call of start()"),
        (lambda one: (one.start(), one.end("sleep")), "Recorder.end: expected 'load', 'calc'"),
        (lambda one: one.end_epoch(1, 1), "expected a call of start_epoch()"),
        (lambda one: one.print_val_info(1), "expected calls of val_error()"),
        (lambda one: one.train_error(1, None, 0.5), "float"),
    ],
)
def test_wrong_calls_of_the_recorder(call, message):
    with pytest.raises((RuntimeError, TypeError, ValueError)) as caught:
        call(Recorder(None, 2, "model", False))
    assert message in str(caught.value)


def test_weights_and_momentums_are_saved_and_loaded(tmp_path, random):
    x = tt.dmatrix()
    first = layers2.FC(x, 3, printinfo=False, input_shape=(2, 4))
    layers = [first, layers2.Softmax(first, 2, printinfo=False)]
    folder = f"{tmp_path}/snapshots/"
    values = [param.get_value() for param in layers2.get_params(layers)[0]]
    model = SimpleNamespace(
        layers=layers, epoch=3, shared_lr=theano.shared(0.5), current_info=[1, 2.0, 0.5, 0.25]
    )
    helper_funcs.save_model(model, folder, verbose=False)
    assert np.load(f"{folder}lr_3.npy") == 0.5
    for layer in layers:
        layer.W.val.set_value(0 * layer.W.val.get_value())
    helper_funcs.load_weights(layers, folder, 3)
    assert all(map(np.array_equal, (p.get_value() for p in layers2.get_params(layers)[0]), values))
    helper_funcs.load_weights_from_memory(layers, [one + 1 for one in values])
    assert np.array_equal(layers[1].b.val.get_value(), values[3] + 1)
    assert helper_funcs.collect_weight_path(layers, folder, 3, [1]) == [
        f"{folder}W_1_3.npy", f"{folder}b_1_3.npy",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="expected the shape"):
        layers[0].W.load_weight(folder, "W_1_3")
    velocities = [theano.shared(random.normal(size=2))]
    before = velocities[0].get_value()
    helper_funcs.save_momentums(velocities, folder, 1)
    velocities[0].set_value(0 * before)
    helper_funcs.load_momentums(velocities, folder, 1)
    assert np.array_equal(velocities[0].get_value(), before)
    with pytest.raises(TypeError, match="train_iter"):
        helper_funcs.check_model(model)


def test_batches_are_repeated_until_all_ranks_have_as_many():
    batches = list("abcde")
    images, labels = utils.extend_data(1, 3, batches, [*range(7)])
    assert (images, labels) == (list("abcdee"), [0, 1, 2, 3, 4, 4])
    assert batches == list("abcde")
    assert utils.get_bad_list(8, 3) == [7, 6]
    assert utils.extend_data(0, 5, batches, batches) == (batches, batches)
    with pytest.raises(ValueError, match="expected at least 3 batches"):
        utils.extend_data(0, 4, ["a"], [0])


def test_a_part_of_each_image():
    data = np.arange(2 * 8 * 8 * 3.0).reshape(2, 8, 8, 3)
    middle = data[:, 2:6, 2:6].astype("float32")
    assert np.array_equal(utils.crop_and_mirror(data, "val", True, cropsize=4), middle)
    assert np.array_equal(utils.crop_and_mirror(data, "train", False, False, 4), middle)
    np.random.seed(0)
    for flag_batch in (True, False):
        cut = utils.crop_and_mirror(data, "train", True, flag_batch, 4)
        assert cut.shape == (2, 4, 4, 3) and cut.dtype == "float32" and cut.flags["C_CONTIGUOUS"]
        starts = cut[0, 0, :, :].min(axis=0)  # the first column of each image, mirrored or not
        assert (np.ptp((starts - np.arange(3)) // 3) == 0) == flag_batch
    assert utils.get_params_crop_and_mirror((1, 0, 1), data.shape, 4) == (4, 0, True)


def test_pickles_of_data_are_read_and_no_code_is_run(tmp_path):
    path = tmp_path / "data_batch_1"
    content = {b"data": np.arange(6, dtype="uint8").reshape(2, 3), b"labels": [3, 1], b"n": np.int64(2)}
    path.write_bytes(pickle.dumps(content, 2))
    loaded = utils.unpickle(path)
    assert np.array_equal(loaded.pop("data"), content[b"data"])
    assert loaded == {"labels": [3, 1], "n": 2}
    for wrong in (SimpleNamespace, {"a": SimpleNamespace()}, {"a": np.array(["text"])}):
        path.write_bytes(pickle.dumps(wrong))
        with pytest.raises(ValueError, match="expected a pickle of arrays, numbers and strings"):
            utils.unpickle(path)
