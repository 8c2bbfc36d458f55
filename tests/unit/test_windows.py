"""Rows that an index selects in `givens`: each rank has its part, and results are the serial ones."""

import warnings

import numpy as np
import pytest
import scipy.sparse
from compilers import Streams, compiler, ifelse, scan, softmax, sparse, tt

import synkhronos as synk
from synkhronos.engines.names import with_pattern
from synkhronos.extensions import train

pytestmark = pytest.mark.usefixtures("in_python", "in_threads")

RNG = np.random.RandomState(3)
ROWS, SIZE, COLUMNS = 12, 4, 3


class Lab:
    """Data in shared variables, an index, and what a script may replace by givens."""

    def __init__(self):
        self.data = compiler.shared(RNG.normal(size=(ROWS, COLUMNS)), "data")
        self.labels = compiler.shared(np.arange(ROWS) % COLUMNS, "labels")
        self.order = compiler.shared(RNG.permutation(ROWS), "order")
        self.series = compiler.shared(RNG.normal(size=(5, ROWS, COLUMNS)), "series")
        self.batches = compiler.shared(RNG.normal(size=(3, SIZE, COLUMNS)), "batches")
        self.i, self.numbers = tt.lscalar("i"), tt.lvector("numbers")
        self.x, self.x3, self.y = tt.dmatrix("x"), tt.dtensor3("x3"), tt.lvector("y")
        self.rows = slice(self.i * SIZE, (self.i + 1) * SIZE)
        self.window = self.data[self.rows]


@pytest.fixture
def lab(two):
    return Lab()


def one_hot(labels):
    return tt.set_subtensor(tt.zeros((labels.shape[0], COLUMNS))[tt.arange(labels.shape[0]), labels], 1)


#: What replaces a matrix of rows, by its name.
MATRICES = {
    "a slice": lambda lab: lab.window,
    "fewer rows than ranks": lambda lab: lab.data[lab.i : lab.i + 2],
    "from a row on": lambda lab: lab.data[lab.i * 5 :],
    "row numbers from a slice": lambda lab: lab.data[lab.order[lab.rows]],
    "a slice of rows in another order": lambda lab: lab.data[lab.order][lab.rows],
    "row numbers by arange": lambda lab: lab.data[tt.arange(lab.i * SIZE, (lab.i + 1) * SIZE)],
    "row numbers by a sum": lambda lab: lab.data[lab.i * SIZE + tt.arange(SIZE)],
    "row numbers from each other": lambda lab: lab.data[tt.stack([lab.i, lab.i + 3, lab.i + 1])],
    "the first rows": lambda lab: lab.data[tt.arange(lab.i + 2)],
    "computed by row": lambda lab: tt.cast(1 - lab.window / 2.0, "float64"),
    "less a constant matrix": lambda lab: lab.window - np.ones((SIZE, COLUMNS)),
    "less its own mean": lambda lab: lab.window - lab.window.mean(axis=0),
    "softmax": lambda lab: softmax(lab.window),
    "a loop over rows and another sequence": lambda lab: scan(
        lambda row, other: row * other.sum(), sequences=[lab.window, lab.batches[0]]
    ),
    "a product": lambda lab: tt.dot(lab.window, np.eye(COLUMNS) * 2),
    "reshaped": lambda lab: lab.window.reshape((-1, COLUMNS)),
    "reshaped to a constant size": lambda lab: lab.window.reshape((SIZE, COLUMNS)),
    "reshaped by its own shape": lambda lab: lab.window.reshape((lab.window.shape[0], COLUMNS)),
    "flattened": lambda lab: lab.window.dimshuffle(0, "x", 1).flatten(2),
    "concatenated columns": lambda lab: tt.concatenate([lab.window] * 2, axis=1)[:, 1 : COLUMNS + 1],
    "concatenated rows": lambda lab: tt.concatenate([lab.window, lab.data[: lab.i]], axis=0),
    "columns": lambda lab: lab.window[:, ::-1],
    "columns by another index": lambda lab: lab.data[lab.rows, lab.i * 0 :],
    "all but the first row": lambda lab: lab.window[1:],
    "backwards": lambda lab: lab.window[::-1],
    "one time step": lambda lab: lab.series[2, lab.rows],
    "one-hot labels": lambda lab: one_hot(lab.labels[lab.rows]),
    "transposed twice": lambda lab: lab.window.T.dimshuffle(1, 0),
    "batch first": lambda lab: lab.series[:, lab.rows].dimshuffle(1, 0, 2)[:, 1],
    "columns of another axis": lambda lab: lab.data.T[:, lab.rows].T,
    "looked up along another axis": lambda lab: lab.data.T[:, lab.order[lab.rows]].T,
    "in another order": lambda lab: lab.window[[1, 0]],
    "one of two": lambda lab: ifelse(tt.gt(lab.i, 1), lab.window, 2 * lab.data[lab.rows]),
    "noisy": lambda lab: lab.window + 0 * Streams(1).normal(size=lab.window.shape),
    "noisy in place": lambda lab: tt.set_subtensor(lab.window[:, :1], 0.5),
    "the rows of one group": lambda lab: lab.data[tt.eq(lab.labels, lab.i).nonzero()[0]],
    "a loop over another axis": lambda lab: scan(
        lambda row: row * 2, sequences=[lab.series[:, lab.rows]]
    )[0],
    "cumulative sums of each row": lambda lab: tt.cumsum(lab.window, axis=1),
    "each row sorted": lambda lab: tt.sort(lab.window, axis=1),
    "the greatest of each row": lambda lab: lab.window.max(axis=1, keepdims=True) + lab.window,
}


def reshaped_by(x, shape):
    return x.reshape((shape[0], shape[1], shape[2]))


def outputs_of(x):
    """A mean over the rows, a sum, the rows themselves, and their number on the master."""
    return [tt.sqr(x).mean(), (x.sum(axis=0), "sum"), (x * 2, "gather"), (x.shape[0], None)]


def plain(outputs):
    return [one[0] if isinstance(one, tuple) else one for one in outputs]


def assert_close(value, expected, message=""):
    np.testing.assert_allclose(value, expected, rtol=1e-9, atol=1e-12, err_msg=message)


def share(n_rows, size):
    """Return the number of rows of the first rank."""
    return -(-n_rows // size)


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_the_rows_that_an_index_selects_are_divided_however_the_script_selects_them(world_of, size):
    world_of(size)
    lab = Lab()
    for name, make in MATRICES.items():
        givens = {lab.x: make(lab)}
        ours = synk.function([lab.i], outputs_of(lab.x), givens=givens)
        theirs = compiler.function([lab.i], plain(outputs_of(lab.x)), givens=givens)
        for index in (1, 2):
            for num_slices in (1, 2):
                *found, n_own = ours(index, num_slices=num_slices) if num_slices > 1 else ours(index)
                *expected, n_rows = theirs(index)
                for got, wanted in zip(found, expected):
                    assert_close(got, wanted, f"{name}, {index}")
                if num_slices == 1:
                    assert n_own == share(n_rows, size), name
        assert_close(ours.as_theano(1)[2], theirs(1)[2], name)


def test_a_rank_without_rows_takes_part_in_collectives_with_another_row(world_of):
    world_of(3)
    lab = Lab()
    highest = synk.ops.all_reduce(lab.x.max(), "max")  # of no number it would be an error
    f = synk.function([lab.i], (highest, None), givens={lab.x: lab.data[lab.i : lab.i + 2]})
    for i in range(3):
        assert f(i) == lab.data.get_value()[i : i + 2].max()


def test_rows_along_another_axis_are_divided_along_it(lab):
    outputs = [
        tt.sqr(lab.x3).mean(),
        (lab.x3.sum(), "sum"),
        synk.Out(lab.x3, "gather", axis=1),
        (lab.x3.shape[1], None),
    ]
    values = [
        lab.series[:, lab.rows],
        lab.series[:, lab.order[lab.rows]] * 2,
        lab.series[1:, lab.rows],
        lab.window.dimshuffle("x", 0, 1) + np.ones((5, 1, 1)),
        lab.series[:, lab.rows].reshape((5, -1, COLUMNS)),
        lab.series[:, lab.rows].reshape((5, SIZE, 1, COLUMNS)).reshape((5, SIZE, COLUMNS)),
        reshaped_by(lab.series[:, lab.rows], lab.series[:, lab.rows].shape),
        tt.concatenate([lab.series[:, lab.rows]] * 2, axis=2)[:, :, 1:4],
        softmax(lab.window).dimshuffle("x", 0, 1).reshape((1, SIZE, COLUMNS)),
    ]
    for value in values:
        ours = synk.function([lab.i], outputs, givens={lab.x3: value})
        mean, total, gathered, n_own = ours(1)
        [expected] = compiler.function([lab.i], [value])(1)
        assert_close(mean, np.square(expected).mean())
        assert_close(total, expected.sum())
        assert_close(gathered, expected)
        assert n_own == 2
    f = synk.function([lab.i], (lab.x.sum(axis=0), "gather"), givens={lab.x: lab.window.T})
    assert_close(f(1), lab.data.get_value()[4:8].sum(axis=1))


def test_rows_that_an_input_numbers_are_divided(lab):
    for value in (lab.data[lab.numbers], softmax(lab.data[lab.numbers])):
        f = synk.function([lab.numbers], outputs_of(lab.x), givens={lab.x: value})
        g = compiler.function([lab.numbers], plain(outputs_of(lab.x)), givens={lab.x: value})
        *found, n_own = f([3, 1, 7, 9])
        for got, wanted in zip(found, g([3, 1, 7, 9])):
            assert_close(got, wanted)
        assert n_own == 2


def test_row_numbers_themselves_are_divided(lab):
    picked = lab.data[lab.y]
    for value in (tt.arange(lab.i, lab.i + 5), lab.i + 2 * tt.arange(5), lab.order[lab.rows]):
        f = synk.function([lab.i], [(picked.sum(), "sum"), (lab.y, "gather")], givens={lab.y: value})
        total, numbers = f(2)
        [expected] = compiler.function([lab.i], [value])(2)
        np.testing.assert_array_equal(numbers, expected)
        assert_close(total, lab.data.get_value()[expected].sum())


def test_a_sparse_matrix_is_divided_by_its_rows(lab):
    matrix = scipy.sparse.random(ROWS, COLUMNS, 0.5, "csr", random_state=1)
    shared, x = sparse.shared(matrix), sparse.csr_matrix("sparse")
    givens = {x: shared[lab.rows]}
    f = synk.function([lab.i], [(sparse.dense_from_sparse(x), "gather"), (sparse.sp_sum(x), "sum")],
                      givens=givens)  # fmt: skip
    rows, total = f(1)
    assert_close(rows, matrix[4:8].toarray())
    assert_close(total, matrix[4:8].sum())


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_rank_has_the_same_rows_of_an_input_and_of_what_an_index_selects(world_of, size):
    world_of(size)
    lab = Lab()
    y = tt.dvector("y")
    outputs = [(lab.x.sum(axis=1) * y).mean(), (tt.dot(lab.x.T, y), "sum")]
    outputs.append(((lab.x.T * y).T, "gather"))
    givens = {lab.x: lab.data[lab.order[lab.rows]]}
    f = synk.function([y, lab.i], outputs, givens=givens)
    g = compiler.function([y, lab.i], plain(outputs), givens=givens)
    values = RNG.normal(size=SIZE)
    for index in range(3):
        for num_slices in (1, 2):
            for got, wanted in zip(f(values, index, num_slices=num_slices), g(values, index)):
                assert_close(got, wanted)
    data = synk.data(np.arange(12.0))
    for rows in (slice(4, 8), [7, 2, 5, 0]):
        for got, wanted in zip(f(data, 1, batch=rows), g(np.arange(12.0)[rows], 1)):
            assert_close(got, wanted)
    assert_close(f.as_theano(values, 2)[2], g(values, 2)[2])
    assert not f.check(values, 1).not_compared


@pytest.mark.parametrize("n_rows", [1, 2, 4])
def test_collectives_in_the_graph_are_those_of_all_rows(world_of, n_rows):
    """Also where a rank has no rows."""
    world_of(3)
    lab = Lab()
    y, data = tt.dvector("y"), lab.data.get_value()
    rows = slice(lab.i * n_rows, (lab.i + 1) * n_rows)
    total = synk.ops.all_reduce((lab.x.T * y).sum(axis=1))
    f = synk.function([y, lab.i], total, givens={lab.x: lab.data[rows]})
    values = RNG.normal(size=n_rows)
    for index in range(3):
        assert_close(f(values, index), values.dot(data[index * n_rows : (index + 1) * n_rows]))


def test_a_program_computes_on_all_rows_that_an_index_selects(lab):
    y, data = tt.dvector("y"), lab.data.get_value()
    total = (lab.x.T * y).sum(axis=1), "sum"
    f = synk.function([y, lab.i], total, givens={lab.x: lab.window})
    synk.distribute()

    def program(rank):
        return rank.call(f, np.arange(4.0), rank.rank)

    for rank, total in enumerate(synk.spmd(program)):
        assert_close(total, np.arange(4.0).dot(data[4 * rank : 4 * rank + 4]))


def test_other_numbers_of_rows_beside_an_input_are_refused_in_the_call(lab):
    y, total = tt.dvector("y"), (lab.x.sum(), "sum")
    f = synk.function([y, lab.i], [total, (y.sum(), "sum")], givens={lab.x: lab.window})
    with pytest.raises(ValueError, match="input 'y'.*8 rows, got 4 rows that replace x.*bcast_inputs"):
        f(np.arange(8.0), 1)
    assert f(np.arange(4.0), 1)[1] == 6
    outputs = [total, (y.sum(), None)]
    whole = synk.function([lab.i], outputs, bcast_inputs=[y], givens={lab.x: lab.window})
    assert whole(1, np.arange(8.0))[1] == 28


def test_what_an_index_selects_but_is_no_row_stays_whole_beside_an_input(lab):
    x, value = tt.dmatrix("x_in"), RNG.normal(size=(5, COLUMNS))
    for one in (
        x * lab.data[lab.i],
        x / lab.series[0, lab.i, 1],
        x + lab.window.mean(axis=0),
        tt.dot(x, lab.batches[lab.i][:COLUMNS]),
        x[:, lab.i :],
        x * tt.zeros((x.shape[0], COLUMNS)) + lab.i,
    ):
        f = synk.function([x, lab.i], (lab.x * 2, "gather"), givens={lab.x: one})
        g = compiler.function([x, lab.i], lab.x * 2, givens={lab.x: one})
        assert_close(f(value, 1), g(value, 1))
    scale, weights = tt.dscalar("scale"), tt.dvector("weights")
    rows = tt.dmatrix("rows")
    f = synk.function(
        [rows, lab.i],
        [(tt.dot(rows, weights) * scale, "gather")],
        givens={weights: lab.data[lab.i], scale: lab.window.mean()},
    )
    value, data = RNG.normal(size=(5, COLUMNS)), lab.data.get_value()
    assert_close(f(value, 1)[0], value.dot(data[1]) * data[4:8].mean())


def squares(lab):
    w = compiler.shared(np.ones(COLUMNS), "w")
    loss = tt.sqr(tt.dot(lab.x, w) - 1).mean()
    return w, loss


@pytest.mark.parametrize("name", MATRICES)
def test_a_training_step_on_them_is_the_serial_one(two, name):
    lab, values = Lab(), []
    givens = {lab.x: MATRICES[name](lab)}
    for make in (compiler.function, train.parallel_function, None):
        w, loss = squares(lab)
        if make is None:
            step = train.make_train_function(
                loss, [w], lab.i, None, lambda grads, params: [(params[0], params[0] - 0.1 * grads[0])],
                givens=givens,
            )  # fmt: skip
        else:
            step = make([lab.i], loss, updates=[(w, w - 0.1 * tt.grad(loss, w))], givens=givens)
        values.append([float(step(index)) for index in (1, 2, 1)] + list(w.get_value()))
    assert_close(values[1], values[0])
    assert_close(values[2], values[0])


UNKNOWN = {
    "rows against rows": lambda lab: tt.dot(lab.window, lab.window.T)[:, :COLUMNS],
    "rows behind an axis that is divided in two": lambda lab: lab.series[1:, lab.rows].reshape(
        (2, -1, COLUMNS)
    )[0],
    "rows among other axes": lambda lab: lab.series[:, lab.rows].reshape((-1, COLUMNS)),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_rows_along_an_unknown_axis_are_refused(lab, name):
    givens = {lab.x: UNKNOWN[name](lab)}
    for make in (synk.function, train.parallel_function):
        with pytest.raises(ValueError, match=r"givens: x .* i selects.*data\[i .*bcast_inputs"):
            make([lab.i], (lab.x.sum(), "sum"), givens=givens)
    f = synk.function([], (lab.x.sum(), None), bcast_inputs=[lab.i], givens=givens)
    assert_close(f(1), compiler.function([lab.i], lab.x.sum(), givens=givens)(1))


def test_an_index_into_the_rows_of_each_rank_is_refused(lab):
    x = tt.dmatrix("x_in")
    cases = [
        ([x, lab.i], {lab.x: x[lab.rows]}, None),
        ([x, lab.i], {lab.x: lab.window * x}, None),
        ([lab.i], {lab.x: lab.window}, [lab.data]),
    ]
    for inputs, givens, sliceable in cases:
        with pytest.raises(ValueError, match=r"givens: x .*rows of (x_in|data).*give i in bcast_inputs"):
            synk.function(inputs, (lab.x.sum(), "sum"), givens=givens, sliceable_shareds=sliceable,
                          on_unused_input="ignore")  # fmt: skip
    f = synk.function([x, lab.i], (lab.x, "gather"), givens={lab.x: x[:, lab.i :]})
    value = RNG.normal(size=(5, COLUMNS))
    np.testing.assert_array_equal(f(value, 1), value[:, 1:])


NOTHING = {
    "one row": (lambda lab: lab.data[lab.i], tt.dvector("one")),
    "a batch by its number": (lambda lab: lab.batches[lab.i], tt.dmatrix("batch")),
    "a number": (lambda lab: lab.data[lab.i, 0], tt.dscalar("number")),
    "a mean of the rows": (lambda lab: lab.window.mean(axis=0), tt.dvector("mean")),
    "the greatest of the rows": (lambda lab: lab.window.max(axis=0), tt.dvector("greatest")),
    "a vector of a length": (lambda lab: tt.arange(lab.i) * 1.0, tt.dvector("vector")),
}


@pytest.mark.parametrize("name", NOTHING)
def test_it_is_said_that_nothing_is_divided(lab, name):
    make, variable = NOTHING[name]
    givens, total = {variable: make(lab)}, tt.sqr(variable).sum()
    wrong = [(total, "sum"), (variable, "gather") if variable.ndim else (total, "prod")]
    for one in wrong:
        with pytest.raises(ValueError, match=rf"outputs\[1\].*{variable}.*bcast_inputs"):
            synk.function([lab.i], [(total, None), one], givens=givens)
    with pytest.raises(ValueError, match="no input is divided among the ranks"):
        train.parallel_function([lab.i], total, givens=givens)
    with pytest.warns(synk.SynkhronosWarning, match=rf"{variable}.*bcast_inputs"):
        f = synk.function([lab.i], [(total, "avg"), (total, "max"), (total, None)], givens=givens)
    expected = compiler.function([lab.i], total, givens=givens)(2)
    assert_close(f(2), [expected] * 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", synk.SynkhronosWarning)
        f = synk.function([], (total, "sum"), bcast_inputs=[lab.i], givens=givens)
        assert_close(f(2), 2 * expected)
        synk.function([lab.i], [(lab.i * 2, "sum"), lab.i * 1.0], givens={variable: variable.type()})


def test_a_batch_of_one_row_by_its_type_stays_whole(lab):
    x = tt.drow("x")
    data = compiler.shared(RNG.normal(size=(5, COLUMNS)))
    row = with_pattern(data[lab.i : lab.i + 1], (True, False))
    with pytest.warns(synk.SynkhronosWarning, match="nothing is divided among the ranks"):
        f = synk.function([lab.i], tt.sqr(x).sum(), givens={x: row})
    assert_close(f(2), np.square(data.get_value()[2]).sum())
