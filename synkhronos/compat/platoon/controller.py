"""The controller of experiments that have no script for one: it starts the workers."""

from __future__ import annotations

import sys

from synkhronos.compat.platoon.channel.controller import Controller


def main() -> int:
    """Start the workers that the command line names, and return the exit code."""
    options = Controller.default_parser().parse_args()
    return Controller(**Controller.default_arguments(options)).serve()


if __name__ == "__main__":
    sys.exit(main())
