"""The options of the scripts of controllers and workers, which the launcher passes on."""

from __future__ import annotations

import argparse
from typing import Any

CONTROL_PORT = 5567
#: Seconds, in milliseconds as Platoon has them
SOCKET_TIMEOUT = 300_000
DATA_HWM = 10


def controller_parser() -> argparse.ArgumentParser:
    """Return a parser for the script of a controller, to which it may add options."""
    parser = argparse.ArgumentParser(description="A controller of Platoon, by synkhronos.")
    parser.add_argument(
        "experiment_name", nargs="?", help="the workers run EXPERIMENT_NAME_worker.py; else none starts"
    )
    parser.add_argument("log_directory", nargs="?", help="where the output of each worker goes")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--single", action="store_true", help="one machine, which is what there is")
    how.add_argument("--multi", action="store_true", help="several machines: not available")
    parser.add_argument(
        "-D", "--devices", nargs="+", metavar="DEVICE", help="Theano's devices, one for each worker"
    )
    parser.add_argument(
        "-nw", "--workers", type=int, metavar="N", help="the number of workers; all_reduce needs it"
    )
    parser.add_argument("-w", "--worker-args", default="", help="the arguments of the workers")
    parser.add_argument("--control-port", type=int, default=CONTROL_PORT, help="default: %(default)s")
    return parser


def of_controller(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of ``Controller`` from its options."""
    names = ("experiment_name", "log_directory", "multi", "devices", "workers", "worker_args")
    return {name: getattr(options, name) for name in (*names, "control_port")}


def worker_parser() -> argparse.ArgumentParser:
    """Return a parser for the script of a worker, to which it may add options."""
    parser = argparse.ArgumentParser(description="A worker of Platoon, by synkhronos.")
    parser.add_argument("--control-port", type=int, default=CONTROL_PORT, help="default: %(default)s")
    parser.add_argument("--data-port", type=int, help="the port of the minibatches, if there is one")
    parser.add_argument("--data-hwm", type=int, default=DATA_HWM, help="accepted, and not used")
    parser.add_argument(
        "--socket-timeout",
        type=int,
        default=SOCKET_TIMEOUT,
        help="milliseconds to wait for the controller; default: %(default)s",
    )
    return parser


def of_worker(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of ``Worker`` from its options."""
    names = ("control_port", "data_port", "data_hwm", "socket_timeout")
    return {name: getattr(options, name) for name in names}


def name_of(port: int) -> str:
    """Return the name of the listener that stands for a port."""
    return f"platoon-{port}"
