"""Run ``main`` of a module of `gpu`. The arguments are its name, and those of the function."""

import importlib
import sys

importlib.import_module(f"gpu.{sys.argv[1]}").main(*sys.argv[2:])
