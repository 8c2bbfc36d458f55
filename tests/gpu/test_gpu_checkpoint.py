"""Tests of checkpoints of arrays on devices, and of the refusal to restart there."""

import numpy as np
import pytest
import theano
from theano.sandbox.rng_mrg import MRG_RandomStreams

import synkhronos as synk


def test_a_loaded_checkpoint_has_the_values_and_the_streams_of_every_rank(world, tmp_path):
    own = theano.shared(np.zeros(3, "float32"), "own")
    same = theano.shared(np.arange(6, dtype="float32").reshape(2, 3), "same")
    draw = synk.function(
        [], (MRG_RandomStreams(5).uniform((2, 3)), "gather"), updates=[(own, own + 1), (same, same * 2)]
    )
    synk.distribute()
    for rank in range(world.size):
        synk.set_value(rank, own, np.full(3, rank, "float32"))
    draw()
    synk.save(tmp_path / "checkpoint.npz", {"step": 1})
    before = synk.gather(own), synk.gather(same), draw()
    draw()
    synk.broadcast([own, same], [np.zeros(3, "float32"), np.zeros((2, 3), "float32")])
    assert synk.load(tmp_path / "checkpoint.npz") == {"step": 1}
    after = synk.gather(own), synk.gather(same), draw()
    for one, other in zip(before, after):
        np.testing.assert_array_equal(one, other)
    assert len({row.tobytes() for row in np.split(after[2], world.size)}) == world.size
    assert type(own.container.storage[0]).__name__ == "GpuArray"  # still on the device


def test_there_is_no_restart_on_devices_and_the_world_goes_on(world):
    with pytest.raises(RuntimeError, match="save.. checkpoints"):
        synk.restart()
    one = theano.shared(np.ones(2, "float32"))
    total = synk.function([], (one.sum(), "sum"))
    assert total() == 2 * world.size
