"""What a rank is given in a call: the very memory of the data where that is possible."""

import mmap

import numpy as np
import pytest

import synkhronos as synk
import theano
import theano.tensor as T


class Where(theano.Op):
    """Where in memory its input begins, its stride, and how many bytes it has."""

    __props__ = ()

    def make_node(self, x):
        return theano.Apply(self, [x], [T.lmatrix()])

    def perform(self, node, inputs, outputs):
        (x,) = inputs
        outputs[0][0] = np.array([[x.__array_interface__["data"][0], x.strides[0], x.nbytes]])


@pytest.fixture(scope="module", params=[1, 3])
def where(request, open_world):
    open_world(request.param)
    x, whole = T.fmatrix("x"), T.fmatrix("whole")
    rows = theano.shared(np.zeros((0, 5), "float32"), "rows")
    outputs = [(Where()(one), "gather") for one in (x, whole, rows)]
    f = synk.function([x], outputs, bcast_inputs=[whole], sliceable_shareds=[rows])
    synk.distribute()
    return request.param, f, rows


def address(array):
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize(
    "batch", [None, 40, slice(3, 35), slice(0, 60, 2), slice(50, 10, -1)], ids=str
)
@pytest.mark.parametrize("num_slices", [1, 2])
def test_slices_are_views_of_the_data_on_every_rank(where, batch, num_slices):
    ranks, f, rows = where
    data, whole = synk.data(np.ones((60, 5), "float32")), synk.data(np.ones((7, 5), "float32"))
    synk.scatter(rows, np.ones((60, 5), "float32"))
    found, found_whole, _ = f(data, whole, batch=batch, num_slices=num_slices)
    chosen = data.data[batch if isinstance(batch, slice) else slice(batch)]
    assert len(found) == ranks * num_slices
    assert (found[:, 1] == chosen.strides[0]).all()
    assert found[:, 2].sum() == chosen.nbytes
    assert found[0, 0] == address(chosen)
    parts = np.cumsum([0, *found[:-1, 2]]) // chosen[:1].nbytes
    assert found[:, 0].tolist() == [address(chosen[part:]) for part in parts]
    assert (found_whole[:, 0] == address(whole.data)).all()


def test_slices_of_sliceable_variables_are_views_of_their_storage(where):
    ranks, f, rows = where
    data = synk.data(np.ones((60, 5), "float32"))
    synk.scatter(rows, np.ones((60, 5), "float32"))
    _, _, all_rows = f(data, data)
    _, _, some_rows = f(data, data, batch_s=slice(4, 12))
    assert (some_rows[:, 0] == all_rows[:, 0] + 4 * 20).all()
    assert (some_rows[:, 2] == 8 * 20).all()


def test_excerpts_of_listed_rows_go_to_the_same_buffer_every_time(where):
    _, f, rows = where
    data = synk.data(np.ones((60, 5), "float32"))
    synk.scatter(rows, np.ones((60, 5), "float32"))
    rng = np.random.RandomState(0)
    places = [f(data, data, batch=rng.permutation(60)[:n])[0][:, 0].tolist() for n in (60, 30, 60)]
    assert places[0] == places[1] == places[2]


def test_a_mapped_file_is_read_where_it_is(where, tmp_path):
    ranks, f, rows = where
    np.save(tmp_path / "x.npy", np.arange(300, dtype="float32").reshape(60, 5))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    synk.scatter(rows, np.ones((60, 5), "float32"))
    data = synk.data(mapped)
    found, _, _ = f(data, data)
    again, _, _ = f(data, data)
    assert found.tolist() == again.tolist()
    assert found[0, 0] % mmap.PAGESIZE == mapped.offset  # of the file's own pages
    assert found[:, 2].sum() == mapped.nbytes
