"""Parallel functions on this run's devices: what is cut, reduced and added up."""

import pytest
from test_parallel_function import (  # noqa: F401
    test_counts_are_added_and_extremes_are_kept,
    test_what_is_computed_from_gradients_has_its_serial_value,
)

pytestmark = pytest.mark.usefixtures("two")
