"""Differential tests of training steps and of random streams, on this run's devices."""

from test_streams import (  # noqa: F401
    make_streams,
    test_a_mask_that_depends_on_data_differs_between_ranks_and_slices,
    test_a_stream_drawn_from_before_distribute_goes_on_in_the_master,
    test_streams_of_functions_distributed_later_are_independent_too,
)
from test_train import *  # noqa: F403
