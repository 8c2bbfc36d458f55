"""Functions as Theano scripts define them: indices, defaults, dictionaries, time-major data."""

import io

import numpy as np
import pytest
import scipy.sparse
import theano
import theano.sparse
import theano.tensor as tt

import synkhronos as synk

pytestmark = pytest.mark.usefixtures("in_python")
RNG = np.random.RandomState(5)
X, Y = RNG.normal(size=(7, 3)), RNG.normal(size=7)


@pytest.fixture(params=[1, 2, 3])
def world(request, world_of):
    world_of(request.param)


def test_a_scalar_among_the_inputs_goes_to_every_rank(world):
    x, scale, y = tt.dmatrix("x"), tt.dscalar("scale"), tt.dvector("y")
    f = synk.function([x, scale, y], ((x.T * y * scale).sum(axis=0), "gather"))
    expected = (X.T * Y * 3).sum(axis=0)
    np.testing.assert_allclose(f(X, 3.0, Y), expected)
    np.testing.assert_allclose(f(X, y=Y, scale=3), expected)
    np.testing.assert_allclose(f(X, 3.0, Y, batch=[6, 0]), expected[[6, 0]])


class Describe(theano.Op):
    """The length of any object, added to a vector."""

    __props__ = ()

    def make_node(self, x, thing):
        return theano.Apply(self, [x, thing], [x.type()])

    def perform(self, node, inputs, outputs):
        outputs[0][0] = inputs[0] + len(inputs[1])


def test_an_input_that_is_given_twice_is_refused_also_if_the_last_call_was_right(two):
    x = tt.dvector("x")
    f, data = synk.function([x], x.mean()), synk.data(np.arange(4.0))
    assert f(data) == f(data) == 1.5
    with pytest.raises(TypeError, match="'x'"):
        f(data, x=data)


def test_an_object_of_any_type_goes_to_every_rank(two):
    x, thing = tt.dvector("x"), theano.gof.generic("thing")
    f = synk.function([x, thing], (Describe()(x, thing), "gather"))
    np.testing.assert_array_equal(f(Y, {"a": 1, "b": 2}), Y + 2)
    np.testing.assert_array_equal(f(Y, thing="abc"), Y + 3)
    with pytest.raises(TypeError, match="input 'thing': the value cannot be pickled"):
        f(Y, [lambda: None])
    np.testing.assert_array_equal(f(Y, [1]), Y + 1)


@pytest.mark.parametrize("kind", [theano.In, synk.In])
def test_an_input_may_have_a_default_value_and_a_name(two, kind):
    x, scale = tt.dvector("x"), tt.dscalar("scale")
    f = synk.function([x, kind(scale, value=2.0, name="factor")], (x * scale, "gather"))
    np.testing.assert_array_equal(f(Y), 2 * Y)
    np.testing.assert_array_equal(f(Y, 3), 3 * Y)
    np.testing.assert_array_equal(f(Y, factor=4), 4 * Y)
    with pytest.raises(TypeError, match="no input is named 'scale'"):
        f(Y, scale=4)


def test_an_input_that_would_keep_a_value_between_calls_is_refused(two):
    state = tt.dscalar("state")
    with pytest.raises(TypeError, match="keeps a value between calls.*shared variable"):
        synk.function([theano.In(state, value=0.0, update=state + 1)], state)
    with pytest.raises(TypeError, match="keeps a value between calls"):
        synk.function([theano.In(state, value=theano.shared(0.0))], state)


def test_one_input_may_be_downcast_and_the_others_not(two):
    x, y = tt.fvector("x"), tt.fvector("y")
    f = synk.function([theano.In(x, allow_downcast=True), y], (x + y, "gather"))
    single = Y.astype("float32")
    np.testing.assert_array_equal(f(Y, single), 2 * single)
    with pytest.raises(TypeError, match="input 'y': expected float32, got float64"):
        f(Y, Y)


def test_outputs_may_be_wrapped(two):
    x = tt.dvector("x")
    f = synk.function([x], [theano.Out(x.mean(), borrow=True), (theano.Out(x), "gather")])
    mean, rows = f(Y)
    np.testing.assert_allclose(mean, Y.mean())
    np.testing.assert_array_equal(rows, Y)
    assert synk.function([x], synk.Out(x.sum(), "sum"))(np.ones(4)) == 4


def test_outputs_may_be_a_dictionary(world):
    x = tt.dvector("x")
    outputs = {"rows": (x, "gather"), "largest": (x.max(), "max"), "mean": x.mean()}
    f = synk.function([x], outputs)
    plain = theano.function([x], {"rows": x, "largest": x.max(), "mean": x.mean()})
    expected = plain(Y)
    chosen = {key: expected[key] for key in ("mean", "rows")}
    assert_same(f(Y), expected)
    assert_same(f(Y, output_subset=["mean", "rows"]), chosen)
    assert_same(f.as_theano(Y), expected)
    assert_same(f.as_theano(Y, output_subset=["mean", "rows"]), chosen)
    with pytest.raises(IndexError, match="expected keys of .*'largest'.* got 'smallest'"):
        f(Y, output_subset=["smallest"])


def assert_same(ours, expected):
    assert list(ours) == list(expected)
    for key in expected:
        np.testing.assert_allclose(ours[key], expected[key], err_msg=key)


def test_keys_of_outputs_are_strings(two):
    with pytest.raises(TypeError, match="expected strings as the keys"):
        synk.function([], {1: tt.constant(1.0)})


def test_an_input_may_be_split_along_another_axis(world):
    series, y = tt.dtensor3("series"), tt.dvector("y")
    last = (series.cumsum(axis=0)[-1].sum(axis=1) + y) ** 2
    f = synk.function(
        [synk.In(series, axis=1), y],
        [last.mean(), synk.Out(series * 2, "gather", axis=1), (series.sum(axis=1), "sum")],
    )
    values, others = RNG.normal(size=(4, 7, 2)), RNG.normal(size=7)
    for rows in (slice(None), slice(1, 6, 2), [6, 0, 3, 3], slice(0, 1)):
        for num_slices in (1, 2):
            mean, gathered, total = f(values, others, batch=rows, num_slices=num_slices)
            chosen = values[:, rows]
            expected = (chosen.sum(axis=(0, 2)) + others[rows]) ** 2
            np.testing.assert_allclose(mean, expected.mean())
            np.testing.assert_array_equal(gathered, 2 * chosen)
            np.testing.assert_allclose(total, chosen.sum(axis=1))


def test_rows_are_those_of_the_axis_in_every_message(two):
    series, y = tt.dmatrix("series"), tt.dvector("y")
    f = synk.function([synk.In(series, axis=1), y], ((series * y).sum(), "sum"))
    with pytest.raises(ValueError, match="the same number of rows, got .*'series': 5, .*'y': 4"):
        f(np.ones((4, 5)), np.ones(4))
    with pytest.raises(IndexError, match="row 5 is out of range for 5 rows"):
        f(np.ones((4, 5)), np.ones(5), batch=[5])


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda x: ([synk.In(x, axis=2)], x.sum()), "cannot be split along axis 2"),
        (lambda x: ([synk.In(x, axis=-1)], x.sum()), "In: axis: expected zero or more, got -1"),
        (lambda x: ([x], synk.Out(x, "avg", axis=1)), "axis=1 is for an output that is gathered"),
        (lambda x: ([x], synk.Out(x, "gather", axis=2)), "axis=2 is for an output that is gathered"),
    ],
)
def test_an_axis_that_does_not_exist_is_refused(two, make, message):
    with pytest.raises(ValueError, match=message):
        inputs, outputs = make(tt.dmatrix("x"))
        synk.function(inputs, outputs)


def test_an_input_for_every_rank_has_no_axis(two):
    x = tt.dmatrix("x")
    with pytest.raises(ValueError, match="bcast_inputs: x is not split"):
        synk.function([], x.sum(), bcast_inputs=[synk.In(x, axis=1)])


@pytest.mark.parametrize("format", ["csr", "csc"])
def test_a_sparse_input_is_split_by_rows(world, format):
    x = theano.sparse.SparseType(format, "float64")("x")
    w = theano.shared(RNG.normal(size=(3, 2)), "w")
    product = theano.sparse.structured_dot(x, w)
    f = synk.function([x], [(product, "gather"), product.mean()])
    matrix = scipy.sparse.random(7, 3, 0.5, random_state=RNG)
    dense = matrix.toarray() @ w.get_value()
    for value in (matrix.tocsr(), matrix.tocsc(), matrix.toarray()):
        gathered, mean = f(value)
        np.testing.assert_allclose(gathered, dense)
        np.testing.assert_allclose(mean, dense.mean())
    for rows in (slice(2, 6), [5, 0, 1]):
        np.testing.assert_allclose(f(matrix, batch=rows, num_slices=2)[0], dense[rows])


def test_a_sparse_input_may_go_to_every_rank(two):
    x, m = tt.dmatrix("x"), theano.sparse.csr_matrix("m")
    f = synk.function([x], (theano.sparse.structured_dot(m, x.T).T, "gather"), bcast_inputs=[m])
    matrix = scipy.sparse.random(4, 3, 0.5, format="csr", random_state=RNG)
    np.testing.assert_allclose(f(X, matrix), X @ matrix.toarray().T)


def test_what_is_no_matrix_of_the_type_is_refused(two):
    x = theano.sparse.SparseType("csr", "float32")("x")
    f = synk.function([x], theano.sparse.sp_sum(x))
    for value, message in [
        (scipy.sparse.eye(3), "expected float32, got float64"),
        (np.zeros(3), "expected a sparse csr matrix or an array of 2 dimensions, got 1"),
        (synk.data(np.zeros((2, 2), "float32")), "expected a value for a csr input, got a Data"),
    ]:
        with pytest.raises(TypeError, match=f"input 'x': {message}"):
            f(value)
    with pytest.raises(TypeError, match="'x' is a csr input"):
        f.build_inputs(np.zeros((2, 2)))
    with pytest.raises(ValueError, match="sparse and can be split along axis 0 only"):
        synk.function([synk.In(x, axis=1)], theano.sparse.sp_sum(x))


def test_slices_of_unequal_lengths_are_refused(two):
    index = tt.lscalar("index")
    x, y = tt.dvector("x"), tt.dvector("y")
    data = theano.shared(Y)
    total = x.sum() + y.sum(), "sum"
    f = synk.function([index], total, givens={x: data[: index + 2], y: data[:index]})
    with pytest.raises(ValueError, match=r"slices of the same number of rows, got x: 5, y: 3"):
        f(3)
    assert f.output_modes == ["sum"]


def test_theanos_tools_take_a_function(two):
    x = tt.dvector("x")
    f = synk.function([x], (x.sum(), "sum"), name="total")
    assert len(f.maker.fgraph.inputs) == 1
    text = io.StringIO()
    theano.printing.debugprint(f, file=text)
    assert "Sum" in text.getvalue()
