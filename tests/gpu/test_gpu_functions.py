"""The differential tests of calls, on this run's devices."""

from test_function_oracle import *  # noqa: F403
