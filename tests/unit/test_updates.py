"""Tests of the update rules against NumPy code for the papers' formulas, and against Lasagne."""

from collections import OrderedDict

import numpy
import pytest
from synkhronos.extensions import updates
from compilers import FLOAT16, change_flags, compiler, run_examples, shared, tt

STEPS = 20
CHANGED_AT = 9  # the step after which the hyper-parameter in a shared variable changes
FAST_COMPILE = compiler.compile.get_mode("FAST_COMPILE")
TOLERANCES = {"float32": {"rtol": 2e-5, "atol": 2e-6}, "float64": {"rtol": 1e-12, "atol": 1e-13}}


# The reference functions return the new value of a parameter `w` with gradient `g` in step `t`,
# counted from 1. The dictionary `s` holds the rule's state for this parameter.
def reference_sgd(w, g, s, t, learning_rate):
    return w - learning_rate * g


def reference_momentum(w, g, s, t, learning_rate, momentum=0.9):
    s["v"] = momentum * s.get("v", 0) - learning_rate * g
    return w + s["v"]


def reference_nesterov_momentum(w, g, s, t, learning_rate, momentum=0.9):
    s["v"] = momentum * s.get("v", 0) - learning_rate * g
    return w + momentum * s["v"] - learning_rate * g


def reference_adagrad(w, g, s, t, learning_rate=1.0, epsilon=1e-6):
    s["sum"] = s.get("sum", 0) + g**2
    return w - learning_rate * g / numpy.sqrt(s["sum"] + epsilon)


def reference_rmsprop(w, g, s, t, learning_rate=1.0, rho=0.9, epsilon=1e-6):
    s["r"] = rho * s.get("r", 0) + (1 - rho) * g**2
    return w - learning_rate * g / numpy.sqrt(s["r"] + epsilon)


def reference_adadelta(w, g, s, t, learning_rate=1.0, rho=0.95, epsilon=1e-6):
    s["r"] = rho * s.get("r", 0) + (1 - rho) * g**2
    step = g * numpy.sqrt(s.get("s", 0) + epsilon) / numpy.sqrt(s["r"] + epsilon)
    s["s"] = rho * s.get("s", 0) + (1 - rho) * step**2
    return w - learning_rate * step


def reference_adam(w, g, s, t, learning_rate=0.001, beta1=0.9, beta2=0.999, epsilon=1e-8):
    s["m"] = beta1 * s.get("m", 0) + (1 - beta1) * g
    s["v"] = beta2 * s.get("v", 0) + (1 - beta2) * g**2
    rate = learning_rate * numpy.sqrt(1 - beta2**t) / (1 - beta1**t)
    return w - rate * s["m"] / (numpy.sqrt(s["v"]) + epsilon)


def reference_adamax(w, g, s, t, learning_rate=0.002, beta1=0.9, beta2=0.999, epsilon=1e-8):
    s["m"] = beta1 * s.get("m", 0) + (1 - beta1) * g
    s["u"] = numpy.maximum(beta2 * s.get("u", 0), abs(g))
    return w - learning_rate / (1 - beta1**t) * s["m"] / (s["u"] + epsilon)


# Each rule with its hyper-parameters. The first one changes after the step CHANGED_AT.
RULES = {
    "sgd": {"learning_rate": 0.05},
    "momentum": {"momentum": 0.8, "learning_rate": 0.02},
    "nesterov_momentum": {"momentum": 0.8, "learning_rate": 0.02},
    "adagrad": {"learning_rate": 0.3, "epsilon": 1e-3},
    "rmsprop": {"rho": 0.7, "learning_rate": 0.05, "epsilon": 1e-4},
    "adadelta": {"rho": 0.9, "learning_rate": 0.5, "epsilon": 1e-3},
    "adam": {"beta2": 0.95, "learning_rate": 0.02, "beta1": 0.8, "epsilon": 1e-5},
    "adamax": {"beta1": 0.8, "learning_rate": 0.02, "beta2": 0.9, "epsilon": 1e-5},
}
ONLY_LEARNING_RATE = {"sgd": 0.05, "momentum": 0.05, "nesterov_momentum": 0.05}
INITIAL = OrderedDict(
    scalar=numpy.array(0.7), row=numpy.linspace(-1, 1, 4).reshape(1, 4), vector=numpy.linspace(2, -1, 3),
    single=numpy.array([[0.4]]), empty=numpy.zeros((0, 2)),
    kernel=numpy.sin(numpy.arange(36.0)).reshape(3, 2, 3, 2),
)  # fmt: skip
BROADCASTABLE = {"row": (True, False), "single": (True, False)}


def float32_variable(value):
    return compiler.shared(numpy.float32(value))


def make_parameters(dtype):
    return [
        shared(value.astype(dtype), name, BROADCASTABLE.get(name)) for name, value in INITIAL.items()
    ]


def loss_of(params):
    """Return a convex loss, with gradients of different sizes and signs."""
    return sum((param**4 / 4 + param**2 / 2 - 3 * param).sum() for param in params)


def gradient_at(value):
    return value**3 + value - 3


def compile_pair(rule, mode=FAST_COMPILE):
    grad_updates, param_updates, _ = rule
    return (
        compiler.function([], updates=grad_updates, mode=mode),
        compiler.function([], updates=param_updates, mode=mode),
    )


def run(functions, steps):
    for _ in range(steps):
        for function in functions:
            function()


def reference_values(name, steps, hyper, changed=None, change_at=None):
    """Return the parameters' values after each step, computed in float64."""
    step = globals()[f"reference_{name}"]
    values = [value.copy() for value in INITIAL.values()]
    memories = [{} for _ in values]
    for t in range(1, steps + 1):
        now = {**hyper, **changed} if changed and t > change_at else hyper
        values = [
            step(value, gradient_at(value), memory, t, **now) for value, memory in zip(values, memories)
        ]
    return values


def assert_values(params, expected, dtype):
    for param, value in zip(params, expected):
        assert param.get_value().dtype == dtype
        assert param.get_value().shape == value.shape
        numpy.testing.assert_allclose(
            param.get_value(), value, err_msg=param.name, **TOLERANCES[str(dtype)]
        )


@pytest.mark.parametrize(("dtype", "float_x"), [("float32", "float64"), ("float64", "float32")])
@pytest.mark.parametrize("name", RULES)
def test_rule_follows_its_formula_also_when_a_hyperparameter_changes(name, dtype, float_x):
    hyper = dict(RULES[name])
    changing = next(iter(hyper))
    variable = compiler.shared(numpy.asarray(hyper[changing], dtype=float_x))
    params = make_parameters(dtype)
    with change_flags(floatX=float_x):
        rule = getattr(updates, name)(loss_of(params), params, **{**hyper, changing: variable})
        functions = compile_pair(rule)
    run(functions, CHANGED_AT)
    hyper[changing] = float(variable.get_value())
    changed = {changing: hyper[changing] / 2}
    variable.set_value(numpy.asarray(changed[changing], dtype=float_x))
    run(functions, STEPS - CHANGED_AT)
    assert_values(params, reference_values(name, STEPS, hyper, changed, CHANGED_AT), dtype)
    for variable, _ in rule[1]:
        assert variable.get_value().dtype == dtype


@pytest.mark.parametrize("make", [float, numpy.float64, compiler.shared])
@pytest.mark.parametrize(
    ("name", "decays"),
    [("rmsprop", ["rho"]), ("adadelta", ["rho"]), ("adam", ["beta1", "beta2"]), ("adamax", ["beta1"])],
)
def test_a_decay_close_to_one_keeps_its_precision_with_float32_parameters(name, decays, make):
    gradient = numpy.array([1.0, 2.0, -3.0], "float32")
    param = compiler.shared(numpy.zeros(3, "float32"))
    hyper = dict.fromkeys(decays, 0.99999)
    made = {key: make(value) for key, value in hyper.items()}
    run(compile_pair(getattr(updates, name)([compiler.shared(gradient)], [param], 0.1, **made)), 1)
    expected = globals()[f"reference_{name}"](0, gradient.astype(float), {}, 1, 0.1, **hyper)
    numpy.testing.assert_allclose(param.get_value(), expected, rtol=1e-6)


@pytest.mark.parametrize("make", [float, numpy.float32, float32_variable])
@pytest.mark.parametrize("name", RULES)
def test_no_tensor_of_a_rule_for_float32_parameters_is_float64(name, make):
    hyper = {key: make(value) for key, value in RULES[name].items()}
    params = [param for param in make_parameters("float32") if param.name != "empty"]
    with change_flags(floatX="float32", warn_float64="raise"):
        functions = compile_pair(getattr(updates, name)(loss_of(params), params, **hyper))
    run(functions, 3)
    expected = [one for one in reference_values(name, 3, RULES[name]) if one.size]
    assert_values(params, expected, "float32")


@pytest.mark.parametrize("name", RULES)
def test_parameters_may_be_float16(name):
    params = make_parameters(FLOAT16)
    run(compile_pair(getattr(updates, name)(loss_of(params), params, **RULES[name])), 5)
    for param, value in zip(params, reference_values(name, 5, RULES[name])):
        assert param.get_value().dtype == FLOAT16
        numpy.testing.assert_allclose(param.get_value(), value, rtol=0.01, atol=0.01)


def test_steps_are_counted_beyond_the_integers_of_float16():
    param = compiler.shared(numpy.ones(1, "float16"))
    *_, (count, _) = updates.adam(param.sum(), [param], epsilon=1e-5)[1]
    new = compiler.function([], count + 2049, mode=FAST_COMPILE)()
    assert new == 2049


@pytest.mark.parametrize("name", RULES)
def test_defaults_are_lasagnes(name):
    hyper = {"learning_rate": ONLY_LEARNING_RATE[name]} if name in ONLY_LEARNING_RATE else {}
    params = make_parameters("float64")
    run(compile_pair(getattr(updates, name)(loss_of(params), params, *hyper.values())), 3)
    assert_values(params, reference_values(name, 3, hyper), "float64")


@pytest.mark.parametrize("name", [name for name in RULES if name != "adamax"])
def test_rule_equals_lasagnes(name):
    lasagne_updates = pytest.importorskip("lasagne.updates")

    params, params_of_lasagne = make_parameters("float64"), make_parameters("float64")
    rule = getattr(updates, name)(loss_of(params), params, **RULES[name])
    theirs = getattr(lasagne_updates, name)(loss_of(params_of_lasagne), params_of_lasagne, **RULES[name])
    run(compile_pair(rule), STEPS)
    run([compiler.function([], updates=theirs, mode=FAST_COMPILE)], STEPS)
    assert_values(params, [param.get_value() for param in params_of_lasagne], "float64")


@pytest.mark.parametrize("container", [list, tuple])
def test_gradients_are_accepted_in_place_of_a_loss(container):
    params = make_parameters("float32")
    gradients = container(tt.cast(2 * param, "float64") for param in params)
    run(compile_pair(updates.sgd(gradients, params, 0.25)), 1)
    assert_values(params, [value / 2 for value in INITIAL.values()], "float32")


def test_sgd_nonflat_has_a_gradient_for_each_parameter_and_takes_mixed_dtypes():
    params = make_parameters("float32")[:3] + make_parameters("float64")[3:]
    rule = updates.sgd_nonflat(loss_of(params), params, **RULES["sgd"])
    run(compile_pair(rule), STEPS)
    expected = reference_values("sgd", STEPS, RULES["sgd"])
    assert_values(params[:3], expected[:3], "float32")
    assert_values(params[3:], expected[3:], "float64")
    assert [gradient.type for gradient in rule[2]] == [param.type for param in params]


@pytest.mark.parametrize("kind", [list, OrderedDict])
@pytest.mark.parametrize("name", ["momentum", "nesterov_momentum"])
def test_apply_momentum_to_sgd_equals_the_rule(name, kind):
    params = make_parameters("float32")
    coefficient = compiler.shared(0.8)
    grad_updates, param_updates, grad_shared = updates.sgd(loss_of(params), params, 0.02)
    before = kind(param_updates)
    after = getattr(updates, f"apply_{name}")(before, params, coefficient)
    assert type(after) is kind
    assert len(before) == len(params)
    run(compile_pair((grad_updates, after, grad_shared)), STEPS)
    assert_values(params, reference_values(name, STEPS, RULES[name]), "float32")


def test_apply_momentum_leaves_state_of_rules_alone_and_keeps_the_rest_of_an_entry():
    params = make_parameters("float64")
    _, param_updates, _ = updates.adam(loss_of(params), params)
    param_updates[0] = (*param_updates[0], "sum")
    after = updates.apply_momentum(param_updates)
    twice = updates.apply_nesterov_momentum(after)
    assert after[0][0] is params[0]
    assert after[0][2] == "sum"
    assert after[len(params) : len(param_updates)] == param_updates[len(params) :]
    velocities = [variable for variable, _ in after[len(param_updates) :]]
    assert [velocity.type for velocity in velocities] == [param.type for param in params]
    assert len(twice) == len(after) + len(params)


def test_apply_momentum_to_some_parameters():
    params = make_parameters("float64")
    grad_updates, param_updates, grad_shared = updates.sgd(loss_of(params), params, 0.02)
    after = updates.apply_momentum(param_updates, params[:2], momentum=0.8)
    run(compile_pair((grad_updates, after, grad_shared)), STEPS)
    with_momentum = reference_values("momentum", STEPS, RULES["momentum"])
    without = reference_values("sgd", STEPS, {"learning_rate": 0.02})
    assert_values(params, with_momentum[:2] + without[2:], "float64")


WEIGHTS = compiler.shared(numpy.ones(3, dtype="float32"), name="weights")
BIAS = compiler.shared(numpy.float64(1), name="bias")
HALVES = compiler.shared(numpy.ones(3, dtype="float16"), name="halves")
COUNTS = compiler.shared(numpy.ones(3, dtype="int64"), name="counts")
LOSS = WEIGHTS.sum()
STEP = [(WEIGHTS, WEIGHTS + 1)]


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, r"params: .*empty list", lambda: updates.sgd(LOSS, [], 1)),
        (TypeError, r"params: .*list.*\[parameter\]", lambda: updates.sgd(LOSS, WEIGHTS, 1)),
        (TypeError, r"params: .*got NoneType", lambda: updates.sgd(LOSS, None, 1)),
        (TypeError, r"params\[0\].*shared.*create it with (theano|pytensor).shared",
         lambda: updates.sgd(LOSS, [tt.vector("x")], 1)),
        (TypeError, r"params\[1\].*got int 3", lambda: updates.sgd(LOSS, [WEIGHTS, 3], 1)),
        (TypeError, r"params\[0\] \(counts\).*got int64", lambda: updates.sgd(LOSS, [COUNTS], 1)),
        (TypeError, r"float32 for params\[0\] \(weights\) and float64 for params\[1\] \(bias\)",
         lambda: updates.adam(LOSS + BIAS, [WEIGHTS, BIAS])),
        (ValueError, r"params\[1\].*same shared variable as params\[0\]",
         lambda: updates.sgd(LOSS, [WEIGHTS, WEIGHTS], 1)),
        (ValueError, r"does not: params\[0\] \(bias\)", lambda: updates.sgd(LOSS, [BIAS], 1)),
        (ValueError, r"loss: .*got 1 dimension.*mean", lambda: updates.sgd(WEIGHTS, [WEIGHTS], 1)),
        (TypeError, r"loss: .*got float", lambda: updates.sgd(1.5, [WEIGHTS], 1)),
        (TypeError, r"loss: .*got int64", lambda: updates.sgd(COUNTS.sum(), [WEIGHTS], 1)),
        (ValueError, r"got 2 gradients for 1", lambda: updates.sgd([LOSS, LOSS], [WEIGHTS], 1)),
        (TypeError, r"loss\[0\].*got NoneType", lambda: updates.sgd([None], [WEIGHTS], 1)),
        (ValueError, r"loss\[0\].*1 dimensions.*got 0", lambda: updates.sgd([LOSS], [WEIGHTS], 1)),
        (TypeError, r"learning_rate: .*got str", lambda: updates.sgd(LOSS, [WEIGHTS], "1")),
        (ValueError, r"rho: .*got 1 dim", lambda: updates.rmsprop(LOSS, [WEIGHTS], rho=WEIGHTS)),
        (ValueError, r"epsilon: 1e-08 is 0 in float16; .* at least 6e-08",
         lambda: updates.adam(HALVES.sum(), [HALVES])),
        (ValueError, r"beta1: .*got 1 dim",
         lambda: updates.adam(LOSS, [WEIGHTS], beta1=numpy.ones(2))),
        (TypeError, r"updates\[0\].*param_updates", lambda: updates.apply_momentum([WEIGHTS])),
        (ValueError, r"updates\[1\].*second", lambda: updates.apply_momentum(STEP + STEP)),
        (ValueError, r"params\[0\] \(bias\).*got none",
         lambda: updates.apply_momentum(STEP, [BIAS])),
        (TypeError, r"momentum: .*got NoneType",
         lambda: updates.apply_nesterov_momentum(STEP, momentum=None)),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(error, message, call):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.usefixtures("in_python")
@pytest.mark.parametrize("name", updates.__all__)
def test_examples_in_docstrings(name):
    function = getattr(updates, name)
    assert run_examples(function.__doc__, name, {name: function}) > 5
