"""Differential tests of collectives, on this run's devices."""

from test_collectives_oracle import *  # noqa: F403
