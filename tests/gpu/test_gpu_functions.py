"""Tests of calls, on this run's devices."""

from test_function_oracle import *  # noqa: F403
from test_functions import *  # noqa: F403
