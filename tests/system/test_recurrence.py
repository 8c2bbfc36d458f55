"""Loops along the axis that is divided among the ranks: refused if a step depends on earlier ones."""

import numpy as np
import pytest
from compilers import compiler, scan, tt

import synkhronos as synk
from synkhronos.extensions import train

pytestmark = pytest.mark.usefixtures("two", "in_python", "in_threads")

RNG = np.random.RandomState(4)
STEPS, ROWS, COLUMNS = 6, 4, 3


class Net:
    """A recurrent network, on data with time first."""

    def __init__(self):
        self.x = tt.dtensor3("x")
        self.w = compiler.shared(0.5 * np.eye(COLUMNS), "w")

    def states(self, steps, **options):
        """Return the states of all steps; each is computed from the one before."""
        initial = tt.zeros_like(steps[0])
        return scan(
            lambda row, state: tt.tanh(row + tt.dot(state, self.w)),
            sequences=[steps], outputs_info=[initial], **options,
        )  # fmt: skip


def of_one_layer(net):
    return net.states(net.x)


def of_two_layers(net):
    return net.states(net.states(net.x) * 2)


def of_projected(net):
    return net.states(tt.dot(net.x, net.w))


def backwards(net):
    return net.states(net.x, go_backwards=True)


def shifted(net):
    return net.states(net.x[1:-1])


def of_two_earlier_steps(net):
    start = tt.zeros((2, net.x.shape[1], COLUMNS))
    return scan(
        lambda row, two, one: row + 0.5 * tt.tanh(one) * two,
        sequences=[net.x], outputs_info=[{"initial": start, "taps": [-2, -1]}],
    )  # fmt: skip


def by_number(net):
    return scan(
        lambda step, state, x: tt.tanh(x[step] + state),
        sequences=[tt.arange(net.x.shape[0])],
        outputs_info=[tt.zeros_like(net.x[0])], non_sequences=[net.x],
    )  # fmt: skip


def cumulative(net):
    return scan(
        lambda row, total: total + row, sequences=[net.x], outputs_info=[tt.zeros_like(net.x[0])]
    )


def of_outputs_beside_the_state(net):
    states, outputs = scan(
        lambda row, state: (state + row, state * 2),
        sequences=[net.x], outputs_info=[tt.zeros_like(net.x[0]), None],
    )  # fmt: skip
    return outputs


@pytest.mark.parametrize(
    "make", [of_one_layer, of_two_layers, of_projected, backwards, shifted, of_two_earlier_steps,
             by_number, cumulative, of_outputs_beside_the_state],
)  # fmt: skip
def test_a_recurrence_along_the_divided_axis_is_refused(make):
    net = Net()
    loss = tt.sqr(make(net)).mean()
    words = r"inputs: input 'x' is divided .*synk\.In\(x, axis=1\).*bcast_inputs"
    with pytest.raises(ValueError, match=words):
        synk.function([net.x], loss)
    with pytest.raises(ValueError, match=words):
        train.parallel_function([net.x], loss)
    synk.function([synk.In(net.x, axis=1)], loss)
    synk.function([], loss, bcast_inputs=[net.x])


def serial(net, loss, x):
    return compiler.function([x], loss, updates=[(net.w, net.w - 0.1 * tt.grad(loss, net.w))])


def parallel(net, loss, x):
    updates = [(net.w, net.w - 0.1 * tt.grad(loss, net.w))]
    return train.parallel_function([x], loss, updates=updates)


def by_rule(net, loss, x):
    return train.make_train_function(loss, [net.w], x, None, sgd)


def sgd(gradients, params):
    return [(param, param - 0.1 * gradient) for param, gradient in zip(params, gradients)]


def assert_steps_are_serial(loss_of, wrap=lambda x: x):
    values, found = RNG.normal(size=(STEPS, ROWS, COLUMNS)), []
    for make in (serial, parallel, by_rule):
        net = Net()
        step = make(net, loss_of(net), net.x if make is serial else wrap(net.x))
        found.append([step(values), step(values), *net.w.get_value().ravel()])
    np.testing.assert_allclose(found[1], found[0])
    np.testing.assert_allclose(found[2], found[0])


def test_training_is_refused_along_the_divided_axis_and_serial_along_another():
    def loss_of(net):
        return tt.sqr(net.states(net.x)[1:] - net.x[:-1]).mean()

    assert_steps_are_serial(loss_of, lambda x: synk.In(x, axis=1))
    net = Net()
    for make in (parallel, by_rule):
        with pytest.raises(ValueError, match=r"input 'x'.*synk\.In\(x, axis=1\)"):
            make(net, loss_of(net), net.x)


def by_row(net):
    """A loop over the rows, each by itself."""
    return tt.sqr(scan(lambda row: tt.tanh(tt.dot(row, net.w)), sequences=[net.x])).mean()


def total_of_rows(net):
    """A loop that adds up, of which only the result is used."""
    total = scan(
        lambda row, total: total + tt.sqr(tt.dot(row, net.w)).sum(),
        sequences=[net.x], outputs_info=[tt.zeros(())],
    )  # fmt: skip
    return total[-1] / tt.cast(net.x.size, "float64")


def of_a_fixed_number_of_steps(net):
    """A loop that does not run along the rows, but computes on all of them."""
    states = scan(
        lambda state, x: tt.tanh(tt.dot(state, net.w) + x),
        outputs_info=[tt.zeros_like(net.x)], non_sequences=[net.x], n_steps=3,
    )  # fmt: skip
    return tt.sqr(states[-1]).mean()


def over_columns(net):
    return tt.sqr(net.states(net.x.dimshuffle(2, 0, 1)[:, :, :COLUMNS])).mean()


def batch_major(net):
    return tt.sqr(net.states(net.x.dimshuffle(1, 0, 2))[-1]).mean()


def batch_major_with_a_projection(net):
    return tt.sqr(net.states(tt.dot(net.x, net.w).dimshuffle(1, 0, 2), truncate_gradient=2)[-1]).mean()


@pytest.mark.parametrize(
    "make", [by_row, total_of_rows, of_a_fixed_number_of_steps, over_columns, batch_major,
             batch_major_with_a_projection],
)  # fmt: skip
def test_other_loops_are_right_and_stay(make):
    assert_steps_are_serial(make)


def test_rows_of_shared_data_are_checked_too():
    net, i, start = Net(), tt.lscalar("i"), tt.lscalar("start")
    data = compiler.shared(RNG.normal(size=(STEPS, ROWS, COLUMNS)), "data")
    loss = tt.sqr(net.states(net.x)).mean()
    with pytest.raises(ValueError, match=r"givens: the value of x is divided.*bcast_inputs"):
        synk.function([i], loss, givens={net.x: data[i : i + 4]})
    window = {net.x: data[start : start + 3, i : i + 2]}
    with pytest.raises(ValueError, match=r"givens: the value of x is divided.*bcast_inputs"):
        synk.function([i, start], loss, givens=window)
    f = synk.function([i], loss, bcast_inputs=[start], givens=window)
    serial = compiler.function([i, start], loss, givens=window)
    np.testing.assert_allclose(f(1, 2), serial(1, 2))
    with pytest.raises(ValueError, match=r"sliceable_shareds: data is divided.*synk\.In"):
        synk.function([], loss, givens={net.x: data}, sliceable_shareds=[data])


def test_a_vector_is_given_whole():
    x = tt.dvector("x")
    total = scan(lambda one, state: one * tt.tanh(state), sequences=[x], outputs_info=[tt.ones(())])
    with pytest.raises(ValueError, match=r"input 'x'.*on every rank. If every rank .* bcast_inputs$"):
        synk.function([x], total.sum())
